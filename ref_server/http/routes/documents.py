"""What the routes tell of themselves in OpenAPI."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shared import wire
from shared.api import Error

SAFETENSORS = {wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
UPLOAD_BODY = {"requestBody": {"required": True, "content": SAFETENSORS}}

_REASONS = {
    400: "the body broke off, or the request is not HTTP",
    401: "no token, or one that is not known; see `--token-file`",
    403: "the token's role is too small, or a foreign `Host` or `Origin`",
    404: "no such batch",
    408: "the body came too slowly",
    409: "it contradicts what is there",
    413: "larger than the server takes",
    414: "the URL is too long",
    415: "not a `Content-Type` that this route takes",
    422: "the field named is wrong",
    429: "full or busy: try again after `Retry-After` seconds",
    431: "too many headers, or too long ones",
    503: "not now: starting, draining, or the store is away",
    507: "the disk is full; nothing was kept",
}
# What may come before any route sees a request.
COMMON = (400, 401, 403, 408, 413, 414, 422, 429, 431)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers of these statuses, for a route's `responses`."""
    return {status: {"model": Error, "description": _REASONS[status]} for status in statuses}


def describe(app: FastAPI, *, open_paths: tuple[str, ...]) -> None:
    """Builds the page at the first request for it. open_paths want no token."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            page["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            page["security"] = [{"token": []}]
            for path, operations in page["paths"].items():
                for operation in operations.values():
                    if path in open_paths:
                        operation["security"] = []
                    _say_that_errors_are_json(operation["responses"])
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = openapi


def _say_that_errors_are_json(responses: dict[str, dict[str, Any]]) -> None:
    """FastAPI takes them for what the route answers when all is well: text, say."""
    for status, response in responses.items():
        if status >= "400":
            response["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Error.__name__}"}}}
