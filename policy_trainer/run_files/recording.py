"""Recorded batches: what each step trained on, for `policy-trainer replay`.

A recording has a directory for each step, `step-00000012`, with the step's batches in their order,
`00000-ID.safetensors`: bodies as they were leased, which any safetensors library reads. A step appears complete.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from policy_trainer.learner.groups import Batch, rollout_of
from policy_trainer.lifecycle.endings import write_failures
from shared import wire
from shared.atomic_files import whole_directory
from shared.batch import BatchError
from shared.errors import UserError

_STEP = "step-"
_BODY = ".safetensors"


def open_recording(root: Path, *, resumed_at: int | None) -> None:
    """Removes the steps after the one that a run resumes from.

    resumed_at: None for a new run; then UserError is raised if the directory holds another run's recording.
    """
    steps = [*root.glob(f"{_STEP}*")]
    if steps and resumed_at is None:
        raise UserError(f"record: {root} holds a recording already; choose another directory")
    for step in steps:
        if _number(step) > (resumed_at or 0):
            shutil.rmtree(step)


def record(root: Path, step: int, batches: Sequence[Batch]) -> None:
    """Writes the batches that a step trained on. step: its number, from 1. Raises RunFailed for a full disk."""
    target = root / f"{_STEP}{step:08d}"
    with write_failures(root), whole_directory(target, siblings=f"{_STEP}*") as directory:
        for place, batch in enumerate(batches):
            (directory / f"{place:05d}-{rollout_of(batch).id}{_BODY}").write_bytes(wire.encode(batch))


def read_recording(root: Path, groups_per_step: int) -> Iterator[tuple[int, list[Batch]]]:
    """(number of a step, from 1; its batches). Batches directly in `root` are cut into steps of groups_per_step,
    in the order of their names.

    Raises UserError for a directory without batches, and for a file that is none.
    """
    steps = sorted(root.glob(f"{_STEP}*"))
    files = [(_number(step), sorted(step.glob(f"*{_BODY}"))) for step in steps]
    if not files:
        loose = sorted(root.glob(f"*{_BODY}"))
        starts = range(0, len(loose), groups_per_step)
        files = [(number, loose[start : start + groups_per_step]) for number, start in enumerate(starts, 1)]
    if not any(part for _, part in files):
        raise UserError(f"batches: {root} holds no batches; record some: policy-trainer train --record {root}")
    return ((number, [_read(file) for file in part]) for number, part in files)


def _number(step: Path) -> int:
    return int(step.name.removeprefix(_STEP))


def _read(file: Path) -> Batch:
    try:
        return wire.decode(file.read_bytes())
    except (OSError, BatchError) as error:
        raise UserError(f"batches: {file} is no batch: {error}") from None
