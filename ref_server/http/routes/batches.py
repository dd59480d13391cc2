"""Routes for uploading batches, listing and inspecting them, and for requeueing and dropping them."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Annotated, TypeVar

from anyio import from_thread
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from ref_server.access.keys import Principal, Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.bodies import BodyThreads
from ref_server.http.errors import DELAY_SECONDS, HttpError, http_error, no_room_to_answer
from ref_server.http.guard import media_type
from ref_server.http.load_shedder import LoadShedder
from ref_server.http.requests import Caller, confine, note
from ref_server.http.routes.documents import PathInteger, errors
from ref_server.http.shared_call import QueueStats
from ref_server.service.service import Service
from ref_server.service.views import RunSelection
from shared import wire
from shared.api import (
    CURSOR,
    MAX_UPLOADS,
    MAX_UPLOADS_BYTES,
    Admitted,
    BatchDetails,
    BatchPage,
    ListOrder,
    PurgeBody,
    Purged,
    QueueView,
    RewardsView,
    State,
    TokensView,
    Uploaded,
    UploadResult,
    UploadResults,
)

T = TypeVar("T")

# A token takes about this many bytes as JSON, with its text and log-probs.
_TOKEN_BYTES = 80
# Of one upload of several batches, so many are decoded and stored at once.
_PLACES = 16
# Browsers must neither take it for anything else nor keep it: the batch may be another one's.
_PICTURE_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

_PNG = {"image/png": {"schema": {"type": "string", "format": "binary"}}}

_UPLOADED_BEFORE = (
    f"uploaded before; or the result of each of several. Their body (`{wire.UPLOADS_CONTENT_TYPE}`) repeats a "
    f"big-endian u32 length and a batch of that length: at most {MAX_UPLOADS} of them, {MAX_UPLOADS_BYTES} bytes"
)

Id = Annotated[str, Path(description="The id that the batch was uploaded with.")]


def add(app: FastAPI, service: Service, stats: QueueStats, threads: BodyThreads, shedder: LoadShedder) -> None:
    _add_upload(app, service, threads, shedder)
    _add_views(app, service, stats)
    _add_contents(app, service, threads)
    _add_operations(app, service)


def _add_upload(app: FastAPI, service: Service, threads: BodyThreads, shedder: LoadShedder) -> None:
    async def admit(body: bytes, run: str | None, caller: Principal) -> Uploaded:
        with shedder.admission(run):
            return await threads.run(partial(service.admit, body, caller))

    async def result(
        body: bytes, run: str | None, caller: Principal, places: asyncio.Semaphore
    ) -> Uploaded | HttpError:
        try:
            if full := shedder.refusal(run):
                raise full
            async with places:
                return await admit(body, run, caller)
        except Exception as error:
            return http_error(error)

    async def upload_several(body: bytes, caller: Principal, request: Request) -> Response:
        batches, places = _split(body), asyncio.Semaphore(_PLACES)
        runs: list[str | None] = [None] * len(batches)
        if shedder:  # its middleware sees single batches only
            runs = await threads.run(lambda: [wire.run_of(batch) for batch in batches])
        admitted = (result(batch, run, caller, places) for batch, run in zip(batches, runs, strict=True))
        results = await asyncio.gather(*admitted)
        refused = [each for each in results if isinstance(each, HttpError)]
        note(request, batches=len(batches), refused=len(refused))
        if refused:
            request.state.error_code = refused[0].code
        if any(each.status == 429 for each in refused):
            await asyncio.sleep(DELAY_SECONDS)
        answer = UploadResults(results=[_upload_result(each, request) for each in results])
        return JSONResponse(answer.model_dump(mode="json", exclude_none=True))

    @app.post(
        "/v1/batches", status_code=201, response_model=Admitted,
        responses={200: {"model": Admitted | UploadResults, "description": _UPLOADED_BEFORE}, **errors(409, 503, 507)},
    )  # fmt: skip
    @requires(Role.UPLOAD, wire.CONTENT_TYPE, wire.UPLOADS_CONTENT_TYPE, confines=True)
    async def upload(request: Request, caller: Caller) -> Response:
        """Admits a rollout batch. 201 once it is durable; 200 when the same batch was uploaded before.

        Several small batches may come in one body. The answer is 200 with the result of each.

        ```
        curl localhost:8400/v1/batches -H 'Content-Type: application/vnd.safetensors' --data-binary @batch.safetensors
        ```
        """
        body = await request.body()
        if media_type(request.headers) == wire.UPLOADS_CONTENT_TYPE:
            return await upload_several(body, caller, request)
        uploaded = await admit(body, getattr(request.state, "upload_run", None), caller)
        note(request, id=uploaded.id)
        return JSONResponse(
            uploaded.model_dump(mode="json", exclude={"created"}),
            status_code=201 if uploaded.created else 200,
            headers={"Location": f"/v1/batches/{uploaded.id}"},
        )


def _upload_result(result: Uploaded | HttpError, request: Request) -> UploadResult:
    if isinstance(result, HttpError):
        return UploadResult(error=result.detail(request.scope))
    return UploadResult(uploaded=result)


def _split(body: bytes) -> list[bytes]:
    """The batches of a body with several. Raises HttpError 422."""
    try:
        batches = [*islice(wire.decode_uploads(body), MAX_UPLOADS + 1)]
    except ValueError as error:
        raise HttpError(422, "invalid_request", f"the body must be batches, each behind its length: {error}") from None
    if not 1 <= len(batches) <= MAX_UPLOADS:
        raise HttpError(422, "invalid_request", f"the body must have 1 to {MAX_UPLOADS} batches")
    return batches


def _add_views(app: FastAPI, service: Service, stats: QueueStats) -> None:
    @app.get("/v1/queue", responses=errors(503, 507))
    @requires(Role.UPLOAD, confines=True)
    async def queue(
        caller: Caller,
        run: Annotated[str | None, Query(max_length=200, description="Only this run.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Runs on a page.")] = 1000,
        cursor: Annotated[str | None, Query(max_length=200, description="`next_cursor` of the previous page.")] = None,
    ) -> QueueView:
        """Counts and bytes by run and state, the age of the oldest waiting batch, and the scorer's throughput.

        The counts are read again only after ten times as long as reading them took, however many ask.

        ```
        curl localhost:8400/v1/queue
        ```
        """
        runs = RunSelection(limit, cursor, caller.only(run), confined=caller.run is not None)
        return service.describe_queue(await stats.now(), runs)

    @app.get("/v1/batches", responses=errors(503, 507))
    @requires(Role.TRAIN, confines=True)
    def list_batches(
        caller: Caller,
        state: Annotated[State | None, Query(description="Only batches in this state.")] = None,
        run: Annotated[str | None, Query(description="Only batches of this run.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        cursor: Annotated[str | None, Query(pattern=CURSOR, description="`next_cursor` of the previous page.")] = None,
        order: Annotated[
            ListOrder, Query(description="Which batches come first; the same for every page of a list.")
        ] = ListOrder.OLDEST,
        kept: Annotated[bool, Query(description="Only batches whose payload is there.")] = False,
    ) -> BatchPage:
        """Batches in order of admission, the oldest first unless `order=newest`.

        ```
        curl 'localhost:8400/v1/batches?state=ready&limit=5'
        ```
        """
        return service.queue.list(state, caller.only(run), limit, cursor, order, kept)

    @app.get("/v1/batches/{id}", responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def show(id: Id, caller: Caller) -> BatchDetails:
        """State, history and shape of one batch.

        ```
        curl localhost:8400/v1/batches/$ID
        ```
        """
        confine(caller, service.queue, [id])
        return or_not_found(service.queue.get(id), id)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.post("/v1/batches/{id}/requeue", responses=errors(404, 409, 503, 507))
    @requires(Role.ADMIN, audited=True)
    def requeue(id: Id) -> Admitted:
        """Restores a dead or expired batch.

        ```
        curl -X POST localhost:8400/v1/batches/$ID/requeue
        ```
        """
        state = _known(service.queue.requeue, id)
        service.scoring.ring()
        service.polls.look_now()
        return Admitted(id=id, state=state)

    @app.delete("/v1/batches/{id}", status_code=204, responses=errors(404, 409, 503, 507))
    @requires(Role.ADMIN, audited=True)
    def drop(id: Id) -> None:
        """Drops a batch; its id stays known.

        ```
        curl -X DELETE localhost:8400/v1/batches/$ID
        ```
        """
        _known(service.queue.drop, id)

    @app.post("/v1/batches/purge", responses=errors(503, 507))
    @requires(Role.ADMIN, JSON, audited=True)
    def purge(body: PurgeBody, request: Request) -> Purged:
        """Drops the chosen batches, the oldest first. Each request drops at most 200, so that others get their turn.

        As long as the answer has a `next_cursor`, send the same body with it as `cursor`.

        ```
        curl localhost:8400/v1/batches/purge -H 'Content-Type: application/json' -d '{"state": "dead", "run": "curl"}'
        ```
        """
        note(request, state=body.state, run=body.run)
        purged = service.queue.purge(body)
        note(request, state=body.state, run=body.run, dropped=len(purged.dropped))
        return purged


def _known(operation: Callable[[str], T], id: str) -> T:
    try:
        return operation(id)
    except KeyError:
        raise HttpError(404, "not_found", f"no batch {id[:80]!r} is known here", "id") from None


def _add_contents(app: FastAPI, service: Service, threads: BodyThreads) -> None:
    @app.get("/v1/batches/{id}/tokens", responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def tokens(id: Id, caller: Caller, request: Request) -> TokensView:
        """For display: each token with its text, log-probs and advantage, each row with its rewards.

        ```
        curl localhost:8400/v1/batches/$ID/tokens
        ```
        """
        batch = _batch(service, caller, id)
        _take_room(request, batch.payload_bytes + _TOKEN_BYTES * (batch.prompt_tokens + batch.completion_tokens))
        return or_not_found(service.describe_tokens(batch), id)

    @app.get(
        "/v1/batches/{id}/images/{number}", response_class=Response,
        responses={200: {"description": "the picture", "content": _PNG}, **errors(404, 503, 507)},
    )  # fmt: skip
    @requires(Role.TRAIN, confines=True)
    def image(id: Id, number: PathInteger, caller: Caller, request: Request) -> Response:
        """For display: a picture of the prompt, made from its image tensors.

        At most the first 16, thinned out to at most 512 pixels a side.

        ```
        curl -o picture.png localhost:8400/v1/batches/$ID/images/0
        ```
        """
        batch = _batch(service, caller, id)
        _take_room(request, batch.payload_bytes)
        picture = service.picture(batch, number)
        if picture is None:
            raise HttpError(404, "not_found", f"no picture {number} of batch {id[:80]!r} is there", "number")
        return Response(picture, media_type="image/png", headers=_PICTURE_HEADERS)

    @app.get("/v1/batches/{id}/rewards", responses=errors(404, 503, 507))
    @requires(Role.TRAIN, confines=True)
    def rewards(id: Id, caller: Caller) -> RewardsView:
        """For lists and histograms: the start of the prompt, the gold answer, and each completion's rewards and length.

        ```
        curl localhost:8400/v1/batches/$ID/rewards
        ```
        """
        return or_not_found(service.describe_rewards(_batch(service, caller, id)), id)

    @app.put("/v1/batches/{id}/training", responses=errors(404, 409, 503, 507))
    @requires(Role.TRAIN, wire.CONTENT_TYPE, confines=True)
    async def training(id: Id, caller: Caller, request: Request) -> Admitted:
        """What training made of a leased batch, which then keeps its payload after its ack (`--queue.keep-samples`).

        A safetensors file of float32 (C,) `advantages`, 0 where a token did not train, and `logps` of the policy after
        the step at the batch's temperature; its metadata are `format` = `training/1` and `step`. Again replaces it.

        ```
        curl -X PUT localhost:8400/v1/batches/$ID/training -H 'Content-Type: application/vnd.safetensors' \\
            --data-binary @training.safetensors
        ```
        """
        return await threads.run(partial(_keep_training, service, caller, id, await request.body()))


def _take_room(request: Request, size: int) -> None:
    """Raises HttpError 429 if the memory for long answers has no room for so many bytes."""
    if not from_thread.run_sync(request.state.room, size):
        raise no_room_to_answer()


def or_not_found(value: T | None, id: str) -> T:
    """Raises HttpError 404 for None."""
    if value is None:
        raise HttpError(404, "not_found", f"no batch {id[:80]!r} is known here, or its payload is gone", "id")
    return value


def _keep_training(service: Service, caller: Principal, id: str, body: bytes) -> Admitted:
    batch = _batch(service, caller, id)
    service.keep_training(batch, body)
    return Admitted(id=id, state=batch.state)


def _batch(service: Service, caller: Principal, id: str) -> BatchDetails:
    confine(caller, service.queue, [id])
    return or_not_found(service.queue.get(id), id)
