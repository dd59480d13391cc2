"""Batches in a queue without HTTP, batches that were scored, and a forward that tells when it runs."""

from collections.abc import Callable, Sequence

import httpx
from torch import Tensor
from transformers import PreTrainedModel

from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared import wire
from shared.api import BatchDetails, State
from shared.batch import Array, Batch, TokenGroup
from shared.logprobs import choose_forward
from tests.harness.processes import until
from tests.ref_server.calls import lease


def put(queue: Queue, *batches: Batch) -> None:
    for batch in batches:
        body = wire.encode(batch)
        sizes = len(batch.group.prompt_ids), len(batch.group.completion_ids), batch.group.size
        queue.put(Upload(batch.id, wire.content_hash(body), batch.run, 0, 0, *sizes, body))


def settled(queue: Queue, batch: Batch, state: State = State.READY) -> BatchDetails:
    """The batch, once it is in this state."""
    until(lambda: (info := queue.get(batch.id)) is not None and info.state == state)
    info = queue.get(batch.id)
    assert info is not None
    return info


def scored(body: bytes) -> Batch:
    batch = wire.decode(body)
    assert batch.ref_logps is not None
    return batch


def ref_logps(batch: Batch) -> Array:
    assert batch.ref_logps is not None
    return batch.ref_logps


class Observed:
    """A correct forward that calls `before` with the groups first."""

    name = "observed"

    def __init__(self, model: PreTrainedModel, before: Callable[[Sequence[TokenGroup]], object]) -> None:
        self._forward = choose_forward(model)
        self._before = before

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        self._before(groups)
        return self._forward(groups, temperatures)


def lease_scored(http: httpx.Client, run: str | None = None) -> Batch:
    return scored(lease(http, run).content)
