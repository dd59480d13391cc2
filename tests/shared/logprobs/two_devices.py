"""A machine with two devices of its own, `fake:0` and `fake:1`, on any CPU. It computes as the CPU does, and refuses
what a GPU would: an operation on tensors of several devices, or of a device and the CPU.

Once used, the whole process has the devices, so tests run it as a process of their own.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

_MOVES = {"_to_copy", "copy_"}


class Placed(Tensor):
    """A tensor of the CPU that says it is on another device."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "Placed":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device,
        )  # fmt: skip
        made.on_cpu = inner
        return made

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Operations():
            return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        placed = [value for value in tensors if isinstance(value, Placed)]
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        if name not in _MOVES:
            # Scalars of the CPU are allowed.
            devices = {value.device for value in tensors if isinstance(value, Placed) or value.dim()}
            assert len(devices) < 2, f"{func} of tensors on {devices}"
        where = options.get("device") or (placed[0].device if placed else None)
        if options.get("device"):
            options["device"] = torch.device("cpu")
        made = func(*tree_map(_inner, args), **tree_map(_inner, options))
        if name == "copy_":
            return args[0]
        known = {id(value.on_cpu): value for value in placed}
        return tree_map(lambda value: _outer(value, where, known), made)


class _Makers(TorchFunctionMode):
    """torch.tensor makes its result on the CPU, and would then copy it where no mode looks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.tensor and options.get("device") is not None:
            device = options.pop("device")
            return func(*args, **options).to(device)
        return func(*args, **options)


def _inner(value: Any) -> Any:
    return value.on_cpu if isinstance(value, Placed) else value


def _outer(value: Any, where: Any, known: Mapping[int, Placed]) -> Any:
    if not isinstance(value, Tensor) or where is None or torch.device(where).type != "fake":
        return value
    return known[id(value)] if id(value) in known else Placed(value, torch.device(where))


def two_devices() -> ExitStack:
    """While it is open there are `fake:0` and `fake:1`."""
    _setup_privateuseone_for_python_backend("fake")
    opened = ExitStack()
    opened.enter_context(_Makers())
    opened.enter_context(_Operations())
    return opened


def spread(model: PreTrainedModel, head: str) -> PreTrainedModel:
    """The model on both devices: the second half of its layers and its last norm on fake:1. Hooks of
    accelerate's move what goes between them. head: the device of the LM head."""
    layers = len(model.base_model.layers)  # type: ignore[arg-type]
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), "fake:0")
    places |= {"model.norm": "fake:1", "lm_head": head}
    places |= {f"model.layers.{n}": f"fake:{int(n >= layers // 2)}" for n in range(layers)}
    for name, device in places.items():
        _place(model.get_submodule(name), device)
    return dispatch_model(model, places, force_hooks=True)  # type: ignore[return-value]


def _place(module: nn.Module, device: str) -> None:
    for each in module.modules():
        for name, weights in list(each._parameters.items()):
            if weights is not None:
                each._parameters[name] = nn.Parameter(weights.detach().to(device), requires_grad=False)
        for name, values in list(each._buffers.items()):
            if values is not None:
                each._buffers[name] = values.to(device)
