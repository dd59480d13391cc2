"""The ASGI application: routes and middleware around a `Service`. `server.py` runs it in uvicorn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from ref_server import dashboard
from ref_server.http.answers import Answers
from ref_server.http.bodies import BodyThreads
from ref_server.http.errors import add_error_handlers
from ref_server.http.guard import Guard, RouteTable
from ref_server.http.load_shedder import LoadShedder, ShedUploads
from ref_server.http.requests import Requests
from ref_server.http.routes import (
    batches,
    completions,
    documents,
    events,
    leases,
    monitoring,
    runs,
    scoring,
    tinker,
    weights,
)
from ref_server.http.routes.events import Watchers
from ref_server.http.shared_call import QueueStats
from ref_server.metrics import Traffic
from ref_server.service.service import Service

# MiB of long answers in memory at once, or four of the largest batches: one client may hold half, and a scored batch is
# up to one and a half times as long as its upload.
_ANSWERS_MIB = 256


def create_app(service: Service) -> FastAPI:
    """Starting the application up starts the scoring loop; shutting it down closes the queue."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(
        title="Tandem reference server", version="1", lifespan=lifespan, openapi_url=None,
        description="Scores per-token log-probs with a frozen reference model, and queues generated batches durably.",
        responses=documents.errors(*documents.COMMON),
    )  # fmt: skip
    traffic, shedder, threads = Traffic(), LoadShedder(), BodyThreads(threads=32, most=256)
    stats = QueueStats(service.queue)
    add_error_handlers(app)
    monitoring.add(app, service, traffic)
    batches.add(app, service, stats, threads, shedder)
    leases.add(app, service)
    scoring.add(app, service, threads)
    completions.add(app, service, threads)
    runs.add(app, service)
    watchers = Watchers(service, stats)
    service.at_draining(watchers.end)
    events.add(app, watchers)
    weights.add(app, service)
    if service.config.tinker:
        tinker.add(app, service, threads)
    if not service.config.no_model:
        _add_legacy(app, service)
    dashboard.add(app)
    documents.add(app)
    app.add_middleware(ShedUploads, shedder=shedder)
    app.add_middleware(Guard, config=service.config, routes=RouteTable(app.routes))
    app.add_middleware(Answers, most=max(_ANSWERS_MIB, 4 * service.config.max_body_mib) * 2**20)
    app.add_middleware(Requests, traffic=traffic)
    return app


def _add_legacy(app: FastAPI, service: Service) -> None:
    from ref_server.legacy import app as legacy  # needs PyTorch, which a server without a model does not load
    from ref_server.legacy.upload import register_reader

    register_reader()
    if service.config.legacy:
        legacy.add(app, service)
