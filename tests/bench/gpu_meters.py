"""Time and memory of work on a device, behind one protocol: a GPU, or a CPU to try the benchmark without a GPU."""

import ctypes
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from tests.bench import measure

T = TypeVar("T")
_PRODUCTS = 8  # in one measurement, so that launching and waiting are negligible


class Meter(Protocol):
    """name: of the device. scale: factor on the lengths of prompts and completions. matrix_width: width of matrix
    products that fill the device. repetitions: of each timing."""

    device: torch.device
    name: str
    scale: float
    matrix_width: int
    repetitions: int

    def wait(self) -> None:
        """Blocks until all work is done: a GPU runs asynchronously."""
        ...

    def peak_mib(self, work: Callable[[], object]) -> float:
        """Peak memory of `work` in MiB, above what is in use before."""
        ...

    def free(self) -> None:
        """Releases memory that nothing refers to any more."""
        ...


class CudaMeter:
    scale = 1.0
    matrix_width = 8192
    repetitions = 7

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise SystemExit(f"{device}: this PyTorch, {torch.__version__}, sees no GPU")
        torch.cuda.set_device(device.index or 0)
        self.device = device
        self.name = torch.cuda.get_device_name(device)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def peak_mib(self, work: Callable[[], object]) -> float:
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class CpuMeter:
    name = "a CPU"
    scale = 0.05
    matrix_width = 256
    repetitions = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        pass

    def peak_mib(self, work: Callable[[], object]) -> float:
        ctypes.CDLL(None).malloc_trim(0)  # else memory kept from earlier work would hide this work's
        return measure.peak_mib(work)

    def free(self) -> None:
        gc.collect()


METERS: dict[str, Callable[[torch.device], Meter]] = {"cuda": CudaMeter, "cpu": CpuMeter}


@dataclass(frozen=True)
class Taken:
    """seconds: median. mib: peak above what was in use before."""

    seconds: float
    mib: float


def compare(meter: Meter, sides: Mapping[str, Callable[[], object]]) -> dict[str, Taken | None]:
    """Time and memory of each side, timed in turns; None for a side that does not fit into the memory."""
    peaks: dict[str, float | None] = {}
    for name, side in sides.items():
        fitting(meter, side)  # warms up: the one-time setup of libraries does not count
        peaks[name] = fitting(meter, lambda side=side: meter.peak_mib(side))
    seconds = median_seconds(meter, {name: side for name, side in sides.items() if peaks[name] is not None})
    return {name: None if peak is None else Taken(seconds[name], peak) for name, peak in peaks.items()}


def median_seconds(meter: Meter, sides: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    def done(side: Callable[[], object]) -> Callable[[], object]:
        return lambda: (side(), meter.wait())

    return measure.median_seconds({name: done(side) for name, side in sides.items()}, meter.repetitions)


def fitting(meter: Meter, work: Callable[[], T]) -> T | None:
    """What `work` returns; None when the device has not enough memory for it."""
    try:
        return work()
    except torch.OutOfMemoryError:
        pass
    meter.free()  # only here, where the exception and its frames are gone
    return None


class Products:
    """Matrix products of random numbers: the rate that the device can reach."""

    def __init__(self, meter: Meter, dtype: torch.dtype) -> None:
        self._a, self._b = torch.randn(2, meter.matrix_width, meter.matrix_width, device=meter.device).to(dtype)
        self.operations = _PRODUCTS * 2 * meter.matrix_width**3

    def __call__(self) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._a, self._b)
