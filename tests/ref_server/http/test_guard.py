"""Hostile requests that are refused before a route runs."""

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from ref_server.access.keys import Role
from ref_server.access.requirements import requires
from ref_server.config import ServeConfig
from ref_server.http.guard import MAX_JSON_BYTES, Guard, RouteTable
from shared import wire
from tests.ref_server.sockets import answer, connected, head


@pytest.mark.parametrize("content_type", ["Application/JSON", "application/json; charset=utf-8"])
def test_content_types_are_compared_without_case_and_parameters(http: httpx.Client, content_type: str) -> None:
    answer = http.post("/v1/leases/ack", content=b'{"leases": []}', headers={"Content-Type": content_type})
    assert (answer.status_code, answer.json()) == (200, {"results": []})


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/jsonx", "multipart/form-data", "application/*"]
)
@pytest.mark.parametrize("route", ["batches", "logprobs", "batches/lease", "leases/ack"])
def test_a_wrong_content_type_is_refused(http: httpx.Client, route: str, content_type: str) -> None:
    response = http.post(f"/v1/{route}", content=b"{}", headers={"Content-Type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["field"] == "Content-Type"


@pytest.mark.parametrize("route", ["batches", "logprobs", "reference"])
def test_a_line_break_after_a_path_bypasses_no_check(http: httpx.Client, route: str) -> None:
    method = "PUT" if route == "reference" else "POST"
    response = http.request(method, f"/v1/{route}%0A", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("length", ["abc", "-1", "1e9", "\u00b2", "0x10", "1_0", "9" * 5000, "99999999999999999999"])
def test_hostile_lengths_over_a_socket(http: httpx.Client, length: str) -> None:
    request = (
        f"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    )
    with connected(http) as connection:
        connection.sendall(request.encode("latin-1"))
        status, _ = answer(connection)
    assert status in (400, 413)
    assert http.get("/livez").status_code == 200


@pytest.mark.parametrize("length", ["abc", "-1", "1e9", "\u00b2", "", "9" * 5000, str(2**20 + 1)])
def test_hostile_lengths_behind_another_server(length: str) -> None:
    """uvicorn refuses some of these itself; the guard does not rely on it."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("must not be reached")

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", length.encode("latin-1"))]
    state = {"request_id": "1"}
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "state": state}
    routes = RouteTable([requires(Role.OPEN)(Route("/", app))])
    asyncio.run(Guard(app, ServeConfig(no_model=True, max_body_mib=1), routes)(scope, receive, send))
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "identity, gzip", "x" * 1000])
def test_nothing_is_inflated(http: httpx.Client, encoding: str) -> None:
    headers = {"Content-Type": wire.CONTENT_TYPE, "Content-Encoding": encoding}
    refused = http.post("/v1/batches", content=gzip.compress(bytes(2**20)), headers=headers)
    assert refused.status_code == 415
    assert refused.json()["error"]["field"] == "Content-Encoding"


def test_json_is_bounded_more_than_batches(make_service: Any, serve: Any) -> None:
    with serve(make_service()) as http:
        body = b'{"leases": ["' + b"x" * MAX_JSON_BYTES + b'"]}'
        refused = http.post("/v1/leases/ack", content=body, headers={"Content-Type": "application/json"})
        assert refused.status_code == 413
        assert str(MAX_JSON_BYTES) in refused.json()["error"]["message"]
        ten_thousand = {"leases": [{"id": "x" * 36, "token": "y" * 43}] * 10_000}
        assert http.post("/v1/leases/ack", json=ten_thousand).status_code == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([f"X-{number}: 1" for number in range(90)], 200),
        ([f"X-{number}: 1" for number in range(200)], 431),
        ([f"X-{number}: {'x' * 8000}" for number in range(5)], 431),
        (["Host: localhost"], 400),
        (["Authorization: Bearer a", "Authorization: Bearer b"], 400),
        (["Content-Type: text/plain", "Content-Type: application/json"], 400),
        (["Origin: http://localhost", "Origin: http://evil.example"], 400),
        (["Content-Length: 0", "Content-Length: 1"], 400),
        (["Content-Length: 0"] * 50, 200),
    ],
)
def test_odd_heads_over_a_socket(http: httpx.Client, lines: list[str], status: int) -> None:
    with connected(http) as connection:
        connection.sendall(head("GET", "/livez", "Connection: close", *lines))
        assert answer(connection)[0] == status


def test_a_long_url(http: httpx.Client) -> None:
    assert http.get("/livez?" + "x" * 8000).status_code == 200
    refused = http.get("/livez?" + "x" * 9000)
    assert refused.status_code == 414
