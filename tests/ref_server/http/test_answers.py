"""Answers that nobody reads, or only slowly, over real sockets."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ref_server.config import ServeConfig
from ref_server.http import answers, bodies
from ref_server.http.answers import Answers
from ref_server.http.errors import DELAY_SECONDS, no_room_to_answer
from ref_server.http.server import uvicorn_config
from tests.ref_server.serving import listen, serving
from tests.ref_server.sockets import connected, head, rest

MIB = 2**20
LARGE = 32 * MIB


@contextmanager
def serve(most: int) -> Iterator[httpx.Client]:
    """An application behind `Answers`. The header `X-Token` names the client, the path selects the answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] |= {"request_id": "1", "holder": Request(scope).headers.get("X-Token", "")}
        await answering(scope, receive, send)

    answering = Answers(_answer, most)
    config = uvicorn_config(app, ServeConfig(no_model=True), log_config=None, lifespan="off")
    with serving(config, listen()) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(LARGE // MIB):
            yield bytes(MIB)

    def large() -> Response:
        return Response(bytes(LARGE)) if scope["state"]["room"](LARGE) else no_room_to_answer().answer(scope)

    kinds: dict[str, Callable[[], Response]] = {
        "/large": large,
        "/large-without-room": lambda: Response(bytes(LARGE)),
        "/stream": lambda: StreamingResponse(pieces()),
        "/small": lambda: Response(b"small"),
        "/middling": lambda: Response(bytes(100_000)),
    }
    await kinds[scope["path"]]()(scope, receive, send)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(bodies, "BYTES_PER_SECOND", 64 * MIB)


def unread(http: httpx.Client, stack: ExitStack, path: str, token: str = "") -> socket.socket:
    """A connection whose answer has begun, and which does not read it."""
    connection = stack.enter_context(connected(http))
    connection.sendall(head("GET", path, f"X-Token: {token}"))
    connection.recv(10)
    return connection


@pytest.mark.parametrize("path", ["/large", "/stream", "/small", "/middling"])
def test_an_answer_arrives_as_it_was(path: str) -> None:
    with serve(2 * LARGE) as http:
        answer = http.get(path)
    assert answer.content == (b"small" if path == "/small" else bytes(100_000 if path == "/middling" else LARGE))


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("path", "requests"), [("/large", 1), ("/stream", 1), ("/middling", 300)])
def test_a_reader_that_takes_nothing_is_cut_off(path: str, requests: int, caplog: pytest.LogCaptureFixture) -> None:
    with serve(2 * LARGE) as http, connected(http) as connection:
        connection.sendall(head("GET", path) * requests)
        time.sleep(1.5)
        assert len(rest(connection)) < LARGE / 2, "only what was in the buffers"
        assert http.get("/small").content == b"small"
    assert not caplog.records


@pytest.mark.slow
def test_a_slow_reader_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FIRST_SECONDS", 1.0)
    monkeypatch.setattr(bodies, "BYTES_PER_SECOND", 4 * MIB)
    received, began = 0, time.monotonic()
    with serve(2 * LARGE) as http, connected(http) as connection:
        connection.sendall(head("GET", "/large", "Connection: close"))
        while chunk := connection.recv(MIB):
            received += len(chunk)
            time.sleep(0.05)
    assert received > LARGE
    assert time.monotonic() - began > 1.0, "it took longer than the first seconds"


def test_unread_answers_fill_no_more_than_their_share() -> None:
    with serve(4 * LARGE) as http, ExitStack() as stack:
        for _ in range(2):
            unread(http, stack, "/large", "greedy")
        busy = http.get("/large", headers={"X-Token": "greedy"})
        assert (busy.status_code, busy.headers["Retry-After"]) == (429, "1")
        assert busy.json()["error"]["code"] == "busy"
        assert http.get("/small", headers={"X-Token": "greedy"}).status_code == 200
        assert http.get("/middling", headers={"X-Token": "modest"}).status_code == 200
        assert http.get("/large", headers={"X-Token": "modest"}).status_code == 200


def test_refusals_are_delayed_by_those_the_client_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, delays = asyncio.sleep, []

    async def until_all_wait(seconds: float) -> None:
        if seconds < DELAY_SECONDS:
            return await sleep(seconds)
        delays.append(seconds)
        while len(delays) < 4:
            await sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", until_all_wait)
    with serve(5 * LARGE) as http, ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        for holder in ("greedy", "greedy", "modest"):
            unread(http, stack, "/large", holder)

        def refused(holder: str) -> int:
            return http.get("/large", headers={"X-Token": holder}).status_code

        assert list(pool.map(refused, ["greedy"] * 3 + ["modest"])) == [429] * 4
    turn = 1 / answers.REFUSALS_PER_SECOND
    assert sorted(delays) == pytest.approx([DELAY_SECONDS + number * turn for number in (1, 1, 2, 3)])


def test_answers_that_asked_for_no_room_are_cut_off() -> None:
    with serve(MIB) as http, ExitStack() as stack:
        flood = [unread(http, stack, "/large-without-room", token) for token in ("greedy", "modest")]
        assert all(len(rest(connection)) < answers.PIECE_BYTES for connection in flood)
        assert http.get("/small").content == b"small"
