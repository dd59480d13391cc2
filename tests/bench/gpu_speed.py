"""Tables of time and memory: log-probs and their gradients, tokens per forward, and torch.compile."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs import PackedForward
from shared.logprobs.head import LMHead
from tests.bench import scoring
from tests.bench.gpu_meters import Meter, Products, Taken, compare, fitting, median_seconds
from tests.bench.gpu_rows import Ratio, Row, Setting, Share, reason
from tests.bench.scoring import Score, classic, ours, score_only

SCORE_BAR, STEP_BAR = 3.0, 2.8
SHARE_BAR, SHARE_FROM = 0.45, 8000  # share of the rate of matrix products, from this many tokens per forward
TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768)
COMPILED_TOKENS = (1024, 16_384)


def packed(model: PreTrainedModel) -> Score:
    """The packed form without the kernel for sequences of any lengths."""
    forward = PackedForward(model)
    return lambda groups: forward(groups, [1.0] * len(groups))


# One model serves all sides: the classic side passes no attention spans, so its attention is plain SDPA.
SIDES: dict[str, Callable[[PreTrainedModel], Score]] = {"ours": ours, "packed": packed, "classic": classic}


def step(model: PreTrainedModel, score: Score, groups: Sequence[TokenGroup]) -> None:
    try:
        scoring.step(model, score, groups)
    finally:
        model.zero_grad(set_to_none=True)  # some remain if memory ran out


def classic_rows(setting: Setting, size: str) -> Iterator[Row]:
    model, groups = setting.make_model(size), setting.make_groups(size, 1)
    scores = {side: make(model) for side, make in SIDES.items()}
    works = {
        "score": ({side: partial(score_only, score, groups) for side, score in scores.items()}, SCORE_BAR),
        "fwd + bwd": ({side: partial(step, model, score, groups) for side, score in scores.items()}, STEP_BAR),
    }
    for work, (sides, bar) in works.items():
        yield {"": f"{size}, {work}", **compared(compare(setting.meter, sides), setting.least(size, bar))}


def compared(taken: Mapping[str, Taken | None], bar: float | None) -> Row:
    """Figures of each side, and how many times as much the classic one takes as ours."""
    row: Row = {f"{side} ms": one and 1000 * one.seconds for side, one in taken.items()}
    mine, other = taken["ours"], taken["classic"]
    row["classic / ours"] = Ratio(other.seconds / mine.seconds, bar) if mine and other else None
    row |= {f"{side} MiB": one and one.mib for side, one in taken.items()}
    row["less memory"] = Ratio(other.mib / max(mine.mib, 1)) if mine and other else None
    return row


# ---------------------------------------------------------------- tokens a forward


def token_rows(setting: Setting, size: str) -> Iterator[Row]:
    model = setting.make_model(size)
    score, products = ours(model), Products(setting.meter, setting.dtype)
    for count in TOKENS:
        groups = setting.groups_of(size, count)
        tokens = sum(group.tokens for group in groups)
        row: Row = {"": size, "tokens": tokens}
        taken = compare(setting.meter, {"score": partial(score_only, score, groups), "products": products})
        scored, multiplied = taken["score"], taken["products"]
        if scored is None or multiplied is None:
            yield row | {"tokens/s": None}
            continue
        needed = 1e9 * scoring.operations(model, groups) / scored.seconds
        rate = products.operations / multiplied.seconds
        yield row | {
            "tokens/s": tokens / scored.seconds,
            "TFLOP/s": needed / 1e12,
            "of products": rate / 1e12,
            "share": Share(needed / rate, setting.least(size, SHARE_BAR) if tokens >= SHARE_FROM else None),
            "MiB": scored.mib,
            "LM head's MiB": head_mib(setting.meter, model, sum(len(group.completion_ids) for group in groups)),
        }


def head_mib(meter: Meter, model: PreTrainedModel, count: int) -> float | None:
    """Peak of the LM head and the log-softmax alone, for `count` completion tokens."""
    head = LMHead.of(model)
    hidden = torch.randn(count, head.weight.shape[1], dtype=model.dtype, device=model.device)
    targets = torch.randint(len(head.weight), (count,), device=model.device)
    temperatures = torch.ones(count, device=model.device)

    def work() -> Tensor:
        with torch.inference_mode():
            return head.logps(hidden, targets, temperatures)

    return fitting(meter, lambda: meter.peak_mib(work))


# ---------------------------------------------------------------- compiling

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {"compiled": {}, "compiled, CUDA graphs": {"mode": "reduce-overhead"}},
    "cpu": {"compiled": {}},
}


def compiled_rows(setting: Setting, size: str) -> Iterator[Row]:
    for mode, options in MODES[setting.meter.device.type].items():
        torch.compiler.reset()
        model = setting.make_model(size)
        score = ours(model)  # before compiling, since its self-test scores small groups
        model.base_model.compile(dynamic=True, **options)
        for count in COMPILED_TOKENS:
            groups = setting.groups_of(size, count)
            tokens = sum(group.tokens for group in groups)
            yield {"": f"{size}, {mode}", "tokens": tokens, **compiled(setting.meter, score, groups)}


def compiled(meter: Meter, score: Score, groups: Sequence[TokenGroup]) -> Row:
    work = partial(score_only, score, groups)
    try:
        expected = eagerly(work)
        started = time.perf_counter()
        got = work()
        meter.wait()
        first = time.perf_counter() - started
        seconds = median_seconds(meter, {"eager": lambda: eagerly(work), "compiled": work})
    except Exception as error:  # compiling can fail with any error, and the product does not use it
        return {"eager / compiled": f"skipped: {reason(error)}"}
    return {
        "eager ms": 1000 * seconds["eager"],
        "compiled ms": 1000 * seconds["compiled"],
        "eager / compiled": Ratio(seconds["eager"] / seconds["compiled"]),
        "first call s": first,
        "mean distance of log-probs": float((got - expected).abs().mean()),
    }


def eagerly(work: Callable[[], Tensor]) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return work()
