"""The uvicorn server that runs the application of `app.py`: its ports, its signals, and its end."""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import structlog
import uvicorn

from ref_server.http.renewal import is_renewable, renew
from ref_server.service.service import Service

log = structlog.get_logger()


class DrainingServer(uvicorn.Server):
    """Drains on a signal, or when the scoring loop ends; then stops.

    While it drains it still listens: trainers can settle their leases, and uploads are answered with 503. uvicorn alone
    would stop listening at once. It stops when the batches being scored are saved, or after drain_seconds at the
    latest. A second signal ends the process at once: what was acknowledged is on disk, and the next start queues the
    claimed batches again. SIGHUP only reads tokens and certificates again.
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
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)  # raised again at the end, so that the shell sees Ctrl-C, too

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        scoring = self._service.scoring
        if self._deadline is None and (self._signalled or not self._service.scores):
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
