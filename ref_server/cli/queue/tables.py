"""The queue as tables for people."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ref_server.cli.terminal import table
from shared.api import (
    BatchDetails,
    BatchSummary,
    Depth,
    LimitsView,
    PromptView,
    QueueView,
    RowView,
    ScoringView,
    State,
    TokensView,
)
from shared.errors import printable

# Batches in these states count against the limits of what waits; a leased one only until its training starts.
_WAITING = (State.QUEUED, State.SCORING, State.READY, State.LEASED)
_IN_FLIGHT = (State.LEASED,)

# Limits of all runs together and of each run: the server's name, what is counted, in which states, the name to print.
_LIMITS = (
    ("max_batches", "batches", _WAITING, "batches"),
    ("max_bytes", "bytes", _WAITING, "MiB"),
    ("max_in_flight", "batches", _IN_FLIGHT, "leased batches"),
)

# Columns aligned to the right, and columns that shrink when the terminal is narrow.
_NUMBERS = ("epoch", "version", "age", "after", "tokens", "deliveries", "batches", "MiB", "used", "of", "%")
_LONG = ("run", "consumer", "reason", "detail", "limit")

_LONG_AGO = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def mib(size: int) -> str:
    """Bytes as MiB; a little is `<0.1`, not `0.0`."""
    return "<0.1" if 0 < size < 0.1 * 2**20 else f"{size / 2**20:,.1f}"


def age(seconds: float) -> str:
    for unit, name in _LONG_AGO:
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def batch_table(batches: Iterable[BatchSummary]) -> Table:
    """One line a batch, also where the terminal is too narrow for long names and reasons."""
    table = _table("id", "run", "epoch", "version", "state", "age", "tokens", "deliveries", "consumer", "reason")
    now = time.time()
    for batch in batches:
        table.add_row(
            _name(batch.id),
            _cut(batch.run),
            str(batch.epoch),
            str(batch.policy_version),
            batch.state,
            age(now - batch.admitted_at),
            str(batch.prompt_tokens + batch.completion_tokens),
            str(batch.deliveries),
            _cut(batch.consumer),
            _cut(batch.reason),
        )
    return table


def batch_sheet(batch: BatchDetails) -> Group:
    """One batch: its facts, its state and its history."""
    facts = Table.grid(padding=(0, 2))
    shape = f"{batch.completions} completions, {batch.completion_tokens} tokens; prompt {batch.prompt_tokens}"
    for fact, value in {
        "batch": batch.id,
        "state": batch.state,
        "reason": batch.reason,
        "run": batch.run,
        "epoch": batch.epoch,
        "policy version": batch.policy_version,
        "shape": shape,
        "payload": f"{mib(batch.payload_bytes)} MiB" if batch.payload_bytes else "gone",
        "deliveries": batch.deliveries,
        "failed scorings": batch.scoring_attempts,
        "consumer": batch.consumer,
    }.items():
        if value is not None:
            facts.add_row(fact, _name(value))
    history = _table("time", "after", "state", "detail")
    for event in batch.history:
        moment = datetime.fromtimestamp(event.at).strftime("%Y-%m-%d %H:%M:%S")
        history.add_row(moment, age(event.at - batch.admitted_at), event.state, _name(event.detail))
    return Group(facts, Text(), history)


def token_sheet(tokens: TokensView) -> Group:
    """The prompt and each completion with its rewards, and its mean advantage where training recorded it."""
    trained = "" if tokens.trained_step is None else f"\ntrained in step {tokens.trained_step}"
    parts: list[RenderableType] = [Text(f"{trained}\nprompt"), _text(tokens.prompt)]
    for number, row in enumerate(tokens.rows):
        rewards = "".join(f", {_name(name)} {_reward(value)}" for name, value in row.rewards.items())
        ending = "finished" if row.finished else "cut off"
        advantage = f", advantage {sum(row.advantages) / len(row.ids):+.2f}" if row.advantages else ""
        about = f"reward {_reward(row.reward)}{rewards}{advantage}; {len(row.ids)} tokens, {ending}"
        parts += [Text(f"\ncompletion {number}: {about}"), _text(row)]
    return Group(*parts)


def stats_sheet(stats: QueueView) -> Group:
    """Batches and MiB by run and state, limits and their use, waiting and scoring."""
    oldest = stats.oldest_age_seconds
    lines = [
        "Leased batches count as waiting here; for the limits, only until their training starts.",
        "",
        "nothing waits" if oldest is None else f"the oldest waiting batch has waited {age(oldest)}",
        *_scoring_lines(stats.scoring),
    ]
    return Group(_depths_table(stats), Text(), _limits_table(stats), Text("\n".join(lines)))


def _depths_table(stats: QueueView) -> Table:
    table = _table("run", "state", "batches", "MiB")
    for run, states in (*stats.runs.items(), ("all runs", stats.states)):
        for state in stats.states:  # in the order of a batch's life
            depth = states.get(state)
            if depth and depth.batches:
                table.add_row(_name(run), state, f"{depth.batches:,}", mib(depth.bytes))
    return table


def _limits_table(stats: QueueView) -> Table:
    table = _table("limit", "used", "of", "%")
    _add_limits(table, stats.limits, "", stats.states, "all runs")
    stored, most = stats.stored_bytes, stats.limits.max_stored_bytes
    table.add_row("stored MiB, all runs", mib(stored), mib(most), f"{100 * stored / most:.1f}")
    for run, states in stats.runs.items():
        _add_limits(table, stats.limits, "_per_run", states, _name(run))
    return table


def _add_limits(table: Table, limits: LimitsView, scope: str, states: Mapping[State, Depth], name: str) -> None:
    for limit, key, counted, unit in _LIMITS:
        bound = getattr(limits, limit + scope)
        used = sum(getattr(states[state], key) for state in counted if state in states)
        number = mib if key == "bytes" else "{:,}".format
        table.add_row(f"{unit}, {name}", number(used), number(bound), f"{100 * used / bound:.1f}")


def _scoring_lines(scoring: ScoringView) -> Sequence[str]:
    working, waiting = scoring.working_seconds, scoring.waiting_seconds
    busy = 100 * working / (working + waiting) if working + waiting else 0.0
    return (
        f"scored since the start: {scoring.batches:,} batches, {scoring.tokens:,} tokens; {scoring.errors:,} errors",
        f"{scoring.tokens_per_second:,.0f} tokens/s while scoring, which was {busy:.0f} % of the time",
    )


def _table(*headers: str) -> Table:
    return table(*headers, numbers=_NUMBERS, long=_LONG)


def _reward(value: float | None) -> str:
    return "not judged" if value is None else f"{value:g}"


def _cut(name: object) -> Text:
    return Text(_name(name), no_wrap=True, overflow="ellipsis")


def _text(tokens: PromptView | RowView) -> Padding:
    """The text, or the ids from a server that has no tokenizer."""
    text = " ".join(map(str, tokens.ids)) if tokens.text is None else tokens.text
    return Padding(Text(printable(text, keep="\n")), (0, 0, 0, 4), expand=False)


def _name(value: object) -> str:
    return "" if value is None else printable(str(value))
