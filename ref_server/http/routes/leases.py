"""Routes for leasing scored batches, and for extending, acking and releasing leases."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from ref_server.access.keys import Principal, Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.errors import HttpError, no_room_to_answer
from ref_server.http.requests import Caller, confine, note
from ref_server.http.routes.documents import SAFETENSORS, errors
from ref_server.queue.errors import TooManyInFlight
from ref_server.queue.records import Wanted
from ref_server.service.polls import Poll
from ref_server.service.service import Service
from shared import wire
from shared.api import (
    AckBody,
    Error,
    ExtendBody,
    Lease,
    LeaseBody,
    LeaseKey,
    LeaseResult,
    LeaseResults,
    LeasesBody,
    Outcome,
    ReleaseBody,
)

# Threads that lease. They are not those of the heartbeats, which must not wait behind a thousand lease requests.
LEASE_THREADS = 8

_LEASED = {
    "description": "a batch; with `count` several, each behind a big-endian u32 length and a JSON header of that "
    "length, which has what the headers have, and `bytes`, the length of the batch",
    "content": SAFETENSORS | {wire.LEASES_CONTENT_TYPE: SAFETENSORS[wire.CONTENT_TYPE]},
    "headers": {
        "Batch-Id": {"schema": {"type": "string"}},
        "Lease-Token": {"schema": {"type": "string"}, "description": "proves the lease"},
        "Lease-Seconds": {"schema": {"type": "number"}, "description": "how long the lease lasts unless extended"},
        "Deliveries": {"schema": {"type": "integer"}, "description": "deliveries counted before, plus one"},
    },
}

_REFUSED = {
    409: {
        "model": Error,
        "description": "`run_taken`: another lineage trains the run; it is gone after `Retry-After` seconds of "
        "silence. `superseded`: a newer incarnation of the consumer has taken over",
    }
}


def add(app: FastAPI, service: Service) -> None:
    _add_lease(app, service)
    _add_settlements(app, service)


def _add_lease(app: FastAPI, service: Service) -> None:
    threads = CapacityLimiter(LEASE_THREADS)

    @app.post(
        "/v1/batches/lease", response_class=Response,
        responses={200: _LEASED, 204: {"description": "none came in time"}, **errors(503, 507), **_REFUSED},
    )  # fmt: skip
    @requires(Role.TRAIN, JSON, confines=True)
    async def lease(body: LeaseBody, request: Request, caller: Caller) -> Response:
        """Leases one scored batch, or up to `count`; waits up to wait_seconds for the first.

        ```
        curl localhost:8400/v1/batches/lease -H 'Content-Type: application/json' \\
            -d '{"consumer": "me", "run": "curl", "wait_seconds": 5}' --dump-header - --output leased.safetensors
        ```
        """
        deadline = time.monotonic() + body.wait_seconds
        batches: list[tuple[Lease, bytes]] = []
        while not batches:  # all that was leased may be purged before it is read
            got = await _poll(service, threads, _confined(body, caller), request, deadline)
            batches = await _read(service, got, request)
            if not got or (not batches and time.monotonic() > deadline):
                return Response(status_code=204)
        if body.count is None:
            note(request, id=batches[0][0].id)
            return _single(*batches[0])
        note(request, batches=len(batches))
        return _several(batches)


def _add_settlements(app: FastAPI, service: Service) -> None:
    @app.post("/v1/leases/ack", responses=errors(503, 507))
    @requires(Role.TRAIN, JSON, confines=True)
    async def ack(body: AckBody, caller: Caller) -> LeaseResults:
        """Settles batches, after the checkpoint that contains their effect is durable.

        ```
        curl localhost:8400/v1/leases/ack -H 'Content-Type: application/json' \\
            -d '{"leases": [{"id": "'$ID'", "token": "'$TOKEN'"}]}'
        ```
        """
        results = await _settle(service, caller, body, lambda keys: service.queue.ack(keys, body.checkpoint))
        service.polls.look_now()  # fewer are in flight now
        return results

    @app.post("/v1/leases/extend", responses=errors(503, 507))
    @requires(Role.TRAIN, JSON, confines=True)
    async def extend(body: ExtendBody, caller: Caller) -> LeaseResults:
        """Heartbeat: makes leases end lease_seconds from now.

        ```
        curl localhost:8400/v1/leases/extend -H 'Content-Type: application/json' \\
            -d '{"leases": [{"id": "'$ID'", "token": "'$TOKEN'"}], "lease_seconds": 60}'
        ```
        """
        return await _settle(
            service, caller, body, lambda keys: service.queue.extend(keys, body.lease_seconds, body.started)
        )

    @app.post("/v1/leases/release", responses=errors(503, 507))
    @requires(Role.TRAIN, JSON, confines=True)
    async def release(body: ReleaseBody, caller: Caller) -> LeaseResults:
        """Gives batches back unused, before their leases end.

        ```
        curl localhost:8400/v1/leases/release -H 'Content-Type: application/json' \\
            -d '{"leases": [{"id": "'$ID'", "token": "'$TOKEN'"}]}'
        ```
        """
        results = await _settle(service, caller, body, lambda keys: service.queue.release(keys, body.error))
        service.polls.look_now()
        return results


async def _poll(
    service: Service, threads: CapacityLimiter, wanted: LeaseBody, request: Request, deadline: float
) -> list[Lease]:
    """Tries at once and whenever it is woken, until there is a lease or the time is over."""
    with service.polls.join(Wanted.by(wanted), request.state.holder) as poll:
        if await request.is_disconnected():
            return []
        got, refusal = await _try(service, threads, wanted, poll)
        if got:
            return got
        with _departure(request, poll) as gone:
            while await poll.wait(deadline - time.monotonic()):
                if gone.done():
                    return []
                got, refusal = await _try(service, threads, wanted, poll)
                if got:
                    return got
    if refusal:
        raise refusal
    return []


async def _try(
    service: Service, threads: CapacityLimiter, wanted: LeaseBody, poll: Poll
) -> tuple[list[Lease], TooManyInFlight | None]:
    """Leases, or why there is none: an ack may make room while the request waits."""
    if service.draining:
        raise HttpError(503, "not_ready", "the server is shutting down", headers={"Retry-After": "1"})
    try:
        got, refusal = await to_thread.run_sync(service.queue.lease, wanted, limiter=threads), None
    except TooManyInFlight as full:
        got, refusal = [], full
    poll.looked()
    return got, refusal


async def _read(service: Service, got: Sequence[Lease], request: Request) -> list[tuple[Lease, bytes]]:
    """The leased batches, without those that were purged meanwhile.

    Raises HttpError 429 if there is no room to send them: the client may repeat its request.
    """
    if not request.state.room(sum(lease.bytes for lease in got)):
        raise no_room_to_answer()
    return await run_in_threadpool(service.read_leased, got)


def _single(lease: Lease, body: bytes) -> Response:
    headers = {
        "Batch-Id": lease.id,
        "Lease-Token": lease.token,
        "Lease-Seconds": f"{lease.lease_seconds:g}",
        "Deliveries": str(lease.deliveries),
    }
    return Response(body, media_type=wire.CONTENT_TYPE, headers=headers)


def _several(batches: Sequence[tuple[Lease, bytes]]) -> Response:
    """All of them, sent piece by piece: no copy of them all is made."""
    pieces = wire.encode_leases(batches)

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    length = str(sum(map(len, pieces)))
    return StreamingResponse(sent(), media_type=wire.LEASES_CONTENT_TYPE, headers={"Content-Length": length})


@contextmanager
def _departure(request: Request, poll: Poll) -> Iterator[asyncio.Future]:
    """Is done when the client goes away, and then wakes the poll. The body was read: nothing else comes."""
    gone = asyncio.ensure_future(request.receive())
    gone.add_done_callback(lambda _: poll.ring())
    try:
        yield gone
    finally:
        gone.cancel()


def _confined(body: LeaseBody, caller: Principal) -> LeaseBody:
    """What a token of a single run asks for: its run, as a consumer whose name no other token can have.

    A new incarnation of a consumer ends all of that consumer's leases, whatever their run.
    """
    if caller.run is None:
        return body
    return body.model_copy(update={"run": caller.only(body.run), "consumer": f"{caller.name}/{body.consumer}"})


async def _settle(
    service: Service, caller: Principal, body: LeasesBody, settle: Callable[[list[LeaseKey]], list[Outcome]]
) -> LeaseResults:
    """Settles and builds the answer in one thread. A route that is no coroutine would use two."""

    def work() -> LeaseResults:
        confine(caller, service.queue, (key.id for key in body.leases))
        outcomes = zip(body.leases, settle(body.leases), strict=True)
        return LeaseResults(results=[LeaseResult(id=key.id, outcome=outcome) for key, outcome in outcomes])

    return await run_in_threadpool(work)
