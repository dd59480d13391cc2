"""Logs on standard error, one event a line: for people, or as JSON for machines.

Libraries' logs and Python's warnings take the same form. Logged text cannot forge another line: the console format
escapes control characters and indents tracebacks, and JSON escapes them anyway. A line that repeats is counted.
"""

import copy
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, MutableMapping
from contextlib import nullcontext
from typing import Any, Literal

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import Processor

from shared.errors import printable

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_Event = MutableMapping[str, Any]
# Fields that are already rendered, as several lines.
_TEXTS = ("exception", "stack")
_OURS = "tandem"
# A line is written at most _REPEATS times in this many seconds; further repetitions are written as a count.
_REPEATS = 3
_WINDOW_SECONDS = 10.0
# The most lines to remember; beyond that all windows end.
_MAX_LINES = 1000
# Fields that may differ between repetitions of a line.
_VARYING = ("request_id", "ms", "bytes_in")

log = structlog.get_logger()


def configure_logs(format: LogFormat = "console", level: LogLevel = "info") -> None:
    """Every process calls this once, at start. level: of our events; libraries log warnings and worse."""
    ours = logging.getLogger(_OURS)
    ours.setLevel(level.upper())
    before: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    structlog.configure(
        processors=[*before, structlog.processors.format_exc_info, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(ours.level),
        logger_factory=lambda *_: ours,
    )
    stamp = structlog.processors.TimeStamper
    rendered: list[Processor] = [stamp(fmt="iso", utc=True), _in_order, structlog.processors.JSONRenderer()]
    if format == "console":
        people = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        rendered = [stamp(fmt="%Y-%m-%d %H:%M:%S", utc=False), _escape, people]
    foreign = [*before, structlog.stdlib.add_logger_name, structlog.processors.format_exc_info]
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(
        ProcessorFormatter(foreign_pre_chain=foreign, processors=[ProcessorFormatter.remove_processors_meta, *rendered])
    )
    root = logging.getLogger()
    others = [known for known in root.handlers if not isinstance(known, CountingHandler)]
    root.handlers = [*others, CountingHandler(lines)]
    logging.captureWarnings(True)
    # On processors with AVX512-BF16 its import warns of a package that it can do without, in each process of a run.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def log_uncaught_errors() -> None:
    """Logs an error that ends the process or a thread like any other event. Call it after `configure_logs`."""

    def end_process(*error: Any) -> None:
        if issubclass(error[0], KeyboardInterrupt):
            sys.__excepthook__(*error)
        else:
            log.critical("the process ends with an error", exc_info=error)

    def end_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else None
        log.critical("a thread ends with an error", thread=name, exc_info=args[:3])

    sys.excepthook = end_process
    threading.excepthook = end_thread


class CountingHandler(logging.Handler):
    """Passes lines on to another handler, but counts those that repeat, so that no client can fill the disk.

    After its window, or at the end, the last repetition of a counted line is passed on with the count. Below level info
    every line is passed on.
    """

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        # By line: end of its window, repetitions, and the last record that was only counted. The oldest line is first.
        self._seen: dict[Hashable, tuple[float, int, logging.LogRecord | None]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._write_counts(now if len(self._seen) < _MAX_LINES else math.inf)
        if record.levelno < logging.INFO:
            self._handler.handle(record)
            return
        line = (record.name, record.levelno, _constant(record))
        end, times, _ = self._seen.get(line, (now + _WINDOW_SECONDS, 0, None))
        counted = times >= _REPEATS
        self._seen[line] = (end, times + 1, record if counted else None)
        if not counted:
            self._handler.handle(record)

    def flush(self) -> None:
        with self.lock or nullcontext():
            self._write_counts(math.inf)
        self._handler.flush()

    def _write_counts(self, now: float) -> None:
        """Passes on the counted lines whose window ended before `now`."""
        over = list(itertools.takewhile(lambda line: self._seen[line][0] <= now, self._seen))
        for line in over:
            _, times, last = self._seen.pop(line)
            if last is not None:
                self._handler.handle(_with_count(last, times - _REPEATS))


def _constant(record: logging.LogRecord) -> str:
    if isinstance(record.msg, dict):
        return repr({name: value for name, value in record.msg.items() if name not in _VARYING})
    return record.getMessage()


def _with_count(record: logging.LogRecord, times: int) -> logging.LogRecord:
    counted = copy.copy(record)
    if isinstance(record.msg, dict):
        counted.msg = {**record.msg, "repeated": times}
    else:
        counted.msg, counted.args = f"{record.getMessage()} (repeated {times} times)", ()
    return counted


def _escape(_logger: object, _method: str, event: _Event) -> _Event:
    for key, value in event.items():
        if isinstance(value, str):
            indented = "\n".join(f"    {printable(line)}" for line in value.split("\n"))
            event[key] = indented if key in _TEXTS else printable(value)
    return event


def _in_order(_logger: object, _method: str, event: _Event) -> _Event:
    head = {key: event.pop(key) for key in ("timestamp", "level", "event")}
    return {**head, **event}
