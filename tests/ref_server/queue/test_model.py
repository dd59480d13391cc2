"""Each store compared with a queue of plain lists: random operations, and both must answer the same.

`make queue-model` does it 50,000 times; here it is a thousand.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ref_server.queue.errors import ContentConflict, EpochAhead, NoRoom, QueueFull, RunTaken, Superseded, WrongState
from ref_server.queue.records import Upload, Wanted
from shared.api import BatchSummary, Lease, LeaseBody, LeaseKey, Order, PurgeableState, PurgeBody, State
from tests.ref_server.queue.backends import BACKEND_NAMES, BACKENDS, CLAIM_SECONDS, RETENTION, Clock, make_limits
from tests.ref_server.queue.model import Entry, ModelQueue

STEPS = 50
EXAMPLES = int(os.environ.get("QUEUE_MODEL_STEPS", "1000")) // 40  # about as many operations an example
# So tight that every one of them is met.
LIMITS = make_limits(
    max_batches=16,
    max_batches_per_run=7,
    max_bytes=160,
    max_bytes_per_run=70,
    max_stored_bytes=190,
    keep_samples=2,
    max_in_flight=9,
    max_in_flight_per_run=4,
    max_deliveries=2,
    max_scoring_attempts=2,
)
# Of one lease request; and how much of it comes with the leases.
MAX_LEASE_BYTES, LARGE_BYTES = 45, 30
REFUSALS = (QueueFull, ContentConflict, EpochAhead, RunTaken, Superseded, WrongState, KeyError)
MADE_UP_REASONS = ("stale", "abandoned", "finished", "dropped", "displaced")

runs = st.sampled_from(["x", "y"])
lineages = st.sampled_from(["", "", "l", "m"])
small = st.integers(0, 4)
ids = st.integers(0, 24).map(str)
uploads = st.builds(
    lambda id, run, lineage, epoch, version, size, to_score, uploader: Upload(
        id, f"{run}{lineage}{epoch}{version}{size}".ljust(32).encode(), run, epoch, version, 4, size, 2, b"u" * size,
        to_score, lineage, uploader,
    ),
    ids, runs, lineages, st.integers(0, 3), small, st.integers(1, 20), st.booleans(), st.sampled_from(["", "t", "u"]),
)  # fmt: skip


wanted = st.just(Wanted(None)) | st.builds(Wanted, runs, lineages, st.sampled_from([None, 0, 1, 2]))


@st.composite
def requests(draw: st.DrawFn) -> LeaseBody:
    run = draw(st.sampled_from([None, "x", "y"]))
    policy_version = draw(st.none() | small)
    return LeaseBody(
        consumer=draw(st.sampled_from(["one", "two"])),
        incarnation=draw(st.sampled_from([None, "1", "1", "2"])),
        request_id=draw(st.sampled_from([None, None, "a", "b"])),
        run=run,
        lineage=(draw(lineages) or None) if run else None,
        epoch=draw(st.sampled_from([None, None, 0, 1, 2])) if run else None,
        policy_version=policy_version,
        max_lag=draw(st.none() | st.integers(0, 2)) if run and policy_version is not None else None,
        order=draw(st.sampled_from(Order)),
        count=draw(st.sampled_from([None, None, 1, 2, 3, 512])),
        lease_seconds=draw(st.sampled_from([5.0, 10.0, 100.0])),
    )


class Machine(RuleBasedStateMachine):
    """One store and the model, through the same operations."""

    backend = ""
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.opened = ExitStack()
        folder = self.opened.enter_context(TemporaryDirectory())
        self.store = self.opened.enter_context(BACKENDS[self.backend](Path(folder)))
        self.queue = self.store.open(self.clock, LIMITS)
        claim_seconds = None if self.backend == "sqlite" else CLAIM_SECONDS
        self.model = ModelQueue(LIMITS, self.clock, claim_seconds, MAX_LEASE_BYTES)
        self.keys: list[LeaseKey] = [LeaseKey(id="0", token="made up"), LeaseKey(id="nobody", token="made up")]

    def teardown(self) -> None:
        self.queue.close()
        self.opened.close()

    def both(self, real: Callable[[], Any], modelled: Callable[[], Any]) -> tuple[Any, Any]:
        """What both answer; a refusal of either must be one of the other, and leaves nothing behind."""
        type(self).steps += 1
        got = _answer(real)
        undo = self.model.begin()
        expected = _answer(modelled)
        if isinstance(expected, type):
            undo()
        if isinstance(expected, type) or isinstance(got, type):
            assert got == expected
        return got, expected

    def same(self, real: Callable[[], Any], modelled: Callable[[], Any]) -> None:
        got, expected = self.both(real, modelled)
        assert got == expected

    @rule(uploads=st.lists(uploads, min_size=1, max_size=4))
    def put(self, uploads: list[Upload]) -> None:
        for upload in uploads:
            self.same(partial(self._put, upload), partial(self.model.put, upload))

    def _put(self, upload: Upload) -> tuple[State, bool]:
        admission = self.queue.put(upload)
        return admission.state, admission.created

    @rule(upload=uploads)
    def put_displacing(self, upload: Upload) -> None:
        self.same(lambda: self.queue.put_displacing(upload), lambda: self.model.put_displacing(upload))

    @rule(run=runs)
    def take(self, run: str) -> None:
        self.same(lambda: self.queue.take(run), lambda: self.model.take(run))

    @rule(max_tokens=st.integers(1, 100))
    def claim(self, max_tokens: int) -> None:
        self.same(
            lambda: [astuple(claim) for claim in self.queue.claim(max_tokens)],
            lambda: self.model.claim(max_tokens),
        )

    @rule(id=ids, size=st.integers(1, 40))
    def complete_any(self, id: str, size: int) -> None:
        self._complete(id, size)

    @rule(size=st.integers(1, 40))
    def complete_claimed(self, size: int) -> None:
        for id in self.ids_in(State.SCORING):
            self._complete(id, size)

    def _complete(self, id: str, size: int) -> None:
        self.same(lambda: self.queue.complete(id, b"s" * size), lambda: self.model.complete(id, b"s" * size))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        id = self.an_id(data, State.SCORING)
        self.same(lambda: self.queue.fail(id, "boom"), lambda: self.model.fail(id, "boom"))

    @rule(several=st.lists(requests(), min_size=1, max_size=3))
    def lease(self, several: list[LeaseBody]) -> None:
        for request in several:
            self._lease(request)

    def _lease(self, request: LeaseBody) -> None:
        leases, entries = self.both(lambda: self.queue.lease(request), lambda: self.model.lease(request))
        if isinstance(leases, type):
            return
        for lease, entry in zip(leases, entries, strict=True):
            self._leased(lease, entry)

    def _leased(self, lease: Lease, entry: Entry) -> None:
        hold = entry.lease
        assert hold.token in (None, lease.token), "a repeated request gets the same token, another one a new one"
        hold.token = lease.token
        self.keys.append(LeaseKey(id=lease.id, token=lease.token))
        expected = entry.upload.id, hold.seconds, entry.deliveries + 1, entry.size
        assert (lease.id, lease.lease_seconds, lease.deliveries, lease.bytes) == expected
        bodies = self.queue.payloads([lease.id]) if lease.body is None else {lease.id: (lease.body, lease.scores)}
        assert bodies == {entry.upload.id: (entry.body, entry.scores)}

    @rule(waiting=st.dictionaries(wanted, st.integers(1, 5), max_size=4), alive=st.booleans())
    def look(self, waiting: dict[Wanted, int], alive: bool) -> None:
        present = {(each.run, each.lineage) for each in waiting if alive and each.run is not None}
        self.same(
            lambda: self.queue.count_leasable(waiting, present), lambda: self.model.count_leasable(waiting, present)
        )

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        keys = self.some_keys(data)
        self.same(lambda: self.queue.ack(keys), lambda: self.model.ack(keys))

    @rule(data=st.data(), size=st.integers(1, 12))
    def put_training(self, data: st.DataObject, size: int) -> None:
        id = self.an_id(data, State.LEASED, State.DONE)
        self.same(lambda: self.queue.put_training(id, b"t" * size), lambda: self.model.put_training(id, b"t" * size))

    @rule(data=st.data(), seconds=st.sampled_from([5.0, 50.0]), started=st.booleans())
    def extend(self, data: st.DataObject, seconds: float, started: bool) -> None:
        keys = self.some_keys(data)
        self.same(lambda: self.queue.extend(keys, seconds, started), lambda: self.model.extend(keys, seconds, started))

    @rule(data=st.data(), error=st.sampled_from([None, "boom"]))
    def release(self, data: st.DataObject, error: str | None) -> None:
        keys = self.some_keys(data)
        self.same(lambda: self.queue.release(keys, error), lambda: self.model.release(keys, error))

    @rule(run=runs, lineage=lineages)
    def finish(self, run: str, lineage: str) -> None:
        self.same(lambda: self.queue.finish(run, lineage), lambda: self.model.finish(run, lineage))

    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        id = self.an_id(data, State.EXPIRED, State.DEAD)
        self.same(lambda: self.queue.requeue(id), lambda: self.model.requeue(id))

    @rule(id=ids)
    def drop(self, id: str) -> None:
        self.same(lambda: self.queue.drop(id), lambda: self.model.drop(id))

    @rule(
        state=st.sampled_from(get_args(PurgeableState)),
        run=st.none() | runs,
        age=st.none() | st.sampled_from([0.0, 5.0, 61.0]),
    )
    def purge(self, state: str, run: str | None, age: float | None) -> None:
        until = None if age is None else self.clock.wall() - age
        chosen = PurgeBody.model_validate({"state": state, "run": run, "admitted_until": until})
        self.same(
            lambda: self.queue.purge(chosen).dropped,
            lambda: self.model.purge(State(state), run, until),
        )

    @rule(seconds=st.sampled_from([1.0, 1.0, 5.0, 5.0, 10.0, 10.0, 61.0, RETENTION, 3600.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def tidy(self) -> None:
        self.model.begin()
        while self.queue.tidy():
            pass
        self.model.tidy()

    @rule()
    def restart(self) -> None:
        self.queue.close()
        self.queue = self.store.open(self.clock, LIMITS)
        self.model.restart()

    def ids_in(self, *states: State) -> list[str]:
        return [entry.upload.id for entry in self.model.entries if entry.state in states]

    def an_id(self, data: st.DataObject, *states: State) -> str:
        """Mostly of a batch in one of the states, where there is one."""
        return data.draw(st.one_of(ids, *[st.sampled_from(self.ids_in(*states) or ["0"])] * 3))

    def some_keys(self, data: st.DataObject) -> list[LeaseKey]:
        """Tokens old and new, of one batch or several, some of them twice."""
        held = [
            LeaseKey(id=e.upload.id, token=e.lease.token or "") for e in self.model.entries if e.state is State.LEASED
        ]
        known = [st.sampled_from(held)] * 3 if held else []
        return data.draw(st.lists(st.one_of(st.sampled_from(self.keys), *known), min_size=1, max_size=4))

    @invariant()
    def both_hold_the_same(self) -> None:
        self.model.begin()
        listed = self.queue.list(None, None, 1000, None).batches
        assert [_seen(info) for info in listed] == [_modelled(entry) for entry in self.model.entries]
        kept = self.queue.list(None, None, 1000, None, kept=True).batches
        assert [info.id for info in kept] == [entry.upload.id for entry in self.model.entries if entry.body is not None]
        for info in kept:
            assert self.queue.training(info.id) == self.model.training(info.id)
        stats = self.queue.stats()
        assert stats.runs == self.model.runs()
        assert stats.oldest_age == pytest.approx(self.model.oldest_age())


def _answer(operation: Callable[[], Any]) -> Any:
    """What it returns, or the kind of its refusal."""
    try:
        return operation()
    except REFUSALS as refusal:
        return QueueFull if isinstance(refusal, NoRoom) else type(refusal)  # the model knows of one fullness


def _seen(info: BatchSummary) -> tuple:
    reason = info.reason if info.reason in MADE_UP_REASONS else bool(info.reason)
    return info.id, info.state, reason, info.payload_bytes, info.deliveries, info.scoring_attempts, info.consumer


def _modelled(entry: Entry) -> tuple:
    reason = entry.reason if entry.reason in MADE_UP_REASONS else bool(entry.reason)
    hold = entry.hold or entry.settled_by
    holder = hold.consumer if hold and entry.state in (State.LEASED, State.DONE) else None
    return entry.upload.id, entry.state, reason, entry.size, entry.deliveries, entry.attempts, holder


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.timeout(3600)  # as long as `make queue-model` may take
def test_a_store_does_what_the_model_does(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ref_server.queue.grants.MAX_LEASE_BYTES", MAX_LEASE_BYTES)
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", LARGE_BYTES)
    machine = type(f"Machine_{backend}", (Machine,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
    print(f"{backend}: {machine.steps:,} operations, no divergence")
