"""What people see of the queue."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Batches in these states count against the limits of what waits; a leased one only until its training starts.
_WAITING = ("queued", "scoring", "ready", "leased")
_IN_FLIGHT = ("leased",)

# Limits of all runs together and of each run: their names on the server, what they count, and what they are called.
_LIMITS = (
    ("max_batches", "batches", _WAITING, "batches"),
    ("max_bytes", "bytes", _WAITING, "MiB"),
    ("max_in_flight", "batches", _IN_FLIGHT, "leased batches"),
)

# Columns to the right, and those that give way when the terminal is narrow.
_NUMBERS = ("epoch", "version", "age", "after", "tokens", "deliveries", "batches", "MiB", "used", "of", "%")
_LONG = ("run", "consumer", "reason", "detail", "limit")

# A terminal with fewer columns folds lines by itself, where a squeezed table would lose its ids.
_NARROWEST = 120

_LONG_AGO = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def show(*sheets: RenderableType) -> None:
    """Prints to standard output. A pipe or a file gets whole lines, whatever their width."""
    console = Console(markup=False, emoji=False, highlight=False)
    if console.is_terminal:
        console.width = max(console.width, _NARROWEST)
        console.print(*sheets, sep="\n")
        return
    console.width = 10_000
    with console.capture() as captured:
        console.print(*sheets, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().rstrip().split("\n")))


def mib(size: int) -> str:
    """Bytes as MiB; what is not nothing does not look like it."""
    return "<0.1" if 0 < size < 0.1 * 2**20 else f"{size / 2**20:,.1f}"


def age(seconds: float) -> str:
    for unit, name in _LONG_AGO:
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def batch_table(batches: Iterable[Mapping[str, Any]]) -> Table:
    """One line a batch, also where the terminal is too narrow for long names and reasons."""
    table = _table("id", "run", "epoch", "version", "state", "age", "tokens", "deliveries", "consumer", "reason")
    now = time.time()
    for batch in batches:
        table.add_row(
            _name(batch["id"]),
            _cut(batch["run"]),
            str(batch["epoch"]),
            str(batch["policy_version"]),
            batch["state"],
            age(now - batch["admitted_at"]),
            str(batch["prompt_tokens"] + batch["completion_tokens"]),
            str(batch["deliveries"]),
            _cut(batch["consumer"]),
            _cut(batch["reason"]),
        )
    return table


def batch_sheet(batch: Mapping[str, Any]) -> Group:
    """All of one batch: what it is, where it stands, how it came there."""
    facts = Table.grid(padding=(0, 2))
    shape = f"{batch['completions']} completions, {batch['completion_tokens']} tokens; prompt {batch['prompt_tokens']}"
    for fact, value in {
        "batch": batch["id"],
        "state": batch["state"],
        "reason": batch["reason"],
        "run": batch["run"],
        "epoch": batch["epoch"],
        "policy version": batch["policy_version"],
        "shape": shape,
        "payload": f"{mib(batch['payload_bytes'])} MiB" if batch["payload_bytes"] else "gone",
        "deliveries": batch["deliveries"],
        "failed scorings": batch["scoring_attempts"],
        "consumer": batch["consumer"],
    }.items():
        if value is not None:
            facts.add_row(fact, _name(value))
    history = _table("time", "after", "state", "detail")
    for event in batch["history"]:
        moment = datetime.fromtimestamp(event["at"]).strftime("%Y-%m-%d %H:%M:%S")
        history.add_row(moment, age(event["at"] - batch["admitted_at"]), event["state"], _name(event["detail"]))
    return Group(facts, Text(), history)


def token_sheet(tokens: Mapping[str, Any]) -> Group:
    """The prompt and each completion with its rewards."""
    parts: list[RenderableType] = [Text("\nprompt"), _text(tokens["prompt"])]
    for number, row in enumerate(tokens["rows"]):
        rewards = "".join(f", {_name(name)} {_reward(value)}" for name, value in row["rewards"].items())
        ending = "finished" if row["finished"] else "cut off"
        about = f"reward {_reward(row['reward'])}{rewards}; {len(row['ids'])} tokens, {ending}"
        parts += [Text(f"\ncompletion {number}: {about}"), _text(row)]
    return Group(*parts)


def stats_sheet(stats: Mapping[str, Any]) -> Group:
    """Batches and MiB by run and state, limits and their use, waiting and scoring."""
    oldest = stats["oldest_age_seconds"]
    lines = [
        "A leased batch stops waiting once its training starts; it is counted as waiting here all the same.",
        "",
        "nothing waits" if oldest is None else f"the oldest waiting batch has waited {age(oldest)}",
        *_scoring_lines(stats["scoring"]),
    ]
    return Group(_depths_table(stats), Text(), _limits_table(stats), Text("\n".join(lines)))


def _depths_table(stats: Mapping[str, Any]) -> Table:
    table = _table("run", "state", "batches", "MiB")
    for run, states in (*stats["runs"].items(), ("all runs", stats["states"])):
        for state in stats["states"]:  # in the order of a batch's life
            depth = states.get(state)
            if depth and depth["batches"]:
                table.add_row(_name(run), state, f"{depth['batches']:,}", mib(depth["bytes"]))
    return table


def _limits_table(stats: Mapping[str, Any]) -> Table:
    table = _table("limit", "used", "of", "%")
    _add_limits(table, stats["limits"], "", stats["states"], "all runs")
    for run, states in stats["runs"].items():
        _add_limits(table, stats["limits"], "_per_run", states, _name(run))
    return table


def _add_limits(
    table: Table, limits: Mapping[str, int], scope: str, states: Mapping[str, Mapping[str, int]], whose: str
) -> None:
    for name, key, counted, unit in _LIMITS:
        bound = limits.get(name + scope)
        if bound is not None:
            used = sum(states[state][key] for state in counted if state in states)
            number = mib if key == "bytes" else "{:,}".format
            table.add_row(f"{unit}, {whose}", number(used), number(bound), f"{100 * used / bound:.1f}")


def _scoring_lines(scoring: Mapping[str, Any]) -> Sequence[str]:
    working, waiting = scoring["working_seconds"], scoring["waiting_seconds"]
    busy = 100 * working / (working + waiting) if working + waiting else 0.0
    return (
        f"scored since the start: {scoring['batches']:,} batches, {scoring['tokens']:,} tokens; "
        f"{scoring['errors']:,} errors",
        f"{scoring['tokens_per_second']:,.0f} tokens/s while scoring, which was {busy:.0f} % of the time",
    )


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(
            Text(header, no_wrap=True, overflow="ellipsis"),
            justify="right" if header in _NUMBERS else "left",
            no_wrap=header not in _LONG,
            overflow="fold",
        )
    return table


def _reward(value: float | None) -> str:
    return "not judged" if value is None else f"{value:g}"


def _cut(name: object) -> Text:
    return Text(_name(name), no_wrap=True, overflow="ellipsis")


def _text(tokens: Mapping[str, Any]) -> Padding:
    """A server without a model knows the ids only."""
    text = " ".join(map(str, tokens["ids"])) if tokens["text"] is None else tokens["text"]
    return Padding(Text(_printable(text, keep="\n")), (0, 0, 0, 4), expand=False)


def _name(value: object) -> str:
    return "" if value is None else _printable(str(value))


def _printable(text: str, keep: str = "") -> str:
    """Clients choose names and models write texts: none of them is to steer the terminal."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
