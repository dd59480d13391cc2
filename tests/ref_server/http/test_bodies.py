"""Bodies that are slow, broken or too much, over real sockets."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from ref_server.http import bodies
from ref_server.http.bodies import RefusedBodies
from shared import wire
from tests.ref_server.calls import MakeService, Rollout, Serve, bearer, upload
from tests.ref_server.sockets import answer, connected, head, one_answer, rest

pytestmark = pytest.mark.slow  # slow clients, on purpose
CONTENT_TYPE = f"Content-Type: {wire.CONTENT_TYPE}"
MIB = 2**20


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FIRST_SECONDS", 1.0)
    monkeypatch.setattr(bodies, "BYTES_PER_SECOND", 100)


@pytest.fixture
def brief_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """For clients that neither send the rest of their body nor leave."""
    monkeypatch.setattr(bodies, "LINGER_IDLE_SECONDS", 0.05)


def dripping(connection: socket.socket, pieces: Iterator[bytes]) -> tuple[int, bytes]:
    """Sends a piece every 50 ms until the server has had enough, then reads its answer."""
    connection.setblocking(False)
    for piece in pieces:
        try:
            if connection.recv(1, socket.MSG_PEEK) is not None:
                break
        except BlockingIOError:
            connection.send(piece)
            time.sleep(0.05)
    connection.settimeout(20)
    return answer(connection)


SLOW = {
    "nothing comes": ("Content-Length: 1000", []),
    "it stops": ("Content-Length: 1000", [b"x" * 100]),
    "it drips": ("Content-Length: 1000", [b"x"] * 999),
    "no chunk comes": ("Transfer-Encoding: chunked", []),
    "chunks drip": ("Transfer-Encoding: chunked", [b"1\r\nx\r\n"] * 999),
    "the size of a chunk drips": ("Transfer-Encoding: chunked", [b"0"] * 999),
}


@pytest.mark.usefixtures("impatient")
def test_a_body_comes_at_a_decent_pace(http: httpx.Client) -> None:
    def send(kind: str) -> tuple[int, bytes]:
        length, pieces = SLOW[kind]
        with connected(http) as connection:
            connection.sendall(head("POST", "/v1/batches", CONTENT_TYPE, length))
            return dripping(connection, iter(pieces))

    with ThreadPoolExecutor(len(SLOW)) as pool:  # all at once, since each waits for seconds
        answers = dict(zip(SLOW, pool.map(send, SLOW), strict=True))
    for kind, (status, received) in answers.items():
        assert status == 408, kind
        assert b"connection: close" in received.lower(), kind
        assert b'"too_slow"' in received, kind


@pytest.mark.usefixtures("impatient")
def test_the_byte_protocol_waits_for_no_slow_client(make_service: MakeService, serve: Serve) -> None:
    with serve(make_service(legacy=True)) as http, ExitStack() as stack:
        connections = [stack.enter_context(connected(http)) for _ in range(20)]
        for connection in connections:
            connection.sendall(head("POST", "/upload", "Content-Length: 1000") + b"x")
        assert http.get("/get").content == b"empty"
        assert http.post("/upload", content=b"\0\0\0\0").status_code == 400
        assert [answer(connection)[0] for connection in connections] == [408] * 20


@pytest.mark.usefixtures("impatient")
def test_what_came_buys_time(http: httpx.Client) -> None:
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches", CONTENT_TYPE, "Content-Length: 3000", "Connection: close"))
        for _ in range(30):  # in all, more than the first seconds
            connection.sendall(b"x" * 100)
            time.sleep(0.05)
        assert answer(connection)[0] == 422


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"zz\r\n", 400),
        (b"-1\r\nx\r\n", 400),
        (b"3\r\nabcdef\r\n", 400),
        (b"fffffffffffffffffffff\r\n", 400),
        (b"5;" + b"x" * 100_000, 431),
        (b"0\r\n" + b"X: y\r\n" * 20_000, 431),
        (b"5\r\nabc", 0),
        (b"5\r\nabcde\r\n", 0),
    ],
)
def test_broken_chunks(http: httpx.Client, sent: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches", CONTENT_TYPE, "Transfer-Encoding: chunked") + sent)
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection)[0] == status
    assert http.get("/livez").status_code == 200
    assert "Traceback" not in caplog.text


def test_a_body_with_two_lengths(http: httpx.Client) -> None:
    """Request smuggling: a second request could hide in the body."""
    lines = ("Content-Length: 4", "Transfer-Encoding: chunked", "Connection: close")
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches", CONTENT_TYPE, *lines) + b"0\r\n\r\nGET /livez HTTP/1.1\r\n\r\n")
        status, received = answer(connection)
    assert 400 <= status < 500
    assert received.count(b"HTTP/1.1 ") == 1


# Clients that send their whole body before they read


@pytest.mark.parametrize("size", [0, 1000, 30 * MIB])
@pytest.mark.parametrize("content_type", ["text/plain", wire.CONTENT_TYPE])
def test_a_refusal_reaches_a_client_that_sends_first(http: httpx.Client, size: int, content_type: str) -> None:
    with connected(http) as connection:
        lines = (f"Content-Type: {content_type}", f"Content-Length: {size}", "Connection: close")
        connection.sendall(head("POST", "/v1/batches", *lines) + bytes(size))
        status, received = answer(connection)
    expected = 415 if content_type == "text/plain" else 413 if size > MIB else 422
    assert status == expected
    assert received.endswith(b"}")


def test_a_refused_body_may_be_broken(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches", "Content-Type: text/plain", "Transfer-Encoding: chunked"))
        assert b" 415 " in one_answer(connection)
        connection.sendall(b"not a chunk\r\n\r\n")
        rest(connection)
    assert "Traceback" not in caplog.text


@pytest.mark.usefixtures("brief_linger")
@pytest.mark.parametrize("expecting", ["Content-Length: 1073741824", "Content-Type: text/plain"])
def test_a_refused_client_that_expects_100_need_not_send(http: httpx.Client, expecting: str) -> None:
    lines = ["Expect: 100-continue", expecting]
    lines += ["Content-Length: 5"] if "Type" in expecting else [CONTENT_TYPE]
    with connected(http) as connection:
        connection.sendall(head("POST", "/v1/batches", *lines))
        status, received = answer(connection)
    assert status in (413, 415)
    assert b"100 Continue" not in received


# Memory that all bodies share


def filling(stack: ExitStack, http: httpx.Client, claimed: int, sent: int) -> socket.socket:
    """A connection on which so much of a body has been sent."""
    connection = stack.enter_context(connected(http))
    connection.sendall(head("POST", "/v1/batches", CONTENT_TYPE, f"Content-Length: {claimed}") + bytes(sent))
    return connection


def let_read(http: httpx.Client) -> None:
    """Each request is a turn of the server's loop, in which it reads what has arrived on other connections."""
    for _ in range(200):
        assert http.get("/livez").status_code == 200


def test_bodies_share_their_memory(make_service: MakeService, serve: Serve, rollout: Rollout) -> None:
    with serve(make_service(max_body_mib=2, max_bodies_mib=4)) as http:
        with ExitStack() as stack:
            for _ in range(30):
                filling(stack, http, claimed=2 * MIB, sent=0)
            assert upload(http, rollout()).status_code == 201, "what is merely claimed locks out nobody"
            fillers = [filling(stack, http, claimed=2 * MIB, sent=MIB - 300) for _ in range(2)]
            let_read(http)
            busy = upload(http, rollout())
            assert busy.status_code == 429
            assert busy.headers["Retry-After"] == "1"
            assert busy.json()["error"]["code"] == "busy"
            assert http.get("/readyz").status_code == 200
            fillers[0].sendall(bytes(1000))  # more than is left: it is refused, and holds nothing any more
            let_read(http)
            assert upload(http, rollout()).status_code == 201
            filling(stack, http, claimed=2 * MIB, sent=MIB - 300)
            let_read(http)
            assert upload(http, rollout()).status_code == 429
        let_read(http)
        assert upload(http, rollout()).status_code == 201


def test_routes_with_json_share_no_memory(make_service: MakeService, serve: Serve) -> None:
    with serve(make_service(token="one-token-for-all-of-them")) as http, ExitStack() as stack:
        allowed = bearer("one-token-for-all-of-them")
        lines = ("Content-Type: application/json", f"Authorization: {allowed['Authorization']}")
        for path in ("/v1/logprobs", "/v1/batches/lease", "/livez", "/v1/batches"):
            for _ in range(20):
                connection = stack.enter_context(connected(http))
                connection.sendall(head("POST", path, *lines, f"Content-Length: {MIB}") + bytes(MIB - 1))
        let_read(http)
        assert http.post("/v1/batches/lease", json={"consumer": "c"}, headers=allowed).status_code == 429
        for path in ("extend", "ack", "release"):
            assert http.post(f"/v1/leases/{path}", json={"leases": []}, headers=allowed).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/livez"), ("HEAD", "/readyz"), ("GET", "/v1/batches"), ("POST", "/v1/batches/some/requeue")],
)
@pytest.mark.parametrize("length", ["Content-Length: 1048575", "Transfer-Encoding: chunked"])
@pytest.mark.usefixtures("brief_linger")
def test_a_route_without_a_body_reads_none(http: httpx.Client, method: str, path: str, length: str) -> None:
    with connected(http) as connection:
        connection.sendall(head(method, path, "Content-Type: application/json", length) + b"1\r\nx\r\n")
        status, received = answer(connection)
    assert status == 413
    assert method == "HEAD" or b"takes no body" in received


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/nowhere", 404), ("PUT", "/v1/batches", 405), ("POST", "/livez", 405)]
)
@pytest.mark.parametrize("length", ["Content-Length: 1048576", "Transfer-Encoding: chunked"])
def test_unknown_routes_read_no_body(http: httpx.Client, method: str, path: str, status: int, length: str) -> None:
    with connected(http) as connection:
        connection.sendall(head(method, path, "Content-Type: application/json", length))
        assert f" {status} ".encode() in one_answer(connection)


def test_a_token_leaves_room_for_another(
    make_service: MakeService, serve: Serve, rollout: Rollout, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("upload greedy-token-of-a-worker\nupload modest-token-of-a-worker\n")
    with serve(make_service(max_body_mib=1, max_bodies_mib=4, token_file=tokens)) as http, ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(connected(http))
            lines = (CONTENT_TYPE, "Authorization: Bearer greedy-token-of-a-worker", f"Content-Length: {MIB}")
            connection.sendall(head("POST", "/v1/batches", *lines) + bytes(MIB - 1))
        let_read(http)
        assert upload(http, rollout(), **bearer("greedy-token-of-a-worker")).status_code == 429
        assert upload(http, rollout(), **bearer("modest-token-of-a-worker")).status_code == 201


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_the_server_waits_for_a_bounded_number_of_refused_bodies() -> None:

    async def crowd() -> None:
        refused = RefusedBodies()
        waiting = [asyncio.create_task(refused.discard(_never)) for _ in range(bodies.MAX_LINGERING)]
        await asyncio.sleep(0)
        await refused.discard(_never)  # at once
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        next_body = asyncio.create_task(refused.discard(_never))
        await asyncio.sleep(0)
        assert not next_body.done(), "those that have left make room"
        next_body.cancel()

    asyncio.run(crowd())
