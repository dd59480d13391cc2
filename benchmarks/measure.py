"""Time and memory of two sides of a comparison, taken so that a noisy machine disturbs both alike."""

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from uuid6 import uuid7

from shared import wire
from shared.batch import Batch, TokenGroup

# Typical completion lengths of one group: most end well before the length limit.
LENGTHS = (400, 233, 167, 130, 102, 78, 55, 35)
VOCABULARY = 32_000
# The text model of google/gemma-3-270m.
GEMMA_3_270M: Mapping[str, Any] = {
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
# From malloc.h.
_M_MMAP_THRESHOLD = -3


def model_25m() -> PreTrainedModel:
    """A random Qwen2 of 26.4M parameters, float32; 12.3M are the embedding, which is the LM head too."""
    return _qwen2(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6
    )


def model_149m() -> PreTrainedModel:
    """A random Qwen2 of 149M parameters, float32; 97M are the embedding, which is the LM head too."""
    return _qwen2(
        vocab_size=151_936, hidden_size=640, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=10
    )


def model_270m() -> PreTrainedModel:
    """A random Gemma 3 of 268M parameters, float32; 168M are the embedding, which is the LM head too."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **GEMMA_3_270M)).eval()


def _qwen2(*, num_attention_heads: int, **others: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **others,
    )
    return Qwen2ForCausalLM(config).eval()


def random_group(prompt: int, lengths: Sequence[int], vocabulary: int, seed: int) -> TokenGroup:
    ids = np.random.default_rng(seed).integers(0, vocabulary, size=prompt + sum(lengths))
    return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths))


def batch_of(group: TokenGroup) -> Batch:
    """A batch with an id of its own, as a worker uploads it; rewards and sampler log-probs are zeros."""
    return Batch(
        id=str(uuid7()),
        run="bench",
        epoch=0,
        policy_version=0,
        temperature=1.0,
        group=group,
        rewards=np.zeros(group.size, dtype=np.float32),
        finished=np.ones(group.size, dtype=np.bool_),
        sampler_logps=np.zeros(len(group.completion_ids), dtype=np.float32),
    )


class Template:
    """Encodes a batch of about `size` bytes, as a worker uploads it; each body differs only in its id."""

    def __init__(self, size: int) -> None:
        length = size // (8 * 12)  # 8 completions; a token has an id of 8 bytes and a log-prob of 4
        batch = batch_of(random_group(8, [length] * 8, 30_000, 0))
        self._id, self._body = batch.id.encode(), wire.encode(batch)

    def body(self, id: str) -> bytes:
        return self._body.replace(self._id, id.encode(), 1)


class Child:
    """A process with one thread. Calls run one at a time and can reuse what earlier calls have loaded.

    start: called first, with its arguments.
    """

    def __init__(self, start: Callable[..., Any] | None = None, *arguments: Any) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
        if start:
            self.call(start, *arguments)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(function, *arguments).result()


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process, which has one thread; other load affects them less than wall-clock time."""
    started = time.process_time()
    work()
    return time.process_time() - started


def median_figures(sides: Mapping[str, Callable[[int], float]], repetitions: int) -> dict[str, float]:
    """Each side's median figure. They take turns, so that other load affects all; the first round warms up.

    sides: called with the number of the round.
    """
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repetitions + 1):
        for name, side in sides.items():
            figures[name].append(side(number))
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def median_seconds(sides: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """See `median_figures`."""

    def seconds(number: int, side: Callable[[], object]) -> float:
        started = time.perf_counter()
        side()
        return time.perf_counter() - started

    return median_figures({name: partial(seconds, side=side) for name, side in sides.items()}, repetitions)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a fresh process with one thread."""
    with Child() as child:
        return child.call(function, *arguments)


def peak_mib(work: Callable[[], object]) -> float:
    """Peak rise of the process's resident memory during `work`, in MiB. Linux with glibc only.

    Freed memory goes back to the system at once, so the figure excludes what the allocator would keep for later.
    """
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _resident_kib("VmRSS")
    work()
    return (_resident_kib("VmHWM") - before) / 1024


def _resident_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
