"""The uvicorn server that runs the application: it drains on a signal, then ends the process."""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Any

import structlog
import uvicorn

from ref_server.service.service import Service

log = structlog.get_logger()


class DrainingServer(uvicorn.Server):
    """Says when it serves. A signal drains it, and so does the end of the scoring loop.

    While it drains it still listens, so that trainers can settle their leases and those who bring work hear that they
    are to come again; uvicorn alone would close its door at once. It ends when what was being scored is saved, or after
    drain_seconds with whatever is not. A second signal ends the process where it stands: what was acknowledged is on
    disk, and the next start takes back what was claimed.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = service.config.drain_seconds
        self._signalled = False
        self._deadline: float | None = None

    @property
    def status(self) -> int:
        """The exit status of the process, once `run` has returned."""
        return 0 if self.started and not self._service.scoring.failed else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._service.config.legacy_port is not None:
            await self._listen_also(self._service.config.legacy_port)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        log.info("serving", url=f"{'https' if self.config.is_ssl else 'http'}://{host}:{self.config.port}")

    async def _listen_also(self, port: int) -> None:
        """Serves the same application on another port. Ends the process where that one is taken, as uvicorn does."""
        make: Any = self.config.http_protocol_class
        protocol = partial(make, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        try:
            listening = await asyncio.get_running_loop().create_server(
                protocol, host=self.config.host, port=port, ssl=self.config.ssl, backlog=self.config.backlog
            )
        except OSError as error:
            log.error("the legacy port cannot be listened on", error=str(error))
            await self.lifespan.shutdown()
            sys.exit(1)
        self.servers.append(listening)
        log.info("serving Simple-GRPO's clients", port=port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Sets a flag and no more: whatever lock the event loop's thread holds, a handler must not want it."""
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)  # raised again at the end: whoever pressed Ctrl-C stops, too

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        scoring = self._service.scoring
        if self._deadline is None and (self._signalled or not scoring.alive):
            self._begin_to_drain()
        if self._deadline is None:
            return await super().on_tick(counter)
        left = self._deadline - time.monotonic()
        if scoring.alive and left > 0:
            return False
        # Half of what is left is for requests that are still answered, the rest for closing the store.
        self.config.timeout_graceful_shutdown = max(0.0, left / 2)  # type: ignore[assignment]
        return True

    def _begin_to_drain(self) -> None:
        log.info("draining", seconds=self._drain_seconds)
        self._deadline = time.monotonic() + self._drain_seconds
        threading.Thread(target=self._end_late, name="drain-deadline", daemon=True).start()
        self._service.drain()

    def _end_late(self) -> None:
        """Ends the process at the deadline, whatever hangs: a forward, a thread, the interpreter's own end."""
        time.sleep(self._drain_seconds)
        if self._service.closed:
            os._exit(self.status)
        log.error(
            "what was in hand could not be finished in time; the next start takes it up again",
            drain_seconds=self._drain_seconds,
        )
        os._exit(1)
