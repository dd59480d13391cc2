"""Sampling with transformers: greedy completions compared with its own `generate` for each architecture, and seeds."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.logprobs import PackedForward
from tests.policy_trainer.rollout.sampling.architectures import NO_TOKEN, PROMPTS, generate, texts

Make = Callable[..., Any]


def ids_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.ids.tolist() for completion in group] for group in groups]


class TestGreedy:
    @pytest.mark.parametrize("size", [1, 3, 8])
    def test_equals_generate_token_for_token(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, size: int
    ) -> None:
        """Prompts of several lengths, rows that end one after the other."""
        groups = sample(HFSampler(model, tokenizer), texts(PROMPTS), SamplingParams(size, 24, temperature=0), seed=0)
        expected = [generate(model, prompt, 24) for prompt in PROMPTS]
        assert len({len(ids) for ids in expected}) > 2, "the rows must end at different times"
        for ids, group in zip(expected, groups, strict=True):
            assert len(group) == size
            for completion in group:
                assert completion.ids.tolist() == ids
                assert completion.finished is (ids[-1] % 4 == 1)

    def test_reports_the_completions_that_have_ended(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        ended: list[int] = []
        greedy = SamplingParams(1, 24, temperature=0)
        groups = sample(HFSampler(model, tokenizer), texts(PROMPTS), greedy, seed=0, on_progress=ended.append)
        assert len(ended) == max(len(completion.ids) for [completion] in groups), "after each token"
        assert ended == sorted(ended) and 0 < len(set(ended)) - 1 < len(ended) and ended[-1] == len(PROMPTS)

    def test_with_a_repetition_penalty_equals_generate(
        self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        """Of the prompt's tokens too, and of no token that pads a shorter prompt."""
        model = make_tiny(eos=7)
        params = SamplingParams(2, 24, temperature=0, repetition_penalty=1.5)
        expected = [generate(model, prompt, 24, repetition_penalty=1.5) for prompt in PROMPTS]
        assert expected != [generate(model, prompt, 24) for prompt in PROMPTS]
        groups = sample(HFSampler(model, tokenizer), texts(PROMPTS), params, seed=0)
        assert ids_of(groups) == [[ids, ids] for ids in expected]

    def test_beyond_the_room_that_is_made_at_first(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        model = make_tiny(eos=NO_TOKEN)
        groups = sample(HFSampler(model, tokenizer), texts(PROMPTS), SamplingParams(1, 100, temperature=0), seed=0)
        assert [group[0].ids.tolist() for group in groups] == [generate(model, prompt, 100) for prompt in PROMPTS]

    def test_through_the_trainers_packed_attention(self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
        """The trainer evaluates with the model that it trains, whose attention is another."""
        model = make_tiny(eos=NO_TOKEN)
        expected = [generate(model, prompt, 12) for prompt in PROMPTS]
        PackedForward(model)
        groups = sample(HFSampler(model, tokenizer), texts(PROMPTS), SamplingParams(2, 12, temperature=0), seed=0)
        assert [group[1].ids.tolist() for group in groups] == expected

    def test_a_model_can_be_trained_after_it_has_sampled(
        self, make_tiny: Make, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        model = make_tiny()
        sampler = HFSampler(model, tokenizer)
        (group,) = sample(sampler, texts([[5, 6]]), SamplingParams(2, 5, temperature=1.0), seed=0)
        tokens, _, _ = group_tokens(EncodedPrompt([5, 6]), group)
        PackedForward(model)([tokens], [1.0]).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_seed_decides_everything(make_tiny: Make, tokenizer: PreTrainedTokenizerFast) -> None:
    sampler, params = HFSampler(make_tiny(), tokenizer), SamplingParams(4, 10, temperature=1.0)
    first = sample(sampler, texts(PROMPTS), params, seed=7)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = sample(sampler, texts(PROMPTS), params, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert ids_of(first) == ids_of(again)
    pairs = zip(chain(*first), chain(*again), strict=True)
    assert all(np.array_equal(a.logps, b.logps) for a, b in pairs)
    assert ids_of(sample(sampler, texts(PROMPTS), params, seed=8)) != ids_of(first)
    assert len({tuple(completion.ids.tolist()) for completion in first[0]}) > 1
