"""Log-probs of whole groups and their gradients: ours against the classic padded step, and both against float64.

Each side is a process of its own with one thread; they work in turns, and their CPU time is compared. The bars are what
the project promises; a figure below one is marked. The last tables compare scoring with plain matrix products on this
machine, and show how time and memory grow.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import measure
from policy_trainer.cli.demo.base_model import make_model
from policy_trainer.trainer import memory as memory_plan
from shared.batch import TokenGroup
from shared.logprobs import choose_forward
from shared.models import embedding_rows

Score = Callable[[Sequence[TokenGroup]], Tensor]


def classic(model: PreTrainedModel) -> Score:
    """Scores one group after the other; the result is (sum of C,) log-probs."""

    def score(groups: Sequence[TokenGroup]) -> Tensor:
        return torch.cat([logps for group in groups for logps in _padded(model, group)])

    return score


def naive_step(exact: PreTrainedModel, groups: Sequence[TokenGroup]) -> Tensor:
    """(sum of C,) log-probs of a float64 model, row by row; leaves the gradients of their sum in its `.grad`."""
    assert exact.dtype == torch.float64
    rows = []
    for group in groups:
        for row in single_rows(group):
            (logps,) = _padded(exact, row)
            logps.sum().backward()
            rows.append(logps.detach())
    return torch.cat(rows)


def _padded(model: PreTrainedModel, group: TokenGroup) -> Iterator[Tensor]:
    rows = [torch.cat([torch.tensor(group.prompt_ids), torch.tensor(ids)]) for ids in group.completions()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    for row, row_logits, row_ids in zip(rows, logits, ids[:, 1:], strict=True):
        logps = row_logits.log_softmax(dim=-1).gather(1, row_ids[:, None])[:, 0]
        yield logps[len(group.prompt_ids) - 1 : len(row) - 1]


def single_rows(group: TokenGroup) -> list[TokenGroup]:
    """The same completions as groups of one."""
    return [replace(group, completion_ids=ids, completion_lengths=np.array([len(ids)])) for ids in group.completions()]


DEMO_LENGTHS = (31, 30, 30, 29, 28, 27, 16, 12)
SIDES = ("ours", "classic")
STEPS = {False: "score", True: "fwd + bwd"}


@dataclass(frozen=True)
class Shape:
    """bars: least ratios of classic to ours: of time and memory, only scoring and with the backward."""

    name: str
    make_model: Callable[[], PreTrainedModel]
    prompt: int
    lengths: tuple[int, ...] = measure.LENGTHS
    groups: int = 1
    dtype: torch.dtype = torch.float32
    repetitions: int = 3
    bars: tuple[tuple[float, float], tuple[float, float]] | None = None

    def make_groups(self, vocabulary: int) -> list[TokenGroup]:
        return [measure.random_group(self.prompt, self.lengths, vocabulary, seed) for seed in range(self.groups)]


SHAPES = (
    Shape("25M, P 400, fp32", measure.model_25m, 400, repetitions=5, bars=((4.3, 12), (4.3, 4))),
    Shape("25M, P 64, fp32", measure.model_25m, 64, repetitions=5, bars=((2.8, 8), (2.8, 3))),
    Shape("149M, P 400, fp32", measure.model_149m, 400, repetitions=1, bars=((5, 18), (5, 5))),
    Shape(
        "149M, P 400, bf16", measure.model_149m, 400, dtype=torch.bfloat16, repetitions=1, bars=((3.3, 5), (3.3, 3.3))
    ),
    Shape("demo, 16 groups", partial(make_model, 0), 12, DEMO_LENGTHS, 16, repetitions=15),
)
# All rows are shorter than its windows of 512 tokens.
LARGE_HEAD = Shape("270M, head of 262,144, P 100, fp32", measure.model_270m, 100)


def ours(model: PreTrainedModel) -> Score:
    forward = choose_forward(model)
    return lambda groups: forward(groups, [1.0] * len(groups))


MAKERS: dict[str, Callable[[PreTrainedModel], Score]] = {"ours": ours, "classic": classic}


@cache
def loaded(make: Callable[[], PreTrainedModel], side: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Score]:
    """A model and how it scores, warmed up on a small group; once for each process."""
    model = cast(make(), dtype)
    score = MAKERS[side](model)
    score_only(score, [measure.random_group(4, (3, 2), embedding_rows(model), 0)])
    return model, score


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    return model.to(dtype).eval()  # type: ignore[arg-type]


def score_only(score: Score, groups: Sequence[TokenGroup]) -> Tensor:
    with torch.inference_mode():
        return score(groups)


def step(model: PreTrainedModel, score: Score, groups: Sequence[TokenGroup]) -> None:
    score(groups).sum().backward()
    model.zero_grad(set_to_none=True)


def work_of(shape: Shape, side: str, backward: bool) -> Callable[[], object]:
    model, score = loaded(shape.make_model, side, shape.dtype)
    groups = shape.make_groups(embedding_rows(model))
    return partial(step, model, score, groups) if backward else partial(score_only, score, groups)


def seconds(shape: Shape, side: str, backward: bool) -> float:
    return measure.cpu_seconds(work_of(shape, side, backward))


def memory(shape: Shape, side: str, backward: bool) -> float:
    return measure.peak_mib(work_of(shape, side, backward))


def times(shape: Shape, backward: bool) -> dict[str, float]:
    """Median CPU seconds of each side, in turns; each child keeps its loaded model."""
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    with measure.Child() as first, measure.Child() as second:
        for _ in range(shape.repetitions):
            for child, side in zip((first, second), SIDES, strict=True):
                taken[side].append(child.call(seconds, shape, side, backward))
    return {side: median(values) for side, values in taken.items()}


# ---------------------------------------------------------------- exactness


def errors(shape: Shape) -> dict[str, tuple[float, float]]:
    """Errors of each side: the largest distance of a log-prob from float64, and the largest relative one of a gradient.

    A gradient's error is the L2 norm of the difference over that of the tensor, or over 1e-6 of that of all tensors.
    """
    exact = cast(shape.make_model(), shape.dtype).double().eval()
    exact.set_experts_implementation("eager")  # the grouped matrix products know no float64
    groups = shape.make_groups(embedding_rows(exact))
    logps = naive_step(exact, groups)
    errors_by_side = {}
    for side, make in MAKERS.items():
        model = cast(shape.make_model(), shape.dtype)
        got = make(model)(groups)
        got.sum().backward()
        errors_by_side[side] = (float((got.detach() - logps).abs().max()), max(relative_errors(model, exact)))
    return errors_by_side


def relative_errors(model: PreTrainedModel, exact: PreTrainedModel) -> Iterator[float]:
    right = {name: parameter.grad for name, parameter in exact.named_parameters() if parameter.grad is not None}
    whole = float(torch.stack([grad.norm() for grad in right.values()]).norm())
    for name, grad in right.items():
        got = model.get_parameter(name).grad
        assert got is not None
        yield float((got - grad).norm()) / max(float(grad.norm()), 1e-6 * whole)


# ---------------------------------------------------------------- the machine's limit


def matrix_rate(dtype: torch.dtype) -> float:
    """Multiply-adds of 2048-wide matrix products, in 1e9 floating-point operations a CPU second: the best of five."""
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    return max(2 * 2048**3 / measure.cpu_seconds(lambda: a @ b) / 1e9 for _ in range(5))


def softmax_seconds(logits: int, backward: bool) -> float:
    """CPU seconds of a log-softmax of so many logits, with the exponentials of its gradient, within the caches."""
    tile = torch.randn(1024, 1024)
    buffer = torch.empty_like(tile)
    taken = min(measure.cpu_seconds(lambda: torch.log_softmax(tile, 1, out=buffer)) for _ in range(20))
    if backward:
        taken += min(measure.cpu_seconds(lambda: torch.exp(tile, out=buffer)) for _ in range(20))
    return logits / tile.numel() * taken


def operations(model: PreTrainedModel, groups: Sequence[TokenGroup]) -> float:
    """The least floating-point operations that the matrix products of scoring need, in 1e9; a backward needs twice as
    many.

    Two for each weight and token: the body's for all tokens, the head's for completions. Attention: four for each
    channel, query and key that it may see.
    """
    config = model.config
    head = embedding_rows(model) * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - head * (1 if config.tie_word_embeddings else 2)
    queries = memory_plan.Shape.of(model).queries
    total = 0.0
    for group in groups:
        prompt, lengths = len(group.prompt_ids), group.completion_lengths
        seen = prompt * (prompt + 1) / 2 + float((lengths * prompt + lengths * (lengths + 1) / 2).sum())
        total += 2 * body * group.tokens + 2 * head * len(group.completion_ids)
        total += 4 * queries * config.num_hidden_layers * seen
    return total / 1e9


def rate(shape: Shape, backward: bool) -> tuple[float, float, float]:
    """1e9 operations a second, those of matrix products, and those that products and log-softmax allow: each measured
    next to the others, medians of three."""
    model, _ = loaded(shape.make_model, "ours", shape.dtype)
    groups = shape.make_groups(embedding_rows(model))
    logits = sum(len(group.completion_ids) for group in groups) * embedding_rows(model)
    needed = operations(model, groups) * (3 if backward else 1)
    rates = []
    for _ in range(3):
        products = matrix_rate(shape.dtype)
        allowed = needed / (needed / products + softmax_seconds(logits, backward))
        rates.append((needed / seconds(shape, "ours", backward), products, allowed))
    return tuple(median(column) for column in zip(*rates, strict=True))  # type: ignore[return-value]


# ---------------------------------------------------------------- tables


def compare(shapes: Sequence[Shape]) -> list[list[str]]:
    rows = []
    for shape in shapes:
        exactness = measure.in_child(errors, shape)
        for backward in (False, True):
            taken = times(shape, backward)
            peak = {side: measure.in_child(memory, shape, side, backward) for side in SIDES}
            of_time, of_memory = shape.bars[backward] if shape.bars else (None, None)
            rows.append(
                [f"{shape.name}, {STEPS[backward]}"]
                + [f"{taken[side]:.3f}" for side in SIDES]
                + [marked(taken["classic"] / taken["ours"], of_time)]
                + [f"{peak[side]:.0f}" for side in SIDES]
                + [marked(peak["classic"] / max(peak["ours"], 1), of_memory)]
                + [f"{exactness[side][backward]:.1e}" for side in SIDES]
            )
            print(*rows[-1], sep=" | ", file=sys.stderr)  # half an hour's rows, in case a later one fails
    return rows


def marked(ratio: float, least: float | None) -> str:
    if least is None:
        return f"{ratio:.1f}x"
    return f"{ratio:.1f}x (bar {least:g}{'' if ratio >= least else ', MISSED'})"


def limits() -> list[list[str]]:
    rows = []
    for shape in [*(shape for shape in SHAPES if shape.bars), LARGE_HEAD]:
        for backward in (False, True):
            ours, products, allowed = measure.in_child(rate, shape, backward)
            shares = f"{ours / products:.0%}", f"{ours / allowed:.0%}"
            rows.append([f"{shape.name}, {STEPS[backward]}", f"{ours:.0f}", f"{products:.0f}", *shares])
    return rows


def growth() -> list[list[str]]:
    grown = [Shape(f"{groups} groups, P 64", measure.model_25m, 64, groups=groups) for groups in (1, 2, 4, 8, 16, 32)]
    grown += [Shape(f"1 group, P {prompt}", measure.model_25m, prompt) for prompt in (64, 256, 1024, 4096)]
    rows = []
    for shape in grown:
        tokens = sum(group.tokens for group in shape.make_groups(measure.VOCABULARY))
        cells = [shape.name, str(tokens)]
        for backward in (False, True):
            if backward and shape.groups > 8:  # the learner's micro-batches hold no more
                cells += ["", ""]
                continue
            taken = measure.in_child(seconds, shape, "ours", backward)
            peak = measure.in_child(memory, shape, "ours", backward)
            cells += [f"{taken / tokens * 1e6:.0f}", f"{peak:.0f}"]
        rows.append(cells)
    return rows


def run() -> None:
    seconds_of, peaks, errors_of = ([f"{side} {unit}" for side in SIDES] for unit in ("s", "MiB", "error"))
    measure.show(
        "Log-probs, one thread, CPU seconds; error: largest distance from float64 of a log-prob (bar 2e-5 in fp32) "
        "and, with the backward, of a gradient tensor (relative L2, bar 1e-5 in fp32)",
        ["", *seconds_of, "ratio", *peaks, "ratio", *errors_of],
        compare(SHAPES),
    )
    measure.show(
        "Log-probs compared with plain matrix products, 1e9 operations a second (goal 85%), and with the sum of these "
        "and a log-softmax in the caches (goal 90%)",
        ["", "ours", "2048-wide products", "share", "with log-softmax"],
        limits(),
    )
    measure.show(
        "Growth, 25M parameters, fp32",
        ["", "tokens", "score us a token", "score MiB", "fwd + bwd us a token", "fwd + bwd MiB"],
        growth(),
    )
