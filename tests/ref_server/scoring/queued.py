"""Batches in a queue without HTTP, and batches that were scored."""

import httpx

from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared import wire
from shared.api import BatchDetails, State
from shared.batch import RolloutBatch, ScoredBatch
from tests.ref_server.calls import lease
from tests.waiting import until


def put(queue: Queue, *batches: RolloutBatch) -> None:
    for batch in batches:
        body = wire.encode(batch)
        sizes = len(batch.group.prompt_ids), len(batch.group.completion_ids), batch.group.size
        queue.put(Upload(batch.id, wire.content_hash(body), batch.run, 0, 0, *sizes, body))


def settled(queue: Queue, batch: RolloutBatch, state: State = State.READY) -> BatchDetails:
    """The batch, once it is in this state."""
    until(lambda: (info := queue.get(batch.id)) is not None and info.state == state)
    info = queue.get(batch.id)
    assert info is not None
    return info


def scored(body: bytes | None) -> ScoredBatch:
    batch = wire.decode(body or b"")
    assert isinstance(batch, ScoredBatch)
    return batch


def lease_scored(http: httpx.Client, run: str | None = None) -> ScoredBatch:
    return scored(lease(http, run).content)
