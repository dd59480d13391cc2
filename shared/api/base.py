"""Base classes of the API's records, the types of their fields, the error record, and what a bearer token is."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shared.batch import LINEAGE

Lineage = Annotated[str, Field(pattern=f"^{LINEAGE}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# strict: otherwise pydantic accepts false for 0, and 0 for false.
Seconds = Annotated[float, Field(gt=0, le=86_400, strict=True)]
Version = Annotated[int, Field(ge=0, lt=2**63, strict=True)]

# A bearer token, RFC 6750.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
# In error messages.
TOKEN_CHARACTERS = "letters, digits and - . _ ~ + / ="


class RequestRecord(BaseModel):
    """A record that a client sends. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ResponseRecord(BaseModel):
    """A record that the server answers. Unknown keys are ignored, so that an older client can read a newer server."""

    model_config = ConfigDict(frozen=True, from_attributes=True, use_attribute_docstrings=True)


def example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


class ErrorDetail(ResponseRecord):
    code: str
    message: str
    field: str | None = None
    """The invalid part of the request."""
    request_id: str


class Error(ResponseRecord):
    """The body of an error response."""

    error: ErrorDetail


def is_token(text: str) -> bool:
    """Whether a header can carry the text as a bearer token."""
    return _TOKEN.fullmatch(text) is not None
