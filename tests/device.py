"""The device of models in tests: the CPU, or what the environment variable `TEST_DEVICE` names, such as `cuda:0`.

Tensors that test code makes without a device lie there, and so do models that it makes from a config. Those that the
product makes lie where the product puts them, so that a device which it forgot shows. What test code turns into NumPy
arrays comes back to main memory first. A generator of the CPU draws there, so that every device sees the same numbers.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils._device import DeviceContext

TEST_DEVICE = torch.device(os.environ["TEST_DEVICE"]) if "TEST_DEVICE" in os.environ else None
DEVICE = TEST_DEVICE or torch.device("cpu")

M = TypeVar("M", bound=torch.nn.Module)
_ROOT = Path(__file__).parents[1]
_TESTS = str(_ROOT / "tests")
_OURS = (_TESTS, *(str(_ROOT / name) for name in ("shared", "ref_server", "policy_trainer")))
_TO_NUMPY = {torch.Tensor.numpy, torch.Tensor.__array__}


def on_device(model: M) -> M:
    torch.nn.Module.to(model, DEVICE)
    return model


class TestDevice(DeviceContext):
    """PyTorch's context of a default device, for calls from tests."""

    __test__ = False  # for pytest: not a class of tests

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _called_by_a_test(sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        if func in _TO_NUMPY:
            args = (args[0].cpu(), *args[1:])
        if func is torch.from_numpy:
            return func(*args).to(self.device)
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator.device.type == "cpu":
            args = tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in args)
            return func(*args, **(kwargs or {})).to(self.device)
        return super().__torch_function__(func, types, args, kwargs)


def _called_by_a_test(frame: FrameType | None) -> bool:
    """Whether the innermost frame of the repository's code is a test's; PyTorch and transformers are in between."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TESTS)
