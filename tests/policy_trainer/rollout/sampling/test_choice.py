"""How a model is decoded: with shared or copied prompts, with transformers' cache, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import TrainConfig
from policy_trainer.rollout.sampling import choice
from policy_trainer.rollout.sampling.choice import choose_decoding
from policy_trainer.rollout.sampling.decoders import Decoding
from policy_trainer.rollout.sampling.engines import load_sampler
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.errors import UserError
from shared.logprobs.attention import attention_of
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.tiny_models import ARCHITECTURES, make_tiny

Make = Callable[..., Any]
OLD = Version(transformers.__version__) < Version("5.23")


@pytest.mark.parametrize(
    ("architecture", "decoding"),
    [
        ("qwen2", Decoding.SHARED),
        ("gpt_oss", Decoding.SHARED),
        ("qwen3_5", Decoding.SHARED),
        ("jamba", Decoding.SHARED),
        ("mamba", Decoding.SHARED),
        ("gemma4_text", Decoding.SHARED),  # some of its layers attend to an earlier layer's keys
        ("deepseek_v3", Decoding.COPIED),  # its cache has latents, from which each step computes keys and values
        ("mpt", Decoding.REPEATED),  # its attention is its own, as GPT-J's before 5.24
        ("gptj", Decoding.SHARED if Version(transformers.__version__) >= Version("5.24") else Decoding.REPEATED),
        ("deepseek_v32", Decoding.REPEATED),  # so is what its cache keeps
    ],
)
def test_the_fastest_way_that_is_right_is_chosen(architecture: str, decoding: Decoding) -> None:
    if architecture not in ARCHITECTURES or (architecture in ("gemma4_text", "deepseek_v3") and OLD):
        pytest.skip("this transformers does not have it, or another cache for it")
    model = make_tiny(architecture)
    before = attention_of(model)
    assert choose_decoding(model) is decoding
    assert attention_of(model) == before and not model.training


def test_a_model_in_bfloat16_may_return_float32_logits() -> None:
    model = make_tiny("nemotron_h").bfloat16()
    assert model(torch.tensor([[5, 6]])).logits.dtype == torch.float32
    assert choose_decoding(model) is Decoding.SHARED


@pytest.mark.parametrize(
    ("architecture", "why"), [("openai-gpt", "keeps no key-value cache"), ("bart", "differs from a plain forward")]
)
def test_a_model_that_cannot_be_sampled_is_refused_by_name(
    architecture: str, why: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_tiny(architecture)
    sampler = HFSampler(model, tokenizer)
    refusal = rf"{type(model).__name__} cannot be sampled with transformers.*{why}.*--sampler vllm.*docs/models.md"
    for call in (
        sampler.check,
        lambda: sample(sampler, texts([[5, 6]]), SamplingParams(1, 4, 1.0), 0),
        sampler.running_batch(SamplingParams(1, 4, 1.0), 0).__enter__,
    ):
        with pytest.raises(UserError, match=refusal):
            call()


def test_a_worker_refuses_it_when_it_starts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    make_tiny("openai-gpt").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = TrainConfig(model=str(tmp_path), task="gsm8k", device="cpu", dtype="float32")
    with pytest.raises(UserError, match="OpenAIGPTLMHeadModel cannot be sampled"):
        load_sampler(config, tokenizer, lambda *_: None)


def test_a_model_is_tested_once(make_tiny: Make, tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    tested: list[Any] = []
    difference = choice.self_test_difference
    monkeypatch.setattr(choice, "self_test_difference", lambda *given: tested.append(given) or difference(*given))
    sampler = HFSampler(make_tiny(), tokenizer)
    for seed in range(2):
        sample(sampler, texts([[5, 6]]), SamplingParams(2, 4, 1.0), seed)
    assert len(tested) == 1
