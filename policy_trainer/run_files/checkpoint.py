"""Checkpoints: the weights and the ledger of trained batches in one atomic rename.

A checkpoint is a directory `step-00000080` that is also a Hugging Face model, or its LoRA adapters.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.learner.adapters import save_policy, save_unrounded
from policy_trainer.learner.interface import WritesWeights
from policy_trainer.learner.optimizer import Weights
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.run_files.run_directory import STATE, RunDirectory, checkpoint_versions
from shared.atomic_files import atomic_file, read_json, sync, write_json
from shared.errors import UserError
from shared.spelling import spell_name

_OPTIMIZER = "optimizer.pt"
# A subdirectory, because some programs read every safetensors file in a model's directory as a part of it.
_MASTERS = "masters/weights.safetensors"

Average = Mapping[str, Tensor]
"""A moving average of the policy's weights: float32 tensors by parameter name; a tied weight once."""


@dataclass
class TrainState:
    """A run's progress: all of a checkpoint but its tensors.

    step: training steps done. epoch: rises at each resume; batches of earlier epochs sampled after the checkpoint are
    not used. ledger: ids of trained batches whose ack the server has not confirmed yet. next_index: the data position,
    one past the highest problem index trained.
    reference, reference_version: the snapshot that the server scores with; None and 0 for the server's initial model.
    renewed_at: step of the last renewal. entropy_coef, last_entropy: of the entropy bonus, its coefficient and the
    entropy that it saw last; None where it adapts to none.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int = 0
    epoch: int = 0
    ledger: list[str] = field(default_factory=list)
    next_index: int = 0
    batches: int = 0
    completions: int = 0
    trained_tokens: int = 0
    bad_steps_in_a_row: int = 0
    unrewarded_steps_in_a_row: int = 0
    training_seconds: float = 0.0
    best_step: int | None = None
    best_scores: list[float] = field(default_factory=list)
    reference: str | None = None
    reference_version: int = 0
    renewed_at: int = 0
    entropy_coef: float = 0.0
    last_entropy: float | None = None

    @property
    def progress(self) -> dict[str, float]:
        """The x axes of plots besides the step."""
        return {"completions_total": self.completions, "runtime_seconds": self.training_seconds}


@dataclass(frozen=True, eq=False)
class PendingCheckpoint:
    """A checkpoint that is being written. state: the run's progress in it."""

    target: Path
    state: TrainState
    _writing: Future[Any] | None
    _block: ExitStack
    _remove_old: Callable[[TrainState], None]

    def done(self) -> bool:
        """Whether `finish` need not wait."""
        return self._writing is None or self._writing.done()

    def finish(self) -> Path:
        """Returns once the checkpoint survives a power cut. Without its weights there is no checkpoint."""
        with self._block:
            if self._writing is not None:
                self._writing.result()
        self._remove_old(self.state)
        return self.target


class Checkpoints:
    """The checkpoints of one run: the newest few, and the best."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = directory
        self._versions = checkpoint_versions(directory)
        self._keep = keep

    def save(
        self,
        state: TrainState,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        weights: Weights,
        average: Average | None = None,
    ) -> Path:
        """Returns once the checkpoint survives a power cut."""
        return self.begin(state, partial(write_weights, model, tokenizer, weights), average).finish()

    def begin(self, state: TrainState, write: WritesWeights, average: Average | None = None) -> "PendingCheckpoint":
        """Begins a checkpoint of this moment, which may still be written in the background when this returns.

        write: writes the weights into a directory, or begins to. Finish a checkpoint before the next begins.
        """
        state = replace(state, ledger=[*state.ledger], best_scores=[*state.best_scores])
        target, writing = self._versions.path(state.step), None
        with ExitStack() as block:
            if (target / STATE).exists():
                # The weights of this step are saved already. Only the state has changed.
                _write_state(target, state, average)
                block.callback(sync, target)
            else:
                directory = block.enter_context(self._versions.write(state.step))
                writing = write(directory)
                _write_state(directory, state, average)
            return PendingCheckpoint(target, state, writing, block.pop_all(), self._remove_old)

    def newest(self) -> Path | None:
        """The checkpoint to resume from."""
        return self._versions.newest()

    def of_step(self, step: int) -> Path | None:
        """The checkpoint of this step, if it is there."""
        return self._versions.by_numbers().get((step,))

    def references(self) -> set[str | None]:
        """The snapshots that the checkpoints were trained with."""
        return {read_state(path).reference for path in self._versions.by_numbers().values()}

    def discard_after(self, step: int) -> None:
        """Removes checkpoints later than the step that the run resumes from."""
        self._versions.remove_after(step)

    def _remove_old(self, state: TrainState) -> None:
        best = () if state.best_step is None else (self._versions.path(state.best_step),)
        self._versions.remove_old(keep=self._keep, also=best)


@dataclass(frozen=True)
class RunFiles:
    """Files and state of a run.

    resumed_from: the checkpoint that this process resumes from; None for a new run. state: the run's progress; the
    trainer updates it. trial: the server keeps neither metrics nor samples of this run.
    """

    directory: RunDirectory
    checkpoints: Checkpoints
    resumed_from: Path | None
    state: TrainState
    lineage: str = ""
    trial: bool = False

    def check_directory(self) -> None:
        """Raises RunFailed if the directory was deleted, and perhaps begun again, since this trainer opened it."""
        if self.directory.lineage != self.lineage:
            raise RunFailed(
                f"{spell_name('run_dir')}: {self.directory.root} was deleted or begun again while this trainer was at "
                "work, so it stops here and writes nothing more",
                "train again to begin a new run",
            )


def read_state(checkpoint: Path) -> TrainState:
    """Raises UserError if it is damaged."""
    return read_json(checkpoint / STATE, _SAVED_STATE, _remedy(checkpoint))


def _remedy(checkpoint: Path) -> str:
    return f"delete {checkpoint} to resume from the checkpoint before it"


_SAVED_STATE = TypeAdapter(TrainState)


def restore(checkpoint: Path, weights: Weights) -> None:
    """Restores the optimizer, the master weights and the random state.

    The model and its adapters are loaded separately. The learning rate is a function of the step.
    """
    optimizer, rng, masters = read_saved(checkpoint)
    weights.optimizer.load_state_dict(deepcopy(optimizer))  # the stepped tensors must not be a part of the file
    torch.set_rng_state(rng)
    if masters:
        weights.load(masters)


def holds_masters(checkpoint: Path) -> bool:
    """Whether it has master weights in addition to the model's weights."""
    return (checkpoint / _MASTERS).exists()


def read_saved(checkpoint: Path) -> tuple[dict[str, Any], Tensor, Mapping[str, Tensor]]:
    """(the optimizer's state_dict, the random state, master weights by name if there are any), on the CPU.

    checkpoint: of one process. Tensors are read from the disk when they are used. Raises UserError for damaged files.
    """
    file, masters = checkpoint / _OPTIMIZER, checkpoint / _MASTERS
    try:
        saved = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
        optimizer, rng = saved["optimizer"], saved["rng"]
        file = masters
        return optimizer, rng, safetensors.torch.load_file(masters) if masters.exists() else {}
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, UnpicklingError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # mapping a short file
            raise
        raise UserError(f"{file} is damaged", _remedy(checkpoint)) from error


def read_average(checkpoint: Path, renewed_at: int) -> Average | None:
    """The average that the reference was rounded from at its last renewal; None if the checkpoint has none."""
    file = _average_file(checkpoint, renewed_at)
    return safetensors.torch.load_file(file) if file.exists() else None


def _write_state(directory: Path, state: TrainState, average: Average | None) -> None:
    """Writes the average before the state that names it."""
    if average is not None:
        _write_average(_average_file(directory, state.renewed_at), average)
    write_json(directory / STATE, asdict(state))


def write_weights(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: Weights, directory: Path
) -> None:
    """A Hugging Face model or its adapters, with the optimizer, the random state and the master weights, unless these
    are the model's."""
    if weights.saves_masters:
        save_unrounded(model, tokenizer, directory, weights.masters)
    else:
        save_policy(model, tokenizer, directory)
    saved = {"optimizer": weights.optimizer.state_dict(), "rng": torch.get_rng_state()}
    _save(saved, directory / _OPTIMIZER)
    if weights.masters and not weights.saves_masters:
        file = directory / _MASTERS
        file.parent.mkdir()
        tensors = {name: master.detach().contiguous() for name, master in weights.masters.items()}
        safetensors.torch.save_file(tensors, file)
        shutil.copymode(directory / _OPTIMIZER, file)  # safetensors lets only the owner read


def _save(saved: dict[str, Any], file: Path) -> None:
    """Raises OSError if the file cannot be written."""
    try:
        torch.save(saved, file)
    except RuntimeError as error:
        if "inline_container" not in str(error):  # the source of PyTorch's writer, whose message says no reason
            raise
        raise OSError(f"PyTorch cannot write all of {file.name}, perhaps because its disk is full") from error


def _average_file(checkpoint: Path, renewed_at: int) -> Path:
    # A subdirectory, as for the masters. One file per renewal: the saved state may still name the previous one.
    return checkpoint / "reference" / f"average-{renewed_at:08d}.safetensors"


def _write_average(file: Path, average: Average) -> None:
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    with atomic_file(file) as temporary:
        safetensors.torch.save_file(dict(average), temporary)
    sync(file.parent)
