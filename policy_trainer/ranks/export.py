"""Converts a checkpoint of ranks' shards, of adapters, or of both into a Hugging Face model directory."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from policy_trainer.adapters import MergedAdapters
from policy_trainer.config import LoraConfig
from policy_trainer.learner.adapters import add_adapters, save_whole
from policy_trainer.quantised import dequantised, load_base
from policy_trainer.ranks.sharded_checkpoint import has_shards, load_from_shards, read_weights_in_one_process
from shared.atomic_files import whole_directory
from shared.errors import UserError
from shared.models import ADAPTER_CONFIG, is_adapter, load_tokenizer


def export(checkpoint: Path, output: Path, base: str | None = None) -> None:
    """Writes the checkpoint's model and tokenizer to `output`, whole or not at all, in the precision it computed in.

    base: of adapters; default: the one that their files name. Raises UserError for a directory that is no such
    checkpoint, for an output that exists, and for a base that is not there or that the adapters do not fit.
    """
    if not is_adapter(checkpoint) and not has_shards(checkpoint):
        if (checkpoint / "model.safetensors").exists() or (checkpoint / "model.safetensors.index.json").exists():
            raise UserError(f"checkpoint: {checkpoint} is a Hugging Face model already: use it as it is")
        raise UserError(
            f"checkpoint: {checkpoint} is none of LoRA's, and none that was written under torchrun: give "
            "RUN_DIR/checkpoints/step-00000100 or another of a run's"
        )
    if output.exists():
        raise UserError(f"output: {output} exists: name another directory")
    tokenizer = load_tokenizer(str(checkpoint))
    model = _read_model(checkpoint, base)
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(output) as directory:
        save_whole(model, tokenizer, directory)


def _read_model(checkpoint: Path, base: str | None) -> PreTrainedModel:
    """The model in its training dtype; adapters are merged in, or kept as layers if they come from shards."""
    if not is_adapter(checkpoint):
        return load_from_shards(checkpoint, device="cpu", dtype="auto")
    saved = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    revision = saved.get("revision") if base is None else None
    described = json.loads((checkpoint / "config.json").read_text())
    lora = LoraConfig(
        rank=saved["r"],
        alpha=saved["lora_alpha"],
        target_modules=saved["target_modules"],
        load_in_4bit="quantization_config" in described,
    )
    name, dtype = base or saved["base_model_name_or_path"], described.get("dtype") or "auto"
    # Devices of another kind quantise with other last bits.
    device = "auto" if lora.load_in_4bit else "cpu"
    model = load_base(name, lora, revision=revision, device=device, dtype=dtype)
    if not has_shards(checkpoint):
        model = dequantised(model)
        MergedAdapters(model).load(checkpoint)
        return model
    add_adapters(model, lora, seed=0, base=saved["base_model_name_or_path"], revision=saved["revision"])
    read_weights_in_one_process(model, checkpoint)
    return model
