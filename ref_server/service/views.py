"""Builds the records of the API: the queue, the runs that report metrics, and what one batch holds."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from pydantic_core import from_json, to_json

from ref_server.metrics import Count, ScoringTotals
from ref_server.queue.records import Stats
from ref_server.queue.run_metrics import Curve, Point
from ref_server.scoring.reference import ReferenceModel
from shared.api import (
    Depth,
    LimitsView,
    PromptView,
    QueueView,
    RewardsView,
    RowView,
    RunPage,
    RunSummary,
    ScoringView,
    State,
    TokensView,
)
from shared.batch import LINEAGE, Array, Batch, Training
from shared.pictures import Picture, pictures

# The queue


@dataclass(frozen=True)
class RunSelection:
    """Which runs to list, by name: a page of them, or a single one. confined: the totals also count only that run."""

    limit: int
    after: str | None = None
    only: str | None = None
    confined: bool = False


def describe_queue(
    stats: Stats, runs: RunSelection, counts: Mapping[Count, int], totals: ScoringTotals, limits: LimitsView
) -> QueueView:
    """The record of `GET /v1/queue`. counts: events since this process started."""
    if runs.only is None:
        names = sorted(name for name in stats.runs if runs.after is None or name > runs.after)
    else:
        names = [runs.only] if runs.only in stats.runs else []
    page = names[: runs.limit]
    of_all = {name: stats.runs[name] for name in page} if runs.confined else stats.runs
    states = {state: _sum_depths(of_all, state) for state in State}
    return QueueView(
        states=states,
        runs={name: stats.runs[name] for name in page},
        next_cursor=page[-1] if len(names) > len(page) else None,
        stored_bytes=sum(depth.bytes for depth in states.values()),
        oldest_age_seconds=stats.oldest_age,
        scoring=_scoring(totals),
        limits=limits,
        since_start={str(count): times for count, times in counts.items()},
    )


def _scoring(totals: ScoringTotals) -> ScoringView:
    """Totals of the scoring loop. The histograms are left out: `/metrics` has them."""
    counts = totals.counts()
    scored, seconds = counts["tokens"] + counts["direct_tokens"], counts["working_seconds"]
    return ScoringView.model_validate({**counts, "tokens_per_second": scored / seconds if seconds else 0.0})


def _sum_depths(runs: Mapping[str, Mapping[State, Depth]], state: State) -> Depth:
    depths = [states[state] for states in runs.values() if state in states]
    return Depth(batches=sum(depth.batches for depth in depths), bytes=sum(depth.bytes for depth in depths))


# Metrics of runs

# When the last run of a page was updated, its lineage and its name.
CURSOR = rf"[0-9]{{1,12}}(\.[0-9]{{1,9}})?:({LINEAGE})?:.{{1,200}}"


# Maximum numbers in one page of a curve, including those that are None.
MOST_VALUES = 2**22


class TooWide(Exception):
    """A page of a curve would have more than MOST_VALUES numbers."""


def summarise(curves: Iterable[Curve]) -> list[RunSummary]:
    """One for each lineage, the latest updated first."""

    def key(curve: Curve) -> tuple[str, str]:
        return curve.run, curve.lineage

    summaries = [_summary(list(of_lineage)) for _, of_lineage in groupby(sorted(curves, key=key), key)]
    return sorted(summaries, key=_order)


def page_of_runs(runs: Sequence[RunSummary], limit: int, cursor: str | None) -> RunPage:
    """The first runs after the cursor. One that is updated between two pages comes first, and so on no later page."""
    if cursor is not None:
        at, lineage, run = cursor.split(":", 2)
        runs = [each for each in runs if _order(each) > (-float(at), run, lineage)]
    last = runs[limit - 1] if len(runs) > limit else None
    next_cursor = None if last is None else f"{last.updated_at!r}:{last.lineage}:{last.run}"
    return RunPage(runs=[*runs[:limit]], next_cursor=next_cursor)


def is_cursor(text: str) -> bool:
    return re.fullmatch(CURSOR, text, re.DOTALL) is not None


def columns(points: Sequence[Point], names: Sequence[str]) -> dict[str, list[int | float | None]]:
    """By name, a number for each point, None where it has none. Without names: all names with a number anywhere.

    Raises TooWide for more than MOST_VALUES: small records whose names all differ would take gigabytes.
    """
    rows, wanted = [], dict.fromkeys(names)
    for point in points:
        rows.append(row := dict(_flat_numbers(_record(point.record))))
        wanted.update({} if names else dict.fromkeys(row))
        if len(wanted) * len(points) > MOST_VALUES:
            raise TooWide
    return {name: [row.get(name) for row in rows] for name in wanted}


def _summary(curves: Sequence[Curve]) -> RunSummary:
    return RunSummary(
        run=curves[0].run,
        lineage=curves[0].lineage,
        records=sum(curve.records for curve in curves),
        step=max(curve.step for curve in curves),
        first_at=min(curve.first_at for curve in curves),
        updated_at=max(curve.updated_at for curve in curves),
    )


def _order(summary: RunSummary) -> tuple[float, str, str]:
    return -summary.updated_at, summary.run, summary.lineage


def _record(record: str) -> Mapping[str, Any]:
    """Empty for a damaged record: the others can be shown."""
    try:
        parsed = from_json(record)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _flat_numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers of a record but its step, those of an object in it as `rewards/tags`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and f"{prefix}{name}" != "step":
            yield f"{prefix}{name}", int(value) if isinstance(value, bool) else value


# One batch

# Of a text that stands for a batch in a list.
_LINE_CHARACTERS = 200


def describe_tokens(batch: Batch, training: Training | None, reference: ReferenceModel) -> TokensView:
    """The tokens of a batch with their texts and log-probs, and the rewards of each completion.

    training: what training recorded of the batch, if anything.
    """
    of_tokens = _rows_of_tokens(batch, training)
    step_ends, step_rewards = _rows_of_steps(batch)
    prompt = batch.group.prompt_ids.tolist()
    return TokensView(
        id=batch.id,
        run=batch.run,
        task=batch.task,
        sample=_parsed(batch.sample),
        temperature=batch.temperature,
        policy_version=batch.policy_version,
        trained_step=None if training is None else training.step,
        prompt=PromptView(text=reference.decode(prompt), ids=prompt),
        images=len(pictures_of(batch)),
        rows=[
            RowView(
                text=reference.decode(ids),
                ids=ids,
                tokens=list(reference.token_texts(ids)),
                reward=_number(batch.rewards[i]),
                rewards={name: _number(part[i]) for name, part in batch.reward_parts.items()},
                step_ends=step_ends[i],
                step_rewards=step_rewards[i],
                finished=bool(batch.finished[i]),
                **{name: rows[i].tolist() for name, rows in of_tokens.items()},
            )
            for i, ids in enumerate(row.tolist() for row in batch.group.completions())
        ],
    )


def describe_rewards(batch: Batch, reference: ReferenceModel) -> RewardsView:
    sample = _parsed(batch.sample)
    about = sample if isinstance(sample, dict) else {}
    prompt = _line(_question(about))
    if prompt is None:
        prompt = _line(reference.decode(batch.group.prompt_ids.tolist(), skip_special_tokens=True), end=True)
    return RewardsView(
        id=batch.id,
        prompt=prompt,
        answer=_line(about.get("answer")),
        rewards=_numbers(batch.rewards),
        parts={name: _numbers(part) for name, part in batch.reward_parts.items()},
        lengths=batch.group.completion_lengths.tolist(),
        finished=batch.finished.tolist(),
    )


def _question(about: Mapping[str, Any]) -> Any:
    """The prompt in a client's sample, which may hold any JSON: a text, or the last of the messages of the user."""
    prompt = about.get("prompt") or about.get("messages")
    if isinstance(prompt, list):
        texts = [each.get("content") for each in prompt if isinstance(each, dict) and each.get("role") == "user"]
        prompt = texts[-1] if texts else None
    if isinstance(prompt, list):  # a message in parts, such as a picture and a text
        texts = [part.get("text") for part in prompt if isinstance(part, dict)]
        prompt = " ".join(text for text in texts if isinstance(text, str))
    return prompt


def _line(value: Any, *, end: bool = False) -> str | None:
    """A text or a number on one line, its beginning (or its end) if it is long; None for anything else."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    line = " ".join(str(value).split())
    if len(line) <= _LINE_CHARACTERS:
        return line or None
    return f"…{line[1 - _LINE_CHARACTERS :]}" if end else f"{line[: _LINE_CHARACTERS - 1]}…"


def pictures_of(batch: Batch) -> list[Picture]:
    return pictures(batch.group.images)


def _rows_of_tokens(batch: Batch, training: Training | None) -> dict[str, list[Array]]:
    """What there is of a value for each token, (C,), cut into the completions' rows."""
    values = {
        "loss_mask": batch.loss_mask,
        "sampler_logps": batch.sampler_logps,
        "ref_logps": batch.ref_logps,
        "teacher_logps": batch.teacher_logps,
        "logps": training and training.logps,
        "advantages": training and training.advantages,
    }
    return {name: batch.group.split(each) for name, each in values.items() if each is not None}


def _rows_of_steps(batch: Batch) -> tuple[Sequence[list[int] | None], Sequence[list[float | None] | None]]:
    """The ends and the rewards of the steps of each completion; None where there are none."""
    if batch.steps is None:
        return [None] * batch.group.size, [None] * batch.group.size
    places = np.cumsum(batch.steps.counts)[:-1]
    ends, rewards = (np.split(each, places) for each in (batch.steps.ends, batch.steps.rewards))
    return [row.tolist() for row in ends], [_numbers(row) for row in rewards]


def _parsed(sample: str | None) -> Any:
    """The client's JSON; None for what could not be JSON again: too deep, or half a character."""
    if sample is None:
        return None
    try:
        value = json.loads(sample, parse_constant=lambda _: None, parse_float=_finite)
        to_json([[[[value]]]])  # a few levels more than where it will stand
        return value
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _numbers(values: Array) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: np.floating) -> float | None:
    """NaN (no reward) becomes None, since JSON has no NaN."""
    return None if np.isnan(value) else float(value)
