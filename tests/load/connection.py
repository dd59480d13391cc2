"""A client that uses little CPU time, which the server needs: requests are bytes made beforehand."""

import asyncio
import json
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from shared import wire

_KEPT = 200_000
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """head: everything before the body."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str:
        """A header's value. Raises KeyError."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode().lower() == name:
                return value.strip().decode()
        raise KeyError(name)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Tally:
    """Counts of answers by kind of request and result, and the seconds of the latest ones by kind."""

    answers: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, deque[float]] = field(default_factory=dict)

    def note(self, what: str, how: object, seconds: float) -> None:
        self.answers[f"{what} {how}"] += 1
        self.seconds.setdefault(what, deque(maxlen=_KEPT)).append(seconds)

    def count(self, what: str, how: object) -> int:
        return self.answers[f"{what} {how}"]


class Connection(asyncio.Protocol):
    """One persistent connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[Answer] | None = None
        self.closed = False

    @classmethod
    async def open(cls, port: int) -> "Connection":
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        """A future of the answer; a ConnectionError when the server closes instead."""
        assert self._transport is not None
        assert self._answer is None, "one request at a time"
        self._answer = asyncio.get_running_loop().create_future()
        if self.closed:
            self._answer.set_exception(ConnectionError("closed"))
            return self._answer
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"closed by the server: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_END_OF_HEAD)
        if end < 0:
            return
        head = bytes(self._received[:end])
        size = end + len(_END_OF_HEAD) + _content_length(head)
        if len(self._received) < size or self._answer is None or self._answer.done():
            return
        answer = Answer(int(head[9:12]), head, bytes(self._received[end + len(_END_OF_HEAD) : size]))
        del self._received[:size]
        self.closed = b"\r\nconnection: close" in head.lower()
        waiting, self._answer = self._answer, None
        waiting.set_result(answer)


class Client:
    """A connection that is opened again after it was closed, and a tally of its answers."""

    def __init__(self, port: int, tally: Tally) -> None:
        self.port = port
        self.tally = tally
        self._connection: Connection | None = None

    async def ask(self, what: str, request: bytes) -> Answer | None:
        """None when there was no answer: the tally says why."""
        began = time.perf_counter()
        try:
            if self._connection is None or self._connection.closed:
                self._connection = await Connection.open(self.port)
            answer = await self._connection.ask(request)
        except OSError as error:  # a ConnectionError is one
            self._connection = None
            self.tally.note(what, type(error).__name__, time.perf_counter() - began)
            await asyncio.sleep(0.1)
            return None
        self.tally.note(what, answer.status, time.perf_counter() - began)
        return answer

    def close(self) -> None:
        """Aborts the connection."""
        if self._connection is not None:
            self._connection.close()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def post(path: str, body: bytes, content_type: str) -> bytes:
    return head("POST", path, len(body), content_type) + body


def post_json(path: str, body: Any) -> bytes:
    return post(path, json.dumps(body).encode(), "application/json")


def head(method: str, path: str, length: int, content_type: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {content_type}")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


class Uploads:
    """Upload requests of one body, each with an id of its own."""

    def __init__(self, body: bytes, id: str) -> None:
        request = post("/v1/batches", body, wire.CONTENT_TYPE)
        before, _, after = request.partition(id.encode())
        self._before = before + id[:24].encode()  # the UUID without its last twelve digits
        self._after = after
        self._number = 0

    def next(self) -> bytes:
        self._number += 1
        return b"%b%012x%b" % (self._before, self._number, self._after)


def _content_length(head: bytes) -> int:
    lower = head.lower()
    assert b"transfer-encoding" not in lower
    _, name, rest = lower.partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if name else 0
