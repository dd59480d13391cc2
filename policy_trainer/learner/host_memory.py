"""Main memory that gradients of a device are moved to, while its backward goes on."""

import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.errors import UserError


class HostMemory(Protocol):
    """Main memory beside a device."""

    def empty(self, numel: int) -> Tensor:
        """float32 (numel,), not initialised."""
        ...

    def run(self, move: Callable[[Tensor, Tensor], None], host: Tensor, own: Tensor) -> None:
        """move(host, own), for a tensor of `empty` and one of the device; perhaps only begun on return."""
        ...

    def wait(self) -> None:
        """Waits until all that was begun between the two memories is done."""
        ...


def host_memory(device: torch.device) -> HostMemory:
    """Raises UserError for a device that is neither a CPU nor CUDA's."""
    if device.type not in _KINDS:
        raise UserError(f"optimizer.offload: there is no offloading from {device.type}, only from cuda; set it to none")
    return _KINDS[device.type](device)


def begin(host: Tensor, gradient: Tensor) -> None:
    """The first gradient of a step: `host` becomes it."""
    host.copy_(gradient.float(), non_blocking=True)


def add(host: Tensor, gradient: Tensor) -> None:
    """A further gradient, added in float32 on the device: it adds faster than a CPU, and copies both ways at once."""
    host.copy_(host.to(gradient.device, non_blocking=True).add_(gradient), non_blocking=True)


class OneMemory:
    """The device is the CPU."""

    def __init__(self, device: torch.device) -> None:
        pass

    def empty(self, numel: int) -> Tensor:
        return torch.empty(numel)

    def run(self, move: Callable[[Tensor, Tensor], None], host: Tensor, own: Tensor) -> None:
        move(host, own)

    def wait(self) -> None:
        pass


class PinnedMemory:
    """Page-locked memory, which a GPU copies from and to on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def empty(self, numel: int) -> Tensor:
        """Locks exactly its pages: PyTorch's own pinned tensors take the next power of two, up to twice as much."""
        pages = mmap.mmap(-1, numel * torch.float32.itemsize)
        tensor = torch.frombuffer(pages, dtype=torch.float32)
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))
        weakref.finalize(pages, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
        return tensor

    def run(self, move: Callable[[Tensor, Tensor], None], host: Tensor, own: Tensor) -> None:
        # One gradient leaves while the next one is computed. Without a bound they would gather on a fast device.
        self._stream.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        own.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            move(host, own)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


_KINDS: dict[str, type[OneMemory] | type[PinnedMemory]] = {"cpu": OneMemory, "cuda": PinnedMemory}
