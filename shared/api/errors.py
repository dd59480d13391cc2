"""What the server answers when it refuses."""

from shared.api.base import Answer


class ErrorDetail(Answer):
    code: str
    message: str
    field: str | None = None
    """The part of the request that is wrong."""
    request_id: str


class Error(Answer):
    error: ErrorDetail
