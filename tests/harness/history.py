"""The events of a test in order, from which it is judged when it has ended."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# kind: what happened. at: seconds since the history began. Everything else depends on the kind.
Event = dict[str, Any]


class History:
    """Append-only. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._events: list[Event] = []
        self._began = time.monotonic()
        self._news = threading.Condition()

    def record(self, kind: str, **fields: Any) -> None:
        with self._news:
            event = {"kind": kind, "at": round(time.monotonic() - self._began, 4), **fields}
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()
            self._events.append(event)
            self._news.notify_all()

    def events(self) -> list[Event]:
        with self._news:
            return list(self._events)

    def mark(self) -> int:
        """The current position, for `wait_for`."""
        with self._news:
            return len(self._events)

    def wait_for(self, matches: Callable[[Event], bool], *, since: int, seconds: float) -> Event | None:
        """The first event after the mark `since` that matches; None when none came within `seconds`."""
        deadline = time.monotonic() + seconds
        seen = since
        with self._news:
            while True:
                for event in self._events[seen:]:
                    if matches(event):
                        return event
                seen = len(self._events)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._news.wait(remaining)

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
