"""The embedded queue: its file, its process, its disk."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from stat import S_IMODE
from types import SimpleNamespace

import apsw
import pytest

from ref_server.metrics import Activity
from ref_server.queue.errors import RunTaken, StorageBroken, StorageFull, WrongState
from ref_server.queue.lineages import PRESENCE_SECONDS
from ref_server.queue.sqlite.store import SqliteQueue
from ref_server.queue.sqlite.writer import Writer
from shared.api import LeaseBody, LeaseKey, Order, Outcome, State
from tests.ref_server.queue.backends import make_limits
from tests.ref_server.queue.batches import LEASE_SECONDS, details, key, lease, lease_many, make_ready, state, upload

ROOT = Path(__file__).parents[4]


def opened(path: Path, clock: Callable[[], float] = time.monotonic, **limits: int) -> closing[SqliteQueue]:
    return closing(SqliteQueue(path, limits=make_limits(**limits), clock=clock))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "queue.sqlite"


@pytest.fixture
def connections() -> Iterator[list[apsw.Connection]]:
    """The connections that are opened during the test."""
    opened: list[apsw.Connection] = []
    apsw.connection_hooks.append(opened.append)
    yield opened
    apsw.connection_hooks.remove(opened.append)


class Disk(apsw.VFS):
    """SQLite's view of the disk, which counts flushes and can fail at a write or a flush."""

    def __init__(self) -> None:
        self.flushes = 0
        self.at_write: type[Exception] | None = None
        self.at_flush: type[Exception] | None = None
        super().__init__("test-disk", "unix", makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> "DiskFile":
        return DiskFile(self, name, flags)


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        super().__init__("unix", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._disk.at_write:
            raise self._disk.at_write("as the test wants")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._disk.flushes += 1
        if self._disk.at_flush:
            raise self._disk.at_flush("as the test wants")
        super().xSync(flags)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.unregister()


# --- opening


def test_a_new_data_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    """It holds all batches. The mode of one that is there is its owner's choice."""
    (tmp_path / "old").mkdir(mode=0o755)
    for name, mode in (("new", 0o700), ("old", 0o755)):
        SqliteQueue(tmp_path / name / "queue.sqlite", limits=make_limits()).close()
        assert S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_batch_that_ends_its_server_again_and_again_is_dead(path: Path) -> None:
    def claimed_at_start() -> list[str]:
        with opened(path, max_deliveries=3) as queue:
            queue.put(upload("poison"))
            queue.put(upload("innocent"))
            return [claim.id for claim in queue.claim(1000)]

    lives = [claimed_at_start() for _ in range(4)]
    assert lives == [["poison", "innocent"], ["poison"], ["poison"], ["innocent"]]
    with opened(path, max_deliveries=3) as queue:
        poison = details(queue, "poison")
        assert (poison.state, poison.reason) == (State.DEAD, "the server ended while scoring it, 3 times")
        assert queue.requeue("poison") is State.QUEUED


def test_a_requeued_batch_is_scored_with_others_again(path: Path) -> None:
    for _ in range(2):
        with opened(path, max_deliveries=2) as queue:
            queue.put(upload("a"))
            queue.claim(1000)
    with opened(path, max_deliveries=2) as queue:
        queue.put(upload("b"))
        assert (state(queue, "a"), queue.requeue("a")) == (State.DEAD, State.QUEUED)
        assert [(claim.id, claim.interruptions) for claim in queue.claim(1000)] == [("a", 0), ("b", 0)]


def test_a_restart_gives_every_lease_its_full_time_on_the_new_clock(path: Path) -> None:
    with opened(path, lambda: 1_000_000.0) as queue:
        for id in ("a", "b"):
            make_ready(queue, upload(id))
        held = [key(lease(queue)) for _ in range(2)]
    now = 3.0
    with opened(path, lambda: now) as queue:
        now += LEASE_SECONDS - 0.1
        assert queue.ack(held[:1]) == [Outcome.OK]
        now += 0.1
        assert queue.ack(held[1:]) == [Outcome.STALE]


def test_a_restart_lets_the_holder_of_a_run_be_heard_again(path: Path) -> None:
    now = 5.0
    with opened(path, lambda: now) as queue:
        lease_many(queue, run="run", lineage="one")
    now += 10 * PRESENCE_SECONDS
    with opened(path, lambda: now) as queue:
        now += PRESENCE_SECONDS - 0.1
        with pytest.raises(RunTaken):
            lease_many(queue, run="run", lineage="two")
        now += 0.1
        assert lease_many(queue, run="run", lineage="two") == []


def run_python(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


OPEN_ONCE = """
import sys
from pathlib import Path
from ref_server.config import QueueConfig
from ref_server.queue.sqlite.store import SqliteQueue
SqliteQueue(Path(sys.argv[1]), limits=QueueConfig().limits).close()
"""


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_is_gone(path: Path) -> None:
    with opened(path):
        _, error = (refused := run_python(OPEN_ONCE, path)).communicate(timeout=30)
        assert refused.returncode != 0
        assert f"StorageBroken: another process holds {path}" in error
    _, error = (allowed := run_python(OPEN_ONCE, path)).communicate(timeout=30)
    assert allowed.returncode == 0, error


def test_a_queue_that_could_not_be_opened_holds_nothing(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database, " * 1000)
    with pytest.raises(StorageBroken, match="not a database"):
        SqliteQueue(path, limits=make_limits())
    path.unlink()
    SqliteQueue(path, limits=make_limits()).close()


def test_a_damaged_file_is_refused(path: Path) -> None:
    with opened(path) as queue:
        for number in range(50):
            queue.put(upload(str(number), body=b"x" * 3000))
    content = bytearray(path.read_bytes())
    page = content.index(b"x" * 3000) // 4096 * 4096
    content[page : page + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(StorageBroken, match="damaged"):
        SqliteQueue(path, limits=make_limits())


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounts = [("/", "ext4"), (str(path.parent.parent), kind), (f"{path.parent.parent}-other", "ext4")]
    monkeypatch.setattr(
        "psutil.disk_partitions", lambda all: [SimpleNamespace(mountpoint=at, fstype=what) for at, what in mounts]
    )
    with pytest.raises(StorageBroken, match=rf"network file system \({kind}\).*PostgreSQL"):
        SqliteQueue(path, limits=make_limits())


def test_an_old_sqlite_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apsw.sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(StorageBroken, match=r"SQLite is 3\.51\.2; older than 3\.51\.3"):
        SqliteQueue(path, limits=make_limits())


# --- committing


PUT_UNTIL_KILLED = """
import itertools, sys, threading
from pathlib import Path
from ref_server.config import QueueConfig
from ref_server.queue.records import (Upload)
from ref_server.queue.sqlite.store import SqliteQueue
queue = SqliteQueue(Path(sys.argv[1]), limits=QueueConfig().limits)
def put(name):
    for number in itertools.count():
        queue.put(Upload(f"{name}{number}", b"." * 32, "run", 0, 0, 4, 6, 2, b"x" * 3000))
        sys.stdout.write(f"{name}{number}\\n")
        sys.stdout.flush()
for name in "abcd":
    threading.Thread(target=put, args=(name,)).start()
"""


@pytest.mark.slow
def test_every_acknowledged_upload_survives_a_kill(path: Path) -> None:
    with run_python(PUT_UNTIL_KILLED, path) as child:
        assert child.stdout is not None
        acknowledged = [child.stdout.readline() for _ in range(200)]
        child.kill()
        acknowledged += child.stdout.readlines()
    ids = [line.strip() for line in acknowledged if line.endswith("\n")]
    with opened(path) as queue:
        assert [id for id in ids if queue.payload(id) != (b"x" * 3000, None)] == []


def test_threads_share_commits(path: Path, connections: list[apsw.Connection]) -> None:
    with opened(path) as queue:
        commits = 0

        def count() -> bool:
            nonlocal commits
            commits += 1
            return False

        connections[0].set_commit_hook(count)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: queue.put(upload(str(number))), range(400)))
        assert sum(depth.batches for states in queue.stats().runs.values() for depth in states.values()) == 400
        assert 0 < commits < 300


def test_uploads_and_acks_are_flushed_before_they_return_and_leases_are_not(path: Path, disk: Disk) -> None:
    def flushes(operation: Callable[[], object]) -> int:
        before = disk.flushes
        operation()
        return disk.flushes - before

    with opened(path) as queue:
        make_ready(queue, upload("a"))
        assert flushes(lambda: queue.put(upload("b"))) > 0
        keys: list[LeaseKey] = []
        assert flushes(lambda: keys.append(key(lease(queue)))) == 0
        assert flushes(lambda: queue.extend(keys, LEASE_SECONDS, started=True)) == 0
        assert flushes(lambda: queue.ack(keys)) > 0
        assert flushes(queue.check) > 0


@contextmanager
def kept_busy(writer: Writer) -> Iterator[None]:
    """Until the end of the block the writer takes no more, so that what comes meanwhile is committed together."""
    busy, go = threading.Event(), threading.Event()

    def hold_up() -> None:
        busy.set()
        go.wait(60)

    thread = threading.Thread(target=lambda: writer.call(hold_up, durable=False))
    thread.start()
    busy.wait(60)
    yield
    go.set()
    thread.join(60)


def call_together(writer: Writer, *operations: Callable[[], object]) -> list[object]:
    """What each of them returned or raised."""
    with kept_busy(writer):
        calls = [writer.submit(operation, durable=True) for operation in operations]
    return [call.exception(60) or call.result() for call in calls]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(str(tmp_path / "test.sqlite"))) as db:
        db.execute("CREATE TABLE numbers (n)")
        yield db


@pytest.fixture
def writer(db: apsw.Connection) -> Iterator[Writer]:
    with closing(Writer(db, Activity())) as writer:
        yield writer


def write(db: apsw.Connection, number: int, error: Exception | None = None) -> Callable[[], int]:
    def operation() -> int:
        db.execute("INSERT INTO numbers VALUES (?)", (number,))
        if error:
            raise error
        return number

    return operation


def written(db: apsw.Connection) -> list[int]:
    return [number for (number,) in db.execute("SELECT n FROM numbers ORDER BY n")]


def test_a_failing_operation_does_not_spoil_its_group(db: apsw.Connection, writer: Writer) -> None:
    wrong = WrongState("wrong")
    assert call_together(writer, write(db, 1), write(db, 2, wrong), write(db, 3)) == [1, wrong, 3]
    assert written(db) == [1, 3]


def test_a_group_with_a_durable_operation_is_flushed(tmp_path: Path, disk: Disk) -> None:
    with closing(apsw.Connection(str(tmp_path / "wal.sqlite"))) as db:
        db.pragma("journal_mode", "WAL")
        db.execute("CREATE TABLE numbers (n)")
        with closing(Writer(db, Activity())) as writer:
            with kept_busy(writer):
                calls = [
                    writer.submit(write(db, number), durable=durable) for number, durable in ((1, False), (2, True))
                ]
                before = disk.flushes
            assert [call.result(60) for call in calls] == [1, 2]
            assert disk.flushes > before


def test_an_operation_that_ends_the_transaction_fails_its_group(db: apsw.Connection, writer: Writer) -> None:
    """As SQLite does by itself on some failures of the disk."""

    def roll_back() -> None:
        db.execute("ROLLBACK")
        raise apsw.FullError("full")

    outcomes = call_together(writer, write(db, 1), roll_back, write(db, 3))
    assert [type(outcome) for outcome in outcomes] == [StorageFull] * 3
    assert written(db) == []
    assert writer.call(write(db, 4), durable=True) == 4
    assert written(db) == [4]


def test_on_a_full_disk_what_stores_nothing_is_tried_again_after_room_was_made(db: apsw.Connection) -> None:
    given: list[str] = []

    def needs_room() -> str:
        if not given:
            raise apsw.FullError("full")
        return "done"

    with closing(Writer(db, Activity(), lambda: given.append("reserve"))) as writer:
        with kept_busy(writer):
            stored = writer.submit(write(db, 1, apsw.FullError("full")), durable=True, stores=True)
            settled = [writer.submit(operation, durable=True) for operation in (needs_room, write(db, 2))]
        assert isinstance(stored.exception(60), StorageFull)
        assert [call.result(60) for call in settled] == ["done", 2]
        with pytest.raises(StorageFull):
            writer.call(write(db, 3, apsw.FullError("full")), durable=True, stores=True)
    assert given == ["reserve"]
    assert written(db) == [2]


def test_a_failing_commit_is_undone_for_its_group(db: apsw.Connection, writer: Writer) -> None:
    def break_a_promise() -> None:
        db.execute("INSERT INTO children VALUES (1)")

    db.pragma("foreign_keys", True)
    db.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    db.execute("CREATE TABLE children (id REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    outcomes = call_together(writer, write(db, 1), break_a_promise)
    assert [type(outcome) for outcome in outcomes] == [apsw.ConstraintError] * 2
    assert writer.call(write(db, 3), durable=True) == 3
    assert written(db) == [3]


def test_an_error_that_ends_the_writer_reaches_every_caller(db: apsw.Connection) -> None:
    def end() -> None:
        raise SystemExit("the interpreter ends")

    writer = Writer(db, Activity())
    with kept_busy(writer):
        calls = [writer.submit(operation, durable=True) for operation in (write(db, 1), end, write(db, 2))]
    for call in calls:
        with pytest.raises(StorageBroken, match="the interpreter ends"):
            call.result(60)
    with pytest.raises(StorageBroken, match="the interpreter ends"):
        writer.call(write(db, 3), durable=False)
    writer.close()
    assert written(db) == []


def test_closing_finishes_what_waits(db: apsw.Connection) -> None:
    writer = Writer(db, Activity())
    with kept_busy(writer):
        calls = [writer.submit(write(db, number), durable=True) for number in (1, 2)]
        closer = threading.Thread(target=writer.close)
        closer.start()
    assert [call.result(60) for call in calls] == [1, 2]
    closer.join(60)
    assert not closer.is_alive()
    assert written(db) == [1, 2]


def test_what_is_forgotten_leaves_nothing_behind(path: Path) -> None:
    now = 0.0
    with closing(
        SqliteQueue(path, limits=make_limits(), retention_seconds=9.0, clock=lambda: now, wall=lambda: now)
    ) as queue:
        for id in ("done", "expired"):
            make_ready(queue, upload(id))
        queue.ack([key(lease(queue))])
        queue.lease(LeaseBody(consumer="c", incarnation="life", run="run", epoch=1, policy_version=9, max_lag=1))
        now = 10_000.0
        assert not queue.tidy()
        assert not queue.tidy(), "a run goes after its batches"
        assert queue.stats().runs == {}
    with closing(apsw.Connection(str(path))) as db:
        tables = ("batches", "payloads", "scores", "training", "events", "depths", "incarnations", "runs", "epochs")
        assert [db.execute(f"SELECT count(*) FROM {table}").get for table in tables] == [0] * len(tables)


# --- failing disks


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ({"at_write": apsw.FullError}, StorageFull),
        ({"at_write": apsw.IOError}, StorageBroken),
        ({"at_flush": apsw.IOError}, StorageBroken),
    ],
)
def test_a_failing_disk_is_reported_and_survived(
    path: Path, disk: Disk, failure: dict[str, type[Exception]], expected: type[Exception]
) -> None:
    with opened(path) as queue:
        make_ready(queue, upload("before"))
        held = key(lease(queue))
        vars(disk).update(failure)
        with pytest.raises(expected):
            queue.put(upload("during"))
        with pytest.raises(expected):
            queue.ack([held])
        with pytest.raises(expected):
            queue.check()
        assert state(queue, "before") is State.LEASED
        vars(disk).update(at_write=None, at_flush=None)
        assert queue.get("during") is None
        assert queue.put(upload("during")).created
        assert queue.ack([held]) == [Outcome.OK]
    with opened(path) as queue:
        assert (state(queue, "before"), state(queue, "during")) == (State.DONE, State.QUEUED)


def test_a_file_that_may_not_grow_keeps_serving_what_it_has(path: Path, connections: list[apsw.Connection]) -> None:
    with opened(path) as queue:
        make_ready(queue, upload("a"))
        connections[0].pragma("max_page_count", connections[0].pragma("page_count"))
        with pytest.raises(StorageFull):
            queue.put(upload("big", body=b"x" * 10**6))
        assert queue.get("big") is None
        assert queue.ack([key(lease(queue))]) == [Outcome.OK]


# --- depth


def count_steps(db: apsw.Connection, operation: Callable[[], object]) -> int:
    """Steps of SQLite's virtual machine that an operation takes: how much it reads, whatever the machine's speed."""
    steps = 0

    def add(event: dict) -> None:
        nonlocal steps
        steps += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    db.trace_v2(apsw.SQLITE_TRACE_PROFILE, add)
    operation()
    db.trace_v2(0, None)
    return steps


def test_the_work_of_a_request_does_not_grow_with_the_queue(path: Path, connections: list[apsw.Connection]) -> None:
    numbers = itertools.count()
    keys: list[LeaseKey] = []

    def make_one_of_each(queue: SqliteQueue) -> None:
        for _ in range(3):
            queue.put(upload(f"{next(numbers)}"))
        for claim in queue.claim(20):
            queue.complete(claim.id, b"scored")
        keys.append(key(lease(queue)))

    def lease_one(order: Order) -> None:
        request = LeaseBody(
            consumer="c", incarnation="life", request_id=f"{next(numbers)}", run="run", epoch=0, policy_version=5,
            max_lag=9, order=order,
        )  # fmt: skip
        assert queue.lease(request)

    def steps_of_each() -> dict[str, int]:
        operations = {
            "put": lambda: queue.put(upload(f"{next(numbers)}")),
            "claim": lambda: queue.claim(10),
            "fifo": lambda: lease_one(Order.FIFO),
            "freshest": lambda: lease_one(Order.FRESHEST),
            "ack": lambda: queue.ack([keys.pop()]),
            "stats": lambda: queue.stats(),
        }
        return {name: count_steps(connections[0], operation) for name, operation in operations.items()}

    # The clock stands still, so that nothing expires meanwhile.
    with opened(path, lambda: 0.0) as queue:
        for _ in range(80):  # more than one claim looks at
            make_one_of_each(queue)
        steps_of_each()  # the first of a consumer's life is another matter
        shallow = steps_of_each()
        for _ in range(400):
            make_one_of_each(queue)
        deep = steps_of_each()
    assert {name: steps for name, steps in deep.items() if steps > 1.2 * shallow[name]} == {}
