"""Every route but leasing, over real sockets: statuses, headers, the shape of errors, and the order of checks."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.service.service import Service
from shared import wire
from shared.batch import RolloutBatch, ScoredBatch, TokenGroup

Rollout = Callable[..., RolloutBatch]
Serve = Callable[[Service], AbstractContextManager[httpx.Client]]
SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}


def upload(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post("/v1/batches", content=body, headers=SAFETENSORS)


def lease(http: httpx.Client, run: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/batches/lease", json={"consumer": "test", "run": run, "wait_seconds": 10, **fields})


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after checking what every error has."""
    assert response.status_code == status, response.text
    (detail,) = response.json().values()
    assert set(detail) - {"field"} == {"code", "message", "request_id"}
    assert all(isinstance(value, str) and value for value in detail.values())
    assert detail["request_id"] == response.headers["X-Request-Id"]
    return detail


# Health and description


def test_health_and_model(http: httpx.Client) -> None:
    assert http.get("/livez").text == "ok"
    ready = http.get("/readyz")
    assert (ready.status_code, ready.text) == (200, "ok")
    model = http.get("/v1/model").json()
    assert model["context_length"] == 256
    assert model["max_batch_tokens"] == 1000
    assert model["reference_version"] == 0
    assert model["dtype"] == "float32"
    assert len(model["tokenizer_fingerprint"]) == 64


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    missing = error(http.get("/v2"), 404)
    assert missing["code"] == "not_found"
    assert missing["message"] == "there is no route '/v2'; /openapi.json has them all"
    allowing = {
        "/livez": "GET",
        "/v1/batches": "GET, POST",
        "/v1/batches/lease": "POST",
        "/v1/batches/3f": "DELETE, GET",
    }
    allowing |= {"/v1/weights/r/l/0/1/commit": "POST"}
    allowing |= {"/v1/weights/r/l/0/1/f": "GET, PUT", "/openapi.json": ""}
    for path, allowed in allowing.items():
        refused = http.patch(path)
        told = error(refused, 405)
        assert told["code"] == "method_not_allowed"
        assert told["message"] == f"this route takes {allowed}, got PATCH"
        assert refused.headers["Allow"] == allowed


# Uploads


def test_upload_once_again_and_with_other_content(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="again", task="sums", sample='{"answer": 3}')
    body = wire.encode(batch)
    first = upload(http, body)
    assert first.status_code == 201
    assert first.json()["id"] == batch.id
    assert first.headers["Location"] == f"/v1/batches/{batch.id}"
    assert http.get(first.headers["Location"]).status_code == 200

    again = upload(http, body)
    assert (again.status_code, again.json()["id"]) == (200, batch.id)
    assert again.headers["Location"] == first.headers["Location"]
    assert upload(http, reordered(body)).status_code == 200

    conflict = upload(http, wire.encode(replace(batch, task="products")))
    assert error(conflict, 409)["field"] == "id"


def test_an_id_is_known_after_its_batch_was_acked(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout(run="settled")
    upload(http, wire.encode(batch))
    leased = lease(http, "settled")
    keys = [{"id": batch.id, "token": leased.headers["Lease-Token"]}]
    assert http.post("/v1/leases/ack", json={"leases": keys}).status_code == 200
    again = upload(http, wire.encode(batch))
    assert (again.status_code, again.json()["state"]) == (200, "done")


def test_a_scored_batch_is_refused(http: httpx.Client, rollout: Rollout) -> None:
    batch = rollout()
    scored = ScoredBatch(batch, np.zeros(len(batch.group.completion_ids), dtype=np.float32), "0")
    assert error(upload(http, wire.encode(scored)), 422)["field"] == "format"


def test_looking_at_batches(http: httpx.Client, rollout: Rollout, naive_logps: Callable[..., np.ndarray]) -> None:
    rewards = np.array([1.0, np.nan], dtype=np.float32)
    batches = [
        rollout(run="look", lengths=(3, 2), rewards=rewards, reward_parts={"format": rewards}, sampler_logps=None)
        for _ in range(3)
    ]
    for batch in batches:
        upload(http, wire.encode(batch))
    assert lease(http, "look").status_code == 200
    ids = [batch.id for batch in batches]

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

    tokens = http.get(f"/v1/batches/{ids[0]}/tokens").json()
    assert [row["reward"] for row in tokens["rows"]] == [1.0, None]
    assert [row["rewards"] for row in tokens["rows"]] == [{"format": 1.0}, {"format": None}]
    assert [len(row["tokens"]) for row in tokens["rows"]] == [3, 2]
    logps = np.concatenate([row["ref_logps"] for row in tokens["rows"]])
    np.testing.assert_allclose(logps, naive_logps(batches[0].group, 1.0), atol=2e-5)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "state=nowhere", "cursor=..", "cursor="])
def test_bad_queries(http: httpx.Client, query: str) -> None:
    assert error(http.get(f"/v1/batches?{query}"), 422)["field"] == query.partition("=")[0]


@pytest.mark.parametrize("path", ["", "/tokens"])
@pytest.mark.parametrize(
    "id", ["01a1f98f-5b6c-71af-9894-b208bc4a84cd", "lease", "%00", "%ff", "a" * 3000, "'; DROP TABLE batches"]
)
def test_batches_that_are_not_there(http: httpx.Client, id: str, path: str) -> None:
    assert error(http.get(f"/v1/batches/{id}{path}"), 404)["code"] == "not_found"


def test_the_queue_counts(http: httpx.Client, rollout: Rollout) -> None:
    upload(http, wire.encode(rollout(run="counted")))
    lease(http, "counted")
    queue = http.get("/v1/queue").json()
    assert queue["runs"]["counted"]["leased"]["batches"] == 1
    assert set(queue["states"]) == {"queued", "scoring", "ready", "leased", "done", "expired", "dead"}
    assert queue["states"]["leased"]["batches"] >= 1
    assert queue["scoring"]["tokens_per_second"] > 0
    assert queue["limits"]["max_deliveries"] == 5
    assert queue["stored_bytes"] == sum(depth["bytes"] for depth in queue["states"].values()) > 0
    assert queue["limits"]["max_stored_bytes"] == 2 * queue["limits"]["max_bytes"]


def test_a_full_queue_says_when_to_come_again(
    make_service: Callable[..., Service], serve: Serve, rollout: Rollout
) -> None:
    first = wire.encode(rollout(run="full"))
    with serve(make_service(queue={"max_batches": 2})) as http:
        assert upload(http, first).status_code == 201
        refused = upload(http, wire.encode(rollout(run="full")))
        assert error(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["Retry-After"]) >= 1
        assert upload(http, first).status_code == 200  # known already: no room is asked for
        leased = lease(http, "full")
        keys = [{"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}]
        http.post("/v1/leases/extend", json={"leases": keys, "started": True})
        assert upload(http, wire.encode(rollout(run="full"))).status_code == 201


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
def test_what_the_store_does_is_told(
    make_service: Callable[..., Service], serve: Serve, rollout: Rollout, failure: Exception, status: int, code: str
) -> None:
    service = make_service(wrap=lambda queue: Refusing(queue, "put", failure))
    with serve(service) as http:
        assert error(upload(http, wire.encode(rollout())), status)["code"] == code
        assert http.get("/livez").status_code == 200


def test_a_store_that_cannot_be_written_is_not_ready(make_service: Callable[..., Service], serve: Serve) -> None:
    service = make_service(wrap=lambda queue: Refusing(queue, "check", StorageFull("the disk is full")))
    with serve(service) as http:
        refused = http.get("/readyz")
        assert "the disk is full" in error(refused, 503)["message"]
        assert refused.headers["Retry-After"] == "1"


# The order of checks


def big_chunks() -> Iterator[bytes]:
    for _ in range(40):
        yield bytes(65536)


def test_checks_come_in_the_order_of_the_contract(http: httpx.Client, rollout: Rollout) -> None:
    foreign = {"Origin": "http://evil.example"}
    json_type = {"Content-Type": "application/json"}
    large = bytes(2**20 + 1)

    def status(content: Any, headers: dict[str, str]) -> int:
        response = http.post("/v1/batches", content=content, headers=headers)
        error(response, response.status_code)
        return response.status_code

    assert status(large, foreign | json_type) == 403
    assert status(large, json_type) == 415
    assert status(large, {}) == 415
    assert status(large, SAFETENSORS) == 413
    assert status(bytes(2**20), SAFETENSORS) == 422


def test_a_chunked_body_is_refused_as_it_grows(http: httpx.Client) -> None:
    detail = error(http.post("/v1/batches", content=big_chunks(), headers=SAFETENSORS), 413)
    assert detail["field"] == "body"
    refused = http.post("/v1/batches/lease", content=big_chunks(), headers={"Content-Type": "application/json"})
    assert error(refused, 413)["code"] == "too_large"


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
        (group([1] * 256, [[1]]), 413, "completion_lengths"),
    ],
)
def test_tokens_must_fit_the_model(
    http: httpx.Client, rollout: Rollout, tokens: TokenGroup, status: int, field: str
) -> None:
    batch = rollout(lengths=tuple(tokens.completion_lengths), group=tokens, run="misfits")
    assert error(upload(http, wire.encode(batch)), status)["field"] == field
    assert http.get("/v1/batches", params={"run": "misfits"}).json()["batches"] == []


def test_the_longest_row_that_fits(http: httpx.Client, rollout: Rollout) -> None:
    assert upload(http, wire.encode(rollout(run="longest", prompt=200, lengths=(56, 1)))).status_code == 201
    assert lease(http, "longest").status_code == 200


# Bad bodies


def parts(body: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    size = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + size])["__metadata__"], safetensors.numpy.load(body)


def reordered(body: bytes) -> bytes:
    """The same content with its metadata the other way round."""
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    header["__metadata__"] = dict(reversed(header["__metadata__"].items()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body[8 + size :]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": "0"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"id": "not-a-uuid"}, "id"),
        ({"epoch": "-1"}, "epoch"),
        ({"run": ""}, "run"),
        ({"run": "\ud800"}, "body"),
        ({"sample": "{"}, "sample"),
        ({"surprise": "1"}, "surprise"),
        ({"format": "rollout-batch/2"}, "format"),
    ],
)
def test_bad_metadata_is_named(http: httpx.Client, rollout: Rollout, changes: dict[str, str], field: str) -> None:
    metadata, tensors = parts(wire.encode(rollout()))
    header: dict[str, Any] = {"__metadata__": metadata | changes}
    data = b""
    names = {np.dtype(np.int64): "I64", np.dtype(np.float32): "F32", np.dtype(np.bool_): "BOOL"}
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    assert error(upload(http, len(text).to_bytes(8, "little") + text + data), 422)["field"] == field


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
        else:
            continue
    response = upload(http, bytes(body))
    assert response.status_code in (200, 201, 409, 413, 422), response.text
    if response.status_code > 201:
        error(response, response.status_code)


def test_drop_and_requeue(http: httpx.Client) -> None:
    missing = "01a1f98f-5b6c-71af-9894-b208bc4a84ce"
    assert error(http.post(f"/v1/batches/{missing}/requeue"), 404)["field"] == "id"
    assert error(http.delete(f"/v1/batches/{missing}"), 404)["field"] == "id"


def test_the_queue_is_told_page_by_page(make_service: Callable[..., Service], serve: Serve, rollout: Rollout) -> None:
    with serve(make_service()) as http:
        for run in ("a", "b/c d", "ä"):
            assert upload(http, wire.encode(rollout(run=run))).status_code == 201
        while len(http.get("/v1/queue").json()["runs"]) < 3:
            pass  # an answer is given again for a moment
        seen, cursor = [], None
        while True:
            page = http.get("/v1/queue", params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
            assert sum(depth["batches"] for depth in page["states"].values()) == 3, "the totals are whole"
            seen += page["runs"]
            if (cursor := page["next_cursor"]) is None:
                break
        assert seen == ["a", "b/c d", "ä"]
        assert list(http.get("/v1/queue").json()["runs"]) == seen
        assert list(http.get("/v1/queue", params={"run": "b/c d"}).json()["runs"]) == ["b/c d"]
        assert http.get("/v1/queue", params={"run": "nobody"}).json()["runs"] == {}
