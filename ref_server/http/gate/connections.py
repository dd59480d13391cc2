"""HTTP connections with deadlines for idle clients, and errors in our JSON form."""

import asyncio
import sys
from uuid import uuid4

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from shared.api import Error, ErrorDetail

# From a connection's first byte, or its opening, to the end of the request's head.
HEAD_SECONDS = 10.0
# What is left of an answer when its connection is to be closed may take this long.
LAST_SECONDS = 10.0
# Bytes that may arrive behind a complete request before it is answered.
MAX_AHEAD_BYTES = 256 * 1024


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with two more deadlines: for a request's head, and for an end that nobody reads."""

    _head_timer: asyncio.TimerHandle | None = None
    _bytes_ahead = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}  # each request's state is a copy of it
        self._wait_for_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting_for_a_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if before is not None and not before.response_complete and not before.more_body:
            self._bytes_ahead += len(data)
            if self._bytes_ahead > MAX_AHEAD_BYTES:
                self.transport.abort()
                return
        super().data_received(data)
        if self.cycle is not before:
            self._bytes_ahead = 0
            self._stop_waiting_for_a_head()
        elif self._head_timer is None and (before is None or before.response_complete):
            self._wait_for_a_head()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is not HTTP, or whose head is too long. h11's current error tells which."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer was begun already
            self.transport.close()
            return
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        status, what = (431, "the head is too long") if hint == 431 else (400, "this is not HTTP/1.1")
        detail = ErrorDetail(code="invalid_request", message=what, request_id=uuid4().hex)
        body = Error(error=detail).model_dump_json(exclude_none=True).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # else it would wait for a client that does not read
            self.timeout_keep_alive_task = self.loop.call_later(LAST_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _wait_for_a_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting_for_a_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
