"""A run's files where scripts for TRL expect them in `output_dir`: links `checkpoint-N` to checkpoints, which contain
`trainer_state.json`. An earlier run is moved out of the way."""

import shutil
import warnings
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.run_files.run_directory import RunDirectory
from shared.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerState

_CHECKPOINT = "checkpoint-"


def show_checkpoint(saved: Path, state: "TrainerState", updates: int) -> Path:
    """Links a checkpoint of the run as `checkpoint-N`, N being the optimizer updates so far, and writes the state.

    Removes links to checkpoints that no longer exist. updates: optimizer updates in a step.
    """
    from shared.models import is_adapter

    output_dir, number = saved.parent.parent, _step(saved) * updates
    link = output_dir / f"{_CHECKPOINT}{min(number, state.max_steps) if state.max_steps > 0 else number}"
    _unlink(old for old in _links(output_dir) if old == link or not old.exists())
    if link.exists():  # a directory that TRL wrote; TRL would overwrite it
        shutil.rmtree(link)
    link.symlink_to(saved.relative_to(output_dir))
    if is_adapter(saved):  # otherwise transformers would take the directory for a whole model
        for name in ("config.json", "generation_config.json"):
            (saved / name).unlink(missing_ok=True)
    if state.best_model_checkpoint == str(saved):
        state.best_model_checkpoint = str(link)
    state.save_to_json(str(saved / "trainer_state.json"))
    return link


def begin_anew(output_dir: Path) -> None:
    """Moves an earlier run in output_dir to output_dir/earlier-run-K, where TRL would overwrite its files.

    Raises UserError if another trainer is running there.
    """
    directory = RunDirectory(output_dir)
    if not output_dir.is_dir() or not directory.has_trained():
        return
    place = next(free for k in count(1) if not (free := output_dir / f"earlier-run-{k}").exists())
    directory.move(place)
    _unlink(_links(output_dir))
    warnings.warn(f"output_dir: the earlier run in {output_dir} was moved to {place}", stacklevel=3)


def resume_from(wanted: Any, output_dir: Path) -> None:
    """Removes the checkpoints after the one to resume from. wanted: its path, or True for the newest.

    Raises UserError if there is none.
    """
    from policy_trainer.run_files.checkpoint import Checkpoints

    checkpoints = Checkpoints(RunDirectory(output_dir).checkpoints, keep=1)
    if wanted is True:
        if checkpoints.newest() is None:
            raise UserError(f"resume_from_checkpoint: No valid checkpoint found in output directory ({output_dir})")
        return
    path = Path(wanted).resolve()
    if path.parent != checkpoints.directory.resolve() or checkpoints.of_step(_step(path)) is None:
        raise UserError(
            f"resume_from_checkpoint: Can't find a valid checkpoint at {wanted}: it must be in this output_dir, "
            f"{output_dir}, with the run's queue; to start a new run from its weights, pass it as the model"
        )
    checkpoints.discard_after(_step(path))


def merge_best(adapters: Path, run_dir: Path) -> str:
    """Merges a checkpoint's adapters into the model. Returns the directory of the merged model."""
    from policy_trainer.ranks.export import export

    target = run_dir / "best-model"
    shutil.rmtree(target, ignore_errors=True)
    export(adapters, target)
    return str(target)


def _step(saved: Path) -> int:
    return int(saved.name.rpartition("-")[2])


def _links(output_dir: Path) -> list[Path]:
    return [path for path in output_dir.glob(f"{_CHECKPOINT}*") if path.is_symlink()]


def _unlink(links: Iterable[Path]) -> None:
    for link in links:
        link.unlink()
