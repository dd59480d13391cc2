"""Which tools a batch's rollouts called, and how they ended: what workers send with it, and the metrics of that.

The texts of the turns follow from the batch's tokens, and the turns' borders from its loss_mask.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from policy_trainer.data.completion import Completion
from policy_trainer.data.conversation import CallRecord, Conversation
from policy_trainer.reporting.metrics import Metrics, sample_fields
from shared.batch import Batch
from shared.errors import printable

# In a batch's `sample`, which is limited in size.
KEY = "rollouts"
_MOST_BYTES = 9 * 1024
_MOST_NAME = 64
# Of what a call printed.
_MOST_LOG = 200
# The settings that end a rollout early, by how it ended. The first one also ends single answers.
_LIMITS = {
    "truncated": "sampling.max_completion_length",
    "out_of_turns": "turns.max_tool_calling_iterations",
    "out_of_time": "turns.rollout_seconds",
}
# Of a batch and of a step: models and clients may invent names.
_MOST_TOOLS = 32

_Name = Annotated[str, Field(max_length=_MOST_NAME)]
_Count = Annotated[int, Field(ge=0, le=10**9)]
_Seconds = Annotated[float, Field(ge=0, le=1e9)]


class ReportedCall(NamedTuple):
    """tool: index into the names of the batch. milliseconds: how long it took. error: the kind of its failure. log: the
    end of what it printed. As JSON a list, since a batch may have hundreds."""

    tool: Annotated[int, Field(ge=0)]
    milliseconds: Annotated[int, Field(ge=0, le=10**12)]
    error: _Name = ""
    log: Annotated[str, Field(max_length=_MOST_LOG)] = ""


class RolloutReport(BaseModel):
    """calls: those after each of the model's turns. end: how the rollout ended."""

    calls: list[list[ReportedCall]]
    end: _Name
    seconds: _Seconds


class Totals(BaseModel):
    """Of all rollouts of a batch. turns: the model's. seconds: their sum; slowest: the largest. ends: rollouts by how
    they ended. calls: of each tool, and how many of them failed. failures: by kind."""

    turns: _Count
    seconds: _Seconds
    slowest: _Seconds
    ends: dict[_Name, _Count]
    calls: list[tuple[_Count, _Count]]
    failures: dict[_Name, _Count]


class Report(BaseModel):
    """rollouts: the first ones of the batch. tools: names; a call of another tool has a larger index."""

    tools: Annotated[list[_Name], Field(max_length=_MOST_TOOLS)]
    totals: Totals
    rollouts: list[RolloutReport]

    def name(self, tool: int) -> str:
        return printable(self.tools[tool]) if tool < len(self.tools) else "?"


def report(completions: Sequence[Completion]) -> dict[str, Any]:
    """For the `sample` of a group's batch. Where it is too long, what was printed is left out, then later turns,
    rollouts, and names of tools; the totals are always those of all."""
    talks = [completion.conversation for completion in completions if completion.conversation]
    if not talks:
        return {}
    called = Counter(call.name[:_MOST_NAME] for talk in talks for turn in talk.calls for call in turn)
    names = [name for name, _ in called.most_common(_MOST_TOOLS)]
    logs, turns, listed = True, max(len(talk.calls) for talk in talks), len(talks)
    while True:
        rollouts = [
            {
                "calls": [[_call(call, names, logs=logs) for call in turn] for turn in talk.calls[:turns]],
                "end": talk.end,
                "seconds": round(talk.seconds, 3),
            }
            for talk in talks[:listed]
        ]
        sent = {"tools": names, "totals": _totals(talks, names), "rollouts": rollouts}
        if len(json.dumps(sent)) <= _MOST_BYTES:
            return {KEY: sent}
        if logs:
            logs = False
        elif turns:
            turns //= 2
        elif listed:
            listed //= 2
        else:
            names = names[: len(names) // 2]


def _totals(talks: Sequence[Conversation], names: Sequence[str]) -> dict[str, Any]:
    calls = [(_index(call, names), call.error) for talk in talks for turn in talk.calls for call in turn]
    by_tool, failed = Counter(tool for tool, _ in calls), Counter(tool for tool, error in calls if error)
    return {
        "turns": sum(len(talk.turn_ends) for talk in talks),
        "seconds": round(sum(talk.seconds for talk in talks), 3),
        "slowest": round(max(talk.seconds for talk in talks), 3),
        "ends": Counter(talk.end for talk in talks),
        "calls": [(by_tool[tool], failed[tool]) for tool in range(max(by_tool, default=-1) + 1)],
        "failures": Counter(error for _, error in calls if error),
    }


def _index(call: CallRecord, names: Sequence[str]) -> int:
    name = call.name[:_MOST_NAME]
    return names.index(name) if name in names else len(names)


def _call(record: CallRecord, names: Sequence[str], *, logs: bool) -> list[Any]:
    log = record.log[-_MOST_LOG:] if logs else ""
    call = [_index(record, names), round(1000 * record.seconds), record.error, log]
    return call if log else call[:3] if record.error else call[:2]


def read_report(batch: Batch) -> Report | None:
    """What the worker says of a batch's rollouts. An outside client may have put any JSON there."""
    try:
        received = Report.model_validate(sample_fields(batch).get(KEY))
    except ValidationError:
        return None
    return received if len(received.rollouts) <= batch.group.size else None


@dataclass(frozen=True)
class SampledTurn:
    """A part of a rollout's text. sampled: whether the model wrote it; else it stands between two of its turns.
    calls: of the tools after it, as people read them."""

    text: str
    sampled: bool
    calls: tuple[str, ...] = ()


Decode = Callable[[list[int]], str]


def turns_of(completion: Completion, decode: Decode) -> tuple[SampledTurn, ...]:
    """The turns of a rollout with their calls; empty for a single answer."""
    if (talk := completion.conversation) is None:
        return ()
    described = [
        [_described(printable(call.name), call.seconds, call.error, call.log[-_MOST_LOG:]) for call in turn]
        for turn in talk.calls
    ]
    return _sampled_turns(completion.ids.tolist(), talk.mask, decode, described)


def turns_of_batch(batch: Batch, completions: Sequence[list[int]], decode: Decode) -> list[tuple[SampledTurn, ...]]:
    """The turns of each of the batch's completions; empty for single answers, and where the worker sent no report."""
    if batch.loss_mask is None or (received := read_report(batch)) is None:
        return [()] * len(completions)
    masks = batch.group.split(batch.loss_mask)
    described = [
        [
            [_described(received.name(call.tool), call.milliseconds / 1000, call.error, call.log) for call in turn]
            for turn in rollout.calls
        ]
        for rollout in received.rollouts
    ]
    described += [[]] * (len(completions) - len(described))
    rows = zip(completions, masks, described, strict=True)
    return [_sampled_turns(ids, mask, decode, calls) for ids, mask, calls in rows]


def _sampled_turns(
    ids: Sequence[int], mask: np.ndarray, decode: Decode, calls: Iterable[Iterable[str]]
) -> tuple[SampledTurn, ...]:
    """ids, mask: of a completion, (T,). calls: after each of the model's turns."""
    borders = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    after, turns = iter(calls), []
    for part in np.split(np.arange(len(mask)), borders):
        sampled = bool(mask[part[0]])
        turns.append(
            SampledTurn(decode([ids[place] for place in part]), sampled, tuple(next(after, ())) if sampled else ())
        )
    return tuple(turns)


def _described(name: str, seconds: float, error: str, log: str) -> str:
    failure = f", {printable(error)}" if error else ""
    printed = f"; printed: {printable(log)}" if log else ""
    return f"{name} {seconds:.3g} s{failure}{printed}"


def limit_of(metrics: Mapping[str, Any]) -> str:
    """The setting that cut most completions off. metrics: of a step."""
    return _LIMITS[max(_LIMITS, key=lambda end: metrics.get(f"rollouts/{end}") or 0.0)]


def rollout_metrics(batches: Sequence[Batch]) -> Metrics:
    """tools/call_frequency and tools/failure_frequency as TRL's; the same by tool; failures by kind; turns, seconds and
    ends of the rollouts. Empty without rollouts of several turns."""
    reports = [received for batch in batches if (received := read_report(batch))]
    count = sum(sum(received.totals.ends.values()) for received in reports)
    if not count:
        return {}
    by_tool, failed, kinds, ends = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for received in reports:
        for tool, (calls, failures) in enumerate(received.totals.calls):
            by_tool[received.name(tool)] += calls
            failed[received.name(tool)] += failures
        kinds.update(received.totals.failures)
        ends.update(received.totals.ends)
    calls = by_tool.total()
    tools = [(name, called) for name, called in by_tool.most_common(_MOST_TOOLS) if called]
    return {
        "tools/call_frequency": calls / count,
        "tools/failure_frequency": failed.total() / calls if calls else 0.0,
        **{f"tools/call_frequency/{name}": called / count for name, called in tools},
        **{f"tools/failure_frequency/{name}": failed[name] / called for name, called in tools},
        **{f"tools/failures/{kind}": failures for kind, failures in kinds.most_common(_MOST_TOOLS)},
        "turns_mean": sum(received.totals.turns for received in reports) / count,
        "rollout_seconds_mean": sum(received.totals.seconds for received in reports) / count,
        "rollout_seconds_max": max(received.totals.slowest for received in reports),
        **{f"rollouts/{end}": number / count for end, number in ends.most_common(_MOST_TOOLS)},
    }
