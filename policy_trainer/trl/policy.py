"""Loads `trainer.model` and `trainer.ref_model`: copies of the run's models in the script's process."""

from pathlib import Path
from typing import Any

from policy_trainer.config import TrainConfig
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trl.files import keep
from shared.errors import UserError


def load_policy_model(config: TrainConfig, dtype: Any, peft_config: Any, name: str, trained: Path | None) -> Any:
    """Loads the model that the run starts from, or the trained one; with peft_config, as a peft.PeftModel.

    name: the model's name, for the adapters' config. trained: directory of the trained weights or adapters; None before
    training.
    """
    from policy_trainer.weights.quantised import load_base
    from shared.models import load_model

    if trained is not None and peft_config is None:
        return load_model(str(trained), revision=None, device=config.device, dtype=dtype)
    device = config.device if config.lora.load_in_4bit else "cpu"  # on the CPU it leaves the GPU's memory to the run
    model: Any = load_base(config.model, config.lora, revision=config.revision, device=device, dtype=dtype)
    if peft_config is None:
        return model
    adapted = with_adapters(model, peft_config, name)
    if trained is not None:
        set_weights(adapted, trained, config.device)
    return adapted


def with_adapters(model: Any, peft_config: Any, name: str) -> Any:
    """Wraps the model in a peft.PeftModel, which adds adapters to its layers in place."""
    from peft import get_peft_model

    adapted = get_peft_model(model, peft_config)
    adapted.peft_config["default"].base_model_name_or_path = name
    return adapted


def save_adapters(model: Any, run_dir: Path) -> Path:
    """Writes the adapters that a run starts from. Returns their directory."""
    return keep(
        run_dir / "initial-adapters",
        lambda directory: model.save_pretrained(str(directory), save_embedding_layers=False),
    )


def set_weights(model: Any, trained: Path, device: str) -> None:
    """Loads weights, or adapters, from a directory into the model, and moves it to the device, as TRL does."""
    import torch
    from safetensors.torch import load_file

    from policy_trainer.weights.adapters import WEIGHTS
    from shared.devices import choose_device
    from shared.models import is_adapter, load_model

    if is_adapter(trained):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(trained / WEIGHTS))
    else:
        dtype: Any = str(model.dtype).removeprefix("torch.")
        saved = load_model(str(trained), revision=None, device="cpu", dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved.get_parameter(name))
    if not getattr(model, "is_loaded_in_4bit", False):
        model.to(choose_device(device))


def load_reference(config: TrainConfig, dtype: Any, checkpoint: Path | None) -> Any:
    """Loads a copy of the reference model. None without a KL penalty, and with adapters, which are turned off for it.

    checkpoint: the run's newest one, whose reference sync_ref_model may have replaced.
    """
    if not config.loss.beta or config.lora.rank:
        return None
    from policy_trainer.run_files.checkpoint import read_state
    from shared.models import load_model

    snapshot = read_state(checkpoint).reference if checkpoint else None
    root = config.reference.snapshot_root or RunDirectory(config.run_dir).snapshots
    source, revision = (str(root / snapshot), None) if snapshot else (config.model, config.revision)
    return load_model(source, revision=revision, device="cpu", dtype=dtype).requires_grad_(False)


def check_adapted(model: Any, peft_config: Any, *, beta: float) -> None:
    """Raises UserError for a PeftModel that cannot be trained further."""
    if peft_config is not None:
        raise UserError(
            "peft_config: You passed a `PeftModel` instance together with a `peft_config`",
            "leave it out to train these adapters further, or pass model.merge_and_unload() to train new ones on the "
            "merged model",
        )
    if [*model.peft_config] != ["default"]:
        raise UserError(f"model: must have one adapter, named default, got {', '.join(model.peft_config)}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError("model: is already quantised", "pass its name, with quantization_config and peft_config")
    if beta and has_learnt(model):
        raise UserError(
            "beta: must be 0, since the reference is the model without its adapters, which have been trained: or pass "
            "model.merge_and_unload(), so that the reference includes them, and a peft_config for new ones"
        )


def has_learnt(model: Any) -> bool:
    """Whether the model has adapters that change its outputs: peft initialises lora_B to 0."""
    return any(bool(weight.any()) for name, weight in model.named_parameters() if ".lora_B." in name)
