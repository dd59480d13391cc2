"""How commands print: tables that fit a terminal, whole lines into a pipe, and no control characters."""

import json
import sys
from collections.abc import Collection
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from shared.api import ResponseRecord
from shared.errors import printable

# A narrower terminal folds the lines by itself: a table squeezed into it would lose its ids.
_NARROWEST = 120


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


def print_json(answer: ResponseRecord, **more: Any) -> None:
    print(json.dumps(answer.model_dump(mode="json") | more, indent=2))


def print_error(line: str) -> None:
    print(printable(line, keep="\n"), file=sys.stderr)


def progress_bar() -> Progress:
    """On standard error, where that is a terminal."""
    return Progress(console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())


def table(*headers: str, numbers: Collection[str], long: Collection[str] = ()) -> Table:
    """numbers: columns aligned to the right. long: columns that shrink when the terminal is narrow."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        made.add_column(
            Text(header, no_wrap=True, overflow="ellipsis"),
            justify="right" if header in numbers else "left",
            no_wrap=header not in long,
            overflow="fold",
        )
    return made
