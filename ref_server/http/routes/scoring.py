"""Routes that score at once, without the queue, and that describe and replace the reference model."""

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ref_server.access.keys import Role
from ref_server.access.requirements import JSON, requires
from ref_server.http.bodies import BodyThreads
from ref_server.http.errors import no_room_to_answer
from ref_server.http.guard import media_type
from ref_server.http.requests import note
from ref_server.http.routes.documents import SAFETENSORS, errors, json_body
from ref_server.scoring.jobs import encode_scores
from ref_server.scoring.reference import Scores, group_of
from ref_server.service.service import Service
from shared import wire
from shared.api import Error, Logprobs, LogprobsRequest, ModelInfo, ReferenceBody, ReferenceVersion
from shared.batch import TokenGroup


def add(app: FastAPI, service: Service, threads: BodyThreads) -> None:
    _add_logprobs(app, service, threads)
    _add_reference(app, service)


def _add_logprobs(app: FastAPI, service: Service, threads: BodyThreads) -> None:
    @app.post(
        "/v1/logprobs", response_model=Logprobs, openapi_extra=json_body(LogprobsRequest),
        responses={200: {"content": SAFETENSORS}, **errors(409, 503)},
    )  # fmt: skip
    @requires(Role.UPLOAD, JSON, wire.CONTENT_TYPE, confines=True)
    async def logprobs(request: Request) -> Any:
        """Scores now, ahead of the queue; nothing is stored. Only a safetensors batch can have images.

        It is answered with the scored batch, or with the same JSON as other requests if that is what it accepts.

        ```
        curl localhost:8400/v1/logprobs -H 'Content-Type: application/json' \\
            -d '{"prompt": "2+3=", "completions": ["5", "6"]}'
        curl localhost:8400/v1/logprobs -H 'Content-Type: application/vnd.safetensors' \\
            --data-binary @batch.safetensors --output scored.safetensors
        curl localhost:8400/v1/logprobs -H 'Content-Type: application/vnd.safetensors' \\
            -H 'Accept: application/json' --data-binary @batch.safetensors
        ```
        """
        body = await request.body()
        is_batch = media_type(request.headers) == wire.CONTENT_TYPE
        if is_batch and request.headers.get("accept") != JSON:
            batch = await threads.run(partial(service.read_rollout, body))
            if not request.state.room(len(body)):  # before scoring, which would be in vain
                raise no_room_to_answer()
            scores = encode_scores([batch.group], await _score(service, batch.group, batch.temperature))
            return Response(await run_in_threadpool(wire.with_scores, body, scores), media_type=wire.CONTENT_TYPE)
        read = _group_of_batch if is_batch else _group
        group, temperature = await threads.run(partial(read, service, body))
        return await run_in_threadpool(_answer, service, group, await _score(service, group, temperature))


def _group_of_batch(service: Service, body: bytes) -> tuple[TokenGroup, float]:
    batch = service.read_rollout(body)
    return batch.group, batch.temperature


def _group(service: Service, body: bytes) -> tuple[TokenGroup, float]:
    wanted = LogprobsRequest.model_validate_json(body)
    if wanted.prompt is not None:
        group = service.tokenize(wanted.prompt, [str(text) for text in wanted.completions])
    else:
        group = group_of(wanted.prompt_ids or [], [list(map(int, ids)) for ids in wanted.completions])
    service.reference.check_group(group)
    return group, wanted.temperature


def _answer(service: Service, group: TokenGroup, scores: Scores) -> Response:
    rows = group.split(scores.logps[0])
    answer = Logprobs.model_validate(
        {
            "logprobs": [row.tolist() for row in rows],
            "tokens": [service.reference.token_texts(ids.tolist()) for ids in group.completions()],
            "reference_version": scores.reference_version,
        }
    )
    return Response(answer.model_dump_json(), media_type=JSON)


async def _score(service: Service, group: TokenGroup, temperature: float) -> Scores:
    return await asyncio.wrap_future(service.scoring.submit([group], temperature))


_NO_SNAPSHOT = {404: {"model": Error, "description": "no such snapshot"}}


def _add_reference(app: FastAPI, service: Service) -> None:
    @app.get("/v1/model")
    @requires(Role.UPLOAD, confines=True)
    async def model() -> ModelInfo:
        """The reference model: what a client's own model must match.

        ```
        curl localhost:8400/v1/model
        ```
        """
        return service.model

    @app.put("/v1/reference", responses={**_NO_SNAPSHOT, **errors(409, 503)})
    @requires(Role.ADMIN, JSON, audited=True)
    def replace(body: ReferenceBody, request: Request) -> ReferenceVersion:
        """Replaces the reference's weights by a snapshot below `--snapshot-root`, of the same architecture.

        The current batch is finished first; every later one is scored with the new weights and carries their
        version. A higher version replaces a lower one; repeating a request is harmless. Without a snapshot the weights
        of `--model` are put back. The queue keeps which reference it wants: a restarted server has it again, and
        every other server on the same queue follows within a second and the time that it takes to load. Until then
        such a server claims no batches, and `/readyz` answers 503.

        ```
        curl -X PUT localhost:8400/v1/reference -H 'Content-Type: application/json' \\
            -d '{"snapshot": "step-200", "version": 1}'
        ```
        """
        note(request, snapshot=body.snapshot, version=body.version)
        return ReferenceVersion(reference_version=service.replace_reference(body.snapshot, body.version))
