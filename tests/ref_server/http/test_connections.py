"""Slow, silent and malformed connections, over real sockets."""

import resource
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ref_server.http import server as connections
from tests.harness.server import Server
from tests.ref_server.sockets import answer, connected, head, one_answer, rest

MIB = 2**20


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a head that comes in one piece, on a busy machine too."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"\0\0"])
def test_a_head_that_does_not_end(http: httpx.Client, sent: bytes) -> None:
    with connected(http) as connection:
        connection.sendall(sent)
        assert answer(connection)[0] in (0, 400)


@pytest.mark.usefixtures("impatient")
def test_a_head_that_drips(http: httpx.Client) -> None:
    with connected(http) as connection, pytest.raises(OSError):
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        for number in range(1000):
            connection.sendall(f"X-{number}: 1\r\n".encode())
            time.sleep(0.05)


@pytest.mark.usefixtures("impatient")
def test_a_second_head_that_does_not_end(http: httpx.Client) -> None:
    with connected(http) as connection:
        connection.sendall(head("GET", "/livez"))
        assert b" 200 " in one_answer(connection)
        connection.sendall(b"GET /livez")
        assert rest(connection) == b""


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_idle_connections_and_long_polls_are_no_slow_heads(http: httpx.Client) -> None:
    poll = b'{"consumer": "c", "run": "none", "wait_seconds": 1.2}'
    with connected(http) as connection:
        lines = ("Content-Type: application/json", f"Content-Length: {len(poll)}")
        connection.sendall(head("POST", "/v1/batches/lease", *lines) + poll)
        assert b" 204 " in one_answer(connection)
        time.sleep(1.2)
        connection.sendall(head("GET", "/livez"))
        assert b" 200 " in one_answer(connection)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
        (b"\0" * 1000, 400),
        (b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX y: 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET /" + b"x" * 60_000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 60_000, 431),
    ],
)
def test_malformed_requests(http: httpx.Client, sent: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with connected(http) as connection:
        connection.sendall(sent)
        got, received = answer(connection)
    assert got == status
    assert received.count(b'{"error":{"code":"invalid_request"') == 1
    assert "Traceback" not in caplog.text


def test_pipelined_requests(http: httpx.Client) -> None:
    with connected(http) as connection:
        connection.sendall(head("GET", "/livez") * 3 + head("GET", "/readyz", "Connection: close"))
        _, received = answer(connection)
    assert received.count(b" 200 OK") == 4


def test_a_flood_behind_a_request_that_waits(http: httpx.Client) -> None:
    poll = b'{"consumer": "c", "run": "none", "wait_seconds": 60}'
    with connected(http) as connection:
        lines = ("Content-Type: application/json", f"Content-Length: {len(poll)}")
        connection.sendall(head("POST", "/v1/batches/lease", *lines) + poll)
        connection.settimeout(1)
        with pytest.raises((BrokenPipeError, ConnectionResetError, TimeoutError)):
            for _ in range(100):
                connection.sendall(bytes(MIB))
    assert http.get("/livez").status_code == 200


@pytest.mark.slow
def test_silent_connections_do_not_use_up_the_usual_limit_of_files(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, usual[1]))
    with Server(None, tmp_path) as server, ExitStack() as silent:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for _ in range(400):
            silent.enter_context(connected(server.http))
        assert server.http.get("/livez", headers={"Connection": "close"}).status_code == 200
        assert httpx.get(f"{server.http.base_url}/readyz").status_code == 200
