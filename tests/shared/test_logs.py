"""Lines on standard error, from separate processes: loggers belong to a whole process."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.logs import CountingHandler

FORGED = "name\n2026-11-20 12:00:00 [info     ] forged\x1b[2K\r\u2028\x85\ud800"

SETUP = """
import logging, sys, threading, warnings
import structlog
from shared.logs import configure_logs, log_uncaught_errors
FORGED = %r
log = structlog.get_logger()
configure_logs(*sys.argv[1:])
log_uncaught_errors()
""" % (FORGED,)  # noqa: UP031


def logged(code: str, *arguments: str, status: int = 0) -> list[str]:
    """The lines that a program leaves on standard error."""
    process = subprocess.run(
        [sys.executable, "-c", SETUP + code, *arguments], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == status, process.stderr
    assert process.stdout == ""
    return process.stderr.splitlines()


def logged_json(code: str, *, level: str = "info", status: int = 0) -> list[dict]:
    return [json.loads(line) for line in logged(code, "json", level, status=status)]


def test_an_event_for_people() -> None:
    (line,) = logged("log.info('serving', url='http://127.0.0.1', batches=3)")
    assert line[4] == "-"
    assert "[info     ] serving" in line
    assert line.endswith("batches=3 url=http://127.0.0.1")


def test_an_event_for_machines() -> None:
    (event,) = logged_json("log.info('serving', batches=3, store=None, odd={1})")
    assert list(event)[:3] == ["timestamp", "level", "event"]
    assert event.pop("timestamp").endswith("Z")
    assert event == {"level": "info", "event": "serving", "batches": 3, "store": None, "odd": "{1}"}


def test_the_level_is_that_of_our_own_events() -> None:
    code = """
for tell in (log, logging.getLogger("some.library")):
    tell.debug("d")
    tell.info("i")
    tell.warning("w")
"""
    noted = [(event.get("logger"), event["level"]) for event in logged_json(code)]
    assert noted == [(None, "info"), (None, "warning"), ("some.library", "warning")]
    noted = [(event.get("logger"), event["level"]) for event in logged_json(code, level="debug")]
    assert noted == [(None, "debug"), (None, "info"), (None, "warning"), ("some.library", "warning")]
    assert [event["level"] for event in logged_json(code, level="error")] == ["warning"]


@pytest.mark.parametrize("format", ["console", "json"])
def test_nobody_forges_a_line(format: str) -> None:
    lines = logged(
        """
log.info("noted", run=FORGED)
log.info(FORGED)
logging.getLogger("uvicorn.error").warning("noted by %s", FORGED)
log.info("noted", runs=[FORGED], error=repr(ValueError(FORGED)))
""",
        format,
    )
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    if format == "json":
        assert json.loads(lines[0])["run"] == FORGED


RAISE = """
try:
    raise ValueError(FORGED)
except ValueError:
    log.exception("noted")
"""


def test_a_traceback_for_people_forges_no_line() -> None:
    head, *lines = logged(RAISE)
    assert "[error    ] noted" in head
    assert lines[0].strip() == "Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in lines if line)
    assert "forged" in lines[-1]


@pytest.mark.parametrize(
    ("code", "level", "status"),
    [
        (RAISE, "error", 0),
        ("raise ValueError(FORGED)", "critical", 1),
        ("thread = threading.Thread(target=lambda: int(FORGED)); thread.start(); thread.join()", "critical", 0),
        ("logging.getLogger('asyncio').error('noted', exc_info=ValueError(FORGED))", "error", 0),
    ],
)
def test_a_traceback_is_one_object(code: str, level: str, status: int) -> None:
    (event,) = logged_json(code, status=status)
    assert event["level"] == level
    assert event["exception"].startswith("Traceback") or "asyncio" in event["logger"]
    assert "ValueError" in event["exception"]
    assert "forged" in event["exception"]


def test_warnings_are_events() -> None:
    (event,) = logged_json("warnings.warn('old')")
    assert (event["level"], event["logger"]) == ("warning", "py.warnings")
    assert "UserWarning: old" in event["event"]


@pytest.mark.slow
def test_libraries_that_print_by_themselves_no_longer_do() -> None:
    code = """
from contextlib import suppress
from shared.models import load_tokenizer
from shared.errors import UserError
with suppress(UserError):
    load_tokenizer("/nowhere")
for name in ("transformers.some.model", "huggingface_hub.file_download"):
    logging.getLogger(name).warning(FORGED)
"""
    events = logged_json(code)
    assert [(event["logger"], event["event"]) for event in events] == [
        ("transformers.some.model", FORGED),
        ("huggingface_hub.file_download", FORGED),
    ]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def noted(clock: Clock) -> Iterator[list[str]]:
    """The lines of the logger `noted` that get through."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(str(record.msg) if isinstance(record.msg, dict) else record.getMessage())

    logger, handler = logging.getLogger("noted"), CountingHandler(Kept(), clock)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_a_line_that_repeats_is_counted(noted: list[str], clock: Clock) -> None:
    """A server at its limit of open files wrote the same line 88,000 times a second."""
    logger = logging.getLogger("noted")
    for _ in range(1000):
        logger.error("accept: %s", "no more files")
    logger.error("another")
    assert noted == ["accept: no more files"] * 3 + ["another"]
    clock.now = 11
    logger.error("accept: %s", "no more files")
    assert noted[4:] == ["accept: no more files (repeated 997 times)", "accept: no more files"]


def test_only_the_same_line_is_counted(noted: list[str]) -> None:
    logger = logging.getLogger("noted")
    for number in range(10):
        logger.info({"event": "step", "step": number})
        logger.debug("every request")
    assert len(noted) == 20
    for number in range(10):
        logger.info({"event": "request", "status": 401, "ms": number, "request_id": str(number), "bytes_in": number})
    assert len(noted) == 23
    for _ in range(5):
        for other in (logger, logging.getLogger("noted.below")):
            other.warning("again")
            other.error("again")
    assert len(noted) == 23 + 12, "other levels and loggers are other lines"


def test_lines_without_number_take_no_memory_without_bound(noted: list[str]) -> None:
    logger = logging.getLogger("noted")
    for _ in range(2):
        for number in range(5000):
            logger.warning("line %d", number)
    assert len(noted) == 10_000


def test_a_process_that_ends_tells_what_it_counted() -> None:
    events = logged_json("for number in range(10): log.warning('again', request_id=str(number))")
    assert [event.get("repeated") for event in events] == [None, None, None, 7]
    assert events[-1]["event"] == "again"
