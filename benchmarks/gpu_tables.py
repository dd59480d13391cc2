"""Meters of time and memory on a GPU, models with random weights, and the tables that are made of them."""

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks import measure
from benchmarks.scoring import marked
from shared.batch import TokenGroup

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


def _qwen2(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


# 0.5B, 3B and 7B are Qwen2.5 as published; `tiny` has heads of 128 channels as the larger two do, 25M and 0.5B of 64.
SIZES = {
    "tiny": _qwen2(2, 256, 512, 2, 1, 1000, tied=True),
    "25M": _qwen2(8, 384, 1024, 6, 6, 32_000, tied=True),
    "0.5B": _qwen2(24, 896, 4864, 14, 2, 151_936, tied=True),
    "3B": _qwen2(36, 2048, 11_008, 16, 2, 151_936, tied=True),
    "7B": _qwen2(28, 3584, 18_944, 28, 4, 152_064, tied=False),
}


def make_model(size: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model: Any = Qwen2ForCausalLM._from_config(SIZES[size], dtype=dtype)
    return model.eval()


PROMPT = 400
PROMISED = ("3B", "7B")  # sizes that have bars, on an H200 in bfloat16
NO_MEMORY = "does not fit"


@dataclass(frozen=True)
class Ratio:
    """least: the bar; None if there is none."""

    value: float
    least: float | None = None

    def __str__(self) -> str:
        return marked(self.value, self.least)


@dataclass(frozen=True)
class Share(Ratio):
    def __str__(self) -> str:
        missed = "" if self.least is None or self.value >= self.least else ", MISSED"
        return f"{self.value:.0%}" + ("" if self.least is None else f" (bar {self.least:.0%}{missed})")


# None: it did not fit into the memory.
Cell = str | int | float | Ratio | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class Setting:
    """Device, dtype and models of all tables. sizes: names of models."""

    meter: Meter
    dtype: torch.dtype
    sizes: tuple[str, ...]

    def make_model(self, size: str) -> PreTrainedModel:
        self.meter.free()  # the previous model
        return make_model(size, self.dtype, self.meter.device)

    def make_groups(self, size: str, count: int) -> list[TokenGroup]:
        return [self.make_group(size, seed) for seed in range(count)]

    def groups_of(self, size: str, tokens: int) -> list[TokenGroup]:
        """Groups of about `tokens` tokens in total: whole ones, and a smaller one of the same shape."""
        whole, rest = divmod(tokens / (PROMPT + sum(measure.LENGTHS)), 1)
        groups = self.make_groups(size, int(whole))
        return [*groups, self.make_group(size, len(groups), rest)] if rest else groups

    def make_group(self, size: str, seed: int, factor: float = 1.0) -> TokenGroup:
        """Random tokens, P 400 and 8 completions, all lengths times `factor` and the meter's scale."""
        factor *= self.meter.scale
        prompt, *lengths = (max(1, round(factor * length)) for length in (PROMPT, *measure.LENGTHS))
        return measure.random_group(prompt, lengths, SIZES[size].vocab_size, seed)

    def least(self, size: str, ratio: float) -> float | None:
        """The bar `ratio`, if this size has bars."""
        return ratio if size in PROMISED else None


@dataclass(frozen=True)
class Table:
    title: str
    rows: Callable[[Setting], Iterator[Row]]


def of_sizes(rows_of: Callable[[Setting, str], Iterator[Row]]) -> Callable[[Setting], Iterator[Row]]:
    """One model after the other: each is freed before the next is made."""

    def rows(setting: Setting) -> Iterator[Row]:
        for size in setting.sizes:
            yield from rows_of(setting, size)

    return rows


def reason(error: Exception) -> str:
    """Type and first line of an error that a table shows in place of figures."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def show(title: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    measure.show(title, columns, [[_text(row.get(name, "")) for name in columns] for row in rows])


def _text(cell: Cell) -> str:
    match cell:
        case None:
            return NO_MEMORY
        case int():
            return f"{cell:,}"
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
        case str() | Ratio():
            return str(cell)
