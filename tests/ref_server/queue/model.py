"""A queue as one would write it down without a database: plain lists, nothing fast, one thread.

It says what a `Queue` must do, so that a test can put both through the same operations.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from ref_server.queue.errors import (
    ContentConflict,
    EpochAhead,
    QueueFull,
    RunTaken,
    Superseded,
    TooManyInFlight,
    WrongState,
)
from ref_server.queue.records import Payload, Upload, Wanted
from shared.api import Depth, LeaseBody, LeaseKey, LimitsView, Order, Outcome, State
from tests.ref_server.queue.backends import RETENTION, Clock

SILENCE_SECONDS = 3600.0
PRESENCE = 10.0
SETTLED = (State.DONE, State.EXPIRED, State.DEAD)


@dataclass
class Hold:
    """A claim (token None) or a lease, and until when it holds; None: as long as its process lives."""

    expires: float | None
    token: str | None = None
    consumer: str | None = None
    incarnation: str | None = None
    request_id: str | None = None
    seconds: float = 0.0
    started: bool = False
    scorer: int | None = None

    def repeats(self, request: LeaseBody) -> bool:
        same = (self.consumer, self.request_id) == (request.consumer, request.request_id)
        return same and request.request_id is not None

    def is_outlived_by(self, request: LeaseBody) -> bool:
        return self.consumer == request.consumer and self.incarnation != request.incarnation


@dataclass
class Holder:
    """Whose a run is: its lineage, when it was heard and for how many seconds that counts."""

    lineage: str
    heard: float
    seconds: float = PRESENCE
    finished: bool = False


@dataclass
class Entry:
    """A batch, as old as its place in the list of all."""

    upload: Upload
    admitted_at: float
    state: State
    body: bytes | None
    scores: bytes | None = None
    training: bytes | None = None
    reason: str | None = None
    settled_at: float = 0.0
    scored: bool = False
    attempts: int = 0
    interruptions: int = 0
    deliveries: int = 0
    returned: bool = False
    in_doubt: bool = False
    hold: Hold | None = None
    settled_by: Hold | None = None
    released: str | None = None  # the last token that gave it back, to know a repeated release

    @property
    def waits(self) -> bool:
        in_line = self.state in (State.QUEUED, State.SCORING, State.READY)
        return in_line or (self.state is State.LEASED and not self.lease.started)

    @property
    def lease(self) -> Hold:
        assert self.hold is not None
        return self.hold

    @property
    def size(self) -> int:
        return 0 if self.body is None else len(self.body) + len(self.scores or b"") + len(self.training or b"")


class ModelQueue:
    """claim_seconds: how long a claim holds; None: as long as its process lives. max_lease_bytes: of one request."""

    def __init__(self, limits: LimitsView, clock: Clock, claim_seconds: float | None, max_lease_bytes: int) -> None:
        self.limits, self.clock, self.claim_seconds, self.max_lease_bytes = (
            limits,
            clock,
            claim_seconds,
            max_lease_bytes,
        )
        self.entries: list[Entry] = []
        self.lives: list[tuple[str, str, float]] = []  # consumer, incarnation, last seen; the newest last
        self.forks: dict[tuple[str, str, int], int] = {}
        self.holders: dict[str, Holder] = {}
        self.scorer = 0

    # --- time

    def begin(self) -> Callable[[], None]:
        """What the passing of time does. Returns how to undo what else an operation does that is then refused."""
        now = self.clock.now
        for entry in self.entries:
            if entry.hold and entry.hold.expires is not None and entry.hold.expires <= now:
                if entry.state is State.SCORING:
                    self._interrupt(entry)
                else:
                    self._lose(entry)
        before = deepcopy((self.entries, self.lives, self.forks, self.holders))

        def undo() -> None:
            self.entries, self.lives, self.forks, self.holders = before

        return undo

    def tidy(self) -> None:
        old = self.clock.now - RETENTION
        self.entries = [e for e in self.entries if not (e.state in SETTLED and e.settled_at < old)]
        self.lives = [life for life in self.lives if life[2] >= old]
        for run in {*self.holders} - {e.upload.run for e in self.entries}:
            holder = self.holders[run]
            if holder.heard + max(holder.seconds, SILENCE_SECONDS) <= self.clock.now:
                del self.holders[run]
                self.forks = {place: version for place, version in self.forks.items() if place[0] != run}

    def restart(self) -> None:
        """Another process opens the store."""
        self.scorer += 1
        if self.claim_seconds is not None:
            return  # the claims and leases go on
        for holder in self.holders.values():
            holder.heard = self.clock.now
        for entry in self.entries:
            if entry.state is State.SCORING:
                self._interrupt(entry)
            elif entry.state is State.LEASED:
                entry.lease.expires = self.clock.now + entry.lease.seconds

    # --- admission and scoring

    def put(self, upload: Upload) -> tuple[State, bool]:
        known = self._known(upload.id)
        if known:
            if known.upload.content_hash != upload.content_hash:
                raise ContentConflict
            return known.state, False
        state = State.QUEUED if upload.to_score else State.READY
        entry = Entry(upload, self.clock.wall(), state, upload.body, scored=not upload.to_score)
        if reason := self._useless_from_now(upload):
            entry.body = None
            self._settle(entry, State.EXPIRED, reason)
        else:
            self._check_epoch(upload)
            self._check_room(upload.run, upload.uploader, len(upload.body))
            self._make_room(len(upload.body))
        self.entries.append(entry)
        return entry.state, True

    def claim(self, max_tokens: int) -> list[tuple[str, str, bytes | None, int, int]]:
        chosen: list[Entry] = []
        for entry in [e for e in self.entries if e.state is State.QUEUED]:
            tokens = sum(e.upload.prompt_tokens + e.upload.completion_tokens for e in [*chosen, entry])
            if chosen and (tokens > max_tokens or entry.interruptions):
                break
            chosen.append(entry)
            if entry.interruptions:
                break
        for entry in chosen:
            expires = None if self.claim_seconds is None else self.clock.now + self.claim_seconds
            entry.state, entry.hold = State.SCORING, Hold(expires, scorer=self.scorer)
        return [
            (entry.upload.id, entry.upload.run, entry.body, entry.attempts, entry.interruptions) for entry in chosen
        ]

    def complete(self, id: str, scores: bytes) -> None:
        entry = self._claimed(id)
        self._make_room(len(scores))
        entry.state, entry.scores, entry.scored, entry.hold = State.READY, scores, True, None
        self._expire_if_useless(entry)

    def fail(self, id: str, error: str) -> State:
        entry = self._claimed(id)
        entry.attempts += 1
        entry.state, entry.hold = State.QUEUED, None
        if entry.attempts == self.limits.max_scoring_attempts:
            self._settle(entry, State.DEAD, error)
        return entry.state

    # --- runs without leases

    def put_displacing(self, upload: Upload) -> list[str]:
        """Without the oldest, without the two oldest, and so on: the first that has room."""
        waiting = [e for e in self.entries if e.upload.run == upload.run and e.state in (State.QUEUED, State.READY)]
        if not self._known(upload.id) and not self._useless_from_now(upload):
            self._check_epoch(upload)
        for count in range(len(waiting) + 1):
            displaced = waiting[:count]
            welcome = self._known(upload.id) or self._useless_from_now(upload)
            if welcome or self._has_room(upload.run, upload.uploader, len(upload.body), displaced):
                for entry in displaced:
                    entry.body = None
                    self._settle(entry, State.EXPIRED, "displaced")
                self.put(upload)
                return [entry.upload.id for entry in displaced]
        raise QueueFull("full")

    def take(self, run: str) -> Payload | None:
        ready = [e for e in self.entries if e.state is State.READY and (e.upload.run, e.upload.lineage) == (run, "")]
        if not ready:
            return None
        taken = max(ready, key=lambda e: (e.returned, e.upload.policy_version, self.entries.index(e)))
        assert taken.body is not None
        payload, taken.body = Payload(taken.body, taken.scores), None
        self._settle(taken, State.DONE, None)
        return payload

    # --- leases

    def lease(self, request: LeaseBody) -> list[Entry]:
        self._check_presence(request)
        if (
            request.run is not None
        ):  # first: batches that come back then belong to a run in use, even if it had finished
            self._enter(request.run, request.lineage_name)
        self._supersede_older(request)
        if request.run is not None:
            if request.epoch is not None and request.policy_version is not None:
                place = request.run, request.lineage_name, request.epoch
                self.forks.setdefault(place, request.policy_version)
            for entry in self.entries:
                if reason := self._useless(entry, request):
                    self._settle(entry, State.EXPIRED, reason)
        leased = self._held_under(request) or self._lease_several(request)
        if request.run is not None:
            self._hear(request.run, request.lineage_name)
        return leased

    def _held_under(self, request: LeaseBody) -> list[Entry]:
        held = [entry for entry in self.entries if entry.state is State.LEASED and entry.lease.repeats(request)]
        return self._in_order(held, request)[: request.most]

    def _lease_several(self, request: LeaseBody) -> list[Entry]:
        """One after the other, as long as there is one that may be leased."""
        leased: list[Entry] = []
        while len(leased) < request.most:
            try:
                entry = self._lease(request, sum(entry.size for entry in leased))
            except TooManyInFlight:
                if not leased:
                    raise
                entry = None
            if entry is None:
                break
            leased.append(entry)
        return leased

    def _lease(self, request: LeaseBody, size: int) -> Entry | None:
        """size: of those that the same request leased before."""
        leased = [entry for entry in self.entries if entry.state is State.LEASED]
        self._check_in_flight(leased, request.run)
        good = [entry for entry in self.entries if entry.state is State.READY and self._suits(entry, request)]
        if not good:
            return None
        chosen = self._in_order(good, request)[0]
        if size and size + chosen.size > self.max_lease_bytes:
            return None
        self._check_in_flight(leased, chosen.upload.run)
        chosen.state = State.LEASED
        chosen.hold = Hold(
            self.clock.now + request.lease_seconds,
            consumer=request.consumer,
            incarnation=request.incarnation,
            request_id=request.request_id,
            seconds=request.lease_seconds,
        )
        return chosen

    def _in_order(self, entries: Sequence[Entry], request: LeaseBody) -> list[Entry]:
        if request.order is Order.FIFO:
            return sorted(entries, key=lambda e: (not e.returned, self.entries.index(e)))
        newest = sorted(entries, key=lambda e: (e.upload.policy_version, self.entries.index(e)), reverse=True)
        return sorted(newest, key=lambda e: not e.returned)

    def count_leasable(self, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]) -> dict[Wanted, int]:
        """For each kind of request as if it were the only one."""
        for run, lineage in alive:
            self._hear(run, lineage)
        leased = [entry for entry in self.entries if entry.state is State.LEASED]
        counts = {}
        for wanted, requests in waiting.items():
            request = LeaseBody(consumer="c", run=wanted.run, lineage=wanted.lineage or None, epoch=wanted.epoch)
            ready = sum(entry.state is State.READY and self._suits(entry, request) for entry in self.entries)
            room = 0
            while room < min(requests, ready) and self._may_lease(leased, wanted.run, room):
                room += 1
            if room:
                counts[wanted] = room
        return counts

    def _may_lease(self, leased: Sequence[Entry], run: str | None, more: int) -> bool:
        """Whether one more may be leased after `more` were."""
        free = self.limits.max_in_flight - len(leased) - more - 1
        if run is None:
            return free >= 0
        of_run = sum(entry.upload.run == run for entry in leased) + more + 1
        of_uploader = min(
            (
                sum(each.upload.uploader == uploader for each in leased) if uploader else 0
                for uploader in {
                    entry.upload.uploader
                    for entry in self.entries
                    if entry.upload.run == run and entry.state in (State.READY, State.LEASED)
                }
            ),
            default=0,
        )
        if of_uploader and of_run + of_uploader + more + 1 > 3 * free:
            return False
        return of_run <= free and of_run <= self.limits.max_in_flight_per_run

    def _check_in_flight(self, leased: Sequence[Entry], run: str | None) -> None:
        if not self._may_lease(leased, run, 0):
            raise TooManyInFlight("full")

    def ack(self, keys: Sequence[LeaseKey]) -> list[Outcome]:
        sampled: set[str] = set()

        def settle(entry: Entry) -> None:
            entry.settled_by = entry.hold
            if entry.training is None:
                entry.body = None
            else:
                sampled.add(entry.upload.run)
            self._settle(entry, State.DONE, None)

        outcomes = self._apply_to_leases(keys, settle)
        for run in sampled:
            kept = [e for e in self.entries if e.upload.run == run and e.state is State.DONE and e.body is not None]
            kept.sort(key=lambda e: (e.upload.content_hash, self.entries.index(e)))
            for entry in kept[self.limits.keep_samples :]:
                entry.body = None
        return outcomes

    def put_training(self, id: str, training: bytes) -> None:
        entry = self._find(id)
        if entry.state not in (State.LEASED, State.DONE) or entry.body is None:
            raise WrongState
        self._make_room(len(training) - len(entry.training or b""))
        if entry.body is None:
            raise WrongState  # it would have to make room itself
        if self._stored() + len(training) - len(entry.training or b"") > self.limits.max_stored_bytes:
            raise QueueFull("full")
        entry.training = training

    def training(self, id: str) -> bytes | None:
        entry = self._known(id)
        return None if entry is None or entry.body is None else entry.training

    def extend(self, keys: Sequence[LeaseKey], seconds: float, started: bool) -> list[Outcome]:
        def prolong(entry: Entry) -> None:
            entry.lease.expires, entry.lease.seconds = self.clock.now + seconds, seconds
            entry.lease.started = entry.lease.started or started

        return self._apply_to_leases(keys, prolong)

    def release(self, keys: Sequence[LeaseKey], error: str | None) -> list[Outcome]:
        def give_back(entry: Entry) -> None:
            entry.training = None
            entry.released = entry.lease.token
            entry.in_doubt = False
            self._return(entry, counts=error is not None)

        return self._apply_to_leases(keys, give_back, once_released=Outcome.ALREADY)

    def finish(self, run: str, lineage: str) -> int:
        if not self._is_anothers(run, lineage):
            self.holders[run] = Holder(lineage, self.clock.now, seconds=0.0, finished=True)
        left = [e for e in self.entries if (e.upload.run, e.upload.lineage) == (run, lineage)]
        left = [e for e in left if e.state in (State.QUEUED, State.READY)]
        for entry in left:
            self._settle(entry, State.EXPIRED, "finished")
        return len(left)

    # --- what an operator does

    def requeue(self, id: str) -> State:
        entry = self._find(id)
        if entry.state not in (State.EXPIRED, State.DEAD) or entry.body is None:
            raise WrongState
        self._check_room(entry.upload.run, "", entry.size)
        entry.state = State.READY if entry.scored else State.QUEUED
        entry.reason, entry.returned, entry.in_doubt = None, False, False
        entry.attempts = entry.interruptions = entry.deliveries = 0
        return entry.state

    def drop(self, id: str) -> None:
        entry = self._find(id)
        if entry.state is State.SCORING:
            raise WrongState
        entry.body = None
        if entry.state is not State.DONE:
            self._settle(entry, State.EXPIRED, "dropped")

    def purge(self, state: State, run: str | None, until: float | None) -> list[str]:
        chosen = [
            entry
            for entry in self.entries
            if entry.state is state
            and entry.body
            and run in (None, entry.upload.run)
            and (until is None or entry.admitted_at <= until)
        ]
        for entry in chosen:
            self.drop(entry.upload.id)
        return [entry.upload.id for entry in chosen]

    # --- looking

    def runs(self) -> dict[str, dict[State, Depth]]:
        runs: dict[str, dict[State, Depth]] = {}
        for run, state in {(e.upload.run, e.state) for e in self.entries}:
            sizes = [e.size for e in self.entries if (e.upload.run, e.state) == (run, state)]
            runs.setdefault(run, {})[state] = Depth(batches=len(sizes), bytes=sum(sizes))
        return runs

    def oldest_age(self) -> float | None:
        waiting = [e for e in self.entries if e.state in (State.QUEUED, State.SCORING, State.READY)]
        return max((self.clock.wall() - e.admitted_at for e in waiting), default=None)

    # --- how

    def _known(self, id: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.upload.id == id), None)

    def _find(self, id: str) -> Entry:
        if (entry := self._known(id)) is None:
            raise KeyError
        return entry

    def _claimed(self, id: str) -> Entry:
        entry = self._find(id)
        if entry.state is not State.SCORING or entry.lease.scorer != self.scorer:
            raise WrongState
        return entry

    def _check_epoch(self, upload: Upload) -> None:
        opened = [epoch for run, lineage, epoch in self.forks if (run, lineage) == (upload.run, upload.lineage)]
        if opened and upload.epoch > max(opened) + 1:
            raise EpochAhead

    def _check_room(self, run: str, uploader: str, size: int) -> None:
        if not self._has_room(run, uploader, size):
            raise QueueFull("full")

    def _make_room(self, size: int) -> None:
        kept = [entry for entry in self.entries if entry.state in SETTLED and entry.body is not None]
        kept.sort(key=lambda entry: entry.settled_at)
        while kept and self._stored() + size > self.limits.max_stored_bytes:
            kept.pop(0).body = None

    def _stored(self) -> int:
        return sum(entry.size for entry in self.entries)

    def _has_room(self, run: str, uploader: str, size: int, without: Sequence[Entry] = ()) -> bool:
        waiting = [entry for entry in self.entries if entry.waits and entry not in without]
        used = [entry for entry in self.entries if entry.state not in SETTLED and entry not in without]
        limits = self.limits
        for entries, amounts, more, of_all, of_one in (
            (waiting, [1] * len(waiting), 1, limits.max_batches, limits.max_batches_per_run),
            (waiting, [entry.size for entry in waiting], size, limits.max_bytes, limits.max_bytes_per_run),
            (used, [entry.size for entry in used], size, limits.max_stored_bytes, limits.max_stored_bytes),
        ):
            pairs = [*zip(amounts, entries, strict=True)]
            of_run = sum(n for n, entry in pairs if entry.upload.run == run) + more
            of_uploader = sum(n for n, entry in pairs if uploader and entry.upload.uploader == uploader)
            free = of_all - sum(amounts) - more
            if of_run > of_one or of_run > free or (of_uploader and of_run + of_uploader + more > 3 * free):
                return False
        return True

    def _supersede_older(self, request: LeaseBody) -> None:
        if request.incarnation is None:
            return
        lives = [incarnation for consumer, incarnation, _ in self.lives if consumer == request.consumer]
        if lives and lives[-1] == request.incarnation:
            self.lives = [self._seen(life, request) for life in self.lives]
            return
        if request.incarnation in lives:
            raise Superseded
        self.lives.append((request.consumer, request.incarnation, self.clock.now))
        for entry in self.entries:
            if entry.state is State.LEASED and entry.lease.is_outlived_by(request):
                self._lose(entry)

    def _seen(self, life: tuple[str, str, float], request: LeaseBody) -> tuple[str, str, float]:
        """A life that asks again; when it was seen is noted once a minute."""
        consumer, incarnation, seen = life
        late = (consumer, incarnation) == (request.consumer, request.incarnation) and seen <= self.clock.now - 60
        return (consumer, incarnation, self.clock.now) if late else life

    def _is_anothers(self, run: str, lineage: str) -> bool:
        """Whether another lineage holds the run and is present."""
        holder = self.holders.get(run)
        if holder is None or holder.lineage == lineage:
            return False
        return holder.heard + holder.seconds > self.clock.now

    def _check_presence(self, request: LeaseBody) -> None:
        if request.run is not None and self._is_anothers(request.run, request.lineage_name):
            raise RunTaken("taken", 0.0)

    def _enter(self, run: str, lineage: str) -> None:
        holder = self.holders.get(run)
        if holder is None or holder.lineage != lineage or holder.finished:
            self.holders[run] = Holder(lineage, self.clock.now)
        self.forks = {place: fork for place, fork in self.forks.items() if place[0] != run or place[1] == lineage}

    def _hear(self, run: str, lineage: str) -> None:
        holder = self.holders.get(run)
        if holder is None or holder.lineage != lineage or holder.finished:
            return
        held = [e for e in self.entries if (e.upload.run, e.upload.lineage) == (run, lineage)]
        longest = max((e.lease.seconds for e in held if e.state is State.LEASED), default=0.0)
        holder.heard, holder.seconds = self.clock.now, max(PRESENCE, longest / 2)

    def _useless_from_now(self, upload: Upload) -> str | None:
        if self._is_anothers(upload.run, upload.lineage):
            return "abandoned"
        holder = self.holders.get(upload.run)
        return "finished" if holder and holder.lineage == upload.lineage and holder.finished else None

    def _expire_if_useless(self, entry: Entry) -> None:
        if reason := self._useless_from_now(entry.upload):
            self._settle(entry, State.EXPIRED, reason)

    def _useless(self, entry: Entry, request: LeaseBody) -> str | None:
        upload = entry.upload
        if entry.state not in (State.QUEUED, State.READY) or request.run != upload.run:
            return None
        if request.lineage_name != upload.lineage:
            return "abandoned"
        if not self._suits(entry, request):
            return None
        for (run, lineage, epoch), version in self.forks.items():
            left = request.epoch is not None and upload.epoch < epoch <= request.epoch
            if (run, lineage) == (upload.run, upload.lineage) and left and upload.policy_version > version:
                return "abandoned"
        if request.policy_version is None or request.max_lag is None or entry.in_doubt:
            return None
        return "stale" if upload.policy_version < request.policy_version - request.max_lag else None

    @staticmethod
    def _suits(entry: Entry, request: LeaseBody) -> bool:
        if request.run is None:
            return True
        of_lineage = (entry.upload.run, entry.upload.lineage) == (request.run, request.lineage_name)
        return of_lineage and (request.epoch is None or entry.upload.epoch <= request.epoch)

    def _apply_to_leases(
        self, keys: Sequence[LeaseKey], effect: Callable[[Entry], None], once_released: Outcome = Outcome.STALE
    ) -> list[Outcome]:
        outcomes = [self._apply_to_key(key, effect, once_released) for key in keys]
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.OK:
                upload = self._find(key.id).upload
                self._hear(upload.run, upload.lineage)
        return outcomes

    def _apply_to_key(self, key: LeaseKey, effect: Callable[[Entry], None], once_released: Outcome) -> Outcome:
        entry = self._known(key.id)
        if entry is None:
            return Outcome.UNKNOWN
        if entry.state is State.LEASED and entry.lease.token == key.token:
            effect(entry)
            return Outcome.OK
        if entry.state is State.DONE and entry.settled_by and entry.settled_by.token == key.token:
            return Outcome.ALREADY
        return once_released if entry.released == key.token else Outcome.STALE

    def _interrupt(self, entry: Entry) -> None:
        entry.interruptions += 1
        entry.state, entry.hold = State.QUEUED, None
        if entry.interruptions == self.limits.max_deliveries:
            self._settle(entry, State.DEAD, "the server ended")

    def _lose(self, entry: Entry) -> None:
        entry.training = None
        entry.in_doubt = entry.in_doubt or entry.lease.started
        self._return(entry, counts=entry.lease.started)

    def _return(self, entry: Entry, *, counts: bool) -> None:
        entry.state, entry.hold = State.READY, None
        entry.deliveries += counts
        if counts and entry.deliveries >= self.limits.max_deliveries:
            self._settle(entry, State.DEAD, "deliveries failed")
        else:
            entry.returned = True
            self._expire_if_useless(entry)

    def _settle(self, entry: Entry, state: State, reason: str | None) -> None:
        entry.state, entry.reason, entry.settled_at, entry.hold = state, reason, self.clock.now, None
