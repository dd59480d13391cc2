"""Makes a Hugging Face model directory of a sharded checkpoint, in one process and in main memory."""

import warnings
from pathlib import Path

import torch

from policy_trainer.ranks.checkpoint import has_shards, read_weights
from policy_trainer.ranks.sharding import materialise
from shared.atomic_files import whole_directory
from shared.errors import UserError
from shared.models import load_empty, load_tokenizer, save_model


def export(checkpoint: Path, output: Path) -> None:
    """Writes the checkpoint's model and tokenizer to `output`, whole or not at all, in the precision it computed in.

    Raises UserError for a directory that is no such checkpoint, and for an output that exists.
    """
    if not has_shards(checkpoint):
        is_model = (checkpoint / "model.safetensors").exists() or (checkpoint / "model.safetensors.index.json").exists()
        if is_model:
            raise UserError(f"checkpoint: {checkpoint} is a Hugging Face model already: use it as it is")
        raise UserError(
            f"checkpoint: {checkpoint} is none that was written under torchrun: give RUN_DIR/checkpoints/step-00000100 "
            "or another of a run's"
        )
    if output.exists():
        raise UserError(f"output: {output} exists: name another directory")
    tokenizer = load_tokenizer(str(checkpoint))
    model = load_empty(str(checkpoint), revision=None, dtype="auto")
    dtype = model.dtype
    materialise(model.float(), torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is
        read_weights(model, checkpoint)
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(output) as directory:
        save_model(model.to(dtype), tokenizer, directory)  # type: ignore[arg-type]
