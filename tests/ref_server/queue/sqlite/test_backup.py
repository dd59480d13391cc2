"""The backup of an SQLite queue: all of it at one moment, in a file that appears complete or not at all."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload, WantedReference
from ref_server.queue.sqlite import backup
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import LeaseKey, MetricsRecord, Outcome, State
from tests.harness.disk import NeedsRoot, small_disk
from tests.ref_server.queue import batches
from tests.ref_server.queue.backends import Clock, make_limits
from tests.ref_server.queue.batches import details, key

ROOT = Path(__file__).parents[4]
OLD = b"an older backup"


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "PAGES", 8)


def opened(path: Path, clock: Clock | None = None) -> Any:
    clocks: dict[str, Any] = {} if clock is None else {"clock": clock.monotonic, "wall": clock.wall}
    return closing(SqliteQueue(path, limits=make_limits(), **clocks))


def back_up(path: Path, target: Path, progress: Callable[[int, int], object] = lambda done, total: None) -> None:
    backup.back_up(path, target, progress)


def lease(queue: Queue, **request: Any) -> LeaseKey:
    return key(batches.lease(queue, run="run", lineage="one", lease_seconds=60.0, **request))


def upload(id: str, *, to_score: bool = False, size: int = 1) -> Upload:
    return batches.upload(id, lineage="one", body=id.encode() * size, to_score=to_score)


def fill(queue: Queue) -> dict[str, LeaseKey]:
    """A batch in each state. Returns the leases: of one that goes on, and of one that is done."""
    for id in ("done", "leased", "sample", "dropped", "ready"):
        queue.put(upload(id))
    queue.drop("dropped")
    for id in ("claimed", "waiting"):
        queue.put(upload(id, to_score=True))
    done = lease(queue, epoch=1, policy_version=3, incarnation="i")
    queue.ack([done], "checkpoint-7")
    held = lease(queue, incarnation="i", request_id="r")
    sample = lease(queue, incarnation="i")
    queue.put_training("sample", b"trained\n\0")
    queue.ack([sample])
    queue.extend([held], 60.0, started=True)
    assert [claim.id for claim in queue.claim(1)] == ["claimed"]
    queue.want_reference(WantedReference("run/step-2", 2, "base"))
    queue.keep_metrics("run", "one", [MetricsRecord.model_validate({"kind": "step", "step": 7, "name": "\u00e9"})])
    return {"done": done, "leased": held}


def pictures(queue: Queue) -> list[dict[str, Any]]:
    """All that clients can see of each batch, oldest first."""
    listed = queue.list(None, None, 100, None).batches
    return [
        details(queue, each.id).model_dump() | {"body": queue.payload(each.id), "training": queue.training(each.id)}
        for each in listed
    ]


def test_all_comes_back(tmp_path: Path) -> None:
    path, restored = tmp_path / "data" / "queue.sqlite", tmp_path / "restored" / "queue.sqlite"
    restored.parent.mkdir()
    steps: list[tuple[int, int]] = []
    with opened(path) as queue:  # a server holds it
        keys = fill(queue)
        back_up(path, tmp_path / "backup", lambda *step: steps.append(step))
        before, curves = pictures(queue), queue.curves()
        queue.put(upload("later"))
    assert steps == sorted(steps)
    assert 0 < steps[0][0] < steps[0][1]
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backup", "data", "restored"]
    (tmp_path / "backup").rename(restored)
    with opened(restored) as queue:
        after = pictures(queue)
        claimed = next(picture for picture in after if picture["id"] == "claimed")
        assert claimed["state"] is State.QUEUED  # as after any restart
        assert [each for each in after if each is not claimed] == [each for each in before if each["id"] != "claimed"]
        assert queue.wanted_reference() == WantedReference("run/step-2", 2, "base")
        assert queue.curves() == curves
        assert queue.ack([keys["done"]]) == [Outcome.ALREADY]
        assert lease(queue, incarnation="i", request_id="r") == keys["leased"]
        assert queue.ack([keys["leased"]]) == [Outcome.OK]
        assert not queue.put(upload("done")).created
        assert queue.put(upload("later")).created


def test_a_backup_is_the_queue_at_one_moment_while_it_is_written_to(tmp_path: Path) -> None:
    """It does not begin again with each commit: that would never end."""
    path, restored = tmp_path / "data" / "queue.sqlite", tmp_path / "restored" / "queue.sqlite"
    restored.parent.mkdir()
    with opened(path) as queue:
        for number in range(20):
            queue.put(upload(f"old-{number}", size=2000))
        numbers, uploaded = count(), threading.Event()

        def put_one(done: int, total: int) -> None:
            queue.put(upload(f"new-{next(numbers)}", size=2000))
            uploaded.set()

        back_up(path, tmp_path / "backup", put_one)
        assert uploaded.is_set()
        ids = {batch.id for batch in queue.list(None, None, 1000, None).batches}
    (tmp_path / "backup").rename(restored)
    with opened(restored) as queue:
        kept = {batch.id for batch in queue.list(None, None, 1000, None).batches}
    assert kept == {f"old-{number}" for number in range(20)} < ids


# --- The target


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """The file of a queue that no server holds."""
    path = tmp_path / "data" / "queue.sqlite"
    with opened(path) as queue:
        fill(queue)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """An older backup. It is what it was, or a new backup; nothing else is left next to it."""
    (tmp_path / "backups").mkdir()
    target = tmp_path / "backups" / "queue.sqlite"
    target.write_bytes(OLD)
    yield target
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_older_backup_stays_if_the_new_one_is_not_finished(
    filled: Path, target: Path, error: type[BaseException]
) -> None:
    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        back_up(filled, target, stop)
    assert target.read_bytes() == OLD


def test_an_older_backup_stays_if_the_new_one_is_killed(filled: Path, target: Path) -> None:
    killed = (
        "import os, signal, sys; from pathlib import Path; from ref_server.queue.sqlite import backup\n"
        "backup.PAGES = 8\n"
        "kill = lambda done, total: os.kill(os.getpid(), signal.SIGKILL)\n"
        "backup.back_up(Path(sys.argv[1]), Path(sys.argv[2]), kill)"
    )
    ended = subprocess.run([sys.executable, "-c", killed, str(filled), str(target)], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    assert target.read_bytes() == OLD
    back_up(filled, target)  # also removes what was left
    assert target.read_bytes() != OLD


def test_of_two_backups_at_once_the_target_is_one(filled: Path, target: Path) -> None:
    begun = iter([True])

    def begin_another(done: int, total: int) -> None:
        if next(begun, False):
            back_up(filled, target)

    with pytest.raises(StorageBroken, match=r"another backup to .* has begun meanwhile"):
        back_up(filled, target, begin_another)
    assert target.read_bytes().startswith(b"SQLite format 3\0")


def test_a_full_disk(filled: Path, tmp_path: Path) -> None:
    with ExitStack() as mounted:
        try:
            disk = mounted.enter_context(small_disk(tmp_path / "disk", 2**20))
        except NeedsRoot as error:
            pytest.skip(str(error))
        target = disk.root / "backup"
        target.write_bytes(OLD)
        disk.fill(leave=2**16)
        with pytest.raises(StorageFull, match=r"the backup has 0\.\d MiB, 0\.1 MiB are free"):
            back_up(filled, target)
        disk.clear()
        with pytest.raises(StorageFull):  # others fill it meanwhile
            back_up(filled, target, lambda done, total: disk.fill())
        assert target.read_bytes() == OLD
        assert sorted(os.listdir(disk.root)) == ["backup", "ballast"]


@pytest.mark.parametrize("name", ["queue.sqlite", "queue.sqlite-wal", "another"])
def test_nothing_in_a_data_directory_is_replaced(filled: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other" / "queue.sqlite"
    with opened(other):
        for held in (filled, other):
            with pytest.raises(StorageBroken, match="is the data directory of a queue: choose a file in another"):
                back_up(filled, held.with_name(name))


def test_what_cannot_be_a_target(filled: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageBroken, match="is not a regular file"):
        back_up(filled, tmp_path)
    with pytest.raises(StorageBroken, match="/dev/null is not a regular file"):
        back_up(filled, Path("/dev/null"))
    with pytest.raises(FileNotFoundError):
        back_up(filled, tmp_path / "missing" / "backup")


def test_what_is_no_queue(tmp_path: Path, target: Path) -> None:
    with pytest.raises(StorageBroken, match="there is no queue at"):
        back_up(tmp_path / "queue.sqlite", target)
    (tmp_path / "queue.sqlite").write_text("text")
    with pytest.raises(StorageBroken, match="file is not a database"):
        back_up(tmp_path / "queue.sqlite", target)
    assert target.read_bytes() == OLD
