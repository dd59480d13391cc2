"""How many bytes are alive that some code allocated, at their peak: counted, since a CPU has no such counter."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(act: Callable[[], object]) -> int:
    """The most bytes that tensors made in `act` held at a time; tensors from before it do not count."""
    with _Counted() as counted:
        act()
    return counted.peak


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an operator is given was there before it: a view or an in-place result is not new.
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._meet(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def _meet(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
