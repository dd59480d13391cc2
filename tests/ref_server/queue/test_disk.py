"""The embedded queue on a disk that its uploads, or others, have filled: what makes room goes on."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ref_server.config import ServeConfig
from ref_server.queue.disk import Disk
from ref_server.queue.errors import StorageFull
from ref_server.queue.records import Upload
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import LeaseKey, Outcome, State
from tests.harness.disk import NeedsRoot, SmallDisk, small_disk
from tests.ref_server.queue.backends import make_limits
from tests.ref_server.queue.batches import expire_waiting, key, lease, ready_upload, state

MIB = 2**20
SIZE = 16 * MIB
FLOOR = SIZE // 20
BODY_BYTES = MIB // 4

Open = Callable[[], SqliteQueue]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with ExitStack() as mounted:
        try:
            disk = mounted.enter_context(small_disk(tmp_path / "disk", SIZE))
        except NeedsRoot as error:
            pytest.skip(str(error))
        yield disk


@pytest.fixture
def open_queue(disk: SmallDisk) -> Iterator[Open]:
    """On the small disk, of which uploads leave free what suits its size."""
    with ExitStack() as opened:

        def open_again() -> SqliteQueue:
            queue = SqliteQueue(disk.root / "queue.sqlite", limits=make_limits(), min_free=None)
            return opened.enter_context(closing(queue))

        yield open_again


def new_upload() -> Upload:
    return ready_upload(f"{next(numbers)}", BODY_BYTES)


def fill(queue: SqliteQueue) -> int:
    """Uploads until there is no room. Returns how many were admitted."""
    for count in itertools.count():
        try:
            queue.put(new_upload())
        except StorageFull:
            return count
    raise AssertionError("it ends when the disk is full")


numbers = itertools.count()


def leased(queue: SqliteQueue) -> LeaseKey:
    return key(lease(queue, lease_seconds=1000.0))


def test_uploads_leave_room_for_all_that_settles(open_queue: Open) -> None:
    queue = open_queue()
    count = fill(queue)
    assert count > 20
    assert queue.disk().free > FLOOR
    with pytest.raises(
        StorageFull, match=r"the disk is full: [0-9.]+ MiB are free in .*, and min_free_mib keeps 0\.8 MiB"
    ):
        queue.check()
    keys = [leased(queue) for _ in range(count // 2)]
    assert queue.ack(keys) == [Outcome.OK] * len(keys)


def test_uploads_go_on_in_the_room_of_settled_batches(open_queue: Open) -> None:
    """The file of the store does not shrink, so the disk shows no more free space than before."""
    queue = open_queue()
    fill(queue)
    for _ in range(3):
        keys = [leased(queue) for _ in range(10)]
        queue.ack(keys)
        queue.check()
        assert fill(queue) >= 9


def payloads(queue: SqliteQueue) -> list[bool]:
    """Whether each batch has its payload still, oldest first."""
    return [batch.payload_bytes > 0 for batch in queue.list(None, None, 1000, None).batches]


def test_payloads_of_settled_batches_make_room_on_the_disk(open_queue: Open) -> None:
    """The limit of stored bytes may be larger than the disk."""
    queue = open_queue()
    count = fill(queue)
    expire_waiting(queue)
    for _ in range(count // 2):
        queue.put(new_upload())
    queue.check()
    kept = payloads(queue)
    assert kept == sorted(kept), "the oldest went first"
    assert count // 2 - 4 < kept.count(False) < count // 2 + 8


def test_a_queue_that_has_payloads_to_drop_is_ready(disk: SmallDisk) -> None:
    path, settings = disk.root / "queue.sqlite", {"limits": make_limits(), "min_free": 4 * MIB}
    with closing(SqliteQueue(path, **settings)) as queue:
        fill(queue)
        expire_waiting(queue)
    disk.fill(leave=3 * MIB)
    with closing(SqliteQueue(path, **settings)) as queue:
        queue.check()
        assert fill(queue) > 0


def test_payloads_stay_where_dropping_them_would_not_help(open_queue: Open, disk: SmallDisk) -> None:
    queue = open_queue()
    fill(queue)
    expire_waiting(queue)
    disk.fill()
    assert fill(queue) == 0
    assert all(payloads(queue))


def test_on_a_disk_that_others_filled_all_but_uploads_goes_on(open_queue: Open, disk: SmallDisk) -> None:
    queue = open_queue()
    fill(queue)
    held = [leased(queue) for _ in range(4)]
    disk.fill()
    assert queue.ack(held[:1]) == [Outcome.OK]
    disk.fill()  # takes what the reserve gave up
    assert queue.release(held[1:2]) == [Outcome.OK]
    queue.drop(held[2].id)
    assert queue.extend(held[3:], 100.0, started=True) == [Outcome.OK]
    assert fill(queue) == 0
    with pytest.raises(StorageFull):
        queue.check()
    for _ in range(15):
        disk.fill()
        assert queue.ack([leased(queue)]) == [Outcome.OK]
    disk.clear()
    queue.check()
    assert fill(queue) > 0


def test_the_first_settlement_on_a_full_disk_has_the_reserve(open_queue: Open, disk: SmallDisk) -> None:
    """The write-ahead log is still empty: there is no room in it that could be used again."""
    queue = open_queue()
    queue.put(ready_upload("a", BODY_BYTES))
    queue.close()
    queue = open_queue()
    disk.fill()
    queue.drop("a")
    assert state(queue, "a") is State.EXPIRED


def test_a_queue_opens_on_a_full_disk(open_queue: Open, disk: SmallDisk) -> None:
    queue = open_queue()
    fill(queue)
    queue.close()
    disk.fill()
    queue = open_queue()
    assert queue.ack([leased(queue)]) == [Outcome.OK]
    assert fill(queue) == 0


def test_the_reserve_comes_back_when_there_is_room(disk: SmallDisk) -> None:
    kept = Disk(disk.root, min_free=4 * MIB)
    kept.restore()
    held = SIZE - kept.space.free
    assert held >= MIB
    disk.fill()
    kept.give_way()
    assert kept.space.free >= MIB
    with pytest.raises(StorageFull):
        kept.check(0)
    assert kept.space.free >= MIB, "it is not made where there is too little room"
    disk.clear()
    kept.check(0)
    assert SIZE - kept.space.free == held


def test_readiness_speaks_of_the_upload_that_was_refused(disk: SmallDisk) -> None:
    kept = Disk(disk.root, min_free=MIB)
    with pytest.raises(StorageFull):
        kept.check(8 * MIB)
    with pytest.raises(StorageFull):
        kept.check(0)
    kept.check(MIB)
    kept.check(0)


@pytest.mark.parametrize(("given", "kept"), [(None, None), (0, 0), (300, 300 * MIB)])
def test_the_setting_is_in_mib(given: int | None, kept: int | None) -> None:
    config = ServeConfig.model_validate({"no_model": True, "queue": {"min_free_mib": given}})
    assert config.queue.min_free == kept
