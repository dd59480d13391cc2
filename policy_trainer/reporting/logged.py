"""What reward functions logged about a group: what workers send with its batch, and what a step makes of it."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from policy_trainer.reporting.metrics import Metrics, sample_fields
from policy_trainer.rewards.call_log import KEY, Logged
from shared.batch import MAX_SAMPLE_BYTES, Batch

# Of a batch and of a step: functions and clients may invent names.
_MOST_NAMES = 32
_MOST_NAME = 64
# Of the values of a column that are texts.
_MOST_CHARACTERS = 300
# For what a server or a later release may add to a batch's `sample`.
_SPARE_BYTES = 512

_Name = Annotated[str, Field(min_length=1, max_length=_MOST_NAME)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=10**9)]


class Report(BaseModel):
    """metrics: mean and number of the completions whose judges logged it. extras: a value for each completion."""

    metrics: dict[_Name, tuple[_Number, _Count]]
    extras: dict[_Name, list[str | bool | int | float | None]]


def report(logged: Sequence[Logged], others: Mapping[str, Any]) -> dict[str, Any]:
    """For the `sample` of a group's batch, which has these other fields. Columns that find no room are left out.

    logged: of each completion of the group.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for each in logged:
        for name, value in each.metrics.items():
            values[name[:_MOST_NAME]].append(value)
    means = {name: (sum(numbers) / len(numbers), len(numbers)) for name, numbers in [*values.items()][:_MOST_NAMES]}
    columns = dict.fromkeys(column for each in logged for column in each.extras)
    if not means and not columns:
        return {}
    extras: dict[str, list[Any]] = {}
    for column in [*columns][:_MOST_NAMES]:
        wider = {**extras, column[:_MOST_NAME]: [_short(each.extras.get(column)) for each in logged]}
        if _size({**others, KEY: {"metrics": means, "extras": wider}}) <= MAX_SAMPLE_BYTES - _SPARE_BYTES:
            extras = wider
    return {KEY: {"metrics": means, "extras": extras}}


def _size(sample: Mapping[str, Any]) -> int:
    return len(json.dumps(sample, ensure_ascii=False).encode(errors="replace"))


def _short(value: Any) -> Any:
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def read_report(batch: Batch) -> Report | None:
    """What the worker says that rewards logged. An outside client may have put any JSON there."""
    try:
        received = Report.model_validate(sample_fields(batch).get(KEY))
    except ValidationError:
        return None
    return received if all(len(values) == batch.group.size for values in received.extras.values()) else None


def extras_of(batch: Batch) -> list[dict[str, Any]]:
    """The values of each of the batch's completions by column."""
    received = read_report(batch)
    columns = received.extras if received else {}
    return [{column: values[i] for column, values in columns.items()} for i in range(batch.group.size)]


def logged_metrics(batches: Sequence[Batch]) -> Metrics:
    """logged/NAME: the mean over the step's completions whose judges logged it. Empty where none did."""
    totals: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for received in filter(None, map(read_report, batches)):
        for name, mean_and_count in received.metrics.items():
            totals[name].append(mean_and_count)
    return {
        f"logged/{name}": sum(mean * count for mean, count in parts) / sum(count for _, count in parts)
        for name, parts in [*totals.items()][:_MOST_NAMES]
    }
