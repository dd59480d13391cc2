"""What is refused before a route sees it, as a hostile page or client would try it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ref_server.config import ServeConfig, is_loopback
from ref_server.guard import Guard
from ref_server.service import Service
from shared import wire


@contextmanager
def connected(http: httpx.Client) -> Iterator[socket.socket]:
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=10) as connection:
        yield connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and everything else, up to where the server closes the connection."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return int(received.split(b" ", 2)[1]), received


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8400", 200),
        ("127.8.8.8", 200),
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("[::1]", 200),
        ("[::1]:8400", 200),
        ("evil.example", 403),
        ("evil.example:8400", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.2", 403),
        ("0.0.0.0", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
def test_only_loopback_names_are_expected(http: httpx.Client, host: str, status: int) -> None:
    response = http.get("/livez", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["field"] == "Host"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8400", 200),
        ("HTTP://127.0.0.1:8400", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:8400", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_only_its_own_page_may_use_it(http: httpx.Client, origin: str, status: int) -> None:
    response = http.get("/v1/model", headers={"Host": "127.0.0.1:8400", "Origin": origin})
    assert response.status_code == status


def test_an_origin_is_compared_without_case(http: httpx.Client) -> None:
    headers = {"Host": "LocalHost:8400", "Origin": "http://localhost:8400"}
    assert http.get("/v1/model", headers=headers).status_code == 200


@pytest.mark.parametrize("given", ["a", "x" * 100, "run-7/step 3"])
def test_a_request_id_comes_back(http: httpx.Client, given: str) -> None:
    assert http.get("/livez", headers={"X-Request-Id": given}).headers["X-Request-Id"] == given
    refused = http.get("/v1/batches/none", headers={"X-Request-Id": given})
    assert refused.json()["error"]["request_id"] == refused.headers["X-Request-Id"] == given


@pytest.mark.parametrize("given", [b"", b"x" * 101, b"\xe4"])
def test_an_odd_request_id_is_replaced(http: httpx.Client, given: bytes) -> None:
    named = http.get("/livez", headers=[(b"X-Request-Id", given)]).headers["X-Request-Id"]
    assert len(named) == 32
    assert named != http.get("/livez").headers["X-Request-Id"]


@pytest.mark.parametrize("content_type", ["Application/JSON", "application/json; charset=utf-8"])
def test_content_types_are_compared_without_case_and_parameters(http: httpx.Client, content_type: str) -> None:
    answer = http.post("/v1/leases/ack", content=b'{"leases": []}', headers={"Content-Type": content_type})
    assert (answer.status_code, answer.json()) == (200, {"results": []})


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/jsonx", "multipart/form-data", "application/*"]
)
@pytest.mark.parametrize(
    "route", ["batches", "logprobs", "batches/lease", "leases/ack", "leases/extend", "leases/release"]
)
def test_every_body_says_what_it_is(http: httpx.Client, route: str, content_type: str) -> None:
    response = http.post(f"/v1/{route}", content=b"{}", headers={"Content-Type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["field"] == "Content-Type"


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


@pytest.mark.parametrize("length", ["abc", "-1", "1e9", "\u00b2", "", "9" * 5000, "101"])
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
    scope = {"type": "http", "method": "GET", "path": "/livez", "headers": headers}
    asyncio.run(Guard(app, host="127.0.0.1", max_body_bytes=100)(scope, receive, send))
    assert sent[0]["status"] == 413


def test_a_body_that_is_too_long_is_answered_before_it_is_sent(http: httpx.Client) -> None:
    head = (
        f"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        f"Content-Length: {2**40}\r\nConnection: close\r\n\r\n"
    )
    with connected(http) as connection:
        connection.sendall(head.encode())
        assert answer(connection)[0] == 413


def test_a_client_that_leaves_amid_its_body_is_no_bug(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    head = (
        f"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        "Content-Length: 1000\r\n\r\nabc"
    )
    with connected(http) as connection:
        connection.sendall(head.encode())
    assert http.get("/livez").status_code == 200
    assert "Exception" not in caplog.text


def test_other_hosts_are_expected_when_it_listens_beyond_loopback(make_service: Any, serve: Any) -> None:
    service: Service = make_service(host="0.0.0.0", insecure=True)
    with serve(service) as http:
        assert http.get("/livez", headers={"Host": "gpu-box:8400"}).status_code == 200
        foreign = {"Host": "gpu-box:8400", "Origin": "http://evil.example"}
        assert http.get("/livez", headers=foreign).status_code == 403


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.255.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("gpu-box", False),
        ("", False),
    ],
)
def test_listening_beyond_loopback_must_be_asked_for(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    assert ServeConfig(model="m", host=host, insecure=True).host == host
    if not local:
        with pytest.raises(ValueError, match=f"host: {host} .*--insecure"):
            ServeConfig(model="m", host=host)
