"""Many batches in one lease over HTTP."""

import json
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from ref_server.access.shares import Shares
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.queue.records import Payload
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.api import Lease
from tests.ref_server.calls import Rollout, Serve, admit, error, lease, settle


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """Without a model: what is uploaded is ready."""
    config = ServeConfig(no_model=True, data_dir=tmp_path, max_batch_tokens=1000)
    return Service(NoReferenceModel(config), open_queue(config), config)


@pytest.fixture
def http(service: Service, serve: Serve) -> Iterator[httpx.Client]:
    with serve(service) as client:
        yield client


def read(answer: httpx.Response) -> list[tuple[Lease, bytes]]:
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, wire.LEASES_CONTENT_TYPE), answer.text
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    return list(wire.decode_leases(answer.content))


def ids_of(answer: httpx.Response) -> list[str]:
    return [header.id for header, _ in read(answer)]


def test_the_body_of_a_lease_of_several(http: httpx.Client, rollout: Rollout, run: str) -> None:
    sent = [rollout(run=run) for _ in range(3)]
    admit(http, *sent)
    first, again = (read(lease(http, run, count=5, lease_seconds=7.5, request_id="r")) for _ in range(2))
    assert [(header.id, header.lease_seconds, header.deliveries) for header, _ in first] == [
        (batch.id, 7.5, 1) for batch in sent
    ]
    assert [wire.content_hash(body) for _, body in first] == [wire.content_hash(wire.encode(batch)) for batch in sent]
    assert again == first
    assert settle(http, "ack", [{"id": header.id, "token": header.token} for header, _ in first]) == ["ok"] * 3


def test_a_count_of_one_differs_from_no_count(http: httpx.Client, rollout: Rollout, run: str) -> None:
    ids = admit(http, rollout(run=run), rollout(run=run))
    assert ids_of(lease(http, run, count=1)) == ids[:1]
    assert lease(http, run, count=None).headers["Batch-Id"] == ids[1]


def test_it_waits_for_the_first_and_not_for_all(http: httpx.Client, rollout: Rollout, run: str) -> None:
    assert lease(http, run, count=4, wait_seconds=0).status_code == 204
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, http, run, count=4, wait_seconds=60)
        assert admit(http, rollout(run=run)) == ids_of(waiting.result(timeout=30))


@pytest.mark.parametrize("most", [1, 2**20])
def test_batches_that_are_dropped_before_they_are_read(
    http: httpx.Client, service: Service, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The lease answers the others, also if it would have to lease again for them."""
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", 1)
    monkeypatch.setattr("ref_server.queue.grants.MAX_LEASE_BYTES", most)
    payloads = service.queue.payloads
    dropped, *kept = admit(http, *(rollout(run=run) for _ in range(2)))

    def drop_first(ids: list[str]) -> dict[str, Payload]:
        if dropped in ids:
            service.queue.drop(dropped)
        return payloads(ids)

    monkeypatch.setattr(service.queue, "payloads", drop_first)
    assert ids_of(lease(http, run, count=2, request_id="r")) == kept
    (dropped,) = admit(http, rollout(run=run))
    assert lease(http, run, count=2, wait_seconds=0).status_code == 204


def test_scores_are_added_without_a_second_copy_of_all(
    service: Service, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, count = rollout(run=run, sample=json.dumps("x" * 12_000)), 200
    body, scores = wire.encode(batch), wire.encode_scores(-np.ones(len(batch.group.completion_ids), np.float32), "0")
    leases = [Lease(id=str(k), token="t", lease_seconds=1, deliveries=1, bytes=len(body)) for k in range(count)]
    monkeypatch.setattr(service.queue, "payloads", lambda ids: {id: Payload(bytes([*body]), scores) for id in ids})
    tracemalloc.start()
    try:
        read = service.read_leased(leases)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        service.queue.close()
    assert [lease.id for lease, _ in read] == [lease.id for lease in leases]
    assert all(wire.decode(scored).ref_logps is not None for _, scored in read)
    assert peak < 1.3 * count * len(body)


def test_an_answer_without_room_can_be_requested_again(
    http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases last meanwhile, and the same request gets them."""
    sent = [rollout(run=run) for _ in range(2)]
    both = sum(len(wire.encode(batch)) for batch in sent)
    full, take = threading.Event(), Shares.take
    full.set()
    monkeypatch.setattr(
        Shares, "take", lambda self, holder, size=1: not (full.is_set() and size >= both) and take(self, holder, size)
    )
    ids = admit(http, *sent)
    assert error(lease(http, run, count=2, request_id="r"), 429)["code"] == "busy"
    assert len(http.get(f"/v1/batches?run={run}&state=leased").json()["batches"]) == 2
    full.clear()
    assert ids_of(lease(http, run, count=2, request_id="r")) == ids


@pytest.mark.parametrize("count", [0, 513, 1.5, "2", True])
def test_a_bad_count(http: httpx.Client, run: str, count: object) -> None:
    assert error(lease(http, run, count=count), 422)["field"] == "count"
