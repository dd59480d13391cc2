"""vLLM gets the pictures themselves, and sees in them what the server and the trainer see in the tensors."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.config import TrainConfig
from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.pictures import encode
from policy_trainer.data.problem import Problem
from policy_trainer.data.prompts import EncodedPrompt, prompt_encoder
from policy_trainer.learner.adapters import adapt, save_policy
from policy_trainer.learner.optimizer import trained
from policy_trainer.rollout.sampling.engines import load_sampler
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams, sample
from shared.errors import UserError
from shared.logprobs import vision_of
from shared.models import load_model, load_tokenizer
from tests.policy_trainer.vision_models import FAMILIES, VOCABULARY, picture, save_vision_model
from tests.vllm.checks import TOLERANCE
from tests.vllm.serving import VllmServe

PARAMS = SamplingParams(6, 24, temperature=1.0)
PLACEHOLDERS = [VOCABULARY["<|image_pad|>"], VOCABULARY["<|video_pad|>"]]
# Of vLLM's attention on a CPU.
HEAD = 32


def save_tiny_vision(directory: Path, *, seed: int) -> Path:
    family = FAMILIES["qwen2_vl"]
    rope = {**family.config["text_config"]["rope_parameters"], "mrope_section": [4, 6, 6]}
    heads = {"head_dim": HEAD, "hidden_size": 2 * HEAD, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**family.config["text_config"], **heads, "rope_parameters": rope}
    tower = {**family.config["vision_config"], "embed_dim": 2 * HEAD, "hidden_size": 2 * HEAD, "num_heads": 2}
    config = {**family.config, "text_config": text, "vision_config": tower}
    return save_vision_model(replace(family, config=config), directory, seed=seed)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_vision(tmp_path / "base", seed=0)


def configured(model: Path, **settings: object) -> TrainConfig:
    common = {"dtype": "float32", "max_steps": 1, "run_dir": model.parent / "run", "task": "jsonl"}
    data = {"path": model, "max_prompt_length": 100, **settings.pop("data", {})}  # type: ignore[dict-item]
    sampling = {"max_completion_length": PARAMS.max_completion_length}
    return TrainConfig.model_validate({"model": str(model), **common, "data": data, "sampling": sampling, **settings})


def prompts_of(config: TrainConfig) -> list[EncodedPrompt]:
    """Two pictures of different sizes, the same text without any, and one picture."""
    encoder = prompt_encoder(config, load_tokenizer(config.model), limit=100)
    wide, high = encode(picture(90, 60)), encode(picture(56, 112))
    return [
        encoder.encode(Problem("", ({"role": "user", "content": text},), images=images))
        for text, images in (("<image>or<image>?", (wide, high)), ("or?", ()), ("<image>is?", (high,)))
    ]


def sampler_of(config: TrainConfig) -> Sampler:
    def never(reason: str, seconds: float) -> None:
        raise AssertionError(reason)

    return load_sampler(config, load_tokenizer(config.model), never, lora=config.lora)[0]


def loaded(model: Path) -> PreTrainedModel:
    return load_model(str(model), revision=None, device="cpu", dtype="float32").eval()


def distance(
    policy: PreTrainedModel, prompts: Sequence[EncodedPrompt], groups: Sequence[Sequence[Completion]]
) -> float:
    """Between the sampler's log-probs and transformers', of all tokens but the placeholders."""
    vision, largest = vision_of(policy), 0.0
    assert vision is not None
    for prompt, completions in zip(prompts, groups, strict=True):
        group, logps, _ = group_tokens(prompt, completions)
        vision.check(group)
        start = 0
        for ids in group.completions():
            row = torch.tensor([[*prompt.ids, *ids]])
            with torch.inference_mode():
                logits = policy(input_ids=row, **vision.inputs([prompt.images], row)).logits[0]
            logits = logits.index_fill(1, torch.tensor(PLACEHOLDERS), -torch.inf)
            expected = logits[len(prompt) - 1 : -1].log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            got = logps[start : start + len(ids)]
            largest = max(largest, float(np.abs(got - expected.numpy()).max()))
            start += len(ids)
    return largest


def running(sampler: Sampler, prompts: Sequence[EncodedPrompt]) -> list[list[Completion]]:
    """Completions of rows that join one after the other."""
    ended: dict[int, Completion] = {}
    with sampler.running_batch(PARAMS, 5) as batch:
        for row, prompt in enumerate(prompts):
            batch.add([row], prompt, 8)
            ended |= dict(batch.advance())
        while len(batch):
            ended |= dict(batch.advance())
    return [[ended[row]] for row in range(len(prompts))]


def check(config: TrainConfig, other: Path) -> None:
    """Samples about pictures are those of transformers, before and after an update of the weights."""
    sampler, prompts = sampler_of(config), prompts_of(config)
    before = sample(sampler, prompts, PARAMS, 5)
    assert distance(loaded(Path(config.model)), prompts, running(sampler, prompts)) < TOLERANCE
    base, updated = loaded(Path(config.model)), loaded(other)
    assert distance(base, prompts, before) < TOLERANCE
    sampler.load(other)
    shutil.rmtree(other)  # as those of a run are, once a worker has read them
    after = sample(sampler, prompts, PARAMS, 5)
    assert distance(updated, prompts, after) < TOLERANCE < distance(base, prompts, after)
    assert not any(np.isin(item.ids, PLACEHOLDERS).any() for group in (*before, *after) for item in group)


def test_in_process(model: Path, tmp_path: Path) -> None:
    check(configured(model, sampler="vllm"), save_tiny_vision(tmp_path / "other", seed=1))


def test_sizes_that_were_set_are_the_engines_too(model: Path) -> None:
    config = configured(model, sampler="vllm", data={"max_pixels": 28 * 28 * 4})
    prompts = prompts_of(config)
    assert len(prompts[0]) < len(prompts_of(configured(model))[0])
    assert distance(loaded(model), prompts, sample(sampler_of(config), prompts, PARAMS, 5)) < TOLERANCE


def test_adapters_of_the_language_model(model: Path, tmp_path: Path) -> None:
    config = configured(model, sampler="vllm", lora={"rank": 8})
    policy, prompts = loaded(model), prompts_of(config)
    adapt(policy, config)
    for weights in trained(policy).values():  # half of them begin as 0
        torch.nn.init.normal_(weights, std=0.05)
    save_policy(policy, load_tokenizer(config.model), tmp_path / "adapter")
    sampler = sampler_of(config)
    sampler.load(tmp_path / "adapter")
    groups = sample(sampler, prompts, PARAMS, 5)
    assert distance(policy, prompts, groups) < TOLERANCE < distance(loaded(model), prompts, groups)


def test_a_server(model: Path, tmp_path: Path, serve: Callable[..., VllmServe]) -> None:
    config = configured(model, sampler="vllm-server", vllm_url=serve(model, "--enable-scale-out").url)
    smaller = prompts_of(configured(model, data={"max_pixels": 28 * 28 * 4}))
    with pytest.raises(UserError, match=r"turns a prompt with pictures into other tokens .*--mm-processor-kw"):
        sample(sampler_of(config), smaller, PARAMS, 5)
    check(config, save_tiny_vision(tmp_path / "other", seed=1))
