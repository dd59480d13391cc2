"""Functions of the user's: those of docs/pieces.md by hand, built-in ones in their place, and mistakes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policy_trainer.algorithms.objective.advantages import ADVANTAGES, advantages
from policy_trainer.algorithms.objective.functions import check_functions
from policy_trainer.algorithms.objective.group import LossInputs
from policy_trainer.algorithms.objective.loss import TokenLoss, token_loss
from policy_trainer.algorithms.surrogates import SurrogateInputs, Surrogates
from policy_trainer.config import LossConfig
from shared.errors import UserError
from tests.docs.pages import texts
from tests.policy_trainer.groups import make_group

_, IDEAS = texts("pieces.md", "python")
NAN = math.nan
Function = Callable[..., Any]


@pytest.fixture(scope="module")
def ideas() -> dict[str, Any]:
    """The functions of the page."""
    module: dict[str, Any] = {}
    exec(IDEAS, module)
    return module


def tokens() -> LossInputs:
    """Three completions; one token is masked, and has no log-probs."""
    generator = torch.Generator().manual_seed(0)
    old, ref = (-3 * torch.rand(7, generator=generator) for _ in range(2))
    old[3] = ref[3] = NAN
    return LossInputs(
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 2, 2]),
        mask=torch.tensor([1, 1, 1, 0, 1, 1, 1], dtype=torch.bool),
        advantages=torch.tensor([1.0, 1.0, 1.0, NAN, -0.5, -2.0, -2.0]),
        old_logps=old,
        ref_logps=ref,
    )


def loss_of(surrogate: Any, **settings: Any) -> tuple[TokenLoss, Tensor]:
    """The token loss, and its gradient."""
    logps = (-3 * torch.rand(7, generator=torch.Generator().manual_seed(1))).requires_grad_()
    config = LossConfig(surrogate=surrogate, aggregation="token_mean", **settings)
    loss = token_loss(logps, tokens(), config)
    (gradient,) = torch.autograd.grad(loss.loss.sum(), logps)
    return loss, gradient


def of_groups(function: Any, *rewards: Sequence[float]) -> list[list[float]]:
    """Advantages of groups whose completions have 1, 2, 3, … tokens."""
    groups = [make_group(np.array(row, np.float32), np.arange(1, len(row) + 1)) for row in rewards]
    return [values.tolist() for values in advantages(groups, LossConfig(advantage=function))]


def test_the_pages_surrogate_by_hand(ideas: dict[str, Any]) -> None:
    """TOPR: the gradient of a token is -A for a good completion, -A times its completion's ratio, at most 1, for a bad
    one."""
    loss, gradient = loss_of(ideas["topr"], beta=0.0, importance_sampling_level="sequence_sum")
    logps = -3 * torch.rand(7, generator=torch.Generator().manual_seed(1))
    inputs = tokens()
    assert inputs.old_logps is not None
    differences = (logps - inputs.old_logps).tolist()
    second, third = min(1, math.exp(differences[4])), min(1, math.exp(differences[5] + differences[6]))
    assert {second, third} != {1}, "one must be tapered"
    expected = [-1.0, -1.0, -1.0, 0.0, 0.5 * second, 2 * third, 2 * third]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)
    assert loss.loss.tolist() == pytest.approx([a * b for a, b in zip(expected, logps.tolist(), strict=True)], rel=1e-6)


def test_the_pages_advantage_by_hand(ideas: dict[str, Any]) -> None:
    """r - the median, for each token; 0 where there is no reward."""
    assert of_groups(ideas["median"], [0.0, 1.0, 5.0], [2.0, NAN, 0.0, 0.0]) == [
        [-1.0, 0.0, 0.0, 4.0, 4.0, 4.0],
        [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("name", list(Surrogates.model_fields))
@pytest.mark.parametrize("whole", [True, False])
def test_a_built_in_surrogate_as_a_function_gives_the_same_bits(name: str, whole: bool) -> None:
    def function(tokens: SurrogateInputs) -> Any:
        result = getattr(tokens.config, name).loss(tokens)
        nowhere = torch.zeros_like(tokens.mask)
        bounds = (nowhere if clipped is None else clipped for clipped in (result.clipped_low, result.clipped_high))
        return (result.values, *bounds) if whole else result.values

    (expected, gradient), (loss, same) = loss_of(name, beta=0.1, epsilon=0.1), loss_of(function, beta=0.1, epsilon=0.1)
    assert torch.equal(loss.loss, expected.loss) and torch.equal(same, gradient) and torch.equal(loss.kl, expected.kl)
    clipped = (expected.clipped_low, expected.clipped_high)
    assert torch.equal(loss.clipped_low, clipped[0] & whole) and torch.equal(loss.clipped_high, clipped[1] & whole)


def test_settings_and_metrics_of_the_users_own() -> None:
    """Metrics may be bools, and go with bounds or without; masked tokens have none."""

    def tapered(tokens: SurrogateInputs) -> Any:
        tapers = tokens.ratio > tokens.config.settings["limit"]
        return -tokens.advantages * tokens.logps, {"tapered": tapers, "lengths/nats": -tokens.logps}

    def bounded(tokens: SurrogateInputs) -> Any:
        values, metrics = tapered(tokens)
        return values, tokens.mask, ~tokens.mask, metrics

    loss, _ = loss_of(tapered, beta=0.0, settings={"limit": 1.0})
    assert loss.metrics["tapered"].tolist() == [float(ratio > 1) for ratio in loss.ratio.tolist()]
    assert 0 < loss.metrics["tapered"].sum() < 7 and loss.metrics["lengths/nats"][3] == 0
    assert not loss.metrics["lengths/nats"].requires_grad and not loss.clipped_low.any()
    loss, _ = loss_of(bounded, beta=0.0, settings={"limit": 1e9})
    assert loss.metrics["tapered"].tolist() == [0.0] * 7 and loss.clipped_low.sum() == 6
    assert [*loss.metrics] == ["lengths/nats", "tapered"], "in an order that all processes have"


@pytest.mark.parametrize(
    "name", ["kl", "step", "staleness", "reward/tags", "logged/x", "eval_loss", "rewards/tags/mean", "tools/failures/a"]
)
def test_a_metric_of_the_users_own_takes_no_name_of_another(name: str) -> None:
    def surrogate(tokens: SurrogateInputs) -> Any:
        return -tokens.advantages * tokens.logps, {name: tokens.ratio}

    with pytest.raises(UserError, match=rf"caller:surrogate returned a metric {name}, a name that is taken.*: give"):
        loss_of(surrogate, beta=0.0)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("process", "gdpo")])  # need more rewards
def test_a_built_in_advantage_as_a_function_gives_the_same_bits(name: str) -> None:
    groups = [
        make_group(np.array(rewards, np.float32), np.array([2, 1, 4]), gradient_norms=np.arange(7.0))
        for rewards in ([0.1, 0.7, 0.3], [5.0, NAN, 1.0], [1.0, 1.0, 1.0])
    ]
    built_in = LossConfig(advantage=name, beta=0.0)
    scale = built_in.scale
    named = {"process": "_process", "rloo": "_rloo", "reinforce++": "_reinforce_plus_plus", "distill": "_nothing"}
    named |= {"maxrl": "_maxrl", "optimal_token_baseline": "_optimal_token_baseline"}
    function = f"policy_trainer.algorithms.objective.advantages:{named.get(name, '_outcome')}"
    ours = LossConfig(advantage=function, scale_rewards=scale, beta=0.0, distillation_coef=0.0)
    expected = [ADVANTAGES[name](groups, built_in)[place].astype(np.float32) for place in range(3)]
    for values, same in zip(advantages(groups, ours), expected, strict=True):
        np.testing.assert_array_equal(values, same)


def wrong_dtype(tokens: SurrogateInputs) -> Tensor:
    return tokens.logps.double()


def detached(tokens: SurrogateInputs) -> Tensor:
    return -tokens.advantages * tokens.old_logps


def raising(tokens: SurrogateInputs) -> Tensor:
    return tokens.logits  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (lambda tokens: tokens.logps.sum(), r"return one torch.float32 for each token, shape \(7,\) on cpu .* \(\) on"),
        (lambda tokens: 1.0, r"it returned a float$"),
        (wrong_dtype, r"caller:wrong_dtype must return one torch.float32 .* returned torch.float64 \(7,\) on cpu"),
        (lambda tokens: (tokens.logps, tokens.ratio, tokens.mask), r"must return one torch.bool for each token"),
        (lambda tokens: (tokens.logps, tokens.mask), "must return one tensor, or three, and perhaps .* got 2 tensors"),
        (
            lambda tokens: (tokens.logps, {"of one": tokens.mask}),
            "a metric called 'of one': a name begins",
        ),
        (lambda tokens: (tokens.logps, {"share": 0.5}), r"as metric share, shape \(7,\) .*; it returned a float"),
        (detached, r"caller:detached returned values without a gradient.*; compute them from tokens.logps or tok"),
        (raising, r"caller:raising raised AttributeError: 'SurrogateInputs' object has no .*\n.*test_functions.py"),
        ("tests.nowhere:f", r"tests.nowhere:f cannot be imported"),
        ("caller:f", r"caller:f was a function in a script; give module:name"),
        ("tests.docs.pages:ROOT", r"must be a function, got a PosixPath"),
    ],
)
def test_a_wrong_surrogate_is_explained(surrogate: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)^loss\.surrogate: .*{message}"):
        loss_of(surrogate, beta=0.0)


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda groups, config: [groups[0].rewards], r"a list with an array for each of the 2 groups; .* a list of 1"),
        (lambda groups, config: 0.0, "it returned a float"),
        (lambda groups, config: [np.zeros(4)] * 2, r"here shape \(3,\), .* here \(6,\); it returned an array of fl"),
        (lambda groups, config: [torch.zeros(3, requires_grad=True)] * 2, r"it returned torch.float32 \(3,\)"),
        (lambda groups, config: [group.rewards * math.inf for group in groups], "returned NaN or infinity"),
        (lambda groups, config: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_advantage_is_explained(advantage: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)^loss\.advantage: .*{message}"):
        of_groups(advantage, [0.0, 1.0, 2.0], [0.0, 1.0, 3.0])


def test_signatures_are_checked_before_the_first_step(ideas: dict[str, Any]) -> None:
    check_functions(LossConfig.model_validate({"surrogate": ideas["topr"], "advantage": ideas["median"]}))
    with pytest.raises(UserError, match=r"loss\.surrogate: .* is called with tokens, but missing a required"):
        check_functions(LossConfig.model_validate({"surrogate": lambda ratio, logps: ratio}))
    with pytest.raises(UserError, match=r"loss\.advantage: .* is called with groups and config, but too many"):
        check_functions(LossConfig.model_validate({"advantage": lambda groups: groups}))


def test_a_function_gets_no_rewards_with_the_kl() -> None:
    with pytest.raises(ValueError, match=r"loss\.kl_in: must be loss"):
        LossConfig(advantage="m:f", kl_in="reward")
