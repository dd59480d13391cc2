"""The queue knows which reference its servers are to score with, and gives batches to no other."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from ref_server.queue.queue import Queue
from ref_server.queue.records import WantedReference
from tests.ref_server.queue.backends import Backend, Clock, make_limits
from tests.ref_server.queue.test_queue import upload

SECOND = WantedReference("run/step-2", 2, "base")


@pytest.fixture
def queue(backend: Backend) -> Iterator[Queue]:
    with closing(backend.open(Clock(), make_limits())) as queue:
        yield queue


def claimed(queue: Queue, *versions: int) -> list[list[str]]:
    return [[claim.id for claim in queue.claim(1, version)] for version in versions]


def test_the_newest_is_wanted_and_survives_a_restart(backend: Backend) -> None:
    with closing(backend.open(Clock(), make_limits())) as queue:
        assert queue.wanted_reference() is None
        assert queue.want_reference(SECOND) == SECOND
        assert queue.want_reference(WantedReference("old", 1, "base")) == SECOND
        assert queue.want_reference(WantedReference("other", 2, "base")) == SECOND
        own = WantedReference(None, 3, "other base")
        assert queue.want_reference(own) == own
    with closing(backend.open(Clock(), make_limits())) as queue:
        assert queue.wanted_reference() == own


def test_only_servers_with_the_wanted_one_get_batches(queue: Queue) -> None:
    for id in "abc":
        queue.put(upload(id))
    assert claimed(queue, 7) == [["a"]]  # none is wanted: every server scores with its own
    queue.want_reference(SECOND)
    assert claimed(queue, 0, 1, 3, 2) == [[], [], [], ["b"]]
    queue.complete("a", b"scored")  # claimed before: finished with the weights that it was begun with
