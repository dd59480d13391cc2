"""A full disk and a read-only store: the server reports them, loses nothing it acknowledged, and recovers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager

import apsw

from tests.chaos.stage import Proof, Stage
from tests.chaos.trouble import Witness, counted, not_ready
from tests.harness.disk import SmallDisk, immutable, small_disk
from tests.harness.postgresql import Postgres, postgres
from tests.harness.processes import until
from tests.harness.server import Server

BAR_FULL = "507 or 503 while the disk is full, no corruption, nothing promised is lost, recovers once there is room"
BAR_READ_ONLY = "503 with the reason while the store may not be written, nothing promised is lost, recovers by itself"

_RUN = "disk"
_MIB = 2**20
_STORE = "queue.sqlite"
_FULL = "disk is full"
_READ_ONLY = "Read-only file system"


def run_full(stage: Stage) -> Proof:
    """Fills a server's disk repeatedly; at last kills the server while the disk is full, and starts it again."""
    room = (6 + _rounds(stage)) * _MIB  # the rounds leave data behind; the rest of the disk is filled each time
    with small_disk(stage.directory / "server", room) as disk:
        with stage.serving() as server:
            witnesses = [Witness(server, stage.chance).go_through(_filled(disk)) for _ in range(_rounds(stage))]
            killed = Witness(server, stage.chance)
            killed.prepare()  # with leases out, a starting server has something to write
            with _filled(disk):
                refused = killed.upload_until_refused()
                server.kill()
                killed.reason = _start_wasted(server)
        with stage.serving() as killed.server:
            killed.recover(refused)
        witnesses.append(killed)
        damage = _damage(stage)
    faults = [fault for witness in witnesses for fault in witness.faults((507, 503), _FULL)]
    return _proof(witnesses, [*faults, *judge_message(killed.reason, _FULL), *damage], killed.reason)


def run_read_only(stage: Stage) -> Proof:
    """Makes a server's store read-only repeatedly; with SQLite also starts a server on a read-only disk."""
    with _changeable_store(stage) as (options, forbidden), stage.serving(*options) as server:
        witnesses = [Witness(server, stage.chance).go_through(forbidden()) for _ in range(_rounds(stage))]
    reason = {"sqlite": "disk I/O error", "postgresql": "read-only"}[stage.backend]
    faults = [fault for witness in witnesses for fault in witness.faults((503,), reason)]
    message = ""
    if stage.backend == "sqlite":
        message = _start_read_only(stage)
        faults += [*_damage(stage), *judge_message(message, _READ_ONLY)]
    return _proof(witnesses, faults, message)


def _rounds(stage: Stage) -> int:
    """Fewer than the cycles, since a round takes seconds: its leases must expire."""
    return max(1, stage.cycles // 5)


def judge_message(message: str, reason: str) -> list[str]:
    """A server that cannot write its store when it starts must name the reason, without a traceback."""
    if reason not in message or "Traceback" in message:
        return [f"a server that was started without a writable store says {message[-300:]!r}"]
    return []


@contextmanager
def _filled(disk: SmallDisk) -> Iterator[None]:
    disk.fill()
    try:
        yield
    finally:
        disk.clear()


@contextmanager
def _changeable_store(
    stage: Stage,
) -> Iterator[tuple[tuple[str, ...], Callable[[], AbstractContextManager[None]]]]:
    """Options for a store, and a function whose block makes the store read-only.

    Linux does not remount a file system read-only while a file on it is open for writing, as the store's always are.
    An immutable file refuses writes also through open descriptors.
    """
    if stage.backend == "sqlite":
        yield (), lambda: immutable([stage.directory / "server" / name for name in (_STORE, f"{_STORE}-wal")])
    else:
        with postgres() as cluster:
            yield ("--store", cluster.create_database("tandem")), lambda: _read_only(cluster)


@contextmanager
def _read_only(cluster: Postgres) -> Iterator[None]:
    def set_to(value: str) -> None:
        cluster.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        cluster.execute("SELECT pg_reload_conf()")

    set_to("on")
    try:
        yield
    finally:
        set_to("off")


def _start_wasted(server: Server) -> str:
    """Starts the server again without a writable store; returns why it is not ready, or its last message."""
    before = len(server.output())
    started = server.again()
    try:
        until(lambda: started.popen.poll() is not None or not_ready(started), "the server to say why not", started)
        output = started.output()[before:].strip()
        return not_ready(started) or (output if "Traceback" in output else output.splitlines()[-1])
    finally:
        started.kill()


def _start_read_only(stage: Stage) -> str:
    """Starts a server on a read-only disk; returns why it is not ready, or its last message."""
    directory = stage.directory / "fresh"
    with small_disk(directory / "server", 6 * _MIB) as disk:
        with stage.serving(directory=directory) as server:
            pass
        disk.forbid_writing()
        return _start_wasted(server)


def _damage(stage: Stage) -> list[str]:
    """What SQLite's integrity check finds in a store that no server has open."""
    with closing(apsw.Connection(str(stage.directory / "server" / _STORE))) as store:
        verdict = str(store.pragma("integrity_check"))
    return [] if verdict == "ok" else [f"the store is damaged: {verdict}"]


def _proof(witnesses: Sequence[Witness], faults: Sequence[str], message: str) -> Proof:
    figures = {
        "times": len(witnesses),
        "admitted": sum(len(witness.admitted) for witness in witnesses),
        "answers": counted(witnesses),
        "started without a writable store": message[-200:],
    }
    return Proof(faults, figures)
