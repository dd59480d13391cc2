"""Where implementations of GRPO go wrong: each trap with the formula that falls into it.

Traps that are proved elsewhere, in tests/policy_trainer if no other folder is named:

| trap | test |
|---|---|
| exponentials that overflow, also under a mask; empty masks | objective/test_loss.py, TestMask and the tests after it |
| the plain form of k3 near 0 | objective/test_loss.py, TestK3 |
| groups cut by micro-batches, means of unequal parts | learner/test_learner.py, TestInvariance |
| several EOS ids, of the generation config | sampling/test_ends.py, test_every_eos_of_the_generation_config_ends |
| top-p and top-k renormalise the sampler | sampling/test_logps.py, test_equal_those_of_the_learner; test_cautions.py |
| truncated = keep, mask, drop | learner/test_groups.py, test_completions_that_were_cut_off; proofs/test_invariance.py |
| a floor is measured where half precision depends on the packing | learner/test_learner.py, TestNoiseFloor |
| a scorer's exception counted as reward 0 | rewards/test_sandbox.py, test_an_exception_is_not_a_reward_of_0 |
| one stuck reward freezing the run | rewards/test_sandbox.py, test_one_stuck_reward_costs_one_completion |
| positions, masks and caches of a forward | tests/shared/logprobs: test_choice.py, test_attention.py, test_values.py |
"""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import LossConfig, OptimizerConfig
from policy_trainer.data.completion import group_tokens
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.learner.learner import Learner
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from tests.policy_trainer.learner.steps import make_learner
from tests.policy_trainer.rollout.sampling.architectures import texts

Make = Callable[..., Any]


def learner(model: PreTrainedModel, **settings: Any) -> Learner:
    return make_learner(model, loss=LossConfig(**settings), optimizer=OptimizerConfig(learning_rate=1e-2))


class TestSampling:
    def test_scored_at_another_temperature_a_policy_is_not_itself(
        self, make_tiny: Make, make_scored: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        """Sampled at 0.7: at this temperature every ratio is 1, at temperature 1 hardly any."""
        model = make_tiny()
        (group,) = sample(HFSampler(model, tokenizer), texts([[3, 4]]), SamplingParams(4, 8, temperature=0.7), seed=0)
        _, logps, _ = group_tokens(EncodedPrompt([3, 4]), group)
        completions = [completion.ids.tolist() for completion in group]

        def ratios(temperature: float) -> tuple[float, float]:
            batch = make_scored([3, 4], completions, [0, 1, 0, 1], old_logps=logps, temperature=temperature)
            stats = learner(make_tiny(), beta=0).step([batch], step=0)
            return stats.metrics["ratio_min"], stats.metrics["ratio_max"]

        assert ratios(0.7) == pytest.approx((1, 1), abs=1e-4)
        naive = ratios(1.0)
        assert naive[0] < 0.9 or naive[1] > 1.1

    def test_where_padding_is_eos_a_mask_by_id_loses_it(
        self, make_tiny: Make, make_scored: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        pad = eos = 0
        model = make_tiny(eos=eos, vocabulary=4)
        (group,) = sample(HFSampler(model, tokenizer), texts([[2, 3]]), SamplingParams(6, 8, temperature=1.0), seed=0)
        ended = [completion for completion in group if completion.finished]
        assert ended and all(completion.ids[-1] == eos for completion in ended)
        rows = [completion.ids.tolist() for completion in ended]
        naive = sum(token != pad for row in rows for token in row)
        batch = make_scored([2, 3], rows, [float(n % 2) for n in range(len(rows))])
        assert naive == sum(map(len, rows)) - len(rows)
        assert learner(model).step([batch], step=0).tokens == sum(map(len, rows))
