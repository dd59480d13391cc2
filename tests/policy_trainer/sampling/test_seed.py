"""The seed decides, and nothing else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import SamplingConfig
from policy_trainer.sampling.hf import HFSampler
from policy_trainer.sampling.sampler import SamplingParams, sampling_params
from tests.policy_trainer.sampling.architectures import NO_TOKEN, PROMPTS
from tests.policy_trainer.sampling.test_greedy import ids_of

Make = Callable[..., Any]


class TestSeed:
    def test_decides_everything(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler, params = HFSampler(make_tiny(), tokenizer), SamplingParams(4, 10, temperature=1.0)
        first = sampler.sample(PROMPTS, params, seed=7)
        torch.manual_seed(123)
        again = sampler.sample(PROMPTS, params, seed=7)
        assert ids_of(first) == ids_of(again)
        assert all(
            np.array_equal(a.logps, b.logps)
            for one, two in zip(first, again, strict=True)
            for a, b in zip(one, two, strict=True)
        )
        assert ids_of(sampler.sample(PROMPTS, params, seed=8)) != ids_of(first)

    def test_leaves_the_global_generator_alone(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler = HFSampler(make_tiny(), tokenizer)
        before = torch.get_rng_state()
        sampler.sample(PROMPTS, SamplingParams(2, 5, temperature=1.0), seed=7)
        assert torch.equal(torch.get_rng_state(), before)

    def test_completions_of_a_group_differ(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        sampler = HFSampler(make_tiny(eos=NO_TOKEN), tokenizer)
        (group,) = sampler.sample([[5, 6]], SamplingParams(8, 10, temperature=1.0), seed=7)
        assert len({tuple(completion.ids.tolist()) for completion in group}) == 8


def test_parameters_are_the_configured_ones_but_for_those_replaced() -> None:
    config = SamplingConfig(num_generations=3, temperature=0.7, stop=["x"], top_k=5)
    assert sampling_params(config).num_generations == 3 and sampling_params(config).temperature == 0.7
    greedy = sampling_params(config, num_generations=1, temperature=0)
    assert (greedy.num_generations, greedy.temperature, greedy.stop, greedy.top_k) == (1, 0, ("x",), 5)
