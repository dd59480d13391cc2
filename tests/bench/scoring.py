"""Log-probs of whole groups: ours against the classic padded forward, and both against float64.

The classic form is Simple-GRPO's: the prompt repeated for every completion, rows padded on the right, logits of every
position, and a log-softmax for each row. In float32 here, so that both sides do the same work to the same precision.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.base_model import make_model
from shared.batch import TokenGroup
from shared.logprobs import choose_forward, embedding_rows
from tests.bench import measure

Score = Callable[[Sequence[TokenGroup]], Tensor]
DEMO_LENGTHS = (31, 30, 30, 29, 28, 27, 16, 12)


@dataclass(frozen=True)
class Shape:
    name: str
    make_model: Callable[[], PreTrainedModel]
    prompt: int
    lengths: tuple[int, ...]
    groups: int
    repetitions: int

    def make_groups(self, vocabulary: int) -> list[TokenGroup]:
        return [measure.random_group(self.prompt, self.lengths, vocabulary, seed) for seed in range(self.groups)]


SHAPES = (
    Shape("25M, P 400", measure.model_25m, 400, measure.LENGTHS, 1, repetitions=3),
    Shape("25M, P 64", measure.model_25m, 64, measure.LENGTHS, 1, repetitions=3),
    Shape("demo, 16 groups", partial(make_model, 0), 12, DEMO_LENGTHS, 16, repetitions=15),
)


def ours(model: PreTrainedModel) -> Score:
    forward = choose_forward(model)
    return lambda groups: forward(groups, [1.0] * len(groups))


def classic(model: PreTrainedModel) -> Score:
    def score(groups: Sequence[TokenGroup]) -> Tensor:
        return torch.cat([logps for group in groups for logps in padded_logps(model, group)])

    return score


SIDES: dict[str, Callable[[PreTrainedModel], Score]] = {"ours": ours, "classic": classic}


def padded_logps(model: PreTrainedModel, group: TokenGroup) -> Iterator[Tensor]:
    rows = [torch.cat([torch.tensor(group.prompt_ids), torch.tensor(ids)]) for ids in group.completions()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    for row, row_logits, row_ids in zip(rows, logits, ids[:, 1:], strict=True):
        logps = row_logits.log_softmax(dim=-1).gather(1, row_ids[:, None])[:, 0]
        yield logps[len(group.prompt_ids) - 1 : len(row) - 1]


def naive(model: PreTrainedModel, groups: Sequence[TokenGroup]) -> Tensor:
    """float64, one row after the other."""
    exact = copy.deepcopy(model).double()
    return torch.cat([padded for group in groups for row in split(group) for padded in padded_logps(exact, row)])


def split(group: TokenGroup) -> list[TokenGroup]:
    """The same completions as groups of one."""
    return [TokenGroup(group.prompt_ids, ids, np.array([len(ids)])) for ids in group.completions()]


def forward_only(score: Score, groups: Sequence[TokenGroup]) -> Tensor:
    with torch.inference_mode():
        return score(groups)


def with_backward(model: PreTrainedModel, score: Score, groups: Sequence[TokenGroup]) -> None:
    score(groups).sum().backward()
    model.zero_grad(set_to_none=True)


def work_of(shape: Shape, side: str, backward: bool) -> Callable[[], object]:
    model = shape.make_model()
    score, groups = SIDES[side](model), shape.make_groups(embedding_rows(model))
    return partial(with_backward, model, score, groups) if backward else partial(forward_only, score, groups)


def times(shape: Shape, backward: bool) -> dict[str, float]:
    return measure.median_seconds({side: work_of(shape, side, backward) for side in SIDES}, shape.repetitions)


def memory(shape: Shape, side: str, backward: bool) -> float:
    return measure.peak_mib(work_of(shape, side, backward))


def errors(shape: Shape) -> dict[str, float]:
    """Largest distance of any log-prob from float64."""
    model = shape.make_model().eval()
    groups = shape.make_groups(embedding_rows(model))
    with torch.inference_mode():
        exact = naive(model, groups)
        return {side: float((make(model)(groups) - exact).abs().max()) for side, make in reversed(SIDES.items())}


def run() -> None:
    rows = []
    for shape in SHAPES:
        error = measure.in_child(errors, shape)
        for work, backward in (("score", False), ("+ backward", True)):
            taken = measure.in_child(times, shape, backward)
            peak = {side: measure.in_child(memory, shape, side, backward) for side in SIDES}
            rows.append(
                [f"{shape.name}, {work}"]
                + [f"{taken[side]:.3f}" for side in SIDES]
                + [f"{taken['classic'] / taken['ours']:.1f}x"]
                + [f"{peak[side]:.0f}" for side in SIDES]
                + [f"{peak['classic'] / max(peak['ours'], 1):.1f}x"]
                + [f"{error[side]:.1e}" for side in SIDES]
            )
    sides = list(SIDES)
    columns = [
        "",
        *(f"{s} s" for s in sides),
        "ratio",
        *(f"{s} MiB" for s in sides),
        "ratio",
        *(f"{s} error" for s in sides),
    ]
    measure.show("Log-probs, float32, one thread; error: largest distance from float64 (bar 2e-5)", columns, rows)
