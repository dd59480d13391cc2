"""The server's wall clock is moved by days while leases are out: leases run on another clock and must not be affected.

libfaketime moves the clock, only for the server, while it runs. A queue on PostgreSQL uses the database's clock,
which stays; there the clock of the server differs from the database's.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from unittest.mock import patch

import httpx

from shared.api import LeaseBody
from shared.client import Leased, RefServerClient
from tests.chaos.stage import Proof, Stage, broken
from tests.harness.batches import random_batch
from tests.harness.processes import until
from tests.harness.server import Server

BAR = "no early expiry, no stuck lease, when the wall clock moves by a day and by two, forward and back"

_RUN = "clock"
_DAY = 86_400
# Offsets from the right time, in seconds: the clock moves by a day and by two, both ways.
_OFFSETS = (_DAY, 0, -_DAY, _DAY, -_DAY, 0)
_SHORT_LEASE = 1.5
_LONG_LEASE = 60.0
# A long poll checks for expired leases once a second; the rest is for a busy machine.
_LATE_SECONDS = 4.0
_CLOCK_ERROR = 30.0


class FaketimeMissing(Exception):
    """libfaketime, which moves a process's clock, is not installed on this machine: `apt-get install faketime`."""


@dataclass(frozen=True)
class Move:
    """One move of the clock while three leases were out.

    wanted, seen: offset in seconds, as set and as read from the server's answers. kept: outcomes of extends and acks of
    the long leases after the move. came_back: seconds after which the short lease's batch could be leased again; None
    if it could not. others: batches under a long lease that were leased again.
    """

    wanted: float
    seen: float
    kept: Sequence[str]
    came_back: float | None
    others: int


def run(stage: Stage) -> Proof:
    rounds = max(1, stage.cycles // 20)
    with stage.store() as store, _wall_clock(stage.directory) as put_clock:
        with stage.serving(*store) as server:
            moves = [_move(server, put_clock, stage.chance, offset) for _ in range(rounds) for offset in _OFFSETS]
            put_clock(_DAY)  # a starting server cleans up by the current time
        with stage.serving(*store) as server:
            moves += [_move(server, put_clock, stage.chance, 0)]
            states = Counter(batch["state"] for batch in server.batches(run=_RUN))
    latest = round(max(move.came_back or 0 for move in moves), 1)
    return Proof(judge(moves, states), {"moves": len(moves), "came back after s, at most": latest})


def judge(moves: Sequence[Move], states: Counter[str]) -> list[str]:
    """The faults. states: of all batches at the end."""
    faults = []
    for number, move in enumerate(moves):
        back = move.came_back
        faults += [f"move {number}: {fault}" for fault in broken({
            f"the clock was off by {move.seen:.0f} s, not by {move.wanted:.0f}":
                abs(move.seen - move.wanted) > _CLOCK_ERROR,
            f"the outcomes of the long leases were {move.kept}, not ok": list(move.kept) != ["ok"] * 3,
            f"{move.others} leased batches were leased again": move.others,
            "the short lease did not expire": back is None,
            f"a lease of {_SHORT_LEASE} s ended after {back} s":
                back is not None and not _SHORT_LEASE <= back <= _SHORT_LEASE + _LATE_SECONDS,
        })]  # fmt: skip
    if not moves or states != Counter(done=3 * len(moves)):
        faults.append(f"of {3 * len(moves)} batches, all settled, the server has {dict(states)}")
    return faults


def _move(server: Server, put_clock: Callable[[int], None], chance: random.Random, offset: int) -> Move:
    """Leases three batches, one of them for a short time, moves the clock, and records what happens to the leases."""
    with RefServerClient(server.url) as client:
        for _ in range(3):
            client.upload(random_batch(chance, _RUN))

        def lease(seconds: float) -> Leased | None:
            return client.lease(LeaseBody(consumer="clock", run=_RUN, lease_seconds=seconds, wait_seconds=10))

        first, second = lease(_LONG_LEASE), lease(_LONG_LEASE)
        began = time.monotonic()  # before the lease, so that came_back < _SHORT_LEASE proves an early expiry
        short = lease(_SHORT_LEASE)
        assert first and second and short, "the batches were not scored in time"
        put_clock(offset)
        seen = until(lambda: _offset_seen(server, offset), "the server's clock to have moved", server)
        kept = [client.extend([first], _LONG_LEASE)[first.id], client.ack([second])[second.id]]
        again = lease(_LONG_LEASE)
        came_back = time.monotonic() - began if again and again.id == short.id else None
        others = int(again is not None and again.id in (first.id, second.id))
        kept.append(client.ack([first])[first.id])
        if again:
            client.ack([again])
        return Move(offset, seen, kept, came_back, others)


def _offset_seen(server: Server, wanted: float) -> float | None:
    """Offset of the server's clock in seconds, by the Date header of its answer; None until it is near `wanted`."""
    date = parsedate_to_datetime(httpx.get(f"{server.url}/livez").headers["Date"])
    seen = date.timestamp() - time.time()
    time.sleep(0.02)
    return seen if abs(seen - wanted) < _CLOCK_ERROR else None


@contextmanager
def _wall_clock(directory: Path) -> Iterator[Callable[[int], None]]:
    """Processes that are started in the block have a wall clock that can be moved. Raises FaketimeMissing.

    Yields a function that sets its offset in seconds: in a file that they read whenever they read the clock.
    """
    file = directory / "clock"

    def put(offset: int) -> None:
        temporary = file.with_suffix(".tmp")
        temporary.write_text(f"{offset:+d}\n")
        temporary.replace(file)

    put(0)
    # the variant for programs with threads
    libraries = sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))
    if not libraries:
        raise FaketimeMissing(FaketimeMissing.__doc__)
    settings = {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",  # its name in older versions
    }
    with patch.dict(os.environ, settings):
        yield put
