"""Claims: which batches a server gets to score, and how each ends."""

from contextlib import closing
from pathlib import Path

import apsw
import pytest
import structlog

from ref_server.queue.errors import WrongState
from ref_server.queue.queue import Queue
from ref_server.queue.records import WantedReference
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import State
from tests.ref_server.queue.backends import Open, make_limits
from tests.ref_server.queue.batches import upload

SECOND = WantedReference("run/step-2", 2, "base")


def claimed(queue: Queue, max_tokens: int, version: int = 0) -> list[str]:
    return [claim.id for claim in queue.claim(max_tokens, version)]


def test_claims_are_the_oldest_batches_up_to_the_budget(queue: Queue) -> None:
    for id in ("a", "b", "c"):
        queue.put(upload(id, tokens=10))
    queue.put(upload("large", tokens=100))
    assert [claimed(queue, 20) for _ in range(4)] == [["a", "b"], ["c"], ["large"], []]


def test_only_a_claimed_batch_is_completed_or_fails(queue: Queue) -> None:
    queue.put(upload("a"))
    with pytest.raises(WrongState):
        queue.complete("a", b"scored")
    with pytest.raises(WrongState):
        queue.fail("a", "boom")
    with pytest.raises(KeyError):
        queue.complete("nobody", b"scored")
    assert queue.payload("a") == (b"raw", None)


@pytest.mark.parametrize(
    ("damage", "remaining"),
    [
        ("DELETE FROM payloads WHERE seq = (SELECT seq FROM batches WHERE id = 'a')", ["b"]),
        ("UPDATE batches SET state = 'zombie' WHERE id = 'a'", ["b"]),
    ],
)
def test_a_damaged_batch_does_not_stop_the_others(tmp_path: Path, damage: str, remaining: list[str]) -> None:
    path = tmp_path / "queue.sqlite"
    with closing(SqliteQueue(path, limits=make_limits())) as queue:
        for id in "ab":
            queue.put(upload(id))
    with closing(apsw.Connection(str(path))) as db:
        db.execute(damage)
    with closing(SqliteQueue(path, limits=make_limits())) as queue:
        assert claimed(queue, 1) == remaining
        with structlog.testing.capture_logs() as logs:
            listed = {batch.id: batch.reason for batch in queue.list(None, None, 9, None).batches}
        if "zombie" in damage:
            assert (listed, [entry["id"] for entry in logs]) == ({"b": None}, ["a"])
            assert queue.stats().runs["run"].keys() == {State.SCORING}
        else:
            assert listed == {"a": "its payload is missing in the store", "b": None}


def test_the_newest_reference_is_wanted_and_survives_a_restart(open_queue: Open) -> None:
    queue = open_queue()
    assert queue.wanted_reference() is None
    assert queue.want_reference(SECOND) == SECOND
    assert queue.want_reference(WantedReference("old", 1, "base")) == SECOND
    assert queue.want_reference(WantedReference("other", 2, "base")) == SECOND
    first_again = WantedReference(None, 3, "other base")
    assert queue.want_reference(first_again) == first_again
    queue.close()
    assert open_queue().wanted_reference() == first_again


def test_only_servers_with_the_wanted_reference_get_batches(queue: Queue) -> None:
    for id in "abc":
        queue.put(upload(id))
    assert claimed(queue, 1, version=7) == ["a"], "none is wanted, so any will do"
    queue.want_reference(SECOND)
    assert [claimed(queue, 1, version) for version in (0, 1, 3, 2)] == [[], [], [], ["b"]]
    queue.complete("a", b"scored")  # claimed before: it is finished with the older weights
