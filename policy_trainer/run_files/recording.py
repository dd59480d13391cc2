"""Recorded batches: what each step trained on, for `policy-trainer replay`.

A recording has a directory for each step, `step-00000012`, with the step's batches in their order,
`00000-ID.safetensors`: bodies as they were leased, which any safetensors library reads. A step appears complete.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from policy_trainer.processes.lifecycle.endings import write_failures
from shared import wire
from shared.atomic_files import VersionedDirectory
from shared.batch import Batch, BatchError
from shared.errors import UserError

_BODY = ".safetensors"


def open_recording(root: Path, *, resumed_at: int | None) -> None:
    """Removes the steps after the one that a run resumes from.

    resumed_at: None for a new run; then UserError is raised if the directory holds another run's recording.
    """
    steps = _steps(root)
    if resumed_at is not None:
        steps.remove_after(resumed_at)
    elif steps.by_numbers():
        raise UserError(f"record: {root} holds a recording already", "choose another directory")


def record(root: Path, step: int, batches: Sequence[Batch]) -> None:
    """Writes the batches that a step trained on. step: its number, from 1. Raises RunFailed for a full disk."""
    with write_failures(root), _steps(root).write(step) as directory:
        for place, batch in enumerate(batches):
            (directory / f"{place:05d}-{batch.id}{_BODY}").write_bytes(wire.encode(batch))


def read_recording(root: Path, groups_per_step: int) -> Iterator[tuple[int, list[Batch]]]:
    """(number of a step, from 1; its batches). Batches directly in `root` are cut into steps of groups_per_step,
    in the order of their names.

    Raises UserError for a directory without batches, and for a file that is none.
    """
    files = [(number, sorted(step.glob(f"*{_BODY}"))) for (number,), step in _steps(root).by_numbers().items()]
    if not files:
        loose = sorted(root.glob(f"*{_BODY}"))
        starts = range(0, len(loose), groups_per_step)
        files = [(number, loose[start : start + groups_per_step]) for number, start in enumerate(starts, 1)]
    if not any(part for _, part in files):
        raise UserError(f"batches: {root} holds no batches", f"record some: `policy-trainer train --record {root}`")
    return ((number, [_read(file) for file in part]) for number, part in files)


def _steps(root: Path) -> VersionedDirectory:
    return VersionedDirectory(root, "step-{0:08d}")


def _read(file: Path) -> Batch:
    try:
        return wire.decode(file.read_bytes())
    except (OSError, BatchError) as error:
        raise UserError(f"batches: {file} is no batch: {error}") from None
