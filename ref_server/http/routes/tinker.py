"""`--tinker`: tinker's client can compute log-probs of prompts here. It cannot sample or train, and is told so."""

from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ref_server.access.keys import Role
from ref_server.access.requirements import ANY, JSON, requires
from ref_server.http.bodies import BodyThreads
from ref_server.http.errors import HttpError
from ref_server.http.routes.completions import check_model, check_row, check_size
from ref_server.scoring.reference import NotReady, TooLarge
from ref_server.scoring.shared_prefixes import Row
from ref_server.service.service import Service
from ref_server.tinker.futures import LogprobFutures
from ref_server.tinker.records import (
    PROTOBUF,
    RetrieveRequest,
    SampleRequest,
    SamplingSessionRequest,
    encode_response,
)
from shared.batch import BatchError

# How long a request for a result is held. The client gives up after 45 s.
_HELD_SECONDS = 20.0


def add(app: FastAPI, service: Service, threads: BodyThreads) -> None:
    """The routes of another project's protocol, which the OpenAPI page leaves out."""
    _add_sessions(app, service)
    _add_logprobs(app, LogprobFutures(service), service, threads)

    @app.api_route("/api/v1/{path:path}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False)
    @requires(Role.UPLOAD, ANY, confines=True)
    async def others(path: str) -> Any:
        message = f"{path[:80]!r} is not served here: this server computes log-probs of prompts (compute_logprobs)"
        raise HttpError(404, "not_found", f"{message}; it neither samples nor trains")


def _add_sessions(app: FastAPI, service: Service) -> None:
    """Nothing is kept of a session, so a client goes on after a restart of the server."""

    @app.get("/api/v1/healthz", include_in_schema=False)
    @requires(Role.UPLOAD, confines=True)
    async def healthz() -> Any:
        return {"status": "ok"}

    @app.get("/api/v1/get_server_capabilities", include_in_schema=False)
    @requires(Role.UPLOAD, confines=True)
    async def capabilities() -> Any:
        info = service.model
        model = {"model_name": info.name, "max_context_length": info.context_length, "trainable": False}
        return {"supported_models": [] if info.name is None else [model]}

    @app.post("/api/v1/client/config", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def config() -> Any:
        return {}  # the client's defaults

    @app.post("/api/v1/client/dynamic_config", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def dynamic_config() -> Any:
        return {}

    @app.post("/api/v1/telemetry", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def telemetry() -> Any:
        return {"status": "accepted"}  # and dropped

    @app.post("/api/v1/create_session", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def create_session() -> Any:
        return {"type": "create_session", "session_id": uuid4().hex}

    @app.post("/api/v1/session_heartbeat", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def session_heartbeat() -> Any:
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/create_sampling_session", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def create_sampling_session(body: SamplingSessionRequest) -> Any:
        if body.model_path is not None:
            raise HttpError(404, "not_found", f"{body.model_path[:200]!r} is not served here", "model_path")
        check_model(service, body.base_model or "", "base_model")
        id = f"{body.session_id}:{body.sampling_session_seq_id}"
        return {"type": "create_sampling_session", "sampling_session_id": id}

    @app.get("/api/v1/samplers/{id}", include_in_schema=False)
    @requires(Role.UPLOAD, confines=True)
    async def sampler(id: str) -> Any:
        return {"sampler_id": id, "base_model": service.model.name}


def _add_logprobs(app: FastAPI, futures: LogprobFutures, service: Service, threads: BodyThreads) -> None:
    @app.post("/api/v1/asample", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def asample(request: Request) -> Any:
        id, row = await threads.run(partial(_read, service, await request.body()))
        futures.submit(request.state.holder, id, row)
        return {"request_id": id, "sample_sequence_ids": []}

    @app.post("/api/v1/retrieve_future", include_in_schema=False)
    @requires(Role.UPLOAD, JSON, confines=True)
    async def retrieve_future(body: RetrieveRequest, request: Request) -> Any:
        try:
            result = await futures.result(request.state.holder, body.request_id, _HELD_SECONDS)
        except KeyError:
            # 410: the client asks anew.
            raise HttpError(410, "gone", "this server does not have the request, or no longer", "request_id") from None
        except TimeoutError:
            return {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        if isinstance(result, NotReady):  # 503: the client tries again, and the server that follows does not know it
            raise result
        if isinstance(result, Exception):
            category = "user" if isinstance(result, BatchError | TooLarge) else "server"
            return {"error": str(result), "category": category}
        return Response(encode_response(result), media_type=PROTOBUF)


def _read(service: Service, body: bytes) -> tuple[str, Row]:
    wanted = SampleRequest.model_validate_json(body)
    ids = wanted.ids()
    scored = len(ids) - 1 if wanted.prompt_logprobs_last_n is None else wanted.prompt_logprobs_last_n
    if not 1 <= scored < len(ids):
        raise BatchError("prompt", "must have at least two tokens, and more than prompt_logprobs_last_n")
    check_size(service, len(ids))
    check_row(service, ids)
    return f"{wanted.sampling_session_id}:{wanted.seq_id}", Row(ids, len(ids) - scored)
