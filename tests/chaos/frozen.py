"""A consumer that is stopped (SIGSTOP) until its lease has expired is refused when it continues."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from shared.api import LeaseBody
from shared.client import Leased, RefServerClient
from tests.chaos.stage import Proof, Stage, broken
from tests.harness.batches import random_batch
from tests.harness.processes import until
from tests.harness.server import Server

BAR = "every ack after a SIGSTOP past the lease is refused as stale, and its batch is settled once, by its next holder"

_RUN = "frozen"
_CONSUMERS = 10
_FREEZES_PER_CYCLE = 5
# Longer than start times differ on a busy machine: no lease may expire before the last consumer has one.
_LEASE_SECONDS = 3.0


@dataclass(frozen=True)
class Freeze:
    """One SIGSTOP. sleeper_outcome, holder_outcome: of the acks of the stopped consumer and of the next holder.

    stopped: the process was stopped when the lease expired. elsewhere: the next holder leased the batch before the
    sleeper woke; otherwise afterwards.
    """

    id: str
    stopped: bool
    elsewhere: bool
    sleeper_outcome: str
    holder_outcome: str


def run(stage: Stage) -> Proof:
    wanted = _FREEZES_PER_CYCLE * stage.cycles
    with stage.serving_store() as server, RefServerClient(server.url) as client:
        for _ in range(wanted):
            client.upload(random_batch(stage.chance, _RUN))
        until(lambda: _count(server, "ready") == wanted, "all batches to be scored", server)
        with _consumers(server, min(_CONSUMERS, wanted)) as sleepers:
            freezes: list[Freeze] = []
            while len(freezes) < wanted:
                elsewhere = not (freezes and freezes[-1].elsewhere)  # by turns
                freezes += _freeze(server, client, sleepers[: wanted - len(freezes)], elsewhere=elsewhere)
        settled = {batch["id"]: _times_done(server, batch["id"]) for batch in server.batches(run=_RUN)}
    elsewhere = sum(freeze.elsewhere for freeze in freezes)
    figures = {"freezes": len(freezes), "leased by another before the sleeper woke": elsewhere}
    return Proof(judge(freezes, settled, wanted), figures)


def judge(freezes: Sequence[Freeze], settled: dict[str, int], wanted: int) -> list[str]:
    """The faults. settled: how often each batch became done, by its history. wanted: the planned number of freezes.

    If the sleeper's ack were accepted, the next holder's would be `stale` or `already`.
    """
    counts = Counter(freeze.id for freeze in freezes)
    return broken({
        "acks of sleepers were not stale": [each for each in freezes if each.sleeper_outcome != "stale"],
        "acks of the next holders were not ok": [each for each in freezes if each.holder_outcome != "ok"],
        "sleepers were not stopped": [each for each in freezes if not each.stopped],
        "batches were not settled once": [id for id, times in settled.items() if times != 1],
        "batches came again after they were settled": [id for id, times in counts.items() if times > 1],
        f"{len(freezes)} freezes of {len(settled)} known batches, not {wanted}":
            len(freezes) < wanted or bool(counts.keys() - settled.keys()),
    })  # fmt: skip


def _freeze(
    server: Server, client: RefServerClient, sleepers: Sequence["_Consumer"], *, elsewhere: bool
) -> list[Freeze]:
    """All sleepers lease, are stopped until their leases expire, and continue to ack. elsewhere: as in Freeze."""

    def lease_again() -> dict[str, Leased]:
        """Batches of expired leases are first in the queue."""
        leases = [_lease(client, "holder", 60) for _ in sleepers]
        return {lease.id: lease for lease in leases if lease is not None}

    for sleeper in sleepers:
        sleeper.pipe.send("lease")
    ids = [sleeper.pipe.recv() for sleeper in sleepers]
    for sleeper in sleepers:
        sleeper.signal(signal.SIGSTOP)
        until(lambda sleeper=sleeper: sleeper.is_stopped, "a consumer to stop")
        sleeper.pipe.send("ack")  # read when it wakes
    until(lambda: not _count(server, "leased"), "the leases to end", server)
    stopped = [sleeper.is_stopped for sleeper in sleepers]
    leases = lease_again() if elsewhere else {}
    for sleeper in sleepers:
        sleeper.signal(signal.SIGCONT)
    outcomes = [sleeper.pipe.recv() for sleeper in sleepers]
    leases = leases or lease_again()
    return [
        Freeze(id, was_stopped, elsewhere, outcome, client.ack([leases[id]])[id] if id in leases else "-")
        for id, was_stopped, outcome in zip(ids, stopped, outcomes, strict=True)
    ]


def _lease(client: RefServerClient, consumer: str, seconds: float) -> Leased | None:
    return client.lease(LeaseBody(consumer=consumer, lease_seconds=seconds, wait_seconds=5))


def _count(server: Server, state: str) -> int:
    return server.get("/v1/queue")["states"][state]["batches"]


def _times_done(server: Server, id: str) -> int:
    return sum(event["state"] == "done" for event in server.get(f"/v1/batches/{id}")["history"])


@contextmanager
def _consumers(server: Server, count: int) -> Iterator[list["_Consumer"]]:
    get_context("forkserver").set_forkserver_preload(["tests.chaos.frozen"])  # imports PyTorch: once, not per process
    consumers = [_Consumer(server.url, f"sleeper-{number}") for number in range(count)]
    try:
        yield consumers
    finally:
        for sleeper in consumers:
            sleeper.process.kill()


class _Consumer:
    """A process that leases a batch on one message, which it answers with the id, and acks it on the next."""

    def __init__(self, url: str, name: str) -> None:
        self.pipe, other = get_context("forkserver").Pipe()
        self.process = get_context("forkserver").Process(target=_consume, args=(other, url, name), daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def is_stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"


def _consume(pipe: Connection, url: str, name: str) -> None:
    with RefServerClient(url) as client:
        while pipe.recv() == "lease":
            lease = _lease(client, name, _LEASE_SECONDS)
            assert lease is not None, "all batches are ready"
            pipe.send(lease.id)
            pipe.recv()
            pipe.send(str(client.ack([lease])[lease.id]))
