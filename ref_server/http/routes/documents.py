"""The OpenAPI page."""

import re
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator

from ref_server.access.keys import Role
from ref_server.access.requirements import JSON, Requirement, requirement_of, requires
from shared import wire
from shared.api import Error

SAFETENSORS = {wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}

_REASONS = {
    400: "the body broke off, or the request is not HTTP",
    401: "no token, or one that is not known; see `--token-file`",
    403: "the token's role is insufficient, or it is for another run, or a foreign `Host` or `Origin`",
    404: "no such batch",
    408: "the body came too slowly",
    409: "conflicts with the current state",
    410: "removed: there is a newer one",
    413: "larger than the server accepts",
    414: "the URL is too long",
    415: "not a `Content-Type` that this route accepts",
    416: "the range begins behind the end of the file",
    422: "the named field is invalid",
    429: "full or busy: try again after `Retry-After` seconds",
    431: "too many headers, or too long ones",
    503: "not ready: starting, draining, or the store is unavailable",
    507: "the disk is full; nothing was stored",
}
# Errors that the gate may answer for any route.
COMMON = (400, 401, 403, 408, 413, 414, 422, 429, 431)


def _digits(text: str) -> str:
    if not re.fullmatch("[0-9]{1,19}", text):
        raise ValueError("must be decimal digits")
    return text


# An integer in a path. Python's own parser would also take `+1`, `1_0` and `1.0`, so that a resource had many URLs.
PathInteger = Annotated[int, Path(ge=0, lt=2**63), BeforeValidator(_digits)]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of these statuses, for a route's `responses`."""
    return {status: {"model": Error, "description": _REASONS[status]} for status in statuses}


def json_body(record: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": record.model_json_schema()}}}}


def add(app: FastAPI) -> None:
    """Adds the page, which is built at the first request for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            page["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            page["security"] = [{"token": []}]
            for route in app.routes:
                if isinstance(route, APIRoute):
                    for method in route.methods or ():
                        _describe(page["paths"][route.path][method.lower()], requirement_of(route))
            app.openapi_schema = page
        return app.openapi_schema

    @requires(Role.UPLOAD, confines=True)
    async def show(_: Request) -> JSONResponse:
        return JSONResponse(app.openapi())

    app.openapi = openapi
    app.add_route("/openapi.json", show, include_in_schema=False)


def _describe(operation: dict[str, Any], required: Requirement) -> None:
    """Documents the role and the media types that an operation requires."""
    if required.role is Role.OPEN:
        operation["security"] = []
    if required.media_types:
        operation["responses"]["415"] = {"description": _REASONS[415]}
    if wire.CONTENT_TYPE in required.media_types:
        body = operation.setdefault("requestBody", {"required": True, "content": {}})
        body["content"].update(SAFETENSORS)
    if wire.UPLOADS_CONTENT_TYPE in required.media_types:
        operation["requestBody"]["content"][wire.UPLOADS_CONTENT_TYPE] = SAFETENSORS[wire.CONTENT_TYPE]
    _document_errors_as_json(operation["responses"])


def _document_errors_as_json(responses: dict[str, dict[str, Any]]) -> None:
    """Errors are JSON. FastAPI documents them with the media type of the route's success, text for example."""
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Error.__name__}"}}}
