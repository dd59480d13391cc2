"""Writes the tables of docs/coming-from-trl.md from the names in trl.toml: `.venv/bin/python -m tests.trl_page`."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from policy_trainer.cli.settings import TRL

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-trl.md"
BEGIN, END = "<!-- written by tests/trl_page.py: {} -->\n", "<!-- end of {} -->\n"
_ABSENT = "What TRL has and Tandem has not: "


def written(page: str) -> str:
    """The page, with the tables of names between their markers rewritten."""
    present = {title: entries for title, entries in TRL.items() if not title.startswith(_ABSENT)}
    absent = {title.removeprefix(_ABSENT).capitalize(): TRL[title] for title in TRL if title.startswith(_ABSENT)}
    return _between(_between(page, "settings", _tables(present)), "absent", _tables(absent))


def _between(page: str, name: str, text: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def _tables(sections: Mapping[str, Mapping[str, str]]) -> str:
    return "\n".join(line for title, entries in sections.items() for line in _table(title, entries)) + "\n"


def _table(title: str, entries: Mapping[str, str]) -> list[str]:
    """Consecutive names with the same note, or with none, share a row."""
    split = [(name, *entry.partition(" | ")[::2]) for name, entry in entries.items()]
    rows = [["TRL", "Tandem", ""], ["---"] * 3]
    for (note, _), group in groupby(split, lambda item: (item[2], item[1] == "-")):
        names, ours = zip(*((name, ours) for name, ours, _ in group), strict=True)
        rows.append([_code(names), _code(word for words in ours for word in words.split() if word != "-"), note])
    if not any(ours for _, ours, _ in rows[2:]):
        rows = [[theirs, note] for theirs, _, note in rows]
    return ["", f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in rows)]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
