"""Runs through `policy_trainer.trl`: what they leave in output_dir, and in the objects that the script has."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from policy_trainer.trl import GRPOConfig, GRPOTrainer
from tests.policy_trainer.trl.test_hub import Hub

ROWS = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(16)])
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft


def spread(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 97) for ids in completion_ids]


def trainer(model: Any, out: Path, *, more: Any = None, **config: Any) -> GRPOTrainer:
    args = GRPOConfig(str(out), **{"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 4,
        "max_completion_length": 6, "save_steps": 1, "logging_steps": 1, "use_cpu": True,
        "report_to": "none", **config})  # fmt: skip
    return GRPOTrainer(model, reward_funcs=spread, args=args, train_dataset=ROWS, **more or {})


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model: Any, before: dict[str, torch.Tensor]) -> float:
    """Share of the elements that train."""
    pairs = [(before[name], each) for name, each in model.named_parameters() if each.requires_grad]
    return sum(float((old != new).sum()) for old, new in pairs) / sum(new.numel() for _, new in pairs)


def test_a_float32_model_is_trained_in_place(random_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """With the defaults: bfloat16 would round most of these updates away."""
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype="float32")
    more = {"processing_class": AutoTokenizer.from_pretrained(random_model)}
    made = trainer(model, tmp_path / "out", more=more, push_to_hub=True, hub_model_id="me/mine", hub_token="t")
    before = values(model)
    made.train()
    assert made.model is model and changed(model, before) > 0.5 and made.ref_model is None
    checkpoint: Any = get_last_checkpoint(str(tmp_path / "out"))
    assert checkpoint == str(tmp_path / "out/checkpoint-2")
    made.save_model()
    for directory in (checkpoint, tmp_path / "out", tmp_path / "out/model"):
        saved = values(AutoModelForCausalLM.from_pretrained(directory))
        assert all(torch.equal(saved[name], each) for name, each in values(model).items())
    assert TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").log_history
    assert [upload["commit_message"] for upload in hub.uploads] == [
        "Training in progress, step 1", "Training in progress, step 2", "Model save",
    ]  # fmt: skip
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {*hub.uploads[-1]["files"]}
    assert "config.toml" not in hub.uploads[-1]["files"]

    again = trainer(str(random_model), tmp_path / "out", save_strategy="no")
    with pytest.warns(UserWarning, match="earlier-run-1"):
        again.train()
    assert get_last_checkpoint(str(tmp_path / "out")) is None, "save_strategy"
    assert again.state.global_step == 2 and (tmp_path / "out/earlier-run-1/model").is_dir()


def test_adapters(random_model: Path, tmp_path: Path) -> None:
    """New ones, then resumed from a checkpoint, then trained further by another run."""
    out, more = tmp_path / "out", {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    made = trainer(str(random_model), out, more=more, learning_rate=1e-3)
    before = values(made.model)
    made.train()
    ended = values(made.model)
    assert changed(made.model, before) > 0.9
    assert all(torch.equal(before[name], ended[name]) for name in before if ".lora_" not in name)
    base = AutoModelForCausalLM.from_pretrained(random_model)
    saved = values(PeftModel.from_pretrained(base, str(out / "checkpoint-2")))
    assert all(torch.equal(saved[name], ended[name]) for name in saved if ".lora_" in name)
    assert isinstance(AutoModelForCausalLM.from_pretrained(out / "checkpoint-2"), torch.nn.Module)

    resumed = trainer(str(random_model), out, more=more, learning_rate=1e-3)
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert all(torch.equal(each, ended[name]) for name, each in values(resumed.model).items() if ".lora_" in name)

    base = AutoModelForCausalLM.from_pretrained(random_model, dtype="float32")
    given: Any = PeftModel.from_pretrained(base, str(out / "checkpoint-2"), is_trainable=True)
    further = trainer(
        given, tmp_path / "further", more={"processing_class": AutoTokenizer.from_pretrained(random_model)}
    )
    start = values(given)
    further.train()
    assert further.model is given and changed(given, start) > 0.9
    moved = max(float((start[name] - each).abs().max()) for name, each in values(given).items())
    assert moved < 1e-4, "two steps of 1e-6 from where they were"
