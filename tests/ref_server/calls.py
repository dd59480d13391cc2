"""Requests that many tests send, and what they read from the answers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx

from ref_server.service.service import Service
from shared import wire
from shared.batch import Batch

MakeService = Callable[..., Service]
Rollout = Callable[..., Batch]
Serve = Callable[[Service], AbstractContextManager[httpx.Client]]
SAFETENSORS = {"Content-Type": wire.CONTENT_TYPE}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def upload(http: httpx.Client, batch: Batch | bytes, **headers: str) -> httpx.Response:
    body = batch if isinstance(batch, bytes) else wire.encode(batch)
    return http.post("/v1/batches", content=body, headers=SAFETENSORS | headers)


def admit(http: httpx.Client, *batches: Batch) -> list[str]:
    """Uploads batches, which must be new; their ids."""
    for batch in batches:
        answer = upload(http, batch)
        assert answer.status_code == 201, answer.text
    return [batch.id for batch in batches]


def lease(http: httpx.Client, run: str | None = None, **fields: Any) -> httpx.Response:
    body = {"consumer": "trainer", "run": run, "wait_seconds": 10} | fields
    return http.post("/v1/batches/lease", json=body)


def lease_key(leased: httpx.Response) -> dict[str, str]:
    assert leased.status_code == 200, leased.text
    return {"id": leased.headers["Batch-Id"], "token": leased.headers["Lease-Token"]}


def settle(http: httpx.Client, verb: str, keys: list[dict[str, str]], **fields: Any) -> list[str]:
    """The outcome for each lease of ack, extend or release."""
    answer = http.post(f"/v1/leases/{verb}", json={"leases": keys, **fields})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [result["id"] for result in results] == [key["id"] for key in keys]
    return [result["outcome"] for result in results]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, after checking what every error has."""
    assert response.status_code == status, response.text
    (detail,) = response.json().values()
    assert set(detail) - {"field"} == {"code", "message", "request_id"}
    assert all(isinstance(value, str) and value for value in detail.values())
    assert detail["request_id"] == response.headers["X-Request-Id"]
    return detail
