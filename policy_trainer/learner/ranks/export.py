"""Converts a checkpoint of ranks' shards, of adapters, or of both into a Hugging Face model directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from policy_trainer.config import LoraConfig
from policy_trainer.learner.adapters import add_adapters, merged_by_peft, save_whole
from policy_trainer.learner.ranks.sharded_checkpoint import has_shards, load_from_shards, read_weights_in_one_process
from policy_trainer.weights.adapters import MergedAdapters, OtherMethod
from policy_trainer.weights.quantised import dequantised, load_base
from shared.atomic_files import atomic_directory
from shared.errors import UserError
from shared.models import ADAPTER_CONFIG, is_adapter, load_tokenizer
from shared.spelling import spell_setting

# Where a checkpoint of adapters has its model's config.json if programs shall not take it for a whole model.
DESCRIPTION = "base/config.json"


def export(checkpoint: Path, output: Path, base: str | None = None) -> None:
    """Writes the checkpoint's model and tokenizer to `output`, whole or not at all, in the precision it computed in.

    checkpoint: of a run, or adapters that any program wrote in peft's format; if their directory has no tokenizer or
    precision, the base's are used. base: of adapters; default: the one that their files name. Raises UserError for
    a directory that is no such checkpoint, for an output that exists, and for a base that is missing or does not fit
    the adapters.
    """
    if not is_adapter(checkpoint) and not has_shards(checkpoint):
        if (checkpoint / "model.safetensors").exists() or (checkpoint / "model.safetensors.index.json").exists():
            raise UserError(f"checkpoint: {checkpoint} is a Hugging Face model already", "use it as it is")
        raise UserError(
            f"checkpoint: {checkpoint} is none of LoRA's, and none that was written under torchrun",
            "give RUN_DIR/checkpoints/step-00000100 or another of a run's",
        )
    if output.exists():
        raise UserError(f"output: {output} exists", "name another directory")
    if not is_adapter(checkpoint):
        tokenizer, model = load_tokenizer(str(checkpoint)), load_from_shards(checkpoint, device="cpu", dtype="auto")
    else:
        saved = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
        name, revision = _base_of(saved, base)
        has_tokenizer = (checkpoint / "tokenizer_config.json").is_file()
        tokenizer = load_tokenizer(str(checkpoint)) if has_tokenizer else load_tokenizer(name, revision=revision)
        model = _with_adapters(checkpoint, saved, name, revision)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(output) as directory:
        save_whole(model, tokenizer, directory)


def _base_of(saved: Mapping[str, Any], base: str | None) -> tuple[str, str | None]:
    """Name and revision of the adapters' base. saved: their configuration. Raises UserError if the base is unknown."""
    if saved.get("task_type") not in (None, "CAUSAL_LM"):
        raise UserError(
            f"checkpoint: has adapters for peft's task {saved['task_type']}, not for a language model",
            "merge them with peft's merge_and_unload()",
        )
    if base is not None:
        return base, None
    if not (name := saved.get("base_model_name_or_path")):
        raise UserError("model: the adapters do not name their base model", f"pass it as {spell_setting('model')}")
    return name, saved.get("revision")


def _with_adapters(checkpoint: Path, saved: Mapping[str, Any], base: str, revision: str | None) -> PreTrainedModel:
    """The base with adapters merged in, or kept as layers if they come from shards; in the training dtype."""
    ours = [file for file in (checkpoint / "config.json", checkpoint / DESCRIPTION) if file.is_file()]
    described = json.loads(ours[0].read_text()) if ours else {}
    lora = _lora(saved, in_4bit="quantization_config" in described)
    # Devices of another kind quantise with other last bits.
    device = "auto" if lora.load_in_4bit else "cpu"
    model = load_base(base, lora, revision=revision, device=device, dtype=described.get("dtype") or "auto")
    if not has_shards(checkpoint):
        model = dequantised(model)
        try:
            MergedAdapters(model).load(checkpoint)
        except OtherMethod:
            return merged_by_peft(model, checkpoint)
        return model
    add_adapters(model, lora, seed=0, base=saved["base_model_name_or_path"], revision=saved["revision"])
    read_weights_in_one_process(model, checkpoint)
    return model


def _lora(saved: Mapping[str, Any], *, in_4bit: bool) -> LoraConfig:
    """What matters of the adapters to load their base; all of it if they are a run's. saved: their description."""
    if saved.get("peft_type") != "LORA" or not isinstance(saved["target_modules"], list):  # a pattern, in peft's own
        return LoraConfig(load_in_4bit=in_4bit)
    options = {"rank": saved["r"], "alpha": saved["lora_alpha"], "target_modules": saved["target_modules"]}
    return LoraConfig(**options, load_in_4bit=in_4bit)
