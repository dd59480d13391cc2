"""How a run ends before its last step: somebody asks it to stop, or it cannot go on.

Ctrl-C ends cleanly: the first asks the training loop to stop between steps, a second stops at once.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class Stopped(Exception):
    """Somebody asked this process to stop while it was waiting."""


class RunFailed(Exception):
    """The run cannot go on; the message says why and what to try. The code is not at fault."""


class StopRequest:
    """While active, SIGINT and SIGTERM set a flag instead of raising in the middle of a step."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises Stopped once a stop was asked for. For places that wait."""
        if self._event.is_set():
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
        # Straight to the descriptor: a handler may interrupt a print.
        os.write(sys.stderr.fileno(), b"\nstopping; once more stops at once\n")
