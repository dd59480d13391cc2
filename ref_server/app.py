"""The reference server as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from ref_server.errors import add_error_handlers
from ref_server.guard import Guard
from ref_server.routes import batches, documents, health, leases, scoring
from ref_server.service import Service


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
    add_error_handlers(app)
    for routes in (health, scoring, batches, leases):
        routes.add(app, service)
    documents.describe(app, open_paths=("/livez", "/readyz"))
    app.add_middleware(Guard, host=service.config.host, max_body_bytes=service.config.max_body_mib * 2**20)
    return app
