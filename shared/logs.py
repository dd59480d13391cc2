"""Logs on standard error, one event a line: for people, or as JSON for machines.

Libraries' logs and Python's warnings take the same form. Logged text cannot forge a line of its own: the console format
escapes control characters and indents tracebacks, and JSON escapes them anyway.
"""

import logging
import sys
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Literal

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import Processor

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_Event = MutableMapping[str, Any]
# Fields that are already rendered, as several lines.
_TEXTS = ("exception", "stack")
_OURS = "tandem"

log = structlog.get_logger()


def configure_logs(format: LogFormat = "console", level: LogLevel = "info") -> None:
    """Every process calls this once, at start. level: of our own events; libraries log from warnings on."""
    ours = logging.getLogger(_OURS)
    ours.setLevel(level.upper())
    before: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    structlog.configure(
        processors=[*before, structlog.processors.format_exc_info, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(ours.level),
        logger_factory=lambda *_: ours,
    )
    foreign = [*before, structlog.stdlib.add_logger_name, structlog.processors.format_exc_info]
    handler = _Handler(sys.stderr)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=foreign, processors=[ProcessorFormatter.remove_processors_meta, *_FORMATS[format]()]
        )
    )
    root = logging.getLogger()
    root.handlers = [known for known in root.handlers if not isinstance(known, _Handler)] + [handler]
    logging.captureWarnings(True)


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


class _Handler(logging.StreamHandler):
    """A class of our own, so that a second call replaces our handler and leaves others alone."""


def _for_people() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        _escape,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
    ]


def _for_machines() -> list[Processor]:
    return [structlog.processors.TimeStamper(fmt="iso", utc=True), _in_order, structlog.processors.JSONRenderer()]


_FORMATS: dict[LogFormat, Callable[[], list[Processor]]] = {"console": _for_people, "json": _for_machines}


def _escape(_logger: object, _method: str, event: _Event) -> _Event:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = _indented(value) if key in _TEXTS else _printable(value)
    return event


def _indented(text: str) -> str:
    return "\n".join("    " + _printable(line) for line in text.split("\n"))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _in_order(_logger: object, _method: str, event: _Event) -> _Event:
    head = {key: event.pop(key) for key in ("timestamp", "level", "event")}
    return {**head, **event}
