"""What trains of a vision-language model: all of it, only the language model, or adapters."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy_trainer.config import TrainConfig
from policy_trainer.learner.adapters import adapt, save_policy, save_whole, vision_tower
from policy_trainer.learner.learner import Learner
from policy_trainer.trainer.memory import Shape
from shared.batch import Batch, TokenGroup
from shared.logprobs import choose_forward
from shared.models import load_model
from tests.device import DEVICE
from tests.policy_trainer.vision_models import FAMILIES, make_vision_tokenizer, save_vision_model
from tests.shared.logprobs.families import make
from tests.shared.logprobs.vision_families import VISION_FAMILIES, make_vision, with_images, without_images

Make = Callable[..., Any]
REWARDS = [1.0, 0.0, 0.5]


def scored(model: PreTrainedModel, number: int, group: TokenGroup) -> Batch:
    chance = np.random.default_rng(number)
    with torch.no_grad():
        logps = choose_forward(model)([group], [1.0]).numpy()
    sampled, reference = np.minimum(logps + 0.1 * chance.normal(size=(2, len(logps))), 0).astype(np.float32)
    rollout = Batch(
        id=f"00000000-0000-7000-8000-{number:012x}",
        run="run",
        epoch=0,
        policy_version=0,
        temperature=1.0,
        group=group,
        rewards=np.array(REWARDS, np.float32),
        finished=np.ones(3, np.bool_),
        sampler_logps=sampled,
    )
    return replace(rollout, ref_logps=reference, reference_version="0")


def batches(model: PreTrainedModel) -> list[Batch]:
    groups = [with_images(model, [3, 5, 2]), without_images(6, [4, 1, 3]), with_images(model, [2, 2, 6], seed=1)]
    return [scored(model, number, group) for number, group in enumerate(groups)]


def config_of(**settings: Any) -> TrainConfig:
    fixed = {"model": "m", "max_steps": 3, "loss": {"beta": 0.1}, "optimizer": {"learning_rate": 1e-2}}
    return TrainConfig(**{**fixed, **settings})


def moved(name: str, **settings: Any) -> tuple[set[str], PreTrainedModel]:
    """The names of the weights that two steps changed."""
    model, config = make_vision(name), config_of(**settings)
    given = batches(model)
    adapt(model, config)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    learner = Learner(model, choose_forward(model), config)
    for step in range(2):
        learner.step(given, step=step)
    return {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}, model


def is_tower(model: PreTrainedModel, name: str) -> bool:
    return name.startswith(tuple(vision_tower(model)))


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_the_tower_trains_unless_it_is_frozen(name: str) -> None:
    changed, model = moved(name)
    assert any(is_tower(model, key) for key in changed)
    changed, model = moved(name, freeze_vision_tower=True)
    assert changed and not any(is_tower(model, key) for key in changed)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_adapters_are_those_of_the_language_model_unless_the_tower_trains(name: str) -> None:
    changed, model = moved(name, lora={"rank": 2})
    assert changed and not any(is_tower(model, key) for key in changed)
    assert all(".lora_" in key for key in changed)
    changed, model = moved(name, lora={"rank": 2}, freeze_vision_tower=False)
    assert any(is_tower(model, key) for key in changed)
    assert all(".lora_" in key for key in changed)


def test_the_plan_counts_what_trains() -> None:
    def trained(model: PreTrainedModel, **settings: Any) -> int:
        adapt(model, config_of(**settings))
        return Shape.of(model).trained

    tower = sum(map(size, vision_tower(make_vision("qwen2_vl")).values()))
    whole = trained(make_vision("qwen2_vl"))
    assert trained(make_vision("qwen2_vl"), freeze_vision_tower=True) == whole - tower


def size(part: Any) -> int:
    parameters: Iterable[Any] = part.parameters() if hasattr(part, "parameters") else [part]
    return sum(parameter.numel() for parameter in parameters)


def test_a_text_model_has_no_tower() -> None:
    assert vision_tower(make("qwen2")) == {}


@pytest.mark.parametrize("cut", [10, 60])
def test_micro_batches_do_not_change_a_step(cut: int) -> None:
    """Groups with and without images, in one forward or in several."""

    def stepped(budget: int) -> torch.Tensor:
        model = make_vision("qwen2_5_vl", torch.float64)
        given = batches(make_vision("qwen2_5_vl"))
        learner = Learner(model, choose_forward(model), config_of(micro_batch_tokens=budget))
        learner.step(given, step=0)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert (stepped(cut) - stepped(10_000)).abs().max() < 1e-6


def test_a_saved_model_has_its_processor(tmp_path: Path) -> None:
    tokenizer = make_vision_tokenizer(FAMILIES["qwen2_vl"])
    source = save_vision_model("qwen2_vl", tmp_path / "source")
    model = load_model(str(source), revision=None, device=str(DEVICE), dtype="float32")
    for name, lora in (("model", {}), ("adapters", {"rank": 2})):
        adapt(model, config_of(lora=lora))
        (tmp_path / name).mkdir()
        save_policy(model, tokenizer, tmp_path / name)
        (tmp_path / f"whole-{name}").mkdir()
        save_whole(model, tokenizer, tmp_path / f"whole-{name}")
        for directory in (tmp_path / name, tmp_path / f"whole-{name}"):
            for file in ("processor_config.json", "preprocessor_config.json"):
                assert (directory / file).read_bytes() == (source / file).read_bytes()
