"""Where implementations of GRPO go wrong: each trap beside the formula that falls into it, which is written out here.

Traps that are proved elsewhere (in tests/policy_trainer, where no other place is named):

| trap | test |
|---|---|
| several EOS ids, of the generation config | sampling/test_ends.py, test_every_eos_of_the_generation_config_ends |
| top-p and top-k renormalise the sampler | sampling/test_logps.py, test_equal_those_of_the_learner; test_cautions.py |
| truncated = keep, mask, drop | test_step_groups.py, test_completions_that_were_cut_off; proofs/test_invariance.py |
| a floor is measured where half precision depends on the packing | test_learner.py, TestNoiseFloor |
| a scorer's exception counted as reward 0 | rewards/test_sandbox.py, test_an_exception_is_not_a_reward_of_0 |
| one stuck reward freezing the run | rewards/test_sandbox.py, test_one_stuck_reward_costs_one_completion |
| positions, masks and caches of a forward | tests/shared/logprobs: test_choice.py, test_attention.py, test_values.py |
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.learner.learner import Learner
from policy_trainer.objective.advantages import ADVANTAGES
from policy_trainer.objective.aggregation import Totals, token_weights
from policy_trainer.objective.group import LossTokens
from policy_trainer.objective.kl import k3
from policy_trainer.objective.loss import token_loss
from policy_trainer.sampling.hf import HFSampler
from policy_trainer.sampling.sampler import SamplingParams
from shared.batch import TokenGroup
from shared.logprobs import PackedForward
from shared.logprobs.head import target_logps
from tests.policy_trainer.groups import make_group
from tests.policy_trainer.learner.steps import make_learner
from tests.policy_trainer.proofs.settings import choices
from tests.rounding import rounding

Make = Callable[..., Any]
AGGREGATIONS = choices("aggregation")


def loss_and_gradient(
    logps: list[float],
    *,
    old: list[float],
    reference: list[float],
    advantages: list[float],
    mask: list[bool],
    **settings: Any,
) -> tuple[float, list[float]]:
    """Of one completion in float32."""
    leaf, sequence_ids, trained = (
        torch.tensor(logps).requires_grad_(),
        torch.zeros(len(mask), dtype=torch.int64),
        torch.tensor(mask),
    )
    tokens = LossTokens(sequence_ids, trained, torch.tensor(advantages), torch.tensor(old), torch.tensor(reference))
    config = LossConfig(**settings)
    totals = Totals(completions=1, tokens=sum(mask), max_completion_length=8)
    weights = token_weights(config.aggregation, sequence_ids, trained, totals)
    loss = (weights.float() * token_loss(leaf, tokens, config).loss).sum()
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.tolist()


def naive_gradient(loss: Callable[[Tensor], Tensor], logps: list[float]) -> tuple[float, list[float]]:
    leaf = torch.tensor(logps).requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.tolist()


class TestOverflow:
    """In float32 exp overflows at 89."""

    def test_masking_after_the_exponential_leaves_nan_gradients(self) -> None:
        mask, old = [True, False], [-1.0, -200.0]

        def naive(logps: Tensor) -> Tensor:
            ratio = (logps - torch.tensor(old)).exp()
            return torch.where(torch.tensor(mask), -ratio, 0.0).sum()

        value, grad = naive_gradient(naive, [-1.0, -1.0])
        assert math.isfinite(value) and math.isnan(grad[1]), "the loss looks right"
        value, grad = loss_and_gradient([-1.0, -1.0], old=old, reference=old, advantages=[1.0, 1.0], mask=mask, beta=0)
        assert value == -1 and grad == [-1.0, 0.0]

    @pytest.mark.parametrize("mean", AGGREGATIONS)
    def test_a_ratio_beside_an_advantage_of_0(self, mean: str) -> None:
        def naive(logps: Tensor) -> Tensor:
            ratio = (logps + 200).exp()
            return -torch.minimum(ratio * 0.0, ratio.clamp(0.8, 1.2) * 0.0).sum()

        value, grad = naive_gradient(naive, [-1.0])
        assert math.isnan(value) and math.isnan(grad[0])
        value, grad = loss_and_gradient(
            [-1.0], old=[-200.0], reference=[-1.0], advantages=[0.0], mask=[True], beta=0, aggregation=mean
        )
        assert value == 0 and grad == [0.0]

    def test_k3(self) -> None:
        def naive(logps: Tensor) -> Tensor:
            x = -1.0 - logps
            return (x.exp() - x - 1).sum()

        value, grad = naive_gradient(naive, [-200.0])
        assert value == math.inf and math.isinf(grad[0])
        value, grad = loss_and_gradient([-200.0], old=[-200.0], reference=[-1.0], advantages=[0.0], mask=[True])
        assert math.isfinite(value) and math.isfinite(grad[0]) and grad[0] <= 0, "towards the reference, or not at all"


def test_k3_written_plainly_has_no_digits_near_0() -> None:
    """Of two policies that are 1e-4 apart, where the KL is 5e-9."""
    x = torch.tensor([1e-4])
    assert abs((x.exp() - x - 1).item() / 5e-9 - 1) > 0.5
    assert k3(x).item() == pytest.approx(5e-9, rel=1e-2)


class TestNothingToDivideBy:
    @pytest.mark.parametrize("mean", AGGREGATIONS)
    def test_an_empty_mask(self, mean: str) -> None:
        nothing = torch.tensor([0.0, 0.0])
        value, grad = naive_gradient(lambda logps: (-logps.exp() * nothing).sum() / nothing.sum(), [-1.0, -2.0])
        assert math.isnan(value) and math.isnan(grad[0])
        old = [-1.0, -2.0]
        value, grad = loss_and_gradient(
            old, old=old, reference=old, advantages=[1.0, 1.0], mask=[False] * 2, aggregation=mean
        )
        assert value == 0 and grad == [0.0, 0.0]

    @pytest.mark.parametrize("advantage", ["outcome", "dr_grpo", "rloo", "reinforce++"])
    @pytest.mark.parametrize("rewards", [[1.0], [math.nan], [math.nan, math.nan], [math.nan, 1.0]])
    def test_a_group_of_one_and_rewards_that_are_all_nan(self, rewards: list[float], advantage: str) -> None:
        own = torch.tensor(rewards)
        judged = own[~own.isnan()]
        assert (
            ((own - judged.mean()) / ((judged - judged.mean()).square().sum() / (len(judged) - 1)).sqrt()).isnan().all()
        )
        group = make_group(np.array(rewards), np.full(len(rewards), 2))
        (values,) = ADVANTAGES[advantage]([group], LossConfig(advantage=advantage, beta=0))  # type: ignore[arg-type]
        assert values.tolist() == [0.0] * (2 * len(rewards))

    def test_a_step_in_which_nothing_was_judged(self, make_tiny: Make, make_scored: Make) -> None:
        nothing = make_scored([3, 4], [[5, 6], [7]], [math.nan, math.nan])
        for drop in (True, False):
            model = make_tiny()
            stats = learner(model, drop_zero_variance=drop).step([nothing], step=0)
            assert stats.updates == 0 and not stats.not_finite
            assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_softmax_in_bfloat16_is_wrong_by_hundredths_of_a_nat() -> None:
    logits = (torch.randn(200, 5000, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    targets = torch.arange(200)
    exact = logits.double().log_softmax(dim=1)[targets, targets]
    naive = logits.log_softmax(dim=1)[targets, targets]
    assert (naive - exact).abs().max() > 0.05
    assert (target_logps(logits, targets, 1.0) - exact).abs().max() < rounding(exact.abs().max(), layers=0) < 5e-3


def learner(
    model: PreTrainedModel,
    forward: Callable[[PreTrainedModel], PackedForward] = PackedForward,
    micro_batch_tokens: int = 10_000,
    **settings: Any,
) -> Learner:
    return make_learner(
        model,
        forward(model),
        loss=LossConfig(**settings),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        max_steps=1,
        micro_batch_tokens=micro_batch_tokens,
        max_completion_length=8,
    )


class TestSampling:
    def test_scored_at_another_temperature_a_policy_is_not_itself(
        self, make_tiny: Make, make_scored: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        """Sampled at 0.7: at this temperature every ratio is 1, at temperature 1 hardly any."""
        model = make_tiny()
        (group,) = HFSampler(model, tokenizer).sample([[3, 4]], SamplingParams(4, 8, temperature=0.7), seed=0)
        _, logps, _ = group_tokens([3, 4], group)
        completions = [one.ids.tolist() for one in group]

        def ratios(temperature: float) -> tuple[float, float]:
            batch = make_scored([3, 4], completions, [0, 1, 0, 1], old_logps=logps, temperature=temperature)
            stats = learner(make_tiny(), beta=0).step([batch], step=0)
            return stats.ratio_min, stats.ratio_max

        assert ratios(0.7) == pytest.approx((1, 1), abs=1e-4)
        naive = ratios(1.0)
        assert naive[0] < 0.9 or naive[1] > 1.1

    def test_text_that_is_tokenised_again_is_other_tokens(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """A policy may spell a tag letter by letter; as text it is one token, which was never sampled."""
        letters: Any = tokenizer.convert_tokens_to_ids(list("<think>"))
        naive = tokenizer.encode(tokenizer.decode(letters), add_special_tokens=False)
        assert len(letters) == 7 and len(naive) == 1
        sampled = Completion(np.array(letters), np.zeros(7, np.float32), finished=True)
        group, logps, _ = group_tokens([3], [sampled])
        assert group.completion_ids.tolist() == letters and len(logps) == 7

    def test_where_padding_is_eos_a_mask_by_id_loses_it(
        self, make_tiny: Make, make_scored: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        pad = eos = 0
        model = make_tiny(eos=eos, vocabulary=4)
        (group,) = HFSampler(model, tokenizer).sample([[2, 3]], SamplingParams(6, 8, temperature=1.0), seed=0)
        ended = [one for one in group if one.finished]
        assert ended and all(one.ids[-1] == eos for one in ended)
        rows = [one.ids.tolist() for one in ended]
        naive = sum(token != pad for row in rows for token in row)
        batch = make_scored([2, 3], rows, [float(n % 2) for n in range(len(rows))])
        assert naive == sum(map(len, rows)) - len(rows)
        assert learner(model).step([batch], step=0).tokens == sum(map(len, rows))


class TestParts:
    def test_chunks_of_a_group_that_are_normalised_apart(self) -> None:
        """In the better half of a group the worse completion would be pushed down, though it is above the mean."""
        rewards = [0.0, 0.1, 0.9, 1.0]
        config = LossConfig()

        def advantages(rewards: list[float]) -> list[float]:
            (values,) = ADVANTAGES["outcome"]([make_group(np.array(rewards))], config)
            return values.tolist()

        naive = advantages(rewards[:2]) + advantages(rewards[2:])
        assert naive[2] < 0 < advantages(rewards)[2]

    def test_micro_batches_never_cut_a_group(self, make_tiny: Make, make_scored: Make) -> None:
        forwards: list[list[int]] = []

        class Watched(PackedForward):
            def with_entropy(
                self, groups: Sequence[TokenGroup], temperatures: Sequence[float]
            ) -> tuple[Tensor, Tensor]:
                forwards.append([group.size for group in groups])
                return super().with_entropy(groups, temperatures)

        batches = [make_scored([3], [[4, 5], [6], [7]], [0.0, 0.1, 1.0]), make_scored([8], [[9], [10]], [0.0, 1.0])]
        learner(make_tiny(), Watched, micro_batch_tokens=1).step(batches, step=0)
        assert forwards == [[3], [2]]

    def test_token_means_averaged_over_micro_batches_of_unequal_size(self) -> None:
        """Tokens of the shorter micro-batch would weigh more."""
        losses = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 7.0])
        parts = [slice(0, 5), slice(5, 6)]
        naive = sum(losses[part].mean().item() for part in parts) / 2
        totals = Totals(completions=2, tokens=6, max_completion_length=8)
        ours = 0.0
        for part in parts:
            mask = torch.ones(len(losses[part]), dtype=torch.bool)
            sequence_ids = torch.zeros(len(mask), dtype=torch.int64)
            weights = token_weights("token_mean", sequence_ids, mask, totals)
            ours += (weights * losses[part]).sum().item()
        assert naive == 4
        assert ours == pytest.approx(losses.mean().item()) == 2
