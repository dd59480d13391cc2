"""A proxy on loopback between trainer, workers and the reference server, which records every exchange.

It supports only the part of HTTP/1.1 that our client and uvicorn use. An upload counts as acknowledged once
the server's 2xx has reached the proxy, whether or not it reaches the client.
"""

import asyncio
import json
import random
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from shared import wire
from tests.harness.history import History

_VERBS = {
    ("POST", "/v1/batches"): "upload",
    ("POST", "/v1/batches/lease"): "lease",
    ("POST", "/v1/leases/ack"): "ack",
    ("POST", "/v1/leases/extend"): "extend",
    ("POST", "/v1/leases/release"): "release",
}


@dataclass(frozen=True)
class Request:
    """headers: names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def verb(self) -> str:
        """upload, lease, ack, extend or release; "look" for everything else."""
        return _VERBS.get((self.method, self.path), "look")

    def about(self) -> list[dict[str, Any]]:
        """What the history has of it: a record for each batch that it uploads, or one with the ids that it names."""
        if self.verb == "upload":
            several = self.headers.get("content-type") == wire.UPLOADS_CONTENT_TYPE
            return [_about_batch(body) for body in (wire.decode_uploads(self.body) if several else [self.body])]
        if self.verb in ("ack", "extend", "release"):
            return [{"ids": [key["id"] for key in json.loads(self.body)["leases"]]}]
        return [{"ids": []}]

    def without_connection(self) -> bytes:
        """The head, asking the server to close after its answer, so that the answer ends where the stream ends."""
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers.items() if name != "connection"]
        return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Answer:
    """raw: as sent to the client, without `connection: close`, so that the client may keep its connection."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes

    def details(self, verb: str) -> dict[str, Any]:
        """Ids of the batches in it; for a lease also the tokens, for settled leases the outcomes."""
        if self.status not in (200, 201):
            return {"ids": []}
        if verb == "upload":
            answer = json.loads(self.body)
            results = answer.get("results", [{"uploaded": answer}])
            return {"ids": [each["uploaded"]["id"] for each in results if "uploaded" in each]}
        if verb == "lease":
            keys = [(self.headers.get("batch-id"), self.headers.get("lease-token"))]
            if self.headers.get("content-type") == wire.LEASES_CONTENT_TYPE:
                keys = [(head.id, head.token) for head, _ in wire.decode_leases(self.body)]
            return {"ids": [id for id, _ in keys], "tokens": [token for _, token in keys]}
        if verb in ("ack", "extend", "release"):
            results = json.loads(self.body)["results"]
            return {"ids": [r["id"] for r in results], "outcomes": [r["outcome"] for r in results]}
        return {"ids": []}


def _parse_answer(raw: bytes) -> Answer | None:
    """A complete answer, or None if the server ended before it was complete."""
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        return None
    first, headers = _parse_head(head)
    if len(body) < int(headers.get("content-length", "0")):
        return None
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return Answer(int(first.split(" ")[1]), headers, body, b"\r\n".join(lines) + separator + body)


def _parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return first, {name.strip().lower(): value.strip() for name, value in pairs}


_LATENCY_SECONDS = (0.02, 0.3)
# On close: nothing more is sent, and the other side sees a reset.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Fault(StrEnum):
    RESET = "reset"  # before the request reaches the server
    CUT_REQUEST = "cut request"
    LOST_ANSWER = "lost answer"  # after the server has handled the request
    CUT_ANSWER = "cut answer"
    LATENCY = "latency"


class LoopbackProxy:
    """Runs on a thread while the block runs; clients connect to `url`."""

    def __init__(self, port: int) -> None:
        """port: the server's."""
        self._port = port
        # References: asyncio would drop the task of a disconnected client before the server's answer is recorded.
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, sock=self._listener)
        self._running.set()
        await self._stop.wait()
        server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection of a client."""
        raise NotImplementedError


class _Broken(Exception):
    """The client's connection is to be reset."""


class Proxy(LoopbackProxy):
    """Records every exchange. A share of the requests fails, with all kinds of faults equally often."""

    def __init__(self, port: int, history: History, share: float, seed: int) -> None:
        super().__init__(port)
        self._history = history
        self._share = share
        self._chance = random.Random(seed)
        self._requests = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read_request(reader):
                await self._exchange(request, reader, writer)
        except _Broken:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone, or its connection was closed already
        finally:
            writer.transport.abort()

    async def _exchange(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._requests += 1
        fault = self._chance.choice(list(Fault)) if self._chance.random() < self._share else None
        known = {"verb": request.verb, "number": self._requests}
        if request.verb != "look":
            for about in request.about():
                self._history.record("request", **known, **about)
        if fault is Fault.LATENCY:
            await asyncio.sleep(self._chance.uniform(*_LATENCY_SECONDS))
        try:
            answer = await self._ask(request, fault, reader)
        except _Broken as error:
            self._history.record("unanswered", **known, why=str(error), fault=fault and fault.value)
            raise
        details = {"status": answer.status, **answer.details(request.verb)}
        self._history.record("answer", **known, **details, fault=fault and fault.value)
        if fault is Fault.LOST_ANSWER:
            raise _Broken
        if fault is Fault.CUT_ANSWER:
            writer.write(self._part(answer.raw))
            writer.close()  # in order: the client sees the end of the stream, and must notice that it came too early
            await writer.wait_closed()
            raise ConnectionAbortedError
        writer.write(answer.raw)
        await writer.drain()

    def _part(self, data: bytes) -> bytes:
        return data[: self._chance.randrange(len(data))] if data else data

    async def _ask(self, request: Request, fault: Fault | None, client: asyncio.StreamReader) -> Answer:
        """The server's answer. Raises _Broken when there is none."""
        if fault is Fault.RESET:
            raise _Broken("reset before the request reached the server")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            raise _Broken("the server is down") from None
        try:
            if fault is Fault.CUT_REQUEST:
                writer.write(request.without_connection() + self._part(request.body))
                await writer.drain()
                raise _Broken("only a part of the request reached the server")
            writer.write(request.without_connection() + request.body)
            await writer.drain()
            answer = _parse_answer(await _read_answer(reader, client, request.verb))
        except ConnectionError:
            raise _Broken("the server ended before it answered") from None
        finally:
            writer.transport.abort()
        if answer is None:
            raise _Broken("the server ended before it answered")
        return answer


def _about_batch(body: bytes) -> dict[str, Any]:
    """Its id and problem, whether it has tensors of images, and whether its sampling called tools."""
    header: dict[str, Any] = {}
    with suppress(ValueError):
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    metadata = header.get("__metadata__", {})
    sample = json.loads(metadata.get("sample", "{}"))
    return {
        "ids": [metadata.get("id", "unreadable")],
        "problem": int(metadata["index"]) if "index" in metadata else None,
        "pictures": any(name.startswith("image/") for name in header),
        "calls": bool(sample.get("rollouts", {}).get("tools")),
    }


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None when the client has closed it."""
    try:
        first, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def _read_answer(server: asyncio.StreamReader, client: asyncio.StreamReader, verb: str) -> bytes:
    """All that the server sends. A long poll ends when its client disconnects, as it would without a proxy."""
    reading = asyncio.ensure_future(server.read())
    if verb != "lease":
        return await reading
    gone = asyncio.ensure_future(client.read(1))
    await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
    for waiting in (reading, gone):
        waiting.cancel()
    outcome, _ = await asyncio.gather(reading, gone, return_exceptions=True)
    if isinstance(outcome, asyncio.CancelledError):
        raise _Broken("the client went away")
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
