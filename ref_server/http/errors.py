"""HTTP error responses, and which exception becomes which."""

import math
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from ref_server.access.keys import Denied, Unauthenticated
from ref_server.queue.errors import (
    ContentConflict,
    EpochAhead,
    QueueFull,
    RunTaken,
    StorageBroken,
    StorageFull,
    Superseded,
    TooManyInFlight,
    WrongState,
)
from ref_server.scoring.reference import (
    Busy,
    NoModel,
    NotReady,
    ReferenceRefused,
    TooLarge,
)
from ref_server.weights.errors import IncompleteVersion, NoWeights, WeightsConflict, WeightsGone, WrongDigest
from shared.api import Error, ErrorDetail
from shared.batch import BatchError

# Each 429 is delayed by this much at least: some clients ignore Retry-After.
DELAY_SECONDS = 1.0


class HttpError(Exception):
    """An error answer. field: the invalid part of the request."""

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.headers = headers or {}

    def answer(self, scope: Scope) -> JSONResponse:
        """The answer to a request. Leaves the code in the request's state, for the log and the metrics."""
        scope["state"]["error_code"] = self.code
        error = Error(error=self.detail(scope))
        return JSONResponse(error.model_dump(exclude_none=True), self.status, headers=self.headers)

    def detail(self, scope: Scope) -> ErrorDetail:
        request_id = scope["state"]["request_id"]
        return ErrorDetail(code=self.code, message=self.message, field=self.field, request_id=request_id)


def denied(error: Denied) -> HttpError:
    """401 without a known token, else 403."""
    if isinstance(error, Unauthenticated):
        return HttpError(401, "unauthorized", str(error), error.field, {"WWW-Authenticate": "Bearer"})
    return HttpError(403, "forbidden", str(error), error.field)


def no_room(code: str, error: QueueFull) -> HttpError:
    """429 with a Retry-After header."""
    return HttpError(429, code, str(error), headers={"Retry-After": str(max(1, round(error.retry_after)))})


def busy(message: str) -> HttpError:
    """429 for a client that may try again in a second."""
    return HttpError(429, "busy", message, headers={"Retry-After": "1"})


def no_room_to_answer() -> HttpError:
    return busy("your long answers would fill more of the memory for them than is free; read those before")


def run_taken(error: RunTaken) -> HttpError:
    """409, with the seconds after which the run is free, unless its holder is heard again."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return HttpError(409, "run_taken", str(error), "run", headers)


def reference_refused(error: ReferenceRefused) -> HttpError:
    """422 for a bad name, 404 if there is no such snapshot, else 409."""
    status = {"invalid_request": 422, "not_found": 404}.get(error.code)
    return HttpError(status or 409, error.code, str(error), "snapshot" if status else None)


def add_error_handlers(app: FastAPI) -> None:
    """Answers every exception of a route with a code, a message, the invalid field and the request's id."""

    def answer(request: Request, error: HttpError) -> JSONResponse:
        return error.answer(request.scope)

    def answer_bug(request: Request, _: Exception) -> JSONResponse:
        # Starlette answers these outside of all middleware, so the request's id is added here. It then raises the error
        # again, and uvicorn closes the connection.
        headers = {"X-Request-Id": request.state.request_id, "Connection": "close"}
        message = "a bug of the server; its log has the traceback"
        return answer(request, HttpError(500, "internal", message, headers=headers))

    for kind in _ANSWERS:
        app.add_exception_handler(kind, lambda request, error: answer(request, http_error(error)))
    app.add_exception_handler(HTTPException, lambda request, error: answer(request, _router_error(request, error)))
    app.add_exception_handler(Exception, answer_bug)


def http_error(error: BaseException) -> HttpError:
    """The answer to an exception of a route. Raises one that has no answer."""
    translate = next((_ANSWERS[kind] for kind in type(error).__mro__ if kind in _ANSWERS), None)
    if translate is None:
        raise error
    return translate(error)


def _router_error(request: Request, error: Any) -> HttpError:
    if error.status_code == 400:  # FastAPI's answer to a body that is not text, or nested too deeply
        return HttpError(422, "invalid_request", "the body must be JSON")
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message = f"this route takes {allowed}, got {request.method[:80]}"
        return HttpError(405, "method_not_allowed", message, headers={"Allow": allowed})
    if error.status_code == 404:
        return HttpError(404, "not_found", f"there is no route {request.url.path[:80]!r}; /openapi.json has them all")
    return HttpError(error.status_code, "error", error.detail, headers=dict(error.headers or {}))


def _methods(request: Request) -> list[str]:
    """All methods of a path. Starlette names those of one route only, and a path may have several."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, APIRoute) and route.path_regex.match(path)]
    # Prefer /v1/batches/lease to /v1/batches/{id}.
    fewest = min((len(route.param_convertors) for route in routes), default=0)
    fitting = [route for route in routes if len(route.param_convertors) == fewest]
    return sorted({method for route in fitting for method in route.methods or ()})


def _invalid(errors: Any) -> HttpError:
    """The first error that pydantic found."""
    first = errors[0]
    # Keep the names that the client wrote: drop FastAPI's "body" and "query", and the types of a union.
    names = [str(part) for part in first["loc"] if part not in ("body", "query") and "[" not in str(part)]
    where = ".".join(names) if first["type"] != "json_invalid" else ""
    message = str(first["msg"]).removeprefix("Value error, ")
    return HttpError(422, "invalid_request", f"{where}: {message}" if where else message, where or None)


# Translates each exception that a route may raise into its error answer.
_ANSWERS: dict[type[Exception], Callable[[Any], HttpError]] = {
    HttpError: lambda error: error,
    Denied: denied,
    BatchError: lambda error: HttpError(422, "invalid_batch", str(error), error.field),
    EpochAhead: lambda error: HttpError(422, "invalid_batch", str(error), "epoch"),
    TooLarge: lambda error: HttpError(413, "too_large", str(error), error.field),
    ContentConflict: lambda error: HttpError(409, "conflict", str(error), "id"),
    Superseded: lambda error: HttpError(409, "superseded", str(error), "incarnation"),
    RunTaken: run_taken,
    WrongState: lambda error: HttpError(409, "wrong_state", str(error), "id"),
    QueueFull: lambda error: no_room("queue_full", error),
    TooManyInFlight: lambda error: no_room("in_flight_full", error),
    NoModel: lambda error: HttpError(409, "no_model", str(error)),
    ReferenceRefused: reference_refused,
    NoWeights: lambda error: HttpError(404, "not_found", str(error)),
    WeightsGone: lambda error: HttpError(410, "gone", str(error)),
    WeightsConflict: lambda error: HttpError(409, "conflict", str(error)),
    WrongDigest: lambda error: HttpError(422, "wrong_digest", str(error), "Content-Digest"),
    IncompleteVersion: lambda error: HttpError(422, "not_whole", str(error), error.field),
    NotReady: lambda error: HttpError(503, "not_ready", str(error), headers={"Retry-After": "1"}),
    Busy: lambda error: busy(str(error)),
    StorageFull: lambda error: HttpError(507, "storage_full", str(error)),
    StorageBroken: lambda error: HttpError(503, "storage_broken", str(error), headers={"Retry-After": "1"}),
    RequestValidationError: lambda error: _invalid(error.errors()),
    ValidationError: lambda error: _invalid(error.errors(include_url=False, include_input=False)),
    ClientDisconnect: lambda _: HttpError(400, "disconnected", "the client went away before its body was complete"),
}
