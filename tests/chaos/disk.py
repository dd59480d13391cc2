"""A full disk, and a store that may not be written: the server says so, keeps what it promised, and recovers."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import apsw

from tests.chaos.filesystem import SmallDisk, immutable, small_disk
from tests.chaos.proof import Proof
from tests.chaos.serving import serving, tiny_model
from tests.chaos.trouble import Trouble, Witness, counted, judge, not_ready
from tests.integration.processes import Server, until
from tests.postgresql import Postgres, postgres

BAR_FULL = "507 or 503 while the disk is full, no corruption, nothing promised is lost, recovers once there is room"
BAR_READ_ONLY = "503 with the reason while the store may not be written, nothing promised is lost, recovers by itself"

_RUN = "disk"
_MIB = 2**20
_STORE = "queue.sqlite"
_FULL = "disk is full"
_READ_ONLY = "Read-only file system"


def run_full(cycles: int, backend: str, directory: Path, seed: int) -> Proof:
    """Fills the disk under a server, again and again; at last kills it while the disk is full, and starts it there."""
    assert backend == "sqlite", "the disk of a database is its own affair"
    model, chance = tiny_model(directory), random.Random(seed)
    room = (6 + _rounds(cycles)) * _MIB  # for what the rounds leave behind; the rest is filled each time
    with small_disk(directory / "server", room) as disk:
        with serving(model, directory) as server:
            troubles = [_go_through(server, chance, _filled(disk)) for _ in range(_rounds(cycles))]
            killed = Trouble()
            witness = Witness(server, chance, _RUN, killed)
            witness.prepare()  # a server that starts writes of leases that are out
            with closing(witness), _filled(disk):
                refused = witness.upload_until_refused()
                server.kill()
                killed.reason = _start_wasted(server)
        with serving(model, directory) as server, closing(Witness(server, chance, _RUN, killed)) as witness:
            witness.recover(refused)
        troubles.append(killed)
        integrity = _check_integrity(directory / "server" / _STORE)
    faults = [fault for trouble in troubles for fault in judge(trouble, (507, 503), _FULL)]
    faults += judge_words(killed.reason, _FULL)
    if integrity != "ok":
        faults.append(f"the store is damaged: {integrity}")
    figures = {"integrity": integrity, "started while full": killed.reason[-200:]}
    return _proof("disk full", backend, BAR_FULL, troubles, faults, figures)


def run_read_only(cycles: int, backend: str, directory: Path, seed: int) -> Proof:
    """Forbids writing under a server, again and again; the embedded store also to one that starts."""
    model, chance = tiny_model(directory), random.Random(seed)
    with _changeable_store(backend, directory) as (options, forbidden), serving(model, directory, *options) as server:
        troubles = [_go_through(server, chance, forbidden()) for _ in range(_rounds(cycles))]
    reason = {"sqlite": "disk I/O error", "postgresql": "read-only"}[backend]
    faults = [fault for trouble in troubles for fault in judge(trouble, (503,), reason)]
    figures = {"/readyz said": troubles[-1].reason if troubles else ""}
    if backend == "sqlite":
        integrity, said = _check_integrity(directory / "server" / _STORE), _start_read_only(model, directory / "fresh")
        faults += [] if integrity == "ok" else [f"the store is damaged: {integrity}"]
        faults += judge_words(said, _READ_ONLY)
        figures |= {"integrity": integrity, "started read-only": said}
    return _proof("store read-only", backend, BAR_READ_ONLY, troubles, faults, figures)


def _rounds(cycles: int) -> int:
    """A round takes seconds: its leases must run out."""
    return max(1, cycles // 5)


def judge_words(said: str, reason: str) -> list[str]:
    """What is wrong with what a server said that was started in trouble: it must name the reason, and as a refusal."""
    if reason not in said or "Traceback" in said:
        return [f"a server that was started in trouble said {said[-300:]!r}"]
    return []


def _go_through(server: Server, chance: random.Random, block: AbstractContextManager[None]) -> Trouble:
    with closing(Witness(server, chance, _RUN, Trouble())) as witness:
        return witness.go_through(block)


@contextmanager
def _filled(disk: SmallDisk) -> Iterator[None]:
    disk.fill()
    try:
        yield
    finally:
        disk.clear()


@contextmanager
def _changeable_store(
    backend: str, directory: Path
) -> Iterator[tuple[tuple[str, ...], Callable[[], AbstractContextManager[None]]]]:
    """Options for a store, and what forbids to write it.

    Linux remounts nothing read-only while a file there is open for writing, which a store's always are. What stops
    those who have it open is a file made immutable.
    """
    if backend == "sqlite":
        yield (), lambda: immutable([directory / "server" / name for name in (_STORE, f"{_STORE}-wal")])
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
    """What a server says when it is started again in trouble: why it is not ready, or why it has ended."""
    before = len(server.output())
    started = server.again()
    try:
        until(lambda: started.popen.poll() is not None or not_ready(started), "the server to say why not", started)
        output = started.output()[before:].strip()
        return not_ready(started) or (output if "Traceback" in output else output.splitlines()[-1])
    finally:
        started.kill()


def _start_read_only(model: Path, directory: Path) -> str:
    """What a server says that is started on a read-only disk."""
    with small_disk(directory / "server", 6 * _MIB) as disk:
        with serving(model, directory) as server:
            pass
        disk.forbid_writing()
        return _start_wasted(server)


def _check_integrity(path: Path) -> str:
    """SQLite's verdict on a store that no server holds."""
    db = apsw.Connection(str(path))
    try:
        return str(db.pragma("integrity_check"))
    finally:
        db.close()


def _proof(
    name: str, backend: str, bar: str, troubles: Sequence[Trouble], faults: Sequence[str], figures: Mapping[str, str]
) -> Proof:
    counts = {
        "times": len(troubles),
        "admitted": sum(len(trouble.admitted) for trouble in troubles),
        "refused": sum(len(trouble.again) for trouble in troubles),
        "answers": counted(troubles),
    }
    return Proof(name, backend, bar, not faults, {**counts, **figures, "faults": "; ".join(faults) or "none"})
