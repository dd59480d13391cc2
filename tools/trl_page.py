"""Writes the lists of docs/coming-from-trl.md from the names in trl.toml: `.venv/bin/python -m tools.trl_page`."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from policy_trainer.config.names import TRL, TRL_METRICS

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-trl.md"
BEGIN, END = "<!-- written by tools/trl_page.py: {} -->\n", "<!-- end of {} -->\n"
_ABSENT = "TRL features that Tandem lacks: "
_WIDTH = 150


def written(page: str) -> str:
    """The page, with the lists of names between their markers rewritten."""
    for name, lines in (
        ("settings", _settings()),
        ("metrics", _metrics()),
        ("absent", _absent()),
        ("idle", _wrapped(_code(name for name, ours, _ in _entries() if ours == "*") + ".")),
    ):
        page = _between(page, name, "\n".join(lines) + "\n")
    return page


def _between(page: str, name: str, text: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def _entries() -> Iterator[tuple[str, str, str]]:
    for section in TRL.values():
        for name, entry in section.items():
            ours, _, note = entry.partition(" | ")
            yield name, ours, note


def _settings() -> list[str]:
    """Settings that have TRL's name and meaning, those with another name, and a table of those with a note."""
    present = [(name, ours, note) for name, ours, note in _entries() if ours not in ("-", "*")]
    plain = [(name, ours) for name, ours, note in present if not note]
    same = [ours for name, ours in plain if ours.rpartition(".")[2] == name]
    renamed = ", ".join(f"`{name}` → {_code(ours.split())}" for name, ours in plain if ours not in same)
    noted = _table((name, ours, note) for name, ours, note in present if note)
    table = ["| TRL | Tandem |  |", "| --- | --- | --- |", *noted]
    lists = (f"Same name and meaning: {_code(same)}.", f"Other names (TRL → Tandem): {renamed}.")
    return [*(line for text in lists for line in ("", *_wrapped(text))), "", *table]


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Consecutive names with the same note share a row."""
    for note, group in groupby(rows, lambda row: row[2]):
        names, ours = zip(*((name, ours) for name, ours, _ in group), strict=True)
        yield f"| {_code(names)} | {_code(word for words in ours for word in words.split())} | {note} |"


def _metrics() -> list[str]:
    rows = (
        f"| `{theirs}` | {'' if ours == '-' else _code(ours.split())} | {note} |"
        for theirs, (ours, note) in TRL_METRICS.items()
    )
    return ["", "| TRL | Tandem |  |", "| --- | --- | --- |", *rows]


def _absent() -> list[str]:
    """A line for each section. Errors give the reasons."""
    lines: list[str] = []
    for title, entries in TRL.items():
        if refused := [name for name, entry in entries.items() if entry.startswith("- |")]:
            lines += ["", *_wrapped(f"**{_upper(title.removeprefix(_ABSENT))}:** {_code(refused)}.")]
    return lines


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
