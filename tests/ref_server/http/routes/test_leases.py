"""Leasing over HTTP: long polls, settling, repeated requests, consumers that come again."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref_server.service.service import Service
from shared import wire
from shared.batch import RolloutBatch, ScoredBatch

Rollout = Callable[..., RolloutBatch]
Serve = Callable[[Service], AbstractContextManager[httpx.Client]]
Lease = Callable[..., httpx.Response]


@pytest.fixture
def run() -> str:
    """A run of the test's own."""
    return uuid4().hex


@pytest.fixture
def upload(http: httpx.Client, rollout: Rollout, run: str) -> Callable[..., str]:
    """Uploads a batch of the run; its id."""

    def post(**fields: Any) -> str:
        batch = rollout(**({"run": run} | fields))
        answer = http.post("/v1/batches", content=wire.encode(batch), headers={"Content-Type": wire.CONTENT_TYPE})
        assert answer.status_code == 201, answer.text
        return batch.id

    return post


@pytest.fixture
def lease(http: httpx.Client, run: str) -> Lease:
    def post(consumer: str = "trainer", **fields: Any) -> httpx.Response:
        asked = {"consumer": consumer, "run": run, "wait_seconds": 10} | fields
        return http.post("/v1/batches/lease", json=asked)

    return post


def key(leased: httpx.Response) -> dict[str, str]:
    assert leased.status_code == 200, leased.text
    return {"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}


def settle(http: httpx.Client, verb: str, keys: list[dict[str, str]], **fields: Any) -> list[str]:
    answer = http.post(f"/v1/leases/{verb}", json={"leases": keys, **fields})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [result["id"] for result in results] == [each["id"] for each in keys]
    return [result["outcome"] for result in results]


def seconds_since(started: float) -> float:
    return time.monotonic() - started


# Waiting


@pytest.fixture
def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is looked at only when something may have become ready."""
    monkeypatch.setattr("ref_server.service.polls.LOOK_SECONDS", 60.0)


@pytest.mark.usefixtures("rare_looks")
def test_a_waiting_lease_is_woken_by_an_upload(upload: Callable[..., str], lease: Lease) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lease, wait_seconds=20)
        time.sleep(0.3)
        assert not waiting.done()
        started = time.monotonic()
        id = upload()
        assert waiting.result().headers["Batch-Id"] == id
        assert seconds_since(started) < 10


@pytest.mark.usefixtures("rare_looks")
def test_a_waiting_lease_is_woken_by_a_release(http: httpx.Client, upload: Callable[..., str], lease: Lease) -> None:
    id = upload()
    held = key(lease())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lease, "other", wait_seconds=20)
        time.sleep(0.3)
        started = time.monotonic()
        assert settle(http, "release", [held]) == ["ok"]
        assert waiting.result().headers["Batch-Id"] == id
        assert seconds_since(started) < 10


def test_a_waiting_lease_sees_another_one_run_out(upload: Callable[..., str], lease: Lease) -> None:
    id = upload()
    lease("sleeper", lease_seconds=0.2)
    started = time.monotonic()
    assert lease("other", wait_seconds=20).headers["Batch-Id"] == id
    assert seconds_since(started) < 10


@pytest.mark.parametrize("wait_seconds", [0, 0.4])
def test_nothing_comes_in_time(lease: Lease, wait_seconds: float) -> None:
    started = time.monotonic()
    answer = lease(wait_seconds=wait_seconds)
    assert (answer.status_code, answer.content) == (204, b"")
    assert wait_seconds <= seconds_since(started) < wait_seconds + 10


@pytest.mark.slow
def test_waiting_polls_hold_up_nobody(http: httpx.Client, upload: Callable[..., str], run: str) -> None:
    """A hundred polls wait; every other route answers meanwhile, and one upload feeds exactly one of them."""

    async def poll(client: httpx.AsyncClient, i: int) -> httpx.Response:
        asked = {"consumer": f"c{i}", "run": run, "wait_seconds": 20}
        return await client.post("/v1/batches/lease", json=asked)

    async def many() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=http.base_url, timeout=120, limits=limits) as client:
            polls = [asyncio.create_task(poll(client, i)) for i in range(100)]
            await asyncio.sleep(1)
            assert not any(task.done() for task in polls)
            for path in ("/livez", "/readyz", "/v1/queue", "/metrics", "/v1/batches", "/livez", "/readyz"):
                assert (await client.get(path)).status_code == 200
            assert not any(task.done() for task in polls)
            await asyncio.to_thread(upload)
            return await asyncio.gather(*polls)

    before = threading.active_count()
    answers = asyncio.run(many())
    assert sorted(answer.status_code for answer in answers) == [200] + [204] * 99
    assert threading.active_count() - before <= 45  # the pool of the server's short calls, not one a poll


@pytest.mark.usefixtures("rare_looks")
def test_a_client_that_has_gone_takes_no_batch(
    http: httpx.Client, upload: Callable[..., str], lease: Lease, run: str
) -> None:
    body = json.dumps({"consumer": "gone", "run": run, "wait_seconds": 30}).encode()
    head = (
        "POST /v1/batches/lease HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.3)
    id = upload()
    answer = lease("here")
    assert answer.headers["Batch-Id"] == id
    history = http.get(f"/v1/batches/{id}").json()["history"]
    assert [event["detail"] for event in history if event["state"] == "leased"] == ["to here"]


def test_a_drained_server_sends_its_polls_home(make_service: Callable[..., Service], serve: Serve) -> None:
    service = make_service()
    with serve(service) as http, ThreadPoolExecutor() as pool:
        waiting = pool.submit(http.post, "/v1/batches/lease", json={"consumer": "c", "wait_seconds": 20})
        time.sleep(0.3)
        started = time.monotonic()
        service.drain()
        assert waiting.result().status_code == 503
        assert waiting.result().headers["Retry-After"] == "1"
        assert seconds_since(started) < 10
        assert http.get("/readyz").status_code == 503
        assert http.post("/v1/logprobs", json={"prompt_ids": [1], "completions": [[1]]}).status_code == 503


# What a lease says


def test_headers_of_a_lease(upload: Callable[..., str], lease: Lease) -> None:
    id = upload()
    leased = lease(lease_seconds=7.5)
    assert leased.headers["Content-Type"] == wire.CONTENT_TYPE
    assert leased.headers["Batch-Id"] == id
    assert len(leased.headers["Lease-Token"]) >= 32
    assert leased.headers["Lease-Seconds"] == "7.5"
    assert leased.headers["Deliveries"] == "1"


def test_orders(upload: Callable[..., str], lease: Lease) -> None:
    ids = [upload(policy_version=version) for version in (3, 5, 4)]
    assert lease("first").headers["Batch-Id"] == ids[0]
    assert lease("second", order="freshest").headers["Batch-Id"] == ids[1]
    assert lease("third", order="fifo").headers["Batch-Id"] == ids[2]


def test_too_old_batches_expire_with_a_reason(http: httpx.Client, upload: Callable[..., str], lease: Lease) -> None:
    old, fresh = upload(policy_version=1), upload(policy_version=9)
    assert lease(policy_version=10, max_lag=2, epoch=0).headers["Batch-Id"] == fresh
    info = http.get(f"/v1/batches/{old}").json()
    assert (info["state"], info["reason"]) == ("expired", "stale")


def test_an_upload_of_an_epoch_far_ahead_is_refused(
    http: httpx.Client, lease: Lease, rollout: Rollout, run: str
) -> None:
    assert lease(epoch=1, policy_version=0, wait_seconds=0).status_code == 204
    body = wire.encode(rollout(run=run, epoch=2**62))
    answer = http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "epoch")


# Settling


def test_ack_extend_release(http: httpx.Client, upload: Callable[..., str], lease: Lease) -> None:
    ids = [upload() for _ in range(3)]
    held = [key(lease()) for _ in ids]
    stranger = {"id": ids[0], "token": "x" * 32}
    nobody = {"id": str(uuid4()), "token": "x"}
    assert settle(http, "extend", [*held, stranger, nobody], lease_seconds=60) == ["ok", "ok", "ok", "stale", "unknown"]
    assert settle(http, "ack", [held[0], stranger], checkpoint="step-1") == ["ok", "stale"]
    assert settle(http, "ack", [held[0]]) == ["already"]
    assert settle(http, "release", [held[1]]) == ["ok"]
    assert settle(http, "release", [held[1]]) == ["already"]
    assert settle(http, "ack", [held[1]]) == ["stale"]
    again = lease()
    assert key(again)["id"] == ids[1]
    assert again.headers["Deliveries"] == "1"  # released without an error
    assert settle(http, "release", [key(again)], error="NaN loss") == ["ok"]
    assert lease().headers["Deliveries"] == "2"
    info = http.get(f"/v1/batches/{ids[0]}").json()
    assert info["state"] == "done"
    assert info["history"][-1]["detail"] == "in checkpoint step-1"
    assert http.get(f"/v1/batches/{ids[0]}/tokens").status_code == 404
    assert settle(http, "ack", []) == []


def test_a_repeated_request_gets_the_same_answer(upload: Callable[..., str], lease: Lease) -> None:
    for _ in range(2):
        upload()
    first, again = lease(request_id="a"), lease(request_id="a")
    assert key(first) == key(again)
    assert first.content == again.content
    assert key(lease(request_id="b"))["id"] != key(first)["id"]


def test_a_new_life_of_a_consumer_ends_the_old_one(
    http: httpx.Client, upload: Callable[..., str], lease: Lease, run: str
) -> None:
    ids = [upload() for _ in range(3)]
    consumer = f"trainer of {run}"
    old = [key(lease(consumer, incarnation="old")) for _ in range(2)]
    new = [key(lease(consumer, incarnation="new")) for _ in range(2)]
    assert [each["id"] for each in new] == ids[:2]
    assert settle(http, "ack", old) == ["stale", "stale"]
    refused = lease(consumer, incarnation="old")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "superseded"
    assert settle(http, "ack", new) == ["ok", "ok"]


# Bad requests


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"consumer": ""}, "consumer"),
        ({"consumer": "x" * 201}, "consumer"),
        ({"consumer": None}, "consumer"),
        ({"consumer": "\ud800"}, "consumer"),
        ({"wait_seconds": 301}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"order": "newest"}, "order"),
        ({"policy_version": -1}, "policy_version"),
        ({"policy_version": 2**63}, "policy_version"),
        ({"policy_version": False}, "policy_version"),
        ({"policy_version": "1"}, "policy_version"),
        ({"lease_seconds": True}, "lease_seconds"),
        ({"max_lag": 3}, None),
        ({"run": None, "epoch": 3}, None),
        ({"surprise": 1}, "surprise"),
        ({"\ud800": 1}, None),
    ],
)
def test_bad_lease_requests(http: httpx.Client, run: str, changes: dict[str, Any], field: str | None) -> None:
    body = json.dumps({"consumer": "c", "run": run, "wait_seconds": 0} | changes).encode()
    answer = http.post("/v1/batches/lease", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"].get("field") == field


@pytest.mark.parametrize("route", ["batches/lease", "leases/ack", "leases/extend", "leases/release"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"1", b"\xff", b'{"leases": 1}'])
def test_bodies_that_are_no_request(http: httpx.Client, route: str, body: bytes) -> None:
    answer = http.post(f"/v1/{route}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert not answer.json()["error"].get("field", "").isdecimal()


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
KEYS = st.sampled_from(
    ["consumer", "incarnation", "request_id", "run", "epoch", "policy_version", "max_lag", "order", "lease_seconds"]
)


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1))
def test_odd_requests_are_never_the_servers_fault(http: httpx.Client, changes: dict[str, Any]) -> None:
    asked = {"consumer": "odd", "run": "odd", "wait_seconds": 0} | changes
    body = json.dumps(asked).encode()
    answer = http.post("/v1/batches/lease", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 204, 409, 422), answer.text


# The bound on what is in flight


def test_a_lease_beyond_the_bound_waits_and_is_then_refused(
    make_service: Callable[..., Service], serve: Serve, rollout: Rollout
) -> None:
    def lease(wait_seconds: float) -> httpx.Response:
        return http.post("/v1/batches/lease", json={"consumer": "trainer", "run": "r", "wait_seconds": wait_seconds})

    with serve(make_service(queue={"max_in_flight_per_run": 1})) as http:
        for _ in range(2):
            body = wire.encode(rollout(run="r"))
            http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE}).raise_for_status()
        held = key(lease(10))
        refused = lease(0.1)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["code"] == "in_flight_full"
        assert "max_in_flight_per_run is 1" in refused.json()["error"]["message"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lease, 20)
            time.sleep(0.2)
            assert settle(http, "ack", [held]) == ["ok"]
            assert key(waiting.result())["id"] != held["id"]


# Lineages


def test_a_lease_has_its_own_lineage_s_batches_only(
    upload: Callable[..., str], lease: Lease, http: httpx.Client
) -> None:
    left, mine = upload(lineage="old"), upload(lineage="new")
    leased = lease(lineage="new")
    assert leased.headers["Batch-Id"] == mine
    batch = wire.decode(leased.content)
    assert isinstance(batch, ScoredBatch) and batch.rollout.lineage == "new"
    listed = http.get(f"/v1/batches/{left}").json()
    assert (listed["lineage"], listed["state"], listed["reason"]) == ("old", "expired", "abandoned")


def test_a_run_of_another_lineage_is_refused_with_the_time_to_wait(lease: Lease, run: str) -> None:
    assert lease(lineage="one", wait_seconds=0).status_code == 204
    refused = lease(lineage="two", wait_seconds=10)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["field"]) == (409, "run_taken", "run")
    assert run in error["message"]
    assert "choose another run" in error["message"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 10


@pytest.mark.parametrize("lineage", ["", "a/b", "a b", "ü", "x" * 201, 3])
def test_a_lineage_is_a_plain_name(lease: Lease, lineage: object) -> None:
    refused = lease(lineage=lineage)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "lineage")


def test_a_lineage_needs_its_run(lease: Lease) -> None:
    assert "need run" in lease(run=None, lineage="one").json()["error"]["message"]
