"""PostgreSQL is restarted under load, by crashes and orderly stops: nothing is lost, and the server continues."""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice

from policy_trainer.trainer.queue_client.terms import LeaseTerms
from shared import wire
from shared.api import State
from shared.client import RefServerClient
from tests.chaos.stage import Proof, Stage, at_work, broken
from tests.harness.batches import random_batch
from tests.harness.postgresql import Postgres, postgres
from tests.harness.processes import until
from tests.harness.server import Server

BAR = "nothing admitted is lost, nothing is settled twice, no lease is stuck, and the same server process goes on"

_RUN = "database"
_UPLOADERS = 3
_CONSUMERS = 3
_LEASE_SECONDS = 2.0
_PAUSE_SECONDS = 0.01
# How long the load lasts between restarts, at most.
_CALM_SECONDS = 1.0
# One lease in this many is abandoned, as by a consumer that died: its batch must be delivered again.
_FORGOTTEN = 10
# After the load: abandoned leases expire, and so do scoring claims whose commit was cut off.
_DRAIN_SECONDS = 150.0


@dataclass
class Load:
    """What the clients recorded. admitted: ids of uploads. acks: id, the token of the lease, and the outcome.

    outages: reasons for which requests were repeated.
    """

    admitted: list[str] = field(default_factory=list)
    acks: list[tuple[str, str, str]] = field(default_factory=list)
    outages: list[str] = field(default_factory=list)


def run(stage: Stage) -> Proof:
    load = Load()
    went_on = []
    with postgres() as cluster, stage.serving("--store", cluster.create_database("tandem")) as server:
        clients = _Clients(server.url, load)
        works = [*[clients.upload] * _UPLOADERS, *[clients.consume] * _CONSUMERS]
        with at_work([partial(work, random.Random(stage.chance.random())) for work in works]):
            for mode in islice(cycle(("immediate", "fast")), stage.cycles):
                time.sleep(stage.chance.uniform(0, _CALM_SECONDS))
                went_on.append(_restart(cluster, mode, load, server))
            clients.full.set()
            with suppress(AssertionError):  # what is left then is a fault
                until(lambda: _is_drained(server), "everything to be settled", server, seconds=_DRAIN_SECONDS)
        done = _times_done(server, load.admitted)
        states = Counter(batch["state"] for batch in server.batches(run=_RUN))
        ended = server.popen.poll() is not None
    holders: dict[str, set[str]] = defaultdict(set)
    for id, token, outcome in load.acks:
        if outcome in ("ok", "already"):
            holders[id].add(token)
    faults = broken({
        "admitted batches are not done": [id for id in load.admitted if done.get(id, 0) == 0],
        "batches were settled more than once": [id for id, times in done.items() if times > 1],
        "batches were acked by more than one holder": [id for id, tokens in holders.items() if len(tokens) > 1],
        "acked batches are not done": [id for id in holders if done.get(id, 0) == 0],
        f"batches are left: {dict(states)}": set(states) - {"done"},
        f"{len(went_on)} restarts, {len(holders)} batches acked": len(went_on) != stage.cycles or not holders,
        "no request met a restart: there was no load": not load.outages,
        "the server process ended": ended,
    })  # fmt: skip
    figures = {
        "restarts": len(went_on), "admitted": len(load.admitted), "acks": len(load.acks),
        "requests repeated": len(load.outages),
        "went on after s, at most": round(max(went_on, default=0.0), 1),
    }  # fmt: skip
    return Proof(faults, figures)


def _restart(cluster: Postgres, mode: str, load: Load, server: Server) -> float:
    """Restarts the database and returns the seconds until uploads and acks succeed again."""
    cluster.restart(mode)
    began = time.monotonic()
    uploads, acks = len(load.admitted), len(load.acks)
    until(lambda: len(load.admitted) > uploads and len(load.acks) > acks, f"the load after a {mode} restart", server)
    return time.monotonic() - began


def _is_drained(server: Server) -> bool:
    states = server.get("/v1/queue")["states"]
    return not any(states[state]["batches"] for state in ("queued", "scoring", "ready", "leased"))


def _times_done(server: Server, ids: Sequence[str]) -> dict[str, int]:
    with RefServerClient(server.url) as client:
        known = {batch.id for batch in client.batches(run=_RUN)}
        histories = {id: client.batch(id).history if id in known else [] for id in ids}
    return {id: sum(event.state == State.DONE for event in history) for id, history in histories.items()}


class _Stopped(Exception):
    """The load is over."""


class _Clients:
    """Uploaders, until there is enough, and consumers."""

    def __init__(self, url: str, load: Load) -> None:
        self._url = url
        self._load = load
        self.full = threading.Event()

    def upload(self, chance: random.Random, over: threading.Event) -> None:
        with self._client(over) as client:
            while not self.full.wait(_PAUSE_SECONDS) and not over.is_set():
                batch = random_batch(chance, _RUN)
                client.upload(wire.encode(batch))
                self._load.admitted.append(batch.id)

    def consume(self, chance: random.Random, over: threading.Event) -> None:
        name = f"consumer {chance.random()}"
        terms = LeaseTerms(name, _RUN, epoch=0, max_lag=None, lease_seconds=_LEASE_SECONDS)
        with self._client(over) as client:
            while not over.is_set():
                leased = client.lease(terms.at(0, wait_seconds=0.5))
                if leased is not None and chance.random() > 1 / _FORGOTTEN:
                    outcomes = client.ack([leased], "none")
                    self._load.acks.append((leased.id, leased.token, outcomes[leased.id]))

    @contextmanager
    def _client(self, over: threading.Event) -> Iterator[RefServerClient]:
        def note(reason: str, seconds: float) -> None:
            self._load.outages.append(reason)
            if over.is_set():  # an upload that has begun is repeated until it is answered
                raise _Stopped

        with suppress(_Stopped), RefServerClient(self._url, patience=None, on_wait=note) as client:
            yield client
