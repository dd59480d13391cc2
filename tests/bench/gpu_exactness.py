"""Tables of exactness: which forward is chosen, the error of its gradients, and the error of half precision."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.objective.kl import k3
from shared.batch import TokenGroup
from shared.logprobs import PackedForward, PaddedForward, choose_forward, self_test_difference
from shared.logprobs.choice import self_test_tolerance
from shared.logprobs.packed import VarlenForward
from tests.bench.gpu_meters import fitting
from tests.bench.gpu_rows import Cell, Row, Setting, reason
from tests.bench.gpu_speed import SIDES
from tests.bench.scoring import Score, classic, score_only, single_rows

FORMS = (VarlenForward, PackedForward, PaddedForward)
NOISE_GROUPS = 4

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

        own = fitting(setting.meter, lambda score=score: gradients(model, score, groups))
        yield row | {"gradients, from float32": distance(own, exact), "from packed": distance(own, stacked)}


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


# ---------------------------------------------------------------- values


def value_rows(setting: Setting, size: str) -> Iterator[Row]:
    model, groups = setting.make_model(size), setting.make_groups(size, NOISE_GROUPS)
    right = fitting(setting.meter, lambda: exact_logps(model, groups[:1]))
    for side, make in SIDES.items():
        score = make(model)
        errors = None if right is None else (score_only(score, groups[:1]).float() - right).abs()
        yield {
            "": f"{size}, {side}",
            "mean distance from float32": None if errors is None else float(errors.mean()),
            "largest": None if errors is None else float(errors.max()),
            "KL to itself, packed otherwise": noise_floor(score, groups) if side != "classic" else "",
        }


def exact_logps(model: PreTrainedModel, groups: Sequence[TokenGroup]) -> Tensor:
    copy = deepcopy(model).float()
    return score_only(by_row(copy), groups)


def noise_floor(score: Score, groups: Sequence[TokenGroup]) -> float:
    """Mean k3 per token between groups packed together and each group alone."""
    alone = torch.cat([score_only(score, [group]) for group in groups])
    return float(k3(score_only(score, groups) - alone).double().mean())
