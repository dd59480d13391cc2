"""The README and docs/: their fenced blocks, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "AGENTS.md", "SECURITY.md")), *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
# Stands for a value of the reader's.
PLACEHOLDER = "…"


@dataclass(frozen=True)
class Block:
    """The text between two fences. page: its path from the root. line: of the first fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a block, with its continuation lines, verbatim."""

    block: Block
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace("\\\n", " "), comments=True)

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.words)[:60]}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, fence.start()) + 1, fence["language"], fence["text"])
        for fence in _FENCE.finditer(text)
    ]


def texts(page: str, language: str) -> list[str]:
    """The fenced blocks of a page of docs/ in this language."""
    return [block.text for block in blocks(ROOT / "docs" / page) if block.language == language]


def commands(block: Block) -> Iterator[Command]:
    """Lines that a backslash or an open quotation mark continues are one command."""
    begun = ""
    for line in block.text.splitlines():
        begun += line
        if begun.endswith("\\") or _is_open(begun):
            begun += "\n"
        elif begun.strip():
            yield Command(block, begun)
            begun = ""
        else:
            begun = ""
    assert not begun, f"{block}: the last command does not end"


def all_commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page)]


def commands_of(page: Path) -> list[Command]:
    return [command for block in blocks(page) if block.language == "sh" for command in commands(block)]


def _is_open(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False
