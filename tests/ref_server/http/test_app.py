"""Routes over real sockets: statuses, headers, the shape of errors, and the order of checks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from shared import wire
from shared.batch import TokenGroup
from tests.ref_server.calls import SAFETENSORS, MakeService, Rollout, Serve, admit, error, lease, lease_key, upload


def test_health_and_model(http: httpx.Client) -> None:
    for path in ("/livez", "/readyz"):
        assert (http.get(path).status_code, http.get(path).text) == (200, "ok")
    model = http.get("/v1/model").json()
    assert {"context_length": 256, "max_batch_tokens": 1000, "reference_version": 0}.items() <= model.items()
    assert model["dtype"] == "float32"
    assert len(model["tokenizer_fingerprint"]) == 64


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    missing = error(http.get("/v2"), 404)
    assert (missing["code"], missing["message"]) == (
        "not_found",
        "there is no route '/v2'; /openapi.json has them all",
    )
    for path, allowed in {
        "/v1/batches": "GET, POST",
        "/v1/batches/lease": "POST",
        "/v1/batches/3f": "DELETE, GET",
        "/v1/weights/r/l/0/1/commit": "POST",
        "/v1/weights/r/l/0/1/f": "GET, PUT",
    }.items():
        refused = http.patch(path)
        detail = error(refused, 405)
        assert detail["code"] == "method_not_allowed"
        assert detail["message"] == f"this route takes {allowed}, got PATCH"
        assert refused.headers["Allow"] == allowed


# Uploads


def reordered(body: bytes) -> bytes:
    """The same content with its metadata in reverse order."""
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    header["__metadata__"] = dict(reversed(header["__metadata__"].items()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body[8 + size :]


def test_repeated_uploads(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="again", task="sums", sample='{"answer": 3}')
    body = wire.encode(batch)
    first = upload(http, body)
    assert (first.status_code, first.json()["id"]) == (201, batch.id)
    assert first.headers["Location"] == f"/v1/batches/{batch.id}"
    for same in (body, reordered(body)):
        again = upload(http, same)
        assert (again.status_code, again.json()["id"]) == (200, batch.id)
        assert again.headers["Location"] == first.headers["Location"]
    conflict = upload(http, rollout(run="again", id=batch.id))
    assert error(conflict, 409)["field"] == "id"
    http.post("/v1/leases/ack", json={"leases": [lease_key(lease(http, "again"))]}).raise_for_status()
    again = upload(http, body)
    assert (again.status_code, again.json()["state"]) == (200, "done")


def test_a_scored_batch_is_refused(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout()
    scored = replace(batch, ref_logps=np.zeros(len(batch.group.completion_ids), np.float32), reference_version="0")
    assert error(upload(http, wire.encode(scored)), 422)["field"] == "format"


def group(prompt: list[int], completions: list[list[int]]) -> TokenGroup:
    lengths = np.array([len(row) for row in completions])
    return TokenGroup(np.array(prompt), np.concatenate(completions).astype(np.int64), lengths)


@pytest.mark.parametrize(
    ("tokens", "status", "field"),
    [
        (group([-1], [[1]]), 422, "prompt_ids"),
        (group([1], [[10_000]]), 422, "completion_ids"),
        (group([1], [[2**62]] * 1001), 422, "completion_ids"),  # the vocabulary before the length
        (group([1], [[1]] * 1000), 413, "completion_ids"),
        (group([1], [[1] * 256]), 413, "completion_lengths"),
        (group([1], [[1] * 255]), 201, None),
    ],
)
def test_tokens_must_fit_the_model(
    http: httpx.Client, rollout: Rollout, tokens: TokenGroup, status: int, field: str | None
) -> None:
    answer = upload(http, rollout(lengths=tuple(tokens.completion_lengths), group=tokens, run=f"{status} {field}"))
    if field is None:
        assert answer.status_code == status
        return
    assert error(answer, status)["field"] == field
    assert http.get("/v1/batches", params={"run": f"{status} {field}"}).json()["batches"] == []


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_bodies_are_never_the_servers_fault(http: httpx.Client, rollout: Rollout, data: st.DataObject) -> None:
    body = bytearray(wire.encode(rollout(run="mutated", top_p=0.9, sample='{"a": [1]}')))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "cut", "digit"]))
        if kind == "set" and at < len(body):
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "digit" and at < len(body):
            body[at] = data.draw(st.sampled_from(b'0123456789-.eE"{}[],:'))
        elif kind == "insert":
            body[at:at] = data.draw(st.binary(max_size=9))
        elif kind == "delete":
            del body[at : at + data.draw(st.integers(1, 9))]
        elif kind == "cut":
            del body[at:]
    response = upload(http, bytes(body))
    assert response.status_code in (200, 201, 409, 413, 422), response.text
    if response.status_code > 201:
        error(response, response.status_code)


# Batches and the queue


def test_listing_and_showing_batches(
    http: httpx.Client, rollout: Rollout, naive_logps: Callable[..., np.ndarray]
) -> None:
    batches = [rollout(run="look", lengths=(3, 2)) for _ in range(3)]
    ids = admit(http, *batches)
    assert lease(http, "look").status_code == 200
    page = http.get("/v1/batches", params={"run": "look", "limit": 2}).json()
    assert [batch["id"] for batch in page["batches"]] == ids[:2]
    rest = http.get("/v1/batches", params={"run": "look", "limit": 2, "cursor": page["next_cursor"]}).json()
    assert [batch["id"] for batch in rest["batches"]] == ids[2:]
    assert rest["next_cursor"] is None
    leased = http.get("/v1/batches", params={"run": "look", "state": "leased"}).json()["batches"]
    assert [batch["id"] for batch in leased] == ids[:1]
    info = http.get(f"/v1/batches/{ids[0]}").json()
    assert [event["state"] for event in info["history"]] == ["queued", "scoring", "ready", "leased"]
    assert (info["prompt_tokens"], info["completion_tokens"], info["completions"]) == (5, 5, 2)
    rows = http.get(f"/v1/batches/{ids[0]}/tokens").json()["rows"]
    logps = np.concatenate([row["ref_logps"] for row in rows])
    np.testing.assert_allclose(logps, naive_logps(batches[0].group, 1.0), atol=2e-5)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "state=nowhere", "cursor=..", "cursor="])
def test_bad_queries(http: httpx.Client, query: str) -> None:
    assert error(http.get(f"/v1/batches?{query}"), 422)["field"] == query.partition("=")[0]


@pytest.mark.parametrize(
    "id", ["01a1f98f-5b6c-71af-9894-b208bc4a84cd", "lease", "%00", "%ff", "a" * 3000, "'; DROP TABLE batches"]
)
def test_unknown_batches(http: httpx.Client, id: str) -> None:
    for path in ("", "/tokens"):
        assert error(http.get(f"/v1/batches/{id}{path}"), 404)["code"] == "not_found"
    assert error(http.post(f"/v1/batches/{id}/requeue"), 404)["field"] == "id"
    if id != "lease":
        assert error(http.delete(f"/v1/batches/{id}"), 404)["field"] == "id"


def test_the_queue_counts(http: httpx.Client, rollout: Rollout) -> None:
    admit(http, rollout(run="counted"))
    lease(http, "counted")
    queue = http.get("/v1/queue").json()
    assert queue["runs"]["counted"]["leased"]["batches"] == 1
    assert set(queue["states"]) == {"queued", "scoring", "ready", "leased", "done", "expired", "dead"}
    assert queue["scoring"]["tokens_per_second"] > 0
    assert queue["stored_bytes"] == sum(depth["bytes"] for depth in queue["states"].values()) > 0
    assert queue["limits"]["max_stored_bytes"] == 2 * queue["limits"]["max_bytes"]


def test_pages_of_the_queue(make_service: MakeService, serve: Serve, rollout: Rollout) -> None:
    with serve(make_service()) as http:
        admit(http, *(rollout(run=run) for run in ("a", "b/c d", "ä")))
        while len(http.get("/v1/queue").json()["runs"]) < 3:
            pass  # an answer is given again for a moment
        seen, cursor = [], ""
        while cursor is not None:
            page = http.get("/v1/queue", params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
            assert sum(depth["batches"] for depth in page["states"].values()) == 3, "totals are of all pages"
            seen += page["runs"]
            cursor = page["next_cursor"]
        assert seen == ["a", "b/c d", "ä"]
        assert list(http.get("/v1/queue", params={"run": "b/c d"}).json()["runs"]) == ["b/c d"]
        assert http.get("/v1/queue", params={"run": "nobody"}).json()["runs"] == {}


def test_a_full_queue(make_service: MakeService, serve: Serve, rollout: Rollout) -> None:
    first = rollout(run="full")
    with serve(make_service(queue={"max_batches": 2})) as http:
        admit(http, first)
        refused = upload(http, rollout(run="full"))
        assert error(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["Retry-After"]) >= 1
        assert upload(http, first).status_code == 200, "a known batch needs no room"
        key = lease_key(lease(http, "full"))
        http.post("/v1/leases/extend", json={"leases": [key], "started": True})
        admit(http, rollout(run="full"))


# Failures of the store


class Refusing:
    """A queue that answers every call of one method with an error, and leaves the rest to the real one."""

    def __init__(self, queue: Queue, method: str, error: Exception) -> None:
        self._queue = queue
        self._method = method
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._method else getattr(self._queue, name)

    def _refuse(self, *_: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (StorageFull("no room"), 507, "storage_full"),
        (StorageBroken("no disk"), 503, "storage_broken"),
        (ZeroDivisionError("a bug"), 500, "internal"),
    ],
)
def test_errors_of_the_store(
    make_service: MakeService, serve: Serve, rollout: Rollout, failure: Exception, status: int, code: str
) -> None:
    with serve(make_service(wrap=lambda queue: Refusing(queue, "put", failure))) as http:
        assert error(upload(http, rollout()), status)["code"] == code
        assert http.get("/livez").status_code == 200


def test_a_store_that_cannot_be_written_is_not_ready(make_service: MakeService, serve: Serve) -> None:
    service = make_service(wrap=lambda queue: Refusing(queue, "check", StorageFull("the disk is full")))
    with serve(service) as http:
        refused = http.get("/readyz")
        assert "the disk is full" in error(refused, 503)["message"]
        assert refused.headers["Retry-After"] == "1"


# The order of checks


def test_checks_come_in_the_order_of_the_contract(http: httpx.Client) -> None:
    json_type, large = {"Content-Type": "application/json"}, bytes(2**20 + 1)
    for content, headers, status in (
        (large, {"Origin": "http://evil.example"} | json_type, 403),
        (large, json_type, 415),
        (large, {}, 415),
        (large, SAFETENSORS, 413),
        (bytes(2**20), SAFETENSORS, 422),
    ):
        error(http.post("/v1/batches", content=content, headers=headers), status)


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/batches", wire.CONTENT_TYPE), ("/v1/batches/lease", "application/json")]
)
def test_a_chunked_body_is_refused_as_it_grows(http: httpx.Client, path: str, kind: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(65536)

    detail = error(http.post(path, content=chunks(), headers={"Content-Type": kind}), 413)
    assert (detail["code"], detail["field"]) == ("too_large", "body")
