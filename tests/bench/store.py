"""The queue in one process: compared with bare SQLite commits, and with many waiting batches."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
from uuid6 import uuid7

from ref_server.queue import batches
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import LeaseBody, LeaseKey
from tests.bench import measure
from tests.bench.clients import Clients, Template
from tests.bench.processes import resident_mib, serving
from tests.postgresql import Postgres, PostgresMissing, postgres
from tests.ref_server.queue.backends import make_limits

DEPTHS = (100, 100_000)
WAITING_BYTES = 2000
CYCLES = 50
REPETITIONS = 9
_AT_ONCE = 1000
_LIMITS = make_limits(max_batches=10**6, max_batches_per_run=10**6)


def upload(body: bytes) -> Upload:
    return Upload(str(uuid7()), b"." * 32, "bench", 0, 0, 8, 160, 8, body)


def scored(body: bytes) -> bytes:
    """Different bytes, and a third more of them: SQLite does not write unchanged pages."""
    return body[::-1] + body[: len(body) // 3]


def cycle(queue: Queue, body: bytes) -> None:
    """Uploads a batch and moves the oldest one of each state on."""
    queue.put(upload(body))
    for claim in queue.claim(1):
        queue.complete(claim.id, scored(body))
    (leased,) = queue.lease(LeaseBody(consumer="bench"))
    queue.ack([LeaseKey(id=leased.id, token=leased.token)])


@contextmanager
def bare(path: Path, body: bytes) -> Iterator[Callable[[], None]]:
    """A function that inserts, replaces and deletes the bytes, each in a flushed commit."""
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("journal_mode", "WAL")
        db.pragma("synchronous", "FULL")
        db.execute("CREATE TABLE payloads (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        numbers = itertools.count()

        def once() -> None:
            number = next(numbers)
            db.execute("INSERT INTO payloads VALUES (?, ?)", (number, body))
            db.execute("UPDATE payloads SET body = ? WHERE seq = ?", (scored(body), number))
            db.execute("DELETE FROM payloads WHERE seq = ?", (number,))

        yield once


def rates(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Calls a second, the sides in turns."""

    def repeated(side: Callable[[], object]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(CYCLES):
                side()

        return repeat

    taken = measure.median_seconds({name: repeated(side) for name, side in sides.items()}, REPETITIONS)
    return {name: CYCLES / seconds for name, seconds in taken.items()}


def show_bare(size: int) -> None:
    body = Template(size).body(str(uuid7()))
    with TemporaryDirectory() as directory, ExitStack() as opened:
        queue = opened.enter_context(closing(SqliteQueue(Path(directory) / "queue.sqlite", limits=_LIMITS)))
        once = opened.enter_context(bare(Path(directory) / "bare.sqlite", body))
        rate = rates({"queue": lambda: cycle(queue, body), "bare": once})
    measure.show(
        f"The queue beside bare SQLite, one process, batches of {size // 1000} KB",
        ["put, claim, complete, lease, ack /s", "three flushed commits of the same bytes /s", "ratio"],
        [[f"{rate['queue']:.0f}", f"{rate['bare']:.0f}", f"{rate['queue'] / rate['bare']:.2f}"]],
    )


def fill(queue: Queue, number: int, body: bytes) -> None:
    """Puts many uploads in each transaction, unlike the server: one by one, filling would take an hour."""
    for start in range(0, number, _AT_ONCE):
        some = [upload(body) for _ in range(min(_AT_ONCE, number - start))]
        queue._run(lambda tx, some=some: [batches.put(tx, each) for each in some], durable=True)


class Sqlite:
    """Stores in a directory."""

    name = "SQLite"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, depth: int) -> Queue:
        return SqliteQueue(self._directory / str(depth) / "queue.sqlite", limits=_LIMITS)

    def options(self, depth: int) -> tuple[str, ...]:
        """Options of a server on the same store."""
        return ("--data-dir", str(self._directory / str(depth)))


class PostgreSQL:
    """Databases of a cluster."""

    name = "PostgreSQL"

    def __init__(self, cluster: Postgres) -> None:
        self._urls = {depth: cluster.create_database(f"depth-{depth}") for depth in DEPTHS}

    def open(self, depth: int) -> Queue:
        return PostgresQueue(self._urls[depth], limits=_LIMITS)

    def options(self, depth: int) -> tuple[str, ...]:
        return ("--store", self._urls[depth])


def depth_row(store: Sqlite | PostgreSQL) -> list[str]:
    body = Template(WAITING_BYTES).body(str(uuid7()))
    with ExitStack() as opened:
        queues = {depth: opened.enter_context(closing(store.open(depth))) for depth in DEPTHS}
        for depth, queue in queues.items():
            fill(queue, depth, body)
        rate = rates({str(depth): lambda queue=queue: cycle(queue, body) for depth, queue in queues.items()})
    memory = [server_mib(store.options(depth)) for depth in DEPTHS]
    shallow, deep = (rate[str(depth)] for depth in DEPTHS)
    return [
        store.name,
        *(f"{number:.0f}" for number in (shallow, deep)),
        f"{deep / shallow:.2f}",
        *(f"{number:.0f}" for number in memory),
    ]


def server_mib(options: tuple[str, ...]) -> float:
    """Resident memory of a server that has opened the store and put a few batches through."""
    limits = ("--queue.max-batches", "1000000", "--queue.max-batches-per-run", "1000000")
    with serving("--no-model", *limits, *options) as (pid, http):
        Clients(http.base_url.port or 0, 1, Template(WAITING_BYTES)).cycle(CYCLES)
        return resident_mib(pid)


def show_depth() -> None:
    rows = []
    with TemporaryDirectory() as directory:
        rows.append(depth_row(Sqlite(Path(directory))))
    try:
        with postgres() as cluster:
            rows.append(depth_row(PostgreSQL(cluster)))
    except PostgresMissing as missing:
        print(f"without PostgreSQL: {missing}")
    measure.show(
        f"put, claim, complete, lease, ack beside waiting batches of {WAITING_BYTES // 1000} KB",
        [
            "store",
            *(f"{depth:,} wait, cycles /s" for depth in DEPTHS),
            "ratio (bar 0.80)",
            *(f"server's memory MiB, {depth:,} wait" for depth in DEPTHS),
        ],
        rows,
    )
