"""A consumer that is stopped (SIGSTOP) until its lease has expired is refused when it continues."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.client import RefServerClient
from tests.chaos import consumer
from tests.chaos.batches import random_batch
from tests.chaos.stage import Proof, Stage, broken
from tests.integration.processes import Server, until

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
    with stage.serving_store() as server:
        with RefServerClient(server.url) as client:
            for _ in range(wanted):
                client.upload(random_batch(stage.chance, _RUN))
        until(lambda: _count(server, "ready") == wanted, "all batches to be scored", server)
        with _consumers(server, min(_CONSUMERS, wanted)) as sleepers:
            freezes: list[Freeze] = []
            while len(freezes) < wanted:
                elsewhere = not (freezes and freezes[-1].elsewhere)  # by turns
                freezes += _freeze(server, sleepers[: wanted - len(freezes)], elsewhere=elsewhere)
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


def _freeze(server: Server, sleepers: Sequence["_Consumer"], *, elsewhere: bool) -> list[Freeze]:
    """All sleepers lease, are stopped until their leases expire, and continue to ack. elsewhere: as in Freeze."""
    for sleeper in sleepers:
        sleeper.say("lease")
    held = [sleeper.hear()["id"] for sleeper in sleepers]
    for sleeper in sleepers:
        sleeper.stop()
        sleeper.say("ack")  # read when it wakes
    until(lambda: not _count(server, "leased"), "the leases to end", server)
    stopped = [sleeper.is_stopped for sleeper in sleepers]
    keys = _lease_again(server, held) if elsewhere else {}
    for sleeper in sleepers:
        sleeper.wake()
    outcomes = [sleeper.hear() for sleeper in sleepers]
    keys = keys or _lease_again(server, held)
    return [
        Freeze(id, was_stopped, elsewhere, outcome, consumer.ack(server.url, keys[id]) if id in keys else "-")
        for id, was_stopped, outcome in zip(held, stopped, outcomes, strict=True)
    ]


def _lease_again(server: Server, ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Leases these batches again and returns their keys: batches of expired leases are first in the queue."""
    keys = [consumer.lease(server.url, "holder", 60) for _ in ids]
    return {key["id"]: key for key in keys if key is not None}


def _count(server: Server, state: str) -> int:
    return server.get("/v1/queue")["states"][state]["batches"]


def _times_done(server: Server, id: str) -> int:
    return sum(event["state"] == "done" for event in server.get(f"/v1/batches/{id}")["history"])


@contextmanager
def _consumers(server: Server, count: int) -> Iterator[list["_Consumer"]]:
    consumers = [_Consumer(server, f"sleeper-{number}") for number in range(count)]
    try:
        yield consumers
    finally:
        for sleeper in consumers:
            sleeper.end()


class _Consumer:
    """A process of tests/chaos/consumer.py."""

    def __init__(self, server: Server, name: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.consumer", server.url, name, str(_LEASE_SECONDS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout

    def say(self, word: str) -> None:
        self._input.write(word + "\n")

    def hear(self) -> Any:
        """The answer to the oldest line that has not been read yet."""
        return json.loads(self._output.readline())

    def stop(self) -> None:
        self._popen.send_signal(signal.SIGSTOP)
        os.waitpid(self._popen.pid, os.WUNTRACED)  # returns once it is stopped

    def wake(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    @property
    def is_stopped(self) -> bool:
        status = Path(f"/proc/{self._popen.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._input.close()
        self._output.close()
