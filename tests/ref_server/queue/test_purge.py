"""The operator's purge: what is chosen goes, in slices, and all else stays."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count

import pytest

from ref_server.metrics.activity import Count
from ref_server.queue.errors import WrongState
from ref_server.queue.housekeeping import LOOKED_AT, SLICE
from ref_server.queue.payloads import BYTES_AT_ONCE
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared.api import Depth, LeaseBody, LeaseKey, Outcome, PurgeBody, Purged, State
from tests.ref_server.queue.backends import Backend, Clock, make_limits

NAMES = count()


@pytest.fixture
def queue(backend: Backend, clock: Clock) -> Iterator[Queue]:
    with closing(backend.open(clock, make_limits(max_batches=100_000, max_bytes=2**30))) as queue:
        yield queue


def put(queue: Queue, run: str = "run", size: int = 10, to_score: bool = False) -> str:
    """The id of a new batch, which is ready unless it is to be scored."""
    id = f"{next(NAMES):06d}"
    queue.put(Upload(id, bytes(32), run, 0, 0, 4, 6, 2, b"." * size, to_score))
    return id


def purges(queue: Queue, state: str = "ready", **chosen: object) -> list[Purged]:
    """All answers, until nothing is left."""
    answers: list[Purged] = []
    while not answers or answers[-1].next_cursor is not None:
        cursor = answers[-1].next_cursor if answers else None
        answers.append(queue.purge(PurgeBody.model_validate({"state": state, "cursor": cursor, **chosen})))
    return answers


def purge(queue: Queue, state: str = "ready", **chosen: object) -> list[str]:
    return [id for answer in purges(queue, state, **chosen) for id in answer.dropped]


def test_a_purge_takes_slices(queue: Queue) -> None:
    ids = [put(queue) for _ in range(SLICE + 50)]
    first, second = purges(queue)
    assert (first.dropped, first.bytes) == (ids[:SLICE], 10 * SLICE)
    assert (second.dropped, second.bytes, second.next_cursor) == (ids[SLICE:], 500, None)
    assert queue.stats().runs == {"run": {State.EXPIRED: Depth(batches=len(ids), bytes=0)}}
    assert purge(queue) == purge(queue, "expired") == [], "a payload goes once"


def test_a_last_slice_that_is_full(queue: Queue) -> None:
    ids = [put(queue) for _ in range(SLICE)]
    assert [answer.dropped for answer in purges(queue)] == [ids, []]


def test_a_slice_is_bounded_in_bytes_too(queue: Queue) -> None:
    ids = [put(queue, size=BYTES_AT_ONCE // 5 * 2) for _ in range(3)]
    assert [answer.dropped for answer in purges(queue)] == [ids[:2], ids[2:]]


def test_a_purge_looks_at_a_bounded_number_of_batches(queue: Queue) -> None:
    for _ in range(LOOKED_AT):
        put(queue, "other")
    mine = put(queue)
    assert [answer.dropped for answer in purges(queue, run="run")] == [[], [mine]]
    assert queue.stats().runs["other"][State.READY].batches == LOOKED_AT


def test_only_what_is_chosen_goes(queue: Queue, clock: Clock) -> None:
    old, others = put(queue), put(queue, "other")
    clock.advance(1.0)
    new, queued = put(queue), put(queue, to_score=True)
    until = clock.wall() - 1.0
    assert purge(queue, run="nobody's") == purge(queue, "dead") == purge(queue, admitted_until=until - 0.5) == []
    assert purge(queue, run="run", admitted_until=until) == [old]
    assert purge(queue, run="other") == [others]
    assert purge(queue, "queued") == [queued]
    assert purge(queue, admitted_until=until + 1.0) == [new]


def test_what_is_purged_is_gone_but_known(queue: Queue) -> None:
    id = put(queue)
    (held,) = queue.lease(LeaseBody(consumer="trainer", run="run"))
    assert purge(queue, "leased") == [id]
    batch = queue.get(id)
    assert batch is not None and (batch.state, batch.reason, batch.payload_bytes) == (State.EXPIRED, "dropped", 0)
    assert queue.payload(id) is None
    assert queue.ack([LeaseKey(id=id, token=held.token)]) == [Outcome.STALE]
    with pytest.raises(WrongState):
        queue.requeue(id)
    assert queue.activity.counts()[Count.EXPIRED_DROPPED] == 1


def test_expired_batches_lose_their_payloads(queue: Queue) -> None:
    id = put(queue)
    queue.finish("run", "")
    assert purge(queue, "expired") == [id]
    assert queue.payload(id) is None
    assert queue.activity.counts()[Count.EXPIRED_DROPPED] == 0, "it had expired before"


def test_of_several_purges_at_once_each_batch_is_dropped_by_one(queue: Queue) -> None:
    ids = [put(queue) for _ in range(2 * SLICE + 50)]
    with ThreadPoolExecutor(4) as threads:
        dropped = Counter(id for part in threads.map(lambda _: purge(queue), range(4)) for id in part)
    assert dropped == Counter(ids)
