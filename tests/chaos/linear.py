"""Every kind of call at once while servers are killed: the calls on each batch must have an order that a model accepts.

One server on SQLite, or two that share a PostgreSQL. The history has every call with its begin, its end and its answer
or the absence of one; `linearizability.py` judges it.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shared.batch import Batch
from shared.client import RefServerClient
from tests.chaos.calls import Caller, Key
from tests.chaos.linearizability import violations
from tests.chaos.stage import Proof, Stage, at_work
from tests.harness.actors import Actor, Launcher
from tests.harness.batches import random_batch
from tests.harness.history import Event, History
from tests.harness.ports import free_port
from tests.harness.processes import until

_RUNS = ("a", "b", "c")
# Only this run is finished now and then: from then on its batches may expire at any time, which proves less.
_FINISHED = "c"
_RECENT = 120
# Short compared with the time between kills: on a restart, the embedded store renews every lease.
_LEASE_SECONDS = (0.3, 0.6, 1.5)
_LONGEST_PAUSE = 0.08


@dataclass
class Bag:
    """Recent requests, which others may repeat. lineages: the current one of each run."""

    uploads: deque[Batch] = field(default_factory=lambda: deque(maxlen=_RECENT))
    leases: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    keys: deque[Key] = field(default_factory=lambda: deque(maxlen=_RECENT))
    lineages: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(_RUNS))


@contextmanager
def playing(urls: Sequence[str], history: History, chance: random.Random) -> Iterator[Bag]:
    """All clients at work, each in a thread, until the block ends."""
    bag = Bag()

    def play(role: type[Player], chance: random.Random, over: threading.Event) -> None:
        with closing(Caller(urls, history, chance)) as caller:
            player = role(caller, bag, chance)
            while not over.wait(chance.uniform(0, _LONGEST_PAUSE)):
                player.turn()

    roles = [Uploader] * 2 + [Consumer] * 4 + [Rival] * 3
    with at_work([partial(play, role, random.Random(chance.random())) for role in roles]):
        yield bag


class Player:
    def __init__(self, caller: Caller, bag: Bag, chance: random.Random) -> None:
        self._caller, self._bag, self._chance = caller, bag, chance

    def turn(self) -> None:
        raise NotImplementedError


class Uploader(Player):
    def turn(self) -> None:
        run = self._chance.choice(_RUNS)
        batch = replace(random_batch(self._chance, run, completions=2), lineage=self._bag.lineages[run])
        self._bag.uploads.append(batch)  # before it is sent, so that another may be the first
        if self._caller.upload(batch) is None and self._chance.random() < 0.5:
            self._caller.upload(batch)


class Consumer(Player):
    def __init__(self, caller: Caller, bag: Bag, chance: random.Random) -> None:
        super().__init__(caller, bag, chance)
        self._name = f"consumer-{chance.randrange(10**6)}"
        self._held: list[Key] = []
        self._be_born()

    def turn(self) -> None:
        if self._chance.random() < 0.03:
            self._be_born()
        request = self._request()
        self._bag.leases.append(request)
        status, keys = self._caller.lease(request)
        if status is None or self._chance.random() < 0.1:
            status, keys = self._caller.lease(request)  # the same request_id, if it has one
        if status == 409 and self._chance.random() < 0.3:  # superseded, or the run is another lineage's
            self._be_born()
        self._bag.keys += keys
        for key in keys:
            self._use(key)

    def _be_born(self) -> None:
        self._incarnation = self._chance.choice((None, f"life-{self._chance.getrandbits(40)}"))

    def _request(self) -> dict[str, Any]:
        run = self._chance.choice((*_RUNS, None))
        return {
            "consumer": self._name,
            "incarnation": self._incarnation,
            "request_id": self._chance.choice((None, f"request-{self._chance.getrandbits(40)}")),
            "run": run,
            "lineage": self._bag.lineages[run] if run else None,
            "count": self._chance.choice((None, None, 1, 2, 5)),
            "wait_seconds": self._chance.choice((0, 0.3)),
            "lease_seconds": self._chance.choice(_LEASE_SECONDS),
        }

    def _use(self, key: Key) -> None:
        ways = (self._ack, self._ack_later, self._train, self._train_and_fail, self._give_back, self._refuse, len)
        self._chance.choices(ways, (5, 3, 3, 3, 2, 1, 2))[0]([key])  # len: forgets it

    def _ack(self, keys: list[Key]) -> None:
        for _ in range(self._chance.choice((1, 1, 2))):
            self._caller.settle("ack", keys)

    def _ack_later(self, keys: list[Key]) -> None:
        self._held += keys
        if len(self._held) == 3:
            self._ack(self._held)
            self._held = []

    def _train(self, keys: list[Key]) -> None:
        self._train_and_fail(keys)
        time.sleep(self._chance.uniform(0, 0.5))
        self._ack(keys)

    def _train_and_fail(self, keys: list[Key]) -> None:
        seconds = self._chance.choice(_LEASE_SECONDS)
        self._caller.settle("extend", keys, lease_seconds=seconds, started=self._chance.random() < 0.8)

    def _give_back(self, keys: list[Key]) -> None:
        for _ in range(self._chance.choice((1, 2))):
            self._caller.settle("release", keys)

    def _refuse(self, keys: list[Key]) -> None:
        self._caller.settle("release", keys, error="it cannot be used")
        self._caller.requeue(keys[0]["id"])  # it may be dead now


class Rival(Player):
    """Repeats earlier requests, concurrently with others or long afterwards."""

    def turn(self) -> None:
        ways = (self._upload, self._upload_other, self._lease, self._settle, self._requeue, self._drop, self._look)
        way = self._chance.choices((*ways, self._finish), (8, 2, 8, 12, 6, 2, 8, 1))[0]
        if self._bag.uploads and self._bag.leases:
            way()

    def _upload(self) -> None:
        self._caller.upload(self._any(self._bag.uploads))

    def _upload_other(self) -> None:
        batch = self._any(self._bag.uploads)
        self._caller.upload(replace(batch, rewards=batch.rewards + 1))

    def _lease(self) -> None:
        self._caller.lease(self._any(self._bag.leases))

    def _settle(self) -> None:
        if self._bag.keys:
            verb = self._chance.choice(("ack", "extend", "release"))
            more = {"extend": {"lease_seconds": self._chance.choice(_LEASE_SECONDS)}}.get(verb, {})
            self._caller.settle(verb, [self._any(self._bag.keys)], **more)

    def _requeue(self) -> None:
        self._caller.requeue(self._any(self._bag.uploads).id)

    def _drop(self) -> None:
        self._caller.drop(self._any(self._bag.uploads).id)

    def _look(self) -> None:
        self._caller.look(self._any(self._bag.uploads).id)

    def _finish(self) -> None:
        self._caller.finish(_FINISHED, self._bag.lineages[_FINISHED])

    def _any(self, recent: deque[Any]) -> Any:
        """Half of the time one of the last few, on which others are at work."""
        return recent[self._chance.randrange(-min(self._chance.choice((4, _RECENT)), len(recent)), 0)]


BAR = "kill -9: the calls on each batch have an order, consistent with real time, that a sequential model accepts"
# Each cycle has one kill, more or less.
CYCLE_SECONDS = 4.0

_SERVERS = {"sqlite": 1, "postgresql": 2}
_MAX_DELIVERIES = 2
# Between kills. The long one is for lineages: a restart of the embedded store renews the presence of each, of 10 s.
_CALM_SECONDS = (*[(0.2, 3.0)] * 7, (16.0, 20.0))
_DOWN_SECONDS = 0.3


def run(stage: Stage) -> Proof:
    directory, chance = stage.directory, stage.chance
    ports = [free_port() for _ in range(_SERVERS[stage.backend])]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with History(directory / "history.jsonl") as history, stage.store() as store, Launcher() as launcher:
        options = ("--data-dir", str(directory / "server"), "--queue.max-deliveries", str(_MAX_DELIVERIES), *store)
        servers: list[Actor] = []
        for port, url in zip(ports, urls, strict=True):
            serve = ("serve", "--no-model", "--port", str(port), *options)
            servers.append(launcher.actor("ref_server.__main__", serve, directory / f"server-{port}.log").start())
            until(lambda url=url: servers[-1].check() or _is_ready(url), "a server to be ready")
        with playing(urls, history, chance) as bag:
            _kill_now_and_then(servers, bag, history, chance, time.monotonic() + stage.cycles * CYCLE_SECONDS)
        for url in urls:
            until(lambda url=url: _is_ready(url), "a server to be ready again")
        _look_at_all(urls[0], history)
        events = history.events()
        wrong = violations(events, _MAX_DELIVERIES)
        lines = (f"{id}:\n" + "".join(f"  {line}\n" for line in wrong[id]) for id in wrong)
        (directory / "violations.txt").write_text("\n".join(lines), encoding="utf-8")
        return judge(events, wrong)


def judge(events: Sequence[Event], wrong: Mapping[str, Sequence[str]]) -> Proof:
    """wrong: the violations by batch, as from `linearizability.violations`."""
    calls = [event for event in events if event["kind"] == "call"]
    answers = Counter(f"{call['verb']} {call['status'] or '-'}" for call in calls)
    faults = [f"{id}: {lines[-1]}" for id, lines in wrong.items()]
    faults += [f"{answer}, {count} times" for answer, count in answers.items() if answer.endswith(" 500")]
    kills = sum(event["kind"] == "kill" for event in events)
    return Proof(faults, {"calls": len(calls), "kills": kills, **dict(sorted(answers.items()))})


def _is_ready(url: str) -> bool:
    with RefServerClient(url) as client:
        return client.not_ready_reason() is None


def _kill_now_and_then(
    servers: Sequence[Actor], bag: Bag, history: History, chance: random.Random, deadline: float
) -> None:
    """Kills one server or all at once, and now and then lets another lineage take over a run."""
    while (left := deadline - time.monotonic()) > 0:
        calm = chance.uniform(*chance.choice(_CALM_SECONDS))
        if calm > 10:
            bag.lineages[chance.choice(list(bag.lineages))] = f"lineage-{chance.getrandbits(40)}"
        time.sleep(min(calm, left))
        killed = servers if chance.random() < 0.3 else [chance.choice(servers)]
        for server in killed:
            server.check()
            server.kill()
            history.record("kill")
        time.sleep(chance.uniform(0, _DOWN_SECONDS))
        for server in killed:
            server.start()


def _look_at_all(url: str, history: History) -> None:
    """Records the end of each batch as calls that look at it: one that is missing was lost."""
    ids = {event["id"] for event in history.events() if event.get("verb") == "upload"}
    begin = time.monotonic()
    with RefServerClient(url) as client:
        known = {batch.id: batch for batch in client.batches()}
    end = time.monotonic()
    for id in sorted(ids):
        status = 200 if id in known else 404
        reply = {"state": known[id].state.value, "deliveries": known[id].deliveries} if id in known else {}
        history.record("call", verb="look", begin=begin, end=end, id=id, status=status, **reply)
