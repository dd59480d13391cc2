"""The cost of monitoring: a request with and without its id, metrics and log line; a scrape of a deep queue.

Requests go into the application without a socket, so that the microseconds are those of our code alone.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from starlette.types import ASGIApp, Message, Scope
from uuid6 import uuid7

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.http.app import create_app
from ref_server.http.requests import Requests
from ref_server.http.routes.monitoring import Metrics
from ref_server.metrics.traffic import Traffic
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from tests.bench import measure
from tests.bench.clients import Template
from tests.bench.store import fill

REQUESTS = 300
REPETITIONS = 9
DEPTHS = (1_000, 100_000)
LEASE = json.dumps({"consumer": "bench", "wait_seconds": 0}).encode()
# One that does nothing, and one that queries the store.
ROUTES = {
    "GET /livez": ("GET", "/livez", b""),
    "POST /v1/batches/lease, none ready": ("POST", "/v1/batches/lease", LEASE),
}


class Asking:
    """One request, sent to an application repeatedly."""

    def __init__(self, app: ASGIApp, method: str, path: str, body: bytes) -> None:
        self._app = app
        self._body = body
        headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
        self._scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1), "server": None,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip

    async def ask(self, times: int) -> None:
        for _ in range(times):
            scope: Scope = {**self._scope, "state": {"request_id": "without"}}
            # A new task for each request, as in uvicorn.
            await asyncio.create_task(self._app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Message) -> None:
        assert message.get("status", 200) < 300


def unwatched(service: Service) -> ASGIApp:
    app = create_app(service)
    app.user_middleware = [layer for layer in app.user_middleware if layer.cls is not Requests]
    return app


def at_level(level: int, ask: Callable[[], object]) -> Callable[[], object]:
    def asking() -> None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
        ask()

    return asking


def run() -> None:
    configured = structlog.get_config()
    with TemporaryDirectory() as directory, asyncio.Runner() as runner, Path(os.devnull).open("w") as nowhere:
        structlog.configure(
            processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer()],
            logger_factory=structlog.WriteLoggerFactory(nowhere),
        )
        show_requests(Path(directory), runner)
        show_scrapes(Path(directory), runner)
    structlog.configure(**configured)


def open_service(directory: Path) -> Service:
    limits = {"max_batches": 10**6, "max_batches_per_run": 10**6, "max_mib": 10**6, "max_mib_per_run": 10**6}
    config = ServeConfig.model_validate({"no_model": True, "data_dir": directory, "queue": limits})
    return Service(NoReferenceModel(config.max_batch_tokens), open_queue(config), config)


def show_requests(directory: Path, runner: asyncio.Runner) -> None:
    service = open_service(directory / "requests")
    apps = {"without": unwatched(service), "watched": create_app(service)}
    with closing(service.queue):
        rows = [request_row(title, runner, apps, request) for title, request in ROUTES.items()]
    columns = ["request", "without", "watched", "more", "with a line in the log"]
    measure.show("Monitoring: microseconds of one request", columns, rows)


def request_row(
    title: str, runner: asyncio.Runner, apps: dict[str, ASGIApp], request: tuple[str, str, bytes]
) -> list[str]:
    asking = {name: Asking(app, *request) for name, app in apps.items()}
    ask = {name: lambda each=each: runner.run(each.ask(REQUESTS)) for name, each in asking.items()}
    sides = {
        "without": at_level(logging.INFO, ask["without"]),
        "watched": at_level(logging.INFO, ask["watched"]),
        "logged": at_level(logging.DEBUG, ask["watched"]),
    }
    seconds = measure.median_seconds(sides, REPETITIONS)
    without, watched, logged = (1e6 * seconds[name] / REQUESTS for name in sides)
    return [title, f"{without:.0f}", f"{watched:.0f}", f"{watched - without:.0f}", f"{logged:.0f}"]


def show_scrapes(directory: Path, runner: asyncio.Runner) -> None:
    body = Template(1_000).body(str(uuid7()))
    with ExitStack() as opened:
        sides: dict[str, Callable[[], object]] = {}
        for depth in DEPTHS:
            service = open_service(directory / str(depth))
            queue = opened.enter_context(closing(service.queue))
            fill(queue, depth, body)
            scraped = Metrics(service, Traffic())
            sides[f"{depth:,}"] = lambda scraped=scraped: runner.run(scraped.text())
        seconds = measure.median_seconds(sides, REPETITIONS)
    rows = [[depth, f"{1000 * taken:.1f}"] for depth, taken in seconds.items()]
    measure.show("A scrape, its durable write included", ["batches that wait", "ms"], rows)
