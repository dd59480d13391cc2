"""Main memory that gradients of a device are moved to during the backward."""

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from shared.errors import UserError


class HostMemory:
    """Main memory for a device that is the CPU."""

    def empty(self, numel: int) -> Float32[Tensor, " numel"]:
        """Not initialised."""
        return torch.empty(numel)

    def run(self, move: Callable[[Tensor, Tensor], None], host: Tensor, gradient: Tensor) -> None:
        """move(host, gradient), for a tensor of `empty` and one of the device; may return before it is done."""
        move(host, gradient)

    def wait(self) -> None:
        """Waits until all that was begun between the two memories is done."""


def host_memory(device: torch.device) -> HostMemory:
    """Raises UserError for a device that is neither a CPU nor CUDA's."""
    if device.type == "cuda":
        return PinnedMemory(device)
    if device.type == "cpu":
        return HostMemory()
    raise UserError(f"optimizer.offload: there is no offloading from {device.type}, only from cuda", "set it to none")


def begin(host: Float32[Tensor, "*shape"], gradient: Float[Tensor, "*shape"]) -> None:
    """The first gradient of a step: `host` becomes it."""
    host.copy_(gradient.float(), non_blocking=True)


def add(host: Float32[Tensor, "*shape"], gradient: Float[Tensor, "*shape"]) -> None:
    """A further gradient, added in float32 on the device: it adds faster than a CPU, and copies both ways at once."""
    host.copy_(host.to(gradient.device, non_blocking=True).add_(gradient), non_blocking=True)


class PinnedMemory(HostMemory):
    """Page-locked memory, which a GPU copies from and to on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def empty(self, numel: int) -> Float32[Tensor, " numel"]:
        """Locks exactly its pages: PyTorch's own pinned tensors take the next power of two, up to twice as much."""
        pages = mmap.mmap(-1, numel * torch.float32.itemsize)
        tensor = torch.frombuffer(pages, dtype=torch.float32)
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))
        weakref.finalize(pages, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
        return tensor

    def run(self, move: Callable[[Tensor, Tensor], None], host: Tensor, gradient: Tensor) -> None:
        # One gradient leaves while the next one is computed. Without a bound they would gather on a fast device.
        self._stream.synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        gradient.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            move(host, gradient)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
