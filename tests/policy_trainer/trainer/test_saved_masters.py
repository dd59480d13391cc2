"""`optimizer.master_weights = "saved"`: the float32 weights begin as the files have them, and are what is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from policy_trainer.config import TrainConfig
from policy_trainer.learner.interface import LoadedLearner
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState
from policy_trainer.trainer.policy import load_in_one_process
from shared.models import save_model


def loaded(model: Path, tokenizer: Any, checkpoint: Path | None = None, **settings: Any) -> LoadedLearner:
    settings = {"optimizer": {"master_weights": "saved"}, "device": "cpu", "dtype": "bfloat16", **settings}
    config = TrainConfig(model=str(model), **settings)
    source = str(checkpoint) if checkpoint and not config.lora.rank else str(model)
    return load_in_one_process(config, source, None, checkpoint, tokenizer, {})


def update(learner: Any) -> None:
    """Smaller than what bfloat16 could show."""
    for parameter in learner.weights.stepped.values():
        parameter.grad = torch.randn_like(parameter)
    for group in learner.weights.optimizer.param_groups:
        group["lr"] = 1e-6
    learner.weights.step()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_float32_from_file_to_file(
    tied: bool, make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    given = make_tiny(vocabulary=len(tokenizer), tied=tied)
    save_model(given, tokenizer, tmp_path / "given")
    policy = loaded(tmp_path / "given", tokenizer)
    trainer: Any = policy.learner
    model, weights = trainer.model, trainer.weights
    assert model.dtype == torch.bfloat16 and all(
        torch.equal(weights.masters[name], parameter) for name, parameter in given.named_parameters()
    )
    update(policy.learner)
    path = Checkpoints(tmp_path / "checkpoints", keep=1).begin(TrainState(step=1), policy.write).finish()
    policy.save(tmp_path / "model")
    assert not (path / "masters").exists()
    for directory in (path, tmp_path / "model"):
        saved: Any = AutoModelForCausalLM.from_pretrained(directory)
        assert saved.dtype == torch.float32
        for name, parameter in saved.named_parameters():
            assert torch.equal(parameter, weights.masters[name])
            assert (parameter != given.get_parameter(name)).float().mean() > 0.99
            assert torch.equal(parameter.bfloat16(), model.get_parameter(name))

    other: Any = loaded(tmp_path / "given", tokenizer, path, optimizer={"master_weights": "float32"}).learner
    assert all(torch.equal(other.weights.masters[name], master) for name, master in weights.masters.items())
    resumed: Any = loaded(tmp_path / "given", tokenizer, path).learner
    for learner in (policy.learner, resumed):
        torch.manual_seed(1)
        update(learner)
    assert all(torch.equal(resumed.weights.masters[name], master) for name, master in weights.masters.items())


def test_adapters_begin_as_their_file_has_them(
    make_tiny: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path / "given")
    lora = {"rank": 2, "target_modules": ["q_proj"]}
    policy = loaded(tmp_path / "given", tokenizer, lora=lora)
    update(policy.learner)
    first = Checkpoints(tmp_path / "first", keep=1).begin(TrainState(step=1), policy.write).finish()
    saved = load_file(first / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    again = loaded(tmp_path / "given", tokenizer, lora={**lora, "path": first})
    second = Checkpoints(tmp_path / "second", keep=1).begin(TrainState(step=1), again.write).finish()
    assert {name: tensor.tolist() for name, tensor in load_file(second / "adapter_model.safetensors").items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }
    with pytest.raises(ValueError, match="has adapters of another rank"):
        loaded(tmp_path / "given", tokenizer, lora={**lora, "rank": 3, "path": first})
