"""The figures of a load test, beside their bars."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """bar: what the value must reach, in words; empty if there is no bar. passed: whether it does."""

    what: str
    value: str
    bar: str = ""
    passed: bool = True


def show(title: str, figures: Sequence[Figure]) -> bool:
    """Prints a table; returns whether all bars are reached."""
    table = Table("", "measured", "bar", "verdict", title=title, title_justify="left")
    for figure in figures:
        verdict = "" if not figure.bar else "[green]passed[/green]" if figure.passed else "[red]MISSED[/red]"
        table.add_row(figure.what, figure.value, figure.bar, verdict)
    Console(width=140).print(table)
    return all(figure.passed for figure in figures)


def milliseconds(seconds: Collection[float]) -> str:
    """Median, 99th percentile and largest."""
    if not seconds:
        return "none"
    median, high = np.percentile([*seconds], (50, 99))
    return f"{1000 * median:.0f} / {1000 * high:.0f} / {1000 * max(seconds):.0f} ms"
