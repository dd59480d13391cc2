"""The reference server as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from ref_server.http.errors import add_error_handlers
from ref_server.http.gate.door import Entrance
from ref_server.http.gate.guard import Guard
from ref_server.http.gate.requests import Requests
from ref_server.http.routes import batches, documents, health, leases, reference, scoring
from ref_server.metrics.traffic import Traffic
from ref_server.service.service import Service


def create_app(service: Service) -> FastAPI:
    """Starting the application up starts the scoring loop; shutting it down closes the queue."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(
        title="Tandem reference server", version="1", lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Scores per-token log-probs with a frozen reference model, and queues generated batches durably.",
        responses=documents.errors(*documents.COMMON),
    )  # fmt: skip
    app.state.traffic = Traffic()
    add_error_handlers(app)
    for routes in (health, scoring, batches, leases, reference):
        routes.add(app, service)
    if service.config.legacy:
        from ref_server.legacy import app as legacy  # needs PyTorch, which a server without a model does not load

        legacy.add(app, service)
    documents.describe(app, open_paths=("/livez", "/readyz"))
    app.add_middleware(Entrance, door=service.door)
    app.add_middleware(Guard, config=service.config)
    app.add_middleware(Requests, traffic=app.state.traffic)
    return app
