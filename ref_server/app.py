"""The routes: HTTP in, calls of the service, HTTP out, and nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
import structlog
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from ref_server.errors import add_error_handlers
from ref_server.guard import Guard, media_type
from ref_server.messages import (
    AckBody,
    Admitted,
    Error,
    ExtendBody,
    LeaseBody,
    LeasesBody,
    Logprobs,
    LogprobsRequest,
    Problem,
    ReleaseBody,
    Result,
    Results,
)
from ref_server.metrics import Metrics
from ref_server.queue.interface import (
    Lease,
    LeaseKey,
    Outcome,
    State,
    TooManyInFlight,
)
from ref_server.service import Service, group_of
from shared import wire
from shared.batch import BatchError, ScoredBatch, TokenGroup

log = structlog.get_logger()

T = TypeVar("T")

# A poll looks again this often, in seconds: neither a lease that runs out nor another server rings the bell.
POLL_SECONDS = 0.5

_SAFETENSORS = {wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_UPLOAD_BODY = {"requestBody": {"required": True, "content": _SAFETENSORS}}
_LOGPROBS_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": LogprobsRequest.model_json_schema()}, **_SAFETENSORS},
    }
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error} for status in statuses}


def create_app(service: Service) -> FastAPI:
    """The reference server as an ASGI application. Starting it up starts the scoring loop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(
        title="Tandem reference server", version="1", lifespan=lifespan, docs_url=None, redoc_url=None,
        responses=_errors(403, 413, 415, 422),
    )  # fmt: skip
    add_error_handlers(app)
    _add_health(app, service)
    _add_scoring(app, service)
    _add_queue(app, service)
    _add_leases(app, service)
    app.add_middleware(Guard, host=service.config.host, max_body_bytes=service.config.max_body_mib * 2**20)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    metrics = Metrics(service)

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """The process is up."""
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses=_errors(503))
    def readyz() -> str:
        """A batch would be scored now, or queued where there is no model."""
        reason = service.not_ready_reason()
        if reason:
            raise Problem(503, "not_ready", reason, headers={"Retry-After": "1"})
        return "ok"

    @app.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Response:
        """Prometheus text."""
        return Response(metrics.text(), media_type=metrics.content_type)

    @app.get("/v1/model")
    async def model() -> dict[str, Any]:
        """The reference model: what a client's own model must match. All null but the limits when there is none."""
        return service.model


def _add_scoring(app: FastAPI, service: Service) -> None:
    @app.post("/v1/logprobs", response_model=Logprobs, openapi_extra=_LOGPROBS_BODY, responses=_errors(409, 429, 503))
    async def logprobs(request: Request) -> Any:
        """Scores now, ahead of the queue; nothing is kept."""
        body = await request.body()
        if media_type(request.headers) == wire.CONTENT_TYPE:
            batch = await run_in_threadpool(service.read_rollout, body)
            ref_logps = await _score(batch.group, batch.temperature)
            scored = ScoredBatch(batch, ref_logps, str(service.model["reference_version"]))
            return Response(await run_in_threadpool(wire.encode, scored), media_type=wire.CONTENT_TYPE)
        group, temperature = await run_in_threadpool(_group, body)
        return await run_in_threadpool(_answer, group, await _score(group, temperature))

    def _group(body: bytes) -> tuple[TokenGroup, float]:
        asked = LogprobsRequest.model_validate_json(body)
        if asked.prompt is not None:
            group = service.tokenize(asked.prompt, [str(text) for text in asked.completions])
        else:
            group = group_of(asked.prompt_ids or [], [list(map(int, ids)) for ids in asked.completions])
        service.reference.check_tokens(group)
        return group, asked.temperature

    def _answer(group: TokenGroup, logps: np.ndarray) -> Response:
        rows = np.split(logps, np.cumsum(group.completion_lengths)[:-1])
        answer = Logprobs.model_validate(
            {
                "logprobs": [row.tolist() for row in rows],
                "tokens": [service.token_texts(ids.tolist()) for ids in group.completions()],
                "reference_version": service.model["reference_version"],
            }
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _score(group: TokenGroup, temperature: float) -> np.ndarray:
        if service.draining or not service.scoring.alive:
            raise Problem(503, "not_ready", service.not_ready_reason() or "shutting down", headers={"Retry-After": "1"})
        logps = await asyncio.wrap_future(service.scoring.submit(group, temperature))
        if not np.isfinite(logps).all():
            raise BatchError("temperature", f"of {temperature} gives log-probs that are not finite")
        return logps


def _add_queue(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/batches", status_code=201, response_model=Admitted, openapi_extra=_UPLOAD_BODY,
        responses={200: {"model": Admitted}, **_errors(409, 429, 503, 507)},
    )  # fmt: skip
    async def upload(request: Request) -> Response:
        """Admits a batch. 201 once it is durable; 200 when the same batch is, or was, there."""
        body = await request.body()
        id, admission = await run_in_threadpool(service.admit, body)
        return JSONResponse(
            {"id": id, "state": admission.state},
            status_code=201 if admission.created else 200,
            headers={"Location": f"/v1/batches/{id}"},
        )

    @app.get("/v1/batches")
    def list_batches(
        state: State | None = None,
        run: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Batches in order of admission."""
        try:
            page = service.queue.list(state, run, limit, cursor)
        except ValueError as error:
            raise Problem(422, "invalid_request", str(error), "cursor") from None
        batches = [{k: v for k, v in asdict(info).items() if k != "history"} for info in page.batches]
        return {"batches": batches, "next_cursor": page.next_cursor}

    @app.get("/v1/batches/{id}", responses=_errors(404))
    def show(id: str) -> dict[str, Any]:
        """State, history and shape of one batch."""
        return asdict(_found(service.queue.get(id), id))

    @app.get("/v1/batches/{id}/tokens", responses=_errors(404))
    def tokens(id: str) -> dict[str, Any]:
        """For looking: each token with its text and log-probs, each row with its rewards."""
        return _found(service.describe_tokens(id), id)

    @app.post("/v1/batches/{id}/requeue", responses=_errors(404, 409, 429, 503, 507))
    def requeue(id: str) -> Admitted:
        """Brings a dead or expired batch back."""
        state = _known(service.queue.requeue, id)
        service.scoring.ring()
        service.bell.ring()
        return Admitted(id=id, state=state)

    @app.delete("/v1/batches/{id}", status_code=204, responses=_errors(404, 409, 503, 507))
    def drop(id: str) -> None:
        """Drops a batch; its id stays known."""
        _known(service.queue.drop, id)

    @app.get("/v1/queue")
    def queue() -> dict[str, Any]:
        """Counts and bytes by run and state, the age of the oldest waiting batch, and the scorer's throughput."""
        return service.describe_queue()


def _add_leases(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/batches/lease", response_class=Response,
        responses={200: {"content": _SAFETENSORS}, 204: {"description": "none came in time"}, **_errors(409, 429, 503)},
    )  # fmt: skip
    async def lease(body: LeaseBody, request: Request) -> Response:
        """Leases one scored batch; waits up to wait_seconds for one."""
        got = await _poll(service, partial(service.queue.lease, body.to_request()), body.wait_seconds, request)
        if got is None:
            return Response(status_code=204)
        headers = {
            "Batch-Id": got.id,
            "Lease-Token": got.token,
            "Lease-Seconds": f"{got.lease_seconds:g}",
            "Deliveries": str(got.deliveries),
        }
        return Response(got.body, media_type=wire.CONTENT_TYPE, headers=headers)

    @app.post("/v1/leases/ack")
    async def ack(body: AckBody) -> Results:
        """Settles batches, after the checkpoint that contains their effect is durable."""
        results = await _settle(body, lambda keys: service.queue.ack(keys, body.checkpoint))
        service.bell.ring()  # fewer are in flight now
        return results

    @app.post("/v1/leases/extend")
    async def extend(body: ExtendBody) -> Results:
        """Heartbeat: gives leases lease_seconds from now."""
        return await _settle(body, lambda keys: service.queue.extend(keys, body.lease_seconds, body.started))

    @app.post("/v1/leases/release")
    async def release(body: ReleaseBody) -> Results:
        """Gives batches back now."""
        results = await _settle(body, lambda keys: service.queue.release(keys, body.error))
        service.bell.ring()
        return results


async def _poll(service: Service, lease: Callable[[], Lease | None], seconds: float, request: Request) -> Lease | None:
    """Tries whenever the bell rings, until there is a lease or the time is over. Occupies no thread while waiting."""
    deadline = time.monotonic() + seconds
    while True:
        bell = service.bell.next()
        if service.draining:
            raise Problem(503, "not_ready", "the server is shutting down", headers={"Retry-After": "1"})
        if await request.is_disconnected():
            return None
        try:
            got = await run_in_threadpool(lease)
        except TooManyInFlight:
            if time.monotonic() >= deadline:
                raise
            got = None
        remaining = deadline - time.monotonic()
        if got or remaining <= 0:
            return got
        try:
            await asyncio.wait_for(bell.wait(), min(remaining, POLL_SECONDS))
        except TimeoutError:
            continue


async def _settle(body: LeasesBody, settle: Callable[[list[LeaseKey]], list[Outcome]]) -> Results:
    """Goes to a thread once; FastAPI would go again to check what a route that is no coroutine returns."""

    def work() -> Results:
        keys = body.keys()
        outcomes = zip(keys, settle(keys), strict=True)
        return Results(results=[Result(id=key.id, outcome=outcome) for key, outcome in outcomes])

    return await run_in_threadpool(work)


def _known(operation: Callable[[str], T], id: str) -> T:
    try:
        return operation(id)
    except KeyError:
        raise Problem(404, "not_found", f"no batch {id[:80]!r} is known here", "id") from None


def _found(value: T | None, id: str) -> T:
    if value is None:
        raise Problem(404, "not_found", f"no batch {id[:80]!r} is known here, or its payload is gone", "id")
    return value
