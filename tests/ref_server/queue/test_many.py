"""Many batches in one lease request: the same promises as for one."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from ref_server.metrics.activity import Count
from ref_server.queue.errors import RunTaken, Superseded, TooManyInFlight
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import LEGACY_RUN, Lease, LeaseBody, Order, Outcome, State
from tests.ref_server.queue.backends import Backend, Clock, make_limits
from tests.ref_server.queue.test_queue import LEASE_SECONDS, ask_many, key, make_ready, state, upload


@pytest.fixture
def queue(backend: Backend, clock: Clock) -> Iterator[Queue]:
    with closing(backend.open(clock, make_limits(max_in_flight=12))) as queue:
        yield queue


def ids(leases: list[Lease]) -> list[str]:
    return [lease.id for lease in leases]


def fill(queue: Queue, names: str, **fields) -> None:
    make_ready(queue, *(upload(name, **fields) for name in names))


def test_the_first_of_the_order(queue: Queue) -> None:
    for name, version in zip("abcd", (1, 3, 2, 3), strict=True):
        fill(queue, name, version=version)
    assert ids(ask_many(queue, run="run", count=2, order=Order.FRESHEST)) == ["d", "b"]
    assert ids(ask_many(queue, run="run", count=5)) == ["a", "c"]
    assert ask_many(queue, run="run", count=5) == []


def test_each_is_a_lease_of_its_own(queue: Queue) -> None:
    fill(queue, "abc")
    held = ask_many(queue, count=3, lease_seconds=7.5)
    assert [(lease.id, lease.lease_seconds, lease.deliveries, lease.body) for lease in held] == [
        (name, 7.5, 1, queue.payload(name)) for name in "abc"
    ]
    assert len({lease.token for lease in held}) == 3
    a, b, c = map(key, held)
    assert queue.ack([a]) == queue.release([b]) == queue.extend([c], 60.0, started=True) == [Outcome.OK]
    assert [state(queue, name) for name in "abc"] == [State.DONE, State.READY, State.LEASED]
    details = queue.get("c")
    assert details and [(event.state, event.detail) for event in details.history][-1] == (State.LEASED, "to trainer")
    assert queue.activity.counts()[Count.LEASED] == 3
    assert ids(ask_many(queue, count=9)) == ["b"]
    assert queue.activity.counts()[Count.REDELIVERED] == 1


def test_a_repeat_is_told_of_those_that_still_hold(queue: Queue, clock: Clock) -> None:
    fill(queue, "abcd")
    first = ask_many(queue, count=3, request_id="r")
    assert ask_many(queue, count=3, request_id="r") == first
    queue.ack([key(first[0])])
    queue.release([key(first[1])])
    assert ask_many(queue, count=3, request_id="r") == first[2:], "and of nothing new"
    assert ids(ask_many(queue, "another", count=3, request_id="r")) == ["b", "d"]
    clock.advance(LEASE_SECONDS)
    again = ask_many(queue, count=3, request_id="r")
    assert ids(again) == ["b", "c", "d"] and not {lease.token for lease in again} & {lease.token for lease in first}


def test_a_repeat_that_asks_for_fewer_is_told_of_fewer(queue: Queue) -> None:
    fill(queue, "abc")
    first = ask_many(queue, count=3, request_id="r", order=Order.FRESHEST)
    assert ask_many(queue, count=2, request_id="r", order=Order.FRESHEST) == first[:2]
    assert ask_many(queue, request_id="r", order=Order.FRESHEST) == first[:1]


def test_a_new_life_gets_what_the_old_one_held(queue: Queue) -> None:
    fill(queue, "abc")
    old = ask_many(queue, count=2, incarnation="old")
    assert ids(ask_many(queue, count=3, incarnation="new")) == ["a", "b", "c"]
    assert queue.ack([key(lease) for lease in old]) == [Outcome.STALE] * 2
    with pytest.raises(Superseded):
        ask_many(queue, count=3, incarnation="old")


def test_a_run_gets_its_share_and_no_more(queue: Queue) -> None:
    """Of twelve a run may have as many as are free."""
    fill(queue, "abcdefgh", run="one")
    fill(queue, "ijklmnop", run="two")
    assert len(ask_many(queue, run="one", count=512)) == 6
    with pytest.raises(TooManyInFlight, match="of run 'one'"):
        ask_many(queue, run="one", count=512)
    assert len(ask_many(queue, run="two", count=512)) == 3
    with pytest.raises(TooManyInFlight):
        ask_many(queue, run="two", count=512)


def test_without_a_run_each_counts_for_its_own(queue: Queue) -> None:
    fill(queue, "abcdefgh", run="one")
    fill(queue, "ijk", run="two")
    assert ids(ask_many(queue, count=512)) == list("abcdef"), "the seventh would be more of run one than are free"
    with pytest.raises(TooManyInFlight, match="of run 'one'"):
        ask_many(queue, count=512)


def test_batches_of_the_other_protocol_are_left_alone(queue: Queue) -> None:
    fill(queue, "a", run=LEGACY_RUN)
    fill(queue, "b")
    assert ids(ask_many(queue, count=512)) == ["b"]


def test_lineages_epochs_and_staleness(queue: Queue) -> None:
    fill(queue, "a", version=1)
    fill(queue, "b", version=4)
    fill(queue, "c", version=5, epoch=1)
    fill(queue, "d", version=9, epoch=2)
    assert ids(ask_many(queue, run="run", count=9, epoch=1, policy_version=5, max_lag=2)) == ["b", "c"]
    assert (state(queue, "a"), state(queue, "d")) == (State.EXPIRED, State.READY)
    with pytest.raises(RunTaken):
        ask_many(queue, run="run", count=9, lineage="another")


@pytest.mark.parametrize(("most", "held"), [(30, "abc"), (29, "ab"), (10, "a"), (9, "a")])
def test_no_more_than_an_answer_holds_unless_one_alone_is_more(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, most: int, held: str
) -> None:
    monkeypatch.setattr("ref_server.queue.grants.MAX_LEASE_BYTES", most)
    for name in "abcd":
        make_ready(queue, upload(name))
    size = len(queue.payload("a") or b"")
    monkeypatch.setattr("ref_server.queue.grants.MAX_LEASE_BYTES", most * size // 10)
    assert ids(ask_many(queue, count=4)) == list(held)


def test_payloads_come_along_up_to_a_sum(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queue, "abc")
    bodies = queue.payloads("abc")
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", 2 * len(bodies["a"]))
    held = ask_many(queue, count=3)
    assert [lease.body for lease in held] == [bodies["a"], bodies["b"], None]
    assert queue.payloads([held[2].id, "unknown"]) == {"c": bodies["c"]}
    queue.ack([key(held[2])])
    assert queue.payloads("abc") == {"a": bodies["a"], "b": bodies["b"]}


def test_the_statements_of_a_request_are_as_many_for_many_as_for_two(tmp_path: Path) -> None:
    asked: list[str] = []

    def count(queue: SqliteQueue, batches: int) -> int:
        asked.clear()
        assert len(queue.lease(LeaseBody(consumer="c", run="run", request_id=f"{batches}", count=batches))) == batches
        return len(asked)

    def trace(db: apsw.Cursor, sql: str, values: object) -> bool:
        asked.append(sql)
        return True

    def watch(db: apsw.Connection) -> None:
        db.exec_trace = trace

    apsw.connection_hooks.append(watch)
    try:
        with closing(SqliteQueue(tmp_path / "queue.sqlite", limits=make_limits())) as queue:
            fill(queue, "".join(chr(ord("A") + number) for number in range(50)))
            count(queue, 1)
            assert count(queue, 40) == count(queue, 2)
    finally:
        apsw.connection_hooks.remove(watch)
