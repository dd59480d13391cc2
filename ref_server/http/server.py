"""The uvicorn server that runs the application of `app.py`: its connections, its signals, and its end.

No other file relies on parts of uvicorn and h11 that they do not document: `H11Protocol` with its constructor's
arguments, its `transport` and `app_state`, and its method `send_400_response`, during which h11's error is the current
exception. Of `uvicorn.Server` the methods `run`, `startup`, `handle_exit` and `on_tick` are overridden. These are why
pyproject.toml has upper bounds for uvicorn and h11.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from http import HTTPStatus
from types import FrameType
from typing import Any
from uuid import uuid4

import structlog
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ref_server.config import ServeConfig
from ref_server.http.guard import MAX_HEADER_BYTES, MAX_URL_BYTES
from ref_server.http.renewal import is_renewable, renew
from ref_server.service.service import Service
from shared.api import Error, ErrorDetail

log = structlog.get_logger()

# From a connection's opening, or from a later request's first byte, to the end of that request's head.
HEAD_SECONDS = 10.0
# What is left in the buffers when an answer has ended may take this long.
LAST_SECONDS = 10.0


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with two more deadlines, for a request's head and for an end that nobody reads, and with
    errors in our JSON form. The state of each request has `abort`, which closes the connection at once.
    """

    def __init__(self, *arguments: Any, app_state: dict[str, Any], **named: Any) -> None:
        super().__init__(*arguments, app_state={**app_state, "connection": self, "abort": self._abort}, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._requests = 0
        self._in_request = self._answering = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self.app_state = {}  # it holds this connection, which would wait for the garbage collector
        super().connection_lost(None)  # uvicorn stops its timer of idle connections only where there was no error

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is None and not self._in_request:
            self._wait_for_head()

    def begin_request(self) -> None:
        """A request's head was read, and the application is called."""
        self._end_wait()
        self._requests += 1
        self._in_request, self._answering = True, False

    def note_answer(self, message: Message) -> None:
        """A message of the answer was written, or is in the transport's buffer."""
        self._answering = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._in_request = self._answering = False
            self._cut_off_late()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not HTTP, or whose head is too long. h11's current error says which."""
        if not self._answering:
            hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
            status, what = (431, "the head is too long") if hint == 431 else (400, "this is not HTTP/1.1")
            detail = ErrorDetail(code="invalid_request", message=what, request_id=uuid4().hex)
            body = Error(error=detail).model_dump_json(exclude_none=True)
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Connection: close",
                "",
                body,
            ]
            self.transport.write("\r\n".join(lines).encode())
        self.transport.close()
        self._cut_off_late()

    def _abort(self) -> None:
        self.transport.abort()

    def _wait_for_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._abort)

    def _end_wait(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cut_off_late(self) -> None:
        """Unless the client reads what is left, or sends another request meanwhile, its connection is closed."""
        if self._unread():
            asyncio.get_running_loop().call_later(LAST_SECONDS, self._cut_off, self._requests)

    def _cut_off(self, requests: int) -> None:
        if requests == self._requests and self._unread():
            self._abort()

    def _unread(self) -> bool:
        return self.transport.is_closing() or self.transport.get_write_buffer_size() > 0


class Loop(asyncio.SelectorEventLoop):
    """Ends TLS handshakes as early as heads of requests. uvloop would not call `Listener.accept`."""

    async def create_server(self, *arguments: Any, ssl: Any = None, **settings: Any) -> asyncio.Server:
        patience = HEAD_SECONDS if ssl else None
        return await super().create_server(*arguments, ssl=ssl, ssl_handshake_timeout=patience, **settings)


def uvicorn_config(app: ASGIApp, config: ServeConfig, **changes: Any) -> uvicorn.Config:
    """changes: other arguments of uvicorn.Config; they override those set here."""

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: Connection = scope["state"].pop("connection")

        async def noted(message: Message) -> None:
            await send(message)
            connection.note_answer(message)

        connection.begin_request()
        await app(scope, receive, noted)

    settings = {
        "host": config.host,
        "port": config.port,
        "http": Connection,
        "loop": f"{Loop.__module__}:{Loop.__name__}",
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


class DrainingServer(uvicorn.Server):
    """Drains on a signal, or when the scoring loop ends; then stops.

    While it drains it still listens: trainers can settle their leases, and uploads are answered with 503. uvicorn would
    stop listening at once. It stops when the batches being scored are saved, or after drain_seconds at the
    latest. A second signal ends the process at once: what was acknowledged is on disk, and the next start queues the
    claimed batches again. SIGHUP only reads tokens and certificates again.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = service.config.drain_seconds
        self._signal = 0
        self._deadline: float | None = None

    @property
    def status(self) -> int:
        """The exit status of the process, once `run` has returned."""
        return 0 if self.started and not self._service.scoring.failed else 1

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        if self._signal == signal.SIGINT:
            signal.raise_signal(signal.SIGINT)  # so that the shell sees Ctrl-C, too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process was faster to listen there, while the model was loaded
            log.error("cannot listen on the address", error=str(error))
            await self.lifespan.shutdown()
            sys.exit(1)
        if is_renewable(self._service.config):  # else SIGHUP ends the server, as when its terminal is closed
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, renew, self._service.config, self.config.ssl)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        log.info("serving", url=f"{'https' if self.config.is_ssl else 'http'}://{host}:{self.config.port}")
        if self._service.config.legacy_port is not None:
            log.info("serving Simple-GRPO's clients", port=self._service.config.legacy_port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only sets a flag: a signal handler must not wait for a lock that the interrupted thread may hold."""
        if self._signal:
            os._exit(128 + sig)
        self._signal = sig

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        scoring = self._service.scoring
        if self._deadline is None and (self._signal or not self._service.scores):
            self._begin_to_drain()
        if self._deadline is None:
            return await super().on_tick(counter)
        left = self._deadline - time.monotonic()
        if scoring.alive and left > 0:
            return False
        # Half of the time left is for open requests, the rest for closing the store.
        self.config.timeout_graceful_shutdown = max(0.0, left / 2)  # type: ignore[assignment]
        return True

    def _begin_to_drain(self) -> None:
        log.info("draining", seconds=self._drain_seconds)
        self._deadline = time.monotonic() + self._drain_seconds
        threading.Thread(target=self._end_late, name="drain-deadline", daemon=True).start()
        self._service.drain()

    def _end_late(self) -> None:
        """Ends the process at the deadline, even if a forward, a thread or the interpreter's shutdown hangs."""
        time.sleep(self._drain_seconds)
        if self._service.closed:
            os._exit(self.status)
        log.error(
            "the work could not be finished in time; the next start resumes it",
            drain_seconds=self._drain_seconds,
        )
        os._exit(1)
