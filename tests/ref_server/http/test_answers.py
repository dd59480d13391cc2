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
    """An application behind the gate's layers. The header `X-Token` names the holder, the path says what it answers."""

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
        "/large-unasked": lambda: Response(bytes(LARGE)),
        "/stream": lambda: StreamingResponse(pieces()),
        "/small": lambda: Response(b"small"),
        "/middling": lambda: Response(bytes(100_000)),
    }
    await kinds[scope["path"]]()(scope, receive, send)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(bodies, "BYTES_PER_SECOND", 64 * MIB)


def asking(http: httpx.Client, stack: ExitStack, path: str, token: str = "") -> socket.socket:
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
@pytest.mark.parametrize("path", ["/large", "/stream"])
def test_a_reader_that_takes_nothing_is_cut_off(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with serve(2 * LARGE) as http, ExitStack() as stack:
        connection = asking(http, stack, path)
        time.sleep(1.5)
        assert len(rest(connection)) < LARGE / 2, "only what was in the pipes"
        assert http.get("/small").content == b"small"
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_short_answers_that_nobody_reads_are_cut_off() -> None:
    """Each fits the pipes, all of them do not."""
    with serve(2 * LARGE) as http, connected(http) as connection:
        connection.sendall(head("GET", "/middling") * 300)
        time.sleep(1.5)
        assert len(rest(connection)) < 300 * 100_000 / 2


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
    """Sixty slow readers of 24 MiB used to take 1.9 GiB, since uvicorn buffered each answer as a whole."""
    with serve(4 * LARGE) as http, ExitStack() as stack:
        for _ in range(2):
            asking(http, stack, "/large", "greedy")
        busy = http.get("/large", headers={"X-Token": "greedy"})
        assert (busy.status_code, busy.headers["Retry-After"]) == (429, "1")
        assert busy.json()["error"]["code"] == "busy"
        assert http.get("/small", headers={"X-Token": "greedy"}).status_code == 200
        assert http.get("/middling", headers={"X-Token": "modest"}).status_code == 200
        assert http.get("/large", headers={"X-Token": "modest"}).status_code == 200


def test_the_more_refusals_a_client_waits_for_the_longer_each_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """180 slow readers took a third of the others' rate by asking again and again."""
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
            asking(http, stack, "/large", holder)

        def refused(holder: str) -> int:
            return http.get("/large", headers={"X-Token": holder}).status_code

        assert list(pool.map(refused, ["greedy"] * 3 + ["modest"])) == [429] * 4
    turn = 1 / answers.REFUSALS_PER_SECOND
    assert sorted(delays) == pytest.approx([DELAY_SECONDS + number * turn for number in (1, 1, 2, 3)])


def test_a_flood_of_answers_of_which_each_has_room_is_cut_off() -> None:
    with serve(MIB) as http, ExitStack() as stack:
        unread = [asking(http, stack, "/large-unasked", token) for token in ("greedy", "modest")]
        assert all(len(rest(connection)) < answers.PIECE_BYTES for connection in unread)
        assert http.get("/small").content == b"small"


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_who_is_cut_off_holds_nothing_any_more() -> None:
    with serve(2 * LARGE) as http, ExitStack() as stack:
        asking(http, stack, "/large")
        assert http.get("/large").status_code == 429
        time.sleep(1.5)
        assert http.get("/large").status_code == 200
