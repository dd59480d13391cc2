"""HTTP error responses."""

import math
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from ref_server.access.keys import Denied, Unauthenticated
from ref_server.queue.errors import QueueFull, RunTaken
from shared.api import Error, ErrorDetail

# Each 429 is delayed by this much at least: some clients ignore Retry-After.
DELAY_SECONDS = 1.0


class Problem(Exception):
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
        return JSONResponse(self.body(scope["state"]["request_id"]), self.status, headers=self.headers)

    def body(self, request_id: str) -> dict[str, Any]:
        detail = ErrorDetail(code=self.code, message=self.message, field=self.field, request_id=request_id)
        return Error(error=detail).model_dump(exclude_none=True)


def denied(error: Denied) -> Problem:
    """401 without a known token, else 403."""
    if isinstance(error, Unauthenticated):
        return Problem(401, "unauthorized", str(error), error.field, {"WWW-Authenticate": "Bearer"})
    return Problem(403, "forbidden", str(error), error.field)


def no_room(code: str, error: QueueFull) -> Problem:
    """429 with a Retry-After header."""
    return Problem(429, code, str(error), headers={"Retry-After": str(max(1, round(error.retry_after)))})


def busy(message: str) -> Problem:
    """429 for a client that may try again in a second."""
    return Problem(429, "busy", message, headers={"Retry-After": "1"})


def no_room_to_answer() -> Problem:
    return busy("your long answers would fill more of the memory for them than is free; read those before")


def run_taken(error: RunTaken) -> Problem:
    """409, with the seconds after which the run is free, unless its holder is heard again."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return Problem(409, "run_taken", str(error), "run", headers)
