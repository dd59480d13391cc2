"""What the clients of `linear` do: uploaders, consumers, and rivals who ask again what others have asked."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shared.batch import RolloutBatch
from tests.chaos.batches import random_batch
from tests.chaos.callers import Caller, Key
from tests.chaos.history import History

_RUNS = ("a", "b", "c")
# Only this run is finished now and then: from then on its batches may expire at any time, which proves less.
_FINISHED = "c"
_RECENT = 120
# Short beside the time between kills, which give each lease of the embedded store its full time again.
_LEASE_SECONDS = (0.3, 0.6, 1.5)
_LONGEST_PAUSE = 0.08


@dataclass
class Bag:
    """What has been asked lately, so that others may ask it again. lineages: the present one of each run."""

    uploads: deque[RolloutBatch] = field(default_factory=lambda: deque(maxlen=_RECENT))
    leases: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    keys: deque[Key] = field(default_factory=lambda: deque(maxlen=_RECENT))
    lineages: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(_RUNS))


@contextmanager
def playing(urls: Sequence[str], history: History, chance: random.Random) -> Iterator[Bag]:
    """All clients at work, each in a thread, until the block ends."""
    bag, over, failures = Bag(), threading.Event(), []
    roles = [Uploader] * 2 + [Consumer] * 4 + [Rival] * 3

    def play(role: Callable[[Caller, Bag, random.Random], Any], chance: random.Random) -> None:
        try:
            with closing(Caller(urls, history, chance)) as caller:
                player = role(caller, bag, chance)
                while not over.wait(chance.uniform(0, _LONGEST_PAUSE)):
                    player.turn()
        except Exception as error:  # raised again where the block ends
            failures.append(error)

    threads = [threading.Thread(target=play, args=(role, random.Random(chance.random()))) for role in roles]
    for thread in threads:
        thread.start()
    try:
        yield bag
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


class Uploader:
    def __init__(self, caller: Caller, bag: Bag, chance: random.Random) -> None:
        self._caller, self._bag, self._chance = caller, bag, chance

    def turn(self) -> None:
        run = self._chance.choice(_RUNS)
        batch = replace(random_batch(self._chance, run, completions=2), lineage=self._bag.lineages[run])
        self._bag.uploads.append(batch)  # before it is sent, so that another may be the first
        if self._caller.upload(batch) is None and self._chance.random() < 0.5:
            self._caller.upload(batch)


class Consumer:
    def __init__(self, caller: Caller, bag: Bag, chance: random.Random) -> None:
        self._caller, self._bag, self._chance = caller, bag, chance
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


class Rival:
    """Asks again what was asked before, at the same time as others or long after."""

    def __init__(self, caller: Caller, bag: Bag, chance: random.Random) -> None:
        self._caller, self._bag, self._chance = caller, bag, chance

    def turn(self) -> None:
        ways = (self._upload, self._upload_other, self._lease, self._settle, self._requeue, self._drop, self._look)
        self._chance.choices((*ways, self._finish), (8, 2, 8, 12, 6, 2, 8, 1))[0]()

    def _upload(self) -> None:
        if batch := self._any(self._bag.uploads):
            self._caller.upload(batch)

    def _upload_other(self) -> None:
        if batch := self._any(self._bag.uploads):
            self._caller.upload(replace(batch, rewards=batch.rewards + 1))

    def _lease(self) -> None:
        if request := self._any(self._bag.leases):
            self._caller.lease(request)

    def _settle(self) -> None:
        if key := self._any(self._bag.keys):
            verb = self._chance.choice(("ack", "extend", "release"))
            more = {"extend": {"lease_seconds": self._chance.choice(_LEASE_SECONDS)}}.get(verb, {})
            self._caller.settle(verb, [key], **more)

    def _requeue(self) -> None:
        if batch := self._any(self._bag.uploads):
            self._caller.requeue(batch.id)

    def _drop(self) -> None:
        if batch := self._any(self._bag.uploads):
            self._caller.drop(batch.id)

    def _look(self) -> None:
        if batch := self._any(self._bag.uploads):
            self._caller.look(batch.id)

    def _finish(self) -> None:
        self._caller.finish(_FINISHED, self._bag.lineages[_FINISHED])

    def _any(self, recent: deque[Any]) -> Any:
        """Half of the time one of the last few, on which others are at work."""
        if not recent:
            return None
        return recent[self._chance.randrange(-min(self._chance.choice((4, _RECENT)), len(recent)), 0)]
