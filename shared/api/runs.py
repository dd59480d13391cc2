"""Runs: their metrics, which trainers report, the curves that are read from them, and the end of a run."""

import json
import math
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from shared.api.base import Lineage, RequestRecord, ResponseRecord, Version, example

# Of one request, and of one record as JSON.
MAX_RECORDS = 256
MAX_RECORD_BYTES = 64 * 1024
_DEPTH = 8


class Kind(StrEnum):
    """What a record is about."""

    STEP = "step"
    EVALUATION = "evaluation"
    HEALTH = "health"
    SETTINGS = "settings"
    """At step 0, one record: `changed` and `unchanged`, the settings by their dotted names."""
    SAMPLES = "samples"
    """A held-out problem and the answers to it at one evaluation. `name` is the problem's."""


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns the value if JSON can hold it and every client can read it. Raises ValueError."""
    if depth > _DEPTH:
        raise ValueError(f"is nested more than {_DEPTH} deep")
    if isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _plain(item, depth + 1)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("must be text: it holds half of a surrogate pair")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a number: JSON has no NaN and no infinity; write null where there is none")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must be an integer of 64 bits")
    return value


class MetricsRecord(RequestRecord):
    """One record of metrics.jsonl, with fields of any name: numbers, texts, lists, objects of them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_plain)]]  # pyright: ignore[reportIncompatibleVariableOverride]

    kind: Kind
    step: Version
    name: str | None = Field(default=None, max_length=200)
    """Distinguishes records of the same kind and step, such as two warnings."""

    @property
    def text(self) -> str:
        """As JSON, in ASCII."""
        return json.dumps(self.model_dump(mode="json", exclude_unset=True), separators=(",", ":"))

    @model_validator(mode="after")
    def _is_small(self) -> "MetricsRecord":
        if (size := len(self.text)) > MAX_RECORD_BYTES:
            raise ValueError(f"a record must be at most {MAX_RECORD_BYTES} bytes of JSON, got {size}: leave lists out")
        return self


class MetricsBody(RequestRecord):
    model_config = example(lineage="5f0c2d9e", records=[{"kind": "step", "step": 12, "reward": 0.4, "kl": 0.01}])

    lineage: Lineage | None = None
    """The lineage that reports. Absent: the one that all clients without a lineage share."""
    after: int | None = Field(default=None, ge=-1, lt=2**63, strict=True)
    """First deletes the lineage's records of later steps: a resumed run continues from this step. -1 deletes all."""
    records: list[MetricsRecord] = Field(min_length=1, max_length=MAX_RECORDS)
    """A record replaces an earlier one of the same kind, step and name."""


class MetricsKept(ResponseRecord):
    kept: int


class RunSummary(ResponseRecord):
    """A lineage of a run that has reported metrics."""

    run: str
    lineage: str
    """Empty for clients without a lineage."""
    records: int
    """Of all kinds."""
    step: int
    """The latest."""
    first_at: float
    """Unix seconds."""
    updated_at: float
    """Unix seconds."""


class RunPage(ResponseRecord):
    runs: list[RunSummary]
    next_cursor: str | None
    """Pass it as `cursor` to get the next page; null on the last one."""


class RunMetrics(ResponseRecord):
    """Columns: entry i of each list is of `steps[i]`. Of a long run older steps are thinned out."""

    run: str
    lineage: str
    kind: Kind
    steps: list[int]
    at: list[float]
    """When the server received each record, Unix seconds."""
    values: dict[str, list[int | float | None]]
    """Numbers by name; nested ones as `rewards/tags`, true and false as 1 and 0."""
    next_after: int | None
    """Pass it as `after` to continue; null where there is no more yet."""


class StepRecords(ResponseRecord):
    records: list[dict[str, Any]]
    """As they were reported, of all kinds."""


class MetricsEvent(ResponseRecord):
    """A curve has new records, or a resumed run has deleted some."""

    run: str
    lineage: str
    kind: Kind
    step: int
    """The latest."""


class FinishBody(RequestRecord):
    model_config = example(lineage="5f0c2d9e")

    lineage: Lineage | None = None
    """The lineage that has finished. Absent: the one that all clients without a lineage share."""


class Finished(ResponseRecord):
    expired: int
    """The number of waiting batches that expired."""
