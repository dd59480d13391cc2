"""Leasing over HTTP: long polls, settling, refusals. The stores are tested in `tests/ref_server/queue`."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import wire
from tests.ref_server.calls import MakeService, Rollout, Serve, admit, error, lease, lease_key, settle, upload
from tests.ref_server.sockets import connected, head

Admit = Callable[..., str]
Lease = Callable[..., httpx.Response]


@pytest.fixture(name="admit")
def _admit(http: httpx.Client, rollout: Rollout, run: str) -> Admit:
    """Uploads a batch of the run; returns its id."""
    return lambda **fields: admit(http, rollout(**({"run": run} | fields)))[0]


@pytest.fixture(name="lease")
def _lease(http: httpx.Client, run: str) -> Lease:
    return lambda **fields: lease(http, **({"run": run} | fields))


# Waiting


@pytest.fixture
def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is read only when something may have become ready."""
    monkeypatch.setattr("ref_server.service.polls.LOOK_SECONDS", 60.0)


@pytest.mark.usefixtures("rare_looks")
@pytest.mark.parametrize("by", ["an upload", "a release"])
def test_a_waiting_lease_is_woken(http: httpx.Client, admit: Admit, lease: Lease, by: str) -> None:
    held = {"id": admit(), **lease_key(lease())} if by == "a release" else {}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lease, consumer="other", wait_seconds=20)
        time.sleep(0.3)
        assert not waiting.done()
        started = time.monotonic()
        if held:
            assert settle(http, "release", [held]) == ["ok"]
        id = held.get("id") or admit()
        assert waiting.result().headers["Batch-Id"] == id
        assert time.monotonic() - started < 10


def test_a_waiting_lease_gets_a_batch_whose_lease_ran_out(admit: Admit, lease: Lease) -> None:
    id = admit()
    lease(consumer="sleeper", lease_seconds=0.2)
    started = time.monotonic()
    assert lease(consumer="other", wait_seconds=20).headers["Batch-Id"] == id
    assert time.monotonic() - started < 10


def test_nothing_comes_in_time(lease: Lease) -> None:
    started = time.monotonic()
    answer = lease(wait_seconds=0.4)
    assert (answer.status_code, answer.content) == (204, b"")
    assert 0.4 <= time.monotonic() - started < 10


@pytest.mark.slow
def test_waiting_polls_block_no_other_request(http: httpx.Client, admit: Admit, run: str) -> None:
    async def poll(client: httpx.AsyncClient, i: int) -> httpx.Response:
        return await client.post("/v1/batches/lease", json={"consumer": f"c{i}", "run": run, "wait_seconds": 20})

    async def many() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=http.base_url, timeout=120, limits=limits) as client:
            polls = [asyncio.create_task(poll(client, i)) for i in range(100)]
            await asyncio.sleep(1)
            for path in ("/livez", "/readyz", "/v1/queue", "/metrics", "/v1/batches"):
                assert (await client.get(path)).status_code == 200
            assert not any(task.done() for task in polls)
            await asyncio.to_thread(admit)
            return await asyncio.gather(*polls)

    before = threading.active_count()
    answers = asyncio.run(many())
    assert sorted(answer.status_code for answer in answers) == [200] + [204] * 99
    assert threading.active_count() - before <= 45  # the pool for short calls, and none for each poll


@pytest.mark.usefixtures("rare_looks")
def test_a_client_that_has_gone_takes_no_batch(http: httpx.Client, admit: Admit, lease: Lease, run: str) -> None:
    body = json.dumps({"consumer": "gone", "run": run, "wait_seconds": 30}).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches/lease", *lines) + body)
        time.sleep(0.3)
    id = admit()
    assert lease(consumer="here").headers["Batch-Id"] == id
    history = http.get(f"/v1/batches/{id}").json()["history"]
    assert [event["detail"] for event in history if event["state"] == "leased"] == ["to here"]


def test_a_draining_server_ends_its_polls(make_service: MakeService, serve: Serve) -> None:
    service = make_service()
    with serve(service) as http, ThreadPoolExecutor() as pool:
        waiting = pool.submit(lease, http, wait_seconds=20)
        time.sleep(0.3)
        started = time.monotonic()
        service.drain()
        assert waiting.result().status_code == 503
        assert waiting.result().headers["Retry-After"] == "1"
        assert time.monotonic() - started < 10
        assert http.get("/readyz").status_code == 503
        assert http.post("/v1/logprobs", json={"prompt_ids": [1], "completions": [[1]]}).status_code == 503


# Answers


def test_headers_of_a_lease(admit: Admit, lease: Lease) -> None:
    id = admit()
    leased = lease(lease_seconds=7.5)
    assert len(leased.headers.pop("Lease-Token")) >= 32
    wanted = {"Content-Type": wire.CONTENT_TYPE, "Batch-Id": id, "Lease-Seconds": "7.5", "Deliveries": "1"}
    assert {name: leased.headers[name] for name in wanted} == wanted


def test_an_upload_of_an_epoch_far_ahead_is_refused(
    http: httpx.Client, lease: Lease, rollout: Rollout, run: str
) -> None:
    assert lease(epoch=1, policy_version=0, wait_seconds=0).status_code == 204
    assert error(upload(http, rollout(run=run, epoch=2**62)), 422)["field"] == "epoch"


def test_ack_extend_release(http: httpx.Client, admit: Admit, lease: Lease) -> None:
    ids = [admit() for _ in range(3)]
    held = [lease_key(lease()) for _ in ids]
    stranger = {"id": ids[0], "token": "x" * 32}
    nobody = {"id": str(uuid4()), "token": "x"}
    assert settle(http, "extend", [*held, stranger, nobody], lease_seconds=60) == ["ok", "ok", "ok", "stale", "unknown"]
    assert settle(http, "ack", [held[0], stranger], checkpoint="step-1") == ["ok", "stale"]
    assert settle(http, "ack", [held[0]]) == ["already"]
    assert settle(http, "release", [held[1]]) == ["ok"]
    assert settle(http, "release", [held[1]]) == ["already"]
    assert settle(http, "ack", [held[1]]) == ["stale"]
    again = lease()
    assert (again.headers["Batch-Id"], again.headers["Deliveries"]) == (ids[1], "1"), "released without an error"
    assert settle(http, "release", [lease_key(again)], error="NaN loss") == ["ok"]
    assert lease().headers["Deliveries"] == "2"
    info = http.get(f"/v1/batches/{ids[0]}").json()
    assert (info["state"], info["history"][-1]["detail"]) == ("done", "in checkpoint step-1")
    assert settle(http, "ack", []) == []


def test_a_superseded_incarnation_is_refused(admit: Admit, lease: Lease) -> None:
    consumer = f"trainer {uuid4()}"
    for incarnation in ("old", "new"):
        lease(consumer=consumer, incarnation=incarnation, wait_seconds=0)
    refused = error(lease(consumer=consumer, incarnation="old"), 409)
    assert (refused["code"], refused["field"]) == ("superseded", "incarnation")


def test_a_lease_receives_only_its_lineage(admit: Admit, lease: Lease, http: httpx.Client) -> None:
    left, mine = admit(lineage="old"), admit(lineage="new")
    leased = lease(lineage="new")
    assert leased.headers["Batch-Id"] == mine
    batch = wire.decode(leased.content)
    assert batch.ref_logps is not None and batch.lineage == "new"
    listed = http.get(f"/v1/batches/{left}").json()
    assert (listed["lineage"], listed["state"], listed["reason"]) == ("old", "expired", "abandoned")


def test_a_run_of_another_lineage_is_refused(lease: Lease, run: str) -> None:
    assert lease(lineage="one", wait_seconds=0).status_code == 204
    refused = lease(lineage="two", wait_seconds=10)
    detail = error(refused, 409)
    assert (detail["code"], detail["field"]) == ("run_taken", "run")
    assert run in detail["message"] and "choose another run" in detail["message"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 10


def test_a_lease_beyond_the_bound_waits_and_is_then_refused(
    make_service: MakeService, serve: Serve, rollout: Rollout
) -> None:
    with serve(make_service(queue={"max_in_flight_per_run": 1})) as http:
        admit(http, rollout(run="r"), rollout(run="r"))
        held = lease_key(lease(http, "r"))
        refused = lease(http, "r", wait_seconds=0.1)
        detail = error(refused, 429)
        assert (detail["code"], refused.headers["Retry-After"]) == ("in_flight_full", "1")
        assert "max_in_flight_per_run is 1" in detail["message"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lease, http, "r", wait_seconds=20)
            time.sleep(0.2)
            assert settle(http, "ack", [held]) == ["ok"]
            assert lease_key(waiting.result())["id"] != held["id"]


# Bad requests


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"consumer": ""}, "consumer"),
        ({"consumer": "x" * 201}, "consumer"),
        ({"consumer": "\ud800"}, "consumer"),
        ({"wait_seconds": 301}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lease_seconds": True}, "lease_seconds"),
        ({"order": "newest"}, "order"),
        ({"policy_version": 2**63}, "policy_version"),
        ({"policy_version": "1"}, "policy_version"),
        ({"max_lag": 3}, None),
        ({"run": None, "epoch": 3}, None),
        ({"run": None, "lineage": "one"}, None),
        ({"lineage": ""}, "lineage"),
        ({"lineage": "a/b"}, "lineage"),
        ({"lineage": "x" * 201}, "lineage"),
        ({"surprise": 1}, "surprise"),
        ({"lease_seconds": float("inf")}, "lease_seconds"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"\ud800": 1}, None),
    ],
)
def test_bad_lease_requests(http: httpx.Client, run: str, changes: dict[str, Any], field: str | None) -> None:
    body = json.dumps({"consumer": "c", "run": run, "wait_seconds": 0} | changes).encode()
    answer = http.post("/v1/batches/lease", content=body, headers={"Content-Type": "application/json"})
    assert error(answer, 422).get("field") == field


@pytest.mark.parametrize("route", ["batches/lease", "leases/ack", "leases/extend", "leases/release"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"leases": 1}'])
def test_malformed_json(http: httpx.Client, route: str, body: bytes) -> None:
    answer = http.post(f"/v1/{route}", content=body, headers={"Content-Type": "application/json"})
    assert not error(answer, 422).get("field", "").isdecimal()


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
KEYS = st.sampled_from(
    ["consumer", "incarnation", "request_id", "run", "epoch", "policy_version", "max_lag", "order", "lease_seconds"]
)


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1))
def test_odd_requests_are_never_the_servers_fault(http: httpx.Client, changes: dict[str, Any]) -> None:
    body = json.dumps({"consumer": "odd", "run": "odd", "wait_seconds": 0} | changes).encode()
    answer = http.post("/v1/batches/lease", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 204, 409, 422), answer.text
