"""Which tools a batch's rollouts called, and how they ended: what workers send with it, and the metrics of that.

The texts of the turns follow from the batch's tokens, and the turns' borders from its loss_mask.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from policy_trainer.data.completion import Completion
from policy_trainer.data.conversation import CallRecord
from policy_trainer.reporting.metrics import Metrics, sample_fields
from shared.batch import RolloutBatch
from shared.errors import printable

# In a batch's `sample`, which is limited in size.
KEY = "rollouts"
_MOST_BYTES = 9 * 1024
_MOST_NAME = 64
# Of what a call printed.
_MOST_LOG = 200
# Of a run: models and clients may invent names.
_MOST_TOOLS = 32

_Seconds = Annotated[float, Field(ge=0, le=1e9)]


class Call(NamedTuple):
    """tool: index into the names of the batch. milliseconds: it took. error: the kind of its failure. log: the end of
    what it printed. As JSON a list, since a batch may have hundreds."""

    tool: Annotated[int, Field(ge=0)]
    milliseconds: Annotated[int, Field(ge=0, le=10**12)]
    error: Annotated[str, Field(max_length=_MOST_NAME)] = ""
    log: Annotated[str, Field(max_length=_MOST_LOG)] = ""


class RolloutReport(BaseModel):
    """calls: those after each of the model's turns. end: how the rollout ended."""

    calls: list[list[Call]]
    end: Annotated[str, Field(max_length=_MOST_NAME)]
    seconds: _Seconds


class Report(BaseModel):
    """Of the rollouts of a batch, in their order."""

    tools: list[Annotated[str, Field(max_length=_MOST_NAME)]]
    rollouts: list[RolloutReport]

    def named(self, call: Call) -> str:
        return printable(self.tools[call.tool]) if call.tool < len(self.tools) else "?"


def reported(completions: Sequence[Completion]) -> dict[str, Any]:
    """For the `sample` of a group's batch. Where it is too long, what was printed is left out, then later turns."""
    talks = [completion.conversation for completion in completions if completion.conversation]
    if not talks:
        return {}
    names = [*dict.fromkeys(call.name[:_MOST_NAME] for talk in talks for turn in talk.calls for call in turn)]
    names = names[:_MOST_TOOLS]
    logs, turns = True, max(len(talk.calls) for talk in talks)
    while True:
        rollouts = [
            {
                "calls": [[_call(call, names, logs=logs) for call in turn] for turn in talk.calls[:turns]],
                "end": talk.end,
                "seconds": round(talk.seconds, 3),
            }
            for talk in talks
        ]
        report = {"tools": names, "rollouts": rollouts}
        if len(json.dumps(report)) <= _MOST_BYTES or not (turns or logs):
            return {KEY: report}
        logs, turns = False, turns if logs else turns // 2


def _call(record: CallRecord, names: Sequence[str], *, logs: bool) -> list[Any]:
    name, log = record.name[:_MOST_NAME], record.log[-_MOST_LOG:] if logs else ""
    call = [names.index(name) if name in names else len(names), round(1000 * record.seconds), record.error, log]
    return call if log else call[:3] if record.error else call[:2]


def read_report(batch: RolloutBatch) -> Report | None:
    """What the worker says of a batch's rollouts. An outside client may have put any JSON there."""
    try:
        report = Report.model_validate(sample_fields(batch).get(KEY))
    except ValidationError:
        return None
    return report if len(report.rollouts) == batch.group.size else None


@dataclass(frozen=True)
class SampledTurn:
    """A part of a rollout's text. sampled: whether the model wrote it; else it stands between two of its turns.
    calls: of the tools after it, as people read them."""

    text: str
    sampled: bool
    calls: tuple[str, ...] = ()


def sampled_turns(ids: Sequence[int], mask: np.ndarray, decode: Callable[[list[int]], str]) -> list[SampledTurn]:
    """The turns of a completion with these ids and this loss_mask, (T,)."""
    borders = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    parts = np.split(np.arange(len(mask)), borders)
    return [SampledTurn(decode([ids[place] for place in part]), bool(mask[part[0]])) for part in parts]


def with_calls(turns: Sequence[SampledTurn], report: Report, rollout: RolloutReport) -> tuple[SampledTurn, ...]:
    """The turns with the calls that followed each of the model's."""
    calls = iter(rollout.calls)
    return tuple(
        replace(turn, calls=tuple(_described(report, call) for call in next(calls, ()))) if turn.sampled else turn
        for turn in turns
    )


def turns_of(completion: Completion, decode: Callable[[list[int]], str]) -> tuple[SampledTurn, ...]:
    """The turns of a rollout with their calls; empty for a single answer."""
    if completion.conversation is None:
        return ()
    report = Report.model_validate(reported([completion])[KEY])
    turns = sampled_turns(completion.ids.tolist(), completion.conversation.mask, decode)
    return with_calls(turns, report, report.rollouts[0])


def _described(report: Report, call: Call) -> str:
    failure = f", {printable(call.error)}" if call.error else ""
    printed = f"; printed: {printable(call.log)}" if call.log else ""
    return f"{report.named(call)} {call.milliseconds / 1000:.3g} s{failure}{printed}"


def rollout_metrics(batches: Sequence[RolloutBatch]) -> Metrics:
    """tools/call_frequency and tools/failure_frequency as TRL's; the same by tool; failures by kind; turns, seconds and
    ends of the rollouts. Empty without rollouts of several turns."""
    reports = [report for batch in batches if (report := read_report(batch))]
    rollouts = [rollout for report in reports for rollout in report.rollouts]
    if not rollouts:
        return {}
    calls = [
        (report.named(call), call.error)
        for report in reports
        for rollout in report.rollouts
        for turn in rollout.calls
        for call in turn
    ]
    by_tool, failed = Counter(name for name, _ in calls), Counter(name for name, error in calls if error)
    kinds, ends = Counter(error for _, error in calls if error), Counter(rollout.end for rollout in rollouts)
    seconds = [rollout.seconds for rollout in rollouts]
    return {
        "tools/call_frequency": len(calls) / len(rollouts),
        "tools/failure_frequency": failed.total() / len(calls) if calls else 0.0,
        **{f"tools/call_frequency/{name}": count / len(rollouts) for name, count in by_tool.most_common(_MOST_TOOLS)},
        **{
            f"tools/failure_frequency/{name}": failed[name] / by_tool[name]
            for name, _ in by_tool.most_common(_MOST_TOOLS)
        },
        **{f"tools/failures/{kind}": count for kind, count in kinds.most_common(_MOST_TOOLS)},
        "turns_mean": float(np.mean([len(rollout.calls) + 1 for rollout in rollouts])),
        "rollout_seconds_mean": float(np.mean(seconds)),
        "rollout_seconds_max": max(seconds),
        **{f"rollouts/{end}": count / len(rollouts) for end, count in ends.most_common(_MOST_TOOLS)},
    }
