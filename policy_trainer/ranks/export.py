"""Converts a checkpoint of ranks' shards, of adapters, or of both into a Hugging Face model directory.

In one process, and in main memory.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from policy_trainer.config import LoraConfig
from policy_trainer.learner.adapters import add_adapters, save_whole
from policy_trainer.ranks.sharded_checkpoint import has_shards, load_from_shards, read_weights_in_one_process
from policy_trainer.sampling.hf import MergedAdapters
from shared.atomic_files import whole_directory
from shared.errors import UserError
from shared.models import ADAPTER_CONFIG, is_adapter, load_model, load_tokenizer


def export(checkpoint: Path, output: Path, base: str | None = None) -> None:
    """Writes the checkpoint's model and tokenizer to `output`, whole or not at all, in the precision it computed in.

    base: of adapters; default: the one that their files name. Raises UserError for a directory that is no such
    checkpoint, for an output that exists, and for a base that is not there or that the adapters do not fit.
    """
    read = _READERS.get((is_adapter(checkpoint), has_shards(checkpoint)))
    if read is None:
        is_model = (checkpoint / "model.safetensors").exists() or (checkpoint / "model.safetensors.index.json").exists()
        if is_model:
            raise UserError(f"checkpoint: {checkpoint} is a Hugging Face model already: use it as it is")
        raise UserError(
            f"checkpoint: {checkpoint} is none of LoRA's, and none that was written under torchrun: give "
            "RUN_DIR/checkpoints/step-00000100 or another of a run's"
        )
    if output.exists():
        raise UserError(f"output: {output} exists: name another directory")
    tokenizer = load_tokenizer(str(checkpoint))
    model = read(checkpoint, base)
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(output) as directory:
        save_whole(model, tokenizer, directory)


def _from_shards(checkpoint: Path, base: str | None) -> PreTrainedModel:
    return load_from_shards(checkpoint, device="cpu", dtype="auto")


def _from_adapter(checkpoint: Path, base: str | None) -> PreTrainedModel:
    model = _load_base(checkpoint, base)
    MergedAdapters(model).load(checkpoint)
    return model


def _from_shards_of_adapters(checkpoint: Path, base: str | None) -> PreTrainedModel:
    """With adapters, rounded as while training."""
    model, saved = _load_base(checkpoint, base), _adapter_config(checkpoint)
    lora = LoraConfig(rank=saved["r"], alpha=saved["lora_alpha"], target_modules=saved["target_modules"])
    add_adapters(model, lora, seed=0, base=saved["base_model_name_or_path"], revision=saved["revision"])
    read_weights_in_one_process(model, checkpoint)
    return model


_Reader = Callable[[Path, str | None], PreTrainedModel]
# By whether it is an adapter's, and whether it was written under torchrun.
_READERS: dict[tuple[bool, bool], _Reader] = {
    (False, True): _from_shards,
    (True, False): _from_adapter,
    (True, True): _from_shards_of_adapters,
}


def _load_base(checkpoint: Path, base: str | None) -> PreTrainedModel:
    """In the precision that the adapters were trained in."""
    saved = _adapter_config(checkpoint)
    revision = saved.get("revision") if base is None else None
    dtype = json.loads((checkpoint / "config.json").read_text()).get("dtype") or "auto"
    return load_model(base or saved["base_model_name_or_path"], revision=revision, device="cpu", dtype=dtype)


def _adapter_config(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / ADAPTER_CONFIG).read_text())
