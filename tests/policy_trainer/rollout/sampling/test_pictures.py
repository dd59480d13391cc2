"""Sampling from prompts with pictures: log-probs, completions and forbidden tokens of each family."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from policy_trainer.config import EvalConfig
from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.pictures import encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, prompt_encoder
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from shared.logprobs import PackedForward
from shared.logprobs.vision import vision_of
from shared.models import load_model, load_tokenizer
from tests.device import DEVICE
from tests.policy_trainer.vision_models import FAMILIES, picture, save_vision_model
from tests.rounding import rounding

LONG = "What is it that you can see here? " * 3


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def sampler(directory: Path) -> HFSampler:
    model = load_model(str(directory), revision=None, device=str(DEVICE), dtype="float32")
    return HFSampler(model, load_tokenizer(str(directory)))


def prompts(directory: Path, question: str) -> list[EncodedPrompt]:
    """With two pictures, one picture and none, all of different lengths."""
    encoder = prompt_encoder(EvalConfig(model=str(directory)), load_tokenizer(str(directory)))
    pictures = encode(picture(60, 90)), encode(picture(100, 50))
    contents = {f"{question}<image> or <image>?": pictures, "<image>It.": pictures[1:], question: ()}
    return [
        encoder.encode(Problem("", ({"role": "user", "content": content},), images=images))
        for content, images in contents.items()
    ]


@pytest.mark.parametrize("question", ["", LONG], ids=["copied prompts", "shared prompts"])
def test_log_probs_are_the_kernels(directory: Path, sampler: HFSampler, question: str) -> None:
    """float32: at temperature 1, prompts of different lengths in one call."""
    given = prompts(directory, question or "?")
    groups = sample(sampler, given, SamplingParams(3, 12, temperature=1.0), seed=0)
    for prompt, completions in zip(given, groups, strict=True):
        group, logps, _ = group_tokens(prompt, completions)
        assert set(group.images) == set(prompt.images)
        assert np.abs(sampler.logps(group) - logps).max() < rounding(np.abs(logps).max(), layers=4)


def test_pictures_are_seen(directory: Path, sampler: HFSampler) -> None:
    """The same prompt with another picture of the same size has other log-probs."""
    prompt = prompts(directory, "?")[1]
    (completions,) = sample(sampler, [prompt], SamplingParams(1, 12, temperature=1.0), seed=0)
    other = {name: tensor * 0.5 if name == "pixel_values" else tensor for name, tensor in prompt.images.items()}
    group, logps, _ = group_tokens(EncodedPrompt(prompt.ids, other), completions)
    assert np.abs(sampler.logps(group) - logps).max() > 1e-3


def test_rows_with_pictures_join_a_running_batch_at_any_time(directory: Path, sampler: HFSampler) -> None:
    """Also with a longer prompt, after a turn."""
    turns: list[EncodedPrompt] = []
    ended: dict[int, Completion] = {}
    with sampler.running_batch(SamplingParams(1, 1, temperature=1.0), seed=0) as batch:
        for row, prompt in enumerate(prompts(directory, "?")):
            batch.add([row], prompt, 6)
            turns.append(prompt)
            ended |= dict(batch.advance())
        while len(batch):
            for row, completion in batch.advance():
                ended[row] = completion
                if row < 3:
                    turns.append(replace(turns[row], ids=[*turns[row].ids, *completion.ids.tolist(), 40]))
                    batch.add([len(turns) - 1], turns[-1], 12)
    assert len(ended) == len(turns) == 6
    for row, completion in ended.items():
        group, logps, _ = group_tokens(turns[row], [completion])
        assert np.abs(sampler.logps(group) - logps).max() < rounding(np.abs(logps).max(), layers=4)


def generated(model: PreTrainedModel, prompt: EncodedPrompt, limit: int) -> list[int]:
    """transformers' own greedy completion."""
    vision = vision_of(model)
    assert vision is not None
    ids = torch.tensor([prompt.ids])
    inputs = vision.inputs([prompt.images], ids)
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=limit,
        suppress_tokens=list(vision.placeholders),
        **inputs,
    )
    return output[0, len(prompt) :].tolist()


def test_greedy_completions_equal_generates(directory: Path, sampler: HFSampler) -> None:
    model = load_model(str(directory), revision=None, device=str(DEVICE), dtype="float32")
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    given = prompts(directory, LONG)
    groups = sample(sampler, given, SamplingParams(2, 10, temperature=0), seed=0)
    for prompt, group in zip(given, groups, strict=True):
        expected = generated(model, prompt, 10)
        assert [completion.ids.tolist() for completion in group] == [expected] * 2


def test_placeholders_are_never_sampled(directory: Path) -> None:
    """Even by a model that is sure of them, which keeps its log-probs of the others."""
    model = load_model(str(directory), revision=None, device=str(DEVICE), dtype="float32")
    vision = vision_of(model)
    assert vision is not None
    head = torch.nn.Linear(32, model.lm_head.out_features)  # type: ignore[union-attr]
    with torch.no_grad():
        head.weight[:] = model.lm_head.weight  # type: ignore[union-attr, index]
        head.bias.zero_()
        head.bias[list(vision.placeholders)] = 20.0
    model.lm_head = head  # type: ignore[assignment]
    sampler = HFSampler(model, load_tokenizer(str(directory)))
    for temperature in (0.0, 1.0):
        (completions,) = sample(sampler, prompts(directory, "?")[1:2], SamplingParams(4, 8, temperature), seed=1)
        for completion in completions:
            assert not np.isin(completion.ids, vision.placeholders).any()
            assert completion.logps.max() < -5, "those of the model, which prefers placeholders"


def test_the_model_can_be_one_in_training(directory: Path, sampler: HFSampler) -> None:
    """The trainer evaluates with its model, whose language model has packed attention."""
    given = prompts(directory, LONG)
    params = SamplingParams(2, 10, temperature=0)
    expected = sample(sampler, given, params, seed=0)
    model = load_model(str(directory), revision=None, device=str(DEVICE), dtype="float32")
    PackedForward(model)
    groups = sample(HFSampler(model, load_tokenizer(str(directory))), given, params, seed=0)
    for group, other in zip(groups, expected, strict=True):
        assert [each.ids.tolist() for each in group] == [each.ids.tolist() for each in other]
