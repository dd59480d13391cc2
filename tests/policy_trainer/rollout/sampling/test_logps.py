"""The log-probs that are captured while sampling, compared with those of forwards afterwards."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.data.completion import group_tokens
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.logprobs import PlainForward, choose_forward
from shared.models import save_model
from tests.policy_trainer.rollout.sampling.architectures import PROMPTS, texts
from tests.rounding import rounding

SAMPLED = SamplingParams(4, 20, temperature=1.0)

Make = Callable[..., Any]


class TestLogps:
    @pytest.mark.parametrize("temperature", [0, 0.7, 1.3])
    def test_equal_those_of_the_learner(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float
    ) -> None:
        """Before top-p, top-k, min-p and the penalty of repetitions, and at temperature 1 where tokens are greedy."""
        params = SamplingParams(4, 20, temperature, top_p=0.95, top_k=40, min_p=0.001, repetition_penalty=1.3)
        groups = sample(HFSampler(model, tokenizer), texts(PROMPTS), params, seed=1)
        packed = [group_tokens(prompt, group) for prompt, group in zip(texts(PROMPTS), groups, strict=True)]
        assert len({len(c.ids) for group in groups for c in group}) > 2, "the rows must end at different times"
        captured = np.concatenate([logps for _, logps, _ in packed])
        assert captured.dtype == np.float32
        for forward in (PlainForward(model), choose_forward(model)):
            with torch.no_grad():
                expected = forward([tokens for tokens, _, _ in packed], [temperature or 1.0] * len(packed)).numpy()
            # Greedy tokens are likely: their log-probs are small next to the logits.
            assert np.abs(captured - expected).max() < rounding(max(4, np.abs(expected).max()))

    def test_of_given_tokens_are_those_of_the_loaded_weights(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        (prompt,) = texts(PROMPTS[:1])
        (group,) = sample(HFSampler(model, tokenizer), [prompt], SAMPLED, seed=1)
        tokens, _, _ = group_tokens(prompt, group)
        sampler = HFSampler(copy.deepcopy(model), tokenizer)
        before = sampler.logps(tokens)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
            expected = PlainForward(model)([tokens], [1.0]).numpy()
        save_model(model, tokenizer, tmp_path)
        sampler.load(tmp_path)
        after = sampler.logps(tokens)
        assert after.dtype == np.float32
        assert np.abs(after - expected).max() < rounding(np.abs(expected).max())
        assert np.abs(before - expected).max() > 0.1
