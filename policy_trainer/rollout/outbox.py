"""A worker's outbox on disk: the index of its next problem, and the batches that it has not uploaded yet.

A batch is written here before it is uploaded, so that a worker killed in between uploads the same batch again, under
the same id. A restart neither skips a problem nor samples one twice.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from policy_trainer.config import RolloutConfig
from policy_trainer.run_files import locks
from policy_trainer.run_files.run_directory import RunDirectory
from shared.api.base import Version
from shared.atomic_files import atomic_file, read_json, write_json
from shared.spelling import spell_setting

# A worker whose trainer was killed takes a moment to end and release its lock.
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class _Cursor:
    next_index: Version
    lineage: str = ""


class Outbox:
    """The outbox of one worker. Worker k of n takes the problems whose indexes are k modulo n.

    next_index: index of the next problem to draw.
    """

    def __init__(self, directory: Path, *, worker: int, workers: int, start: int, lineage: str = "") -> None:
        """start: the lowest index that the worker may take, when the directory has no cursor of this lineage.

        Batches of another training in the directory are removed.
        """
        self._directory = directory
        self._worker = worker
        self._workers = workers
        self._lineage = lineage
        directory.mkdir(parents=True, exist_ok=True)
        self._cursor = directory / "cursor.json"
        if not self._cursor.exists() or self._read_cursor().lineage != lineage:
            for left in (*self._pending(), *directory.glob("*.refused")):
                left.unlink()
            self._write_cursor(start)  # written now, because `start` may differ after a restart
        self._past = self._read_cursor().next_index
        newest = max((_index(path) for path in self._pending()), default=-1)
        self.begin_at(max(self._past, newest + 1))

    @property
    def is_there(self) -> bool:
        """False once the directory has been deleted."""
        return self._cursor.exists()

    @property
    def waiting(self) -> int:
        return len(self._pending())

    @property
    def refusals(self) -> int:
        """How many batches the server has refused."""
        return len(list(self._directory.glob("*.refused")))

    def begin_at(self, index: int) -> None:
        """The next problem is this worker's first from `index` on."""
        self.next_index = index + (self._worker - index) % self._workers

    def draw(self) -> int:
        index = self.next_index
        self.next_index += self._workers
        return index

    def add(self, index: int, body: bytes) -> Path:
        """Writes an encoded batch; returns its file."""
        path = self._directory / f"{index:012d}.safetensors"
        # Sampling does not wait for the disk: `Delivery` drops a batch that a power cut has cut, and skips its problem.
        with atomic_file(path, synced=False) as temporary:
            temporary.write_bytes(body)
        return path

    def undelivered(self) -> list[tuple[Path, bytes]]:
        """All files and their batches, in the order in which their problems were drawn."""
        return [(path, path.read_bytes()) for path in sorted(self._pending())]

    def delivered(self, paths: Sequence[Path]) -> None:
        """Call it when the server has these batches: moves the cursor past them, then removes their files."""
        self._move_past(paths)
        for path in paths:
            path.unlink()

    def refused(self, path: Path) -> None:
        """Call it when the server refused the batch: moves the cursor past it, and keeps the file for inspection."""
        self._move_past([path])
        path.rename(path.with_suffix(".refused"))

    def _move_past(self, paths: Sequence[Path]) -> None:
        # A problem that was regrouped comes after later ones: the cursor never goes back.
        past = max((_index(path) + self._workers for path in paths), default=0)
        if past > self._past:
            self._past = past
            self._write_cursor(past)

    def _write_cursor(self, next_index: int) -> None:
        write_json(self._cursor, asdict(_Cursor(next_index, self._lineage)))

    def _read_cursor(self) -> _Cursor:
        remedy = (
            "delete it and start the worker again: it goes on at the trainer's position, without the batches that it "
            "had not uploaded"
        )
        return read_json(self._cursor, TypeAdapter(_Cursor), remedy)

    def _pending(self) -> list[Path]:
        return list(self._directory.glob("[0-9]*.safetensors"))


def _index(path: Path) -> int:
    return int(path.stem)


def count_refused(workers: Path) -> int:
    """How many batches the server refused, in all outboxes below a directory."""
    return sum(1 for _ in workers.glob("*/*.refused"))


def hold(directory: Path, *, worker: int, workers: int) -> IO[bytes]:
    """Locks an outbox until the returned file is closed. Otherwise two workers could draw the same problems.

    Raises UserError when another process still holds the lock after _LOCK_SECONDS.
    """
    problem = f"worker: worker {worker} of {workers} already runs in {directory}"
    remedy = (
        f"start others with {spell_setting('worker')} and {spell_setting('workers')}, next to a trainer with "
        f"{spell_setting('rollout', 'external')}"
    )
    return locks.hold(directory / "lock", problem, remedy, seconds=_LOCK_SECONDS)


def worker_directory(config: RolloutConfig) -> Path:
    return RunDirectory(config.run_dir).workers / f"{config.worker}-of-{config.workers}"
