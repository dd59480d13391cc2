"""Samples as people read them: on a terminal, and as the tables and texts of trackers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from policy_trainer.data.pictures import decode, from_data_url
from policy_trainer.reporting.conversations import SampledTurn
from policy_trainer.reporting.metrics import without_nan
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from shared.errors import UserError, printable

_INDENT = (0, 0, 0, 4)
# Pixels of the longer side of a picture that is drawn.
_COLUMNS = 48
# Characters of a text while a run prints its samples.
_SHORT = 400
_UNJUDGED = "not judged"


def print_best_and_worst(console: Console, groups: Sequence[SampledGroup]) -> None:
    """Prints one group of a step or evaluation: the best and the worst completion, long texts cut."""
    ranked = by_reward(groups[0].completions)
    ends = (ranked[0],) if len(ranked) == 1 else (ranked[-1], ranked[0])
    console.print(view(replace(groups[0], completions=ends), console, most=_SHORT))


def by_reward(completions: Sequence[SampledCompletion]) -> list[SampledCompletion]:
    """The lowest reward first; completions that could not be judged before all."""
    return sorted(completions, key=lambda item: -math.inf if math.isnan(item.reward) else item.reward)


def view(group: SampledGroup, console: Console, *, most: int | None = None) -> RenderableType:
    """A group for this console, which draws pictures if it has colours.

    most: characters of a text that are shown, and then only one picture; None for all.
    """
    drawn = 0 if console.color_system is None or console.no_color else 1 if most else len(group.images)
    parts: list[RenderableType] = [Text(_title(group), "bold"), Text("prompt", "dim"), _text(group.prompt, most)]
    for number, url in enumerate(group.images, 1):
        parts.append(Text(f"picture {number} of {len(group.images)}", "dim"))
        if number <= drawn:
            parts.append(Padding(_drawn(url), _INDENT, expand=False))
    for item in group.completions:
        parts.append(Text(_about(item), _colour(item)))
        if item.turns and most is None:
            for turn in item.turns:
                parts += [Text(_speaker(turn), "dim"), _text(turn.text, most)]
        else:
            parts.append(_text(item.text, most))
    return Group(*parts, Text())


def columns_and_rows(groups: Sequence[SampledGroup]) -> tuple[list[str], list[list[Any]]]:
    """A table: a row for each completion. Numbers that do not exist are None."""
    parts = sorted({name for group in groups for item in group.completions for name in item.parts})
    extras = sorted({name for group in groups for item in group.completions for name in item.extras})
    fields = ("text", "reward", "advantage", "tokens", "finished")
    named = [*(f"reward/{name}" for name in parts), *(f"logged/{name}" for name in extras)]
    columns = ["step", "problem", "prompt", "answer", "completion", *fields[1:], *named]
    data = [
        [
            *(getattr(group, name) for name in ("step", "problem", "prompt", "answer")),
            *(getattr(item, name) for name in fields),
            *(item.parts.get(name) for name in parts),
            *(item.extras.get(name) for name in extras),
        ]
        for group in groups
        for item in group.completions
    ]
    return columns, without_nan(data)


def markdown(groups: Sequence[SampledGroup]) -> str:
    """The groups as Markdown; texts are verbatim blocks."""
    lines = []
    for group in groups:
        lines += [f"### {_title(group)}", *_verbatim(group.prompt)]
        for item in group.completions:
            lines.append(_about(item))
            for turn in item.turns:
                lines += [_speaker(turn), *_verbatim(turn.text)]
            if not item.turns:
                lines += _verbatim(item.text)
    return "\n\n".join(lines)


def _title(group: SampledGroup) -> str:
    kind = {"train": "training", "eval": "held-out"}.get(group.kind, group.kind)
    where = f"{kind} problem" + ("" if group.problem is None else f" {group.problem}")
    task = f" of {group.task}" if group.task else ""
    answer = f", answer {group.answer}" if group.answer else ""
    step = "" if group.step is None else f"step {group.step} · "
    return printable(f"{step}{where}{task}{answer}")


def _about(item: SampledCompletion) -> str:
    parts = ", ".join(f"{printable(name)} {_number(score)}" for name, score in item.parts.items())
    advantage = "" if item.advantage is None else f", advantage {item.advantage:+.2f}"
    ending = "" if item.finished else ", cut off"
    return (
        f"reward {_number(item.reward)}"
        + (f" ({parts})" if parts else "")
        + f"{advantage}, {item.tokens} tokens{ending}"
        + "".join(printable(f", {column} {value}") for column, value in item.extras.items() if value is not None)
    )


def _speaker(turn: SampledTurn) -> str:
    calls = f", calls {'; '.join(turn.calls)}" if turn.calls else ""
    return printable(f"the model{calls}" if turn.sampled else "tools and template")


def _number(value: float) -> str:
    return _UNJUDGED if math.isnan(value) else f"{value:.3g}"


def _colour(item: SampledCompletion) -> str:
    if item.advantage is None:
        return "cyan"
    return "green" if item.advantage > 0 else "red" if item.advantage < 0 else "cyan"


def _text(text: str, most: int | None) -> Padding:
    cut = text if most is None or len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"
    return Padding(Text(printable(cut, keep="\n") or "(empty)"), _INDENT, expand=False)


def _drawn(url: str) -> Text:
    """A picture as text: each character shows two pixels, one above the other."""
    try:
        picture = decode(from_data_url(url))
    except (UserError, ValueError) as error:
        return Text(printable(f"({error})"), "dim")
    picture.thumbnail((_COLUMNS, _COLUMNS))
    width, height = picture.size
    colours = [f"rgb({red},{green},{blue})" for red, green, blue in np.asarray(picture).reshape(-1, 3).tolist()]
    colours += ["default"] * (height % 2 * width)
    text = Text(no_wrap=True, overflow="crop")
    for row in range(0, height, 2):
        upper, lower = (colours[start : start + width] for start in (row * width, (row + 1) * width))
        text.append_tokens(("▀", f"{top} on {bottom}") for top, bottom in zip(upper, lower, strict=True))
        text.append("\n")
    return text


def _verbatim(text: str) -> list[str]:
    return ["\n".join(f"    {line}" for line in text.split("\n"))]
