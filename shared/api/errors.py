"""The body of an error response."""

from shared.api.base import Answer


class ErrorDetail(Answer):
    code: str
    message: str
    field: str | None = None
    """The invalid part of the request."""
    request_id: str


class Error(Answer):
    error: ErrorDetail
