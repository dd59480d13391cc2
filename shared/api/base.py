"""Base classes of the API's records, requests and answers, and the types of their fields."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shared.batch import LINEAGE

Lineage = Annotated[str, Field(pattern=f"^{LINEAGE}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# strict: otherwise pydantic accepts false for 0, and 0 for false.
Seconds = Annotated[float, Field(gt=0, le=86_400, strict=True)]
Version = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class Request(BaseModel):
    """A record that a client sends. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Answer(BaseModel):
    """A record that the server answers. Unknown keys are ignored, so that an older client can read a newer server."""

    model_config = ConfigDict(frozen=True, from_attributes=True, use_attribute_docstrings=True)


def example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})
