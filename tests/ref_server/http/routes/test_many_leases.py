"""Many batches in one lease over HTTP: the body, and what it promises."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from ref_server.access.shares import Shares
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared import wire
from shared.api import Lease
from shared.batch import RolloutBatch

Rollout = Callable[..., RolloutBatch]
Serve = Callable[[Service], AbstractContextManager[httpx.Client]]


@pytest.fixture
def run() -> str:
    return uuid4().hex


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """Without a model: what is uploaded is ready."""
    config = ServeConfig(no_model=True, data_dir=tmp_path, max_batch_tokens=1000)
    return Service(NoReferenceModel(config.max_batch_tokens), open_queue(config), config)


@pytest.fixture
def queue_http(service: Service, serve: Serve) -> Iterator[httpx.Client]:
    with serve(service) as client:
        yield client


def upload(http: httpx.Client, *batches: RolloutBatch) -> list[str]:
    for batch in batches:
        answer = http.post("/v1/batches", content=wire.encode(batch), headers={"Content-Type": wire.CONTENT_TYPE})
        assert answer.status_code == 201, answer.text
    return [batch.id for batch in batches]


def lease(http: httpx.Client, run: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/batches/lease", json={"consumer": "c", "run": run, "wait_seconds": 10} | fields)


def read(answer: httpx.Response) -> list[tuple[Lease, bytes]]:
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, wire.LEASES_CONTENT_TYPE), answer.text
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    return list(wire.decode_leases(answer.content))


def settle(http: httpx.Client, verb: str, heads: list[Lease]) -> list[str]:
    keys = [{"id": head.id, "token": head.token} for head in heads]
    answer = http.post(f"/v1/leases/{verb}", json={"leases": keys})
    return [result["outcome"] for result in answer.json()["results"]]


def test_what_is_answered(queue_http: httpx.Client, rollout: Rollout, run: str) -> None:
    sent = [rollout(run=run) for _ in range(3)]
    upload(queue_http, *sent)
    got = read(lease(queue_http, run, count=5, lease_seconds=7.5))
    assert [(head.id, head.lease_seconds, head.deliveries) for head, _ in got] == [(each.id, 7.5, 1) for each in sent]
    assert [wire.content_hash(body) for _, body in got] == [wire.content_hash(wire.encode(each)) for each in sent]
    assert settle(queue_http, "ack", [head for head, _ in got]) == ["ok"] * 3


def test_with_a_count_of_one_the_body_has_one(queue_http: httpx.Client, rollout: Rollout, run: str) -> None:
    ids = upload(queue_http, rollout(run=run), rollout(run=run))
    assert [head.id for head, _ in read(lease(queue_http, run, count=1))] == ids[:1]
    assert lease(queue_http, run, count=None).headers["Batch-Id"] == ids[1], "null is as absent"


def test_it_waits_for_the_first_and_not_for_all(queue_http: httpx.Client, rollout: Rollout, run: str) -> None:
    assert lease(queue_http, run, count=4, wait_seconds=0).status_code == 204
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease, queue_http, run, count=4, wait_seconds=60)
        (id,) = upload(queue_http, rollout(run=run))
        assert [head.id for head, _ in read(waiting.result(timeout=30))] == [id]


def test_a_repeat_answers_the_same(queue_http: httpx.Client, rollout: Rollout, run: str) -> None:
    upload(queue_http, *(rollout(run=run) for _ in range(3)))
    first, again = (lease(queue_http, run, count=2, request_id="r") for _ in range(2))
    assert read(first) == read(again)


def test_batches_too_long_to_come_with_their_leases(
    queue_http: httpx.Client, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", 1)
    sent = [rollout(run=run) for _ in range(3)]
    upload(queue_http, *sent)
    got = read(lease(queue_http, run, count=3))
    assert [wire.run_of(body) for _, body in got] == [run] * 3
    assert [head.id for head, _ in got] == [each.id for each in sent]


def test_a_batch_that_is_dropped_before_it_is_read_is_left_out(
    service: Service, serve: Serve, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", 1)
    payloads = service.queue.payloads
    with serve(service) as http:
        dropped, kept = upload(http, rollout(run=run), rollout(run=run))

        def drop_first(ids: list[str]) -> dict[str, bytes]:
            service.queue.drop(dropped)
            return payloads(ids)

        monkeypatch.setattr(service.queue, "payloads", drop_first)
        assert [head.id for head, _ in read(lease(http, run, count=2))] == [kept]
        (dropped,) = upload(http, rollout(run=run))
        assert lease(http, run, count=2, wait_seconds=0).status_code == 204, "all of it was dropped"


def test_a_lease_goes_on_when_all_that_it_got_is_dropped(
    service: Service, serve: Serve, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", 1)
    monkeypatch.setattr("ref_server.queue.grants.MAX_LEASE_BYTES", 1)
    payloads = service.queue.payloads
    with serve(service) as http:
        dropped, kept = upload(http, rollout(run=run), rollout(run=run))

        def drop_first(ids: list[str]) -> dict[str, bytes]:
            if dropped in ids:
                service.queue.drop(dropped)
            return payloads(ids)

        monkeypatch.setattr(service.queue, "payloads", drop_first)
        assert [head.id for head, _ in read(lease(http, run, count=2, request_id="r"))] == [kept]


def test_an_answer_for_which_there_is_no_room_now_is_repeated_later(
    service: Service, serve: Serve, rollout: Rollout, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases hold meanwhile, and the same request gets them."""
    sent = [rollout(run=run) for _ in range(2)]
    both = sum(len(wire.encode(batch)) for batch in sent)
    full, take = threading.Event(), Shares.take
    full.set()
    monkeypatch.setattr(
        Shares, "take", lambda self, holder, size=1: not (full.is_set() and size >= both) and take(self, holder, size)
    )
    with serve(service) as http:
        ids = upload(http, *sent)
        refused = lease(http, run, count=2, request_id="r")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
        assert http.get(f"/v1/queue?run={run}").json()["runs"][run]["leased"]["batches"] == 2
        full.clear()
        assert [head.id for head, _ in read(lease(http, run, count=2, request_id="r"))] == ids


@pytest.mark.parametrize("count", [0, -1, 513, 1.5, "2", True, [2]])
def test_a_count_that_is_none(queue_http: httpx.Client, run: str, count: object) -> None:
    refused = lease(queue_http, run, count=count)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "count")
