"""How commands print: tables that fit a terminal, whole lines into a pipe, and nothing that steers the terminal."""

from collections.abc import Collection

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

# A terminal with fewer columns folds lines by itself, where a squeezed table would lose its ids.
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


def table(*headers: str, numbers: Collection[str], long: Collection[str] = ()) -> Table:
    """numbers: columns to the right. long: columns that give way when the terminal is narrow."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        made.add_column(
            Text(header, no_wrap=True, overflow="ellipsis"),
            justify="right" if header in numbers else "left",
            no_wrap=header not in long,
            overflow="fold",
        )
    return made


def printable(text: str, keep: str = "") -> str:
    """Clients choose names and models write texts: none of them is to steer the terminal."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
