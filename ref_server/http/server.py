"""The uvicorn server that runs the application of `app.py`: its connections, its signals, and its end.

No other file relies on parts of uvicorn that it does not document, which is why pyproject.toml has upper bounds for
uvicorn and h11. They are: `H11Protocol` is an asyncio protocol that may be extended; it has `transport` and `conn`,
h11's connection; it calls `send_400_response` while h11's error is the current exception. `uvicorn.Server.serve` sets
its signal handlers before it waits for anything; the server has `started` and `should_exit`, and reads the setting
`timeout_graceful_shutdown` when it ends.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import h11
import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ref_server.config import ServeConfig
from ref_server.http.errors import HttpError
from ref_server.http.guard import MAX_HEADER_BYTES, MAX_URL_BYTES
from ref_server.http.listening import Listener
from ref_server.http.renewal import is_renewable, renew
from ref_server.service.service import Service

log = structlog.get_logger()

# From a connection's opening, or from a later request's first byte, to the end of that request's head.
HEAD_SECONDS = 10.0
# What is left in the buffers when an answer has ended may take this long.
LAST_SECONDS = 10.0
_TICK_SECONDS = 0.1

# Whose data is being received. The task of a request inherits it.
_connection: "ContextVar[Connection]" = ContextVar("connection")


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with two more deadlines, for a request's head and for an end that nobody reads, and with
    errors in our JSON form.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.abort = transport.abort
        self._begun = self._ended = 0  # requests
        self._head_timer: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(None)  # uvicorn stops its timer of idle connections only where there was no error

    def data_received(self, data: bytes) -> None:
        _connection.set(self)
        super().data_received(data)
        if self._head_timer is None and self._begun == self._ended:
            self._wait_for_head()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around the application's work on a request, whose head was read."""
        self._end_wait()
        self._begun += 1
        try:
            yield
        finally:
            self._ended += 1
            self._cut_off_late()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, or whose head is too long, unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_rejection(getattr(sys.exc_info()[1], "error_status_hint", 400)))
        self.transport.close()
        self._cut_off_late()

    def _wait_for_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.abort)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cut_off_late(self) -> None:
        """Unless the client reads what is left, or sends another request meanwhile, its connection is closed."""
        if self._unread():
            asyncio.get_running_loop().call_later(LAST_SECONDS, self._cut_off, self._begun)

    def _cut_off(self, begun: int) -> None:
        if begun == self._begun and self._unread():
            self.abort()

    def _unread(self) -> bool:
        return self.transport.is_closing() or self.transport.get_write_buffer_size() > 0


def _rejection(hint: int) -> bytes:
    """The whole answer to what h11 does not accept. hint: h11's, of the status."""
    status, message = (431, "the head is too long") if hint == 431 else (400, "this is not HTTP/1.1")
    error = HttpError(status, "invalid_request", message, headers={"Connection": "close"})
    answer = error.answer({"state": {"request_id": uuid4().hex}})
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])


class Loop(asyncio.SelectorEventLoop):
    """Bounds the time that TLS takes to begin and to end. uvloop would not call `Listener.accept`."""

    async def create_server(self, *arguments: Any, ssl: Any = None, **settings: Any) -> asyncio.Server:
        if ssl:
            settings |= {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": LAST_SECONDS}
        return await super().create_server(*arguments, ssl=ssl, **settings)


def uvicorn_config(app: ASGIApp, config: ServeConfig, **changes: Any) -> uvicorn.Config:
    """The state of each request gets `abort`, which closes the connection at once.

    changes: other arguments of uvicorn.Config; they override those set here.
    """

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection = _connection.get()
        scope["state"]["abort"] = connection.abort
        with connection.request():
            await app(scope, receive, send)

    settings = {
        "host": config.host,
        "port": config.port,
        "http": Connection,
        "ws": "none",
        "ssl_certfile": config.tls_cert,
        "ssl_keyfile": config.tls_key,
        "h11_max_incomplete_event_size": MAX_URL_BYTES + MAX_HEADER_BYTES,
        "log_config": None,  # uvicorn logs to our handlers
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,  # anybody can write these headers
        "timeout_graceful_shutdown": 10,
        "timeout_keep_alive": 60,  # longer than clients keep a connection, so that no connection closes under a request
    }
    return uvicorn.Config(timed, **(settings | changes))  # type: ignore[arg-type]


def run(app: ASGIApp, service: Service, listeners: Sequence[Listener]) -> int:
    """Serves until a signal, or until the scoring loop ends; then drains. Returns the exit status of the process.

    While it drains it still listens: trainers can settle their leases, and uploads are answered with 503. uvicorn would
    stop listening at once. It stops when the batches being scored are saved, or after drain_seconds at the
    latest. A second signal ends the process at once: what was acknowledged is on disk, and the next start queues the
    claimed batches again. SIGHUP only reads tokens and certificates again.

    Raises CannotListen if another process was faster to listen there, while the model was loaded.
    """
    for listener in listeners:
        listener.listen()
    server = uvicorn.Server(uvicorn_config(app, service.config))
    signals: list[int] = []
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(_serve(server, service, listeners, signals))
    if signal.SIGINT in signals:
        signal.raise_signal(signal.SIGINT)  # so that the shell sees Ctrl-C, too
    return int(not server.started or service.scoring.failed)


async def _serve(server: uvicorn.Server, service: Service, listeners: Sequence[Listener], signals: list[int]) -> None:
    """signals: gets those that arrive."""
    serving = asyncio.create_task(server.serve([*listeners]))
    await asyncio.sleep(0)  # now uvicorn has set its signal handlers; it restores the earlier ones when it ends
    _note_signals(signals)
    while not server.started:
        if serving.done():
            return serving.result()  # raises why it cannot start
        await asyncio.sleep(_TICK_SECONDS / 10)
    if is_renewable(service.config):  # else SIGHUP ends the server, as when its terminal is closed
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, renew, service.config, server.config.ssl)
    _log_addresses(service.config)
    while service.scores and not (signals or serving.done()):
        await asyncio.sleep(_TICK_SECONDS)
    deadline = _begin_to_drain(service)
    while service.scoring.alive and time.monotonic() < deadline:
        await asyncio.sleep(_TICK_SECONDS)
    # Half of the time left is for open requests, the rest for closing the store.
    left = max(0.0, deadline - time.monotonic())
    server.config.timeout_graceful_shutdown = left / 2  # type: ignore[assignment]
    server.should_exit = True
    await serving


def _note_signals(signals: list[int]) -> None:
    def note(number: int, _: object) -> None:
        """Only notes it: a signal handler must not wait for a lock that the interrupted thread may hold."""
        if signals:
            os._exit(128 + number)
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)


def _log_addresses(config: ServeConfig) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    log.info("serving", url=f"{'http' if config.tls_cert is None else 'https'}://{host}:{config.port}")
    if config.legacy_port is not None:
        log.info("serving Simple-GRPO's clients", port=config.legacy_port)


def _begin_to_drain(service: Service) -> float:
    """The deadline. The process ends then, even if a forward, a thread or the interpreter's shutdown hangs."""
    seconds = service.config.drain_seconds

    def end_late() -> None:
        time.sleep(seconds)
        if service.closed:
            os._exit(int(service.scoring.failed))
        log.error("the work could not be finished in time; the next start resumes it", drain_seconds=seconds)
        os._exit(1)

    log.info("draining", seconds=seconds)
    deadline = time.monotonic() + seconds
    threading.Thread(target=end_late, name="drain-deadline", daemon=True).start()
    service.drain()
    return deadline
