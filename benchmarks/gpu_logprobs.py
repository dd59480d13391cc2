"""Tables of log-probs on a GPU: their time and memory, which forward is chosen, and the error of its gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import scoring
from benchmarks.gpu_tables import (
    Cell,
    Meter,
    Products,
    Ratio,
    Row,
    Setting,
    Share,
    Taken,
    compare,
    fitting,
    reason,
)
from benchmarks.scoring import Score, classic, ours, score_only, single_rows
from shared.batch import TokenGroup
from shared.logprobs import PackedForward, PaddedForward, choose_forward, self_test_difference
from shared.logprobs.choice import self_test_tolerance
from shared.logprobs.head import LMHead
from shared.logprobs.packed import VarlenForward

SCORE_BAR, STEP_BAR = 3.0, 2.8
SHARE_BAR, SHARE_FROM = 0.45, 8000  # share of the rate of matrix products, from this many tokens per forward
TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768)


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
    row: Row = {f"{side} ms": figures and 1000 * figures.seconds for side, figures in taken.items()}
    mine, other = taken["ours"], taken["classic"]
    row["classic / ours"] = Ratio(other.seconds / mine.seconds, bar) if mine and other else None
    row |= {f"{side} MiB": figures and figures.mib for side, figures in taken.items()}
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
    """Peak memory of only the LM head and log-softmax, for `count` completion tokens."""
    head = LMHead.of(model)
    hidden = torch.randn(count, head.weight.shape[1], dtype=model.dtype, device=model.device)
    targets = torch.randint(len(head.weight), (count,), device=model.device)
    temperatures = torch.ones(count, device=model.device)

    def work() -> Tensor:
        with torch.inference_mode():
            return head.logps(hidden, targets, temperatures)

    return fitting(meter, lambda: meter.peak_mib(work))


FORMS = (VarlenForward, PackedForward, PaddedForward)

Gradients = dict[str, Tensor]


# ---------------------------------------------------------------- forms


def form_rows(setting: Setting) -> Iterator[Row]:
    """`tiny` is always included, since it always fits."""
    for size in dict.fromkeys(("tiny", *setting.sizes)):
        yield from forms_of(setting, size)


def forms_of(setting: Setting, size: str) -> Iterator[Row]:
    model, groups = setting.make_model(size), [setting.make_group(size, 0, 0.25)]
    chosen = choose_forward(model).name
    exact = fitting(setting.meter, lambda: exact_gradients(model, groups))
    stacked = fitting(setting.meter, lambda: gradients(model, SIDES["packed"](model), groups))
    for form in FORMS:
        row: Row = {"": size, "forward": form.name, "chosen": "chosen" if form.name == chosen else ""}
        try:
            forward = form(model)
            row["self-test"] = self_test_difference(model, forward)
        except Exception as error:  # as in choose_forward: a form may fail with any error
            yield row | {"self-test": reason(error)}
            continue
        row["allowed"] = self_test_tolerance(model.dtype)

        def score(groups: Sequence[TokenGroup], forward: Callable = forward) -> Tensor:
            return forward(groups, [1.0] * len(groups))

        computed = fitting(setting.meter, lambda score=score: gradients(model, score, groups))
        yield row | {"gradients, from float32": distance(computed, exact), "from packed": distance(computed, stacked)}


def exact_gradients(model: PreTrainedModel, groups: Sequence[TokenGroup]) -> Gradients:
    """Gradients of a float32 copy, one forward for each completion."""
    copy = deepcopy(model).float()
    return gradients(copy, by_row(copy), groups)


def gradients(model: PreTrainedModel, score: Score, groups: Sequence[TokenGroup]) -> Gradients:
    """Gradients of the sum of all log-probs; clears those of the model."""
    try:
        score(groups).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    finally:
        model.zero_grad(set_to_none=True)


def distance(ours: Gradients | None, right: Gradients | None) -> Cell:
    """Relative L2 distance of all gradients as one vector; None if a side did not fit."""
    if ours is None or right is None:
        return None
    assert ours.keys() == right.keys()
    difference = sum(float((ours[name].float() - grad).square().sum()) for name, grad in right.items())
    whole = sum(float(grad.float().square().sum()) for grad in right.values())
    return (difference / whole) ** 0.5


def by_row(model: PreTrainedModel) -> Score:
    """One forward for each completion, nothing packed and nothing padded."""
    score = classic(model)
    return lambda groups: score([row for group in groups for row in single_rows(group)])
