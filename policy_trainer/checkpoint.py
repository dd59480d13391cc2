"""Checkpoints: the weights and the ledger of trained batches in one atomic rename.

A checkpoint is a directory `step-00000080` that is also a Hugging Face model. It is written under a temporary name,
synced, and renamed, so that whatever bears its name is whole.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.json_file import write_json
from shared.models import save_model

_STATE = "trainer.json"
_OPTIMIZER = "optimizer.pt"


@dataclass
class TrainState:
    """Where a run stands, beside its tensors.

    step: training steps done. epoch: lineage of the weights. ledger: ids of batches whose effect the weights hold and
    whose ack was not answered yet. next_index: the data position, one past the newest problem trained.
    """

    step: int = 0
    epoch: int = 0
    ledger: list[str] = field(default_factory=list)
    next_index: int = 0
    batches: int = 0
    groups_left_out: int = 0
    bad_steps: int = 0
    bad_steps_in_a_row: int = 0
    training_seconds: float = 0.0
    best_step: int | None = None
    best_accuracy: float = -1.0


class Checkpoints:
    """The checkpoints of one run: the newest few, and the best."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def save(
        self,
        state: TrainState,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
    ) -> Path:
        """Returns once the checkpoint survives a power cut."""
        target = self._path(state.step)
        if (target / _STATE).exists():
            # The same step has the same weights. Only the state has moved on, and in place nothing is ever missing.
            write_json(target / _STATE, asdict(state))
            _sync(target)
        else:
            self._write(target, state, model, tokenizer, optimizer)
        self._remove_old(state)
        return target

    def _write(
        self,
        target: Path,
        state: TrainState,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
    ) -> None:
        for leftover in self._directory.glob(".tmp-*"):
            shutil.rmtree(leftover)
        temporary = self._directory / f".tmp-{state.step:08d}"
        temporary.mkdir(parents=True)
        save_model(model, tokenizer, temporary)
        torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, temporary / _OPTIMIZER)
        write_json(temporary / _STATE, asdict(state))
        for file in (*temporary.iterdir(), temporary):
            _sync(file)
        temporary.rename(target)
        _sync(self._directory)

    def newest(self) -> Path | None:
        """The checkpoint to resume from."""
        return max(self._saved(), default=None)

    def discard_after(self, step: int) -> None:
        """Removes what an abandoned lineage left beyond the step that is resumed from."""
        for path in self._saved():
            if path > self._path(step):
                shutil.rmtree(path)

    def _remove_old(self, state: TrainState) -> None:
        kept = sorted(self._saved())[-self._keep :]
        for path in self._saved():
            if path not in kept and (state.best_step is None or path != self._path(state.best_step)):
                shutil.rmtree(path)

    def _saved(self) -> list[Path]:
        return [path for path in self._directory.glob("step-*") if (path / _STATE).exists()]

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"


def read_state(checkpoint: Path) -> TrainState:
    return TrainState(**json.loads((checkpoint / _STATE).read_text()))


def restore(checkpoint: Path, optimizer: Optimizer) -> None:
    """Optimizer and random numbers as they were. The weights are loaded as any Hugging Face model, and the learning
    rate is a function of the step."""
    saved = torch.load(checkpoint / _OPTIMIZER, weights_only=True, map_location="cpu")
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
