"""An answer that is an error."""

from typing import Any

from shared.api import Error, ErrorDetail


class Problem(Exception):
    """`field` names the part of the request that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.headers = headers or {}

    def body(self, request_id: str) -> dict[str, Any]:
        detail = ErrorDetail(code=self.code, message=self.message, field=self.field, request_id=request_id)
        return Error(error=detail).model_dump(exclude_none=True)
