"""The command `policy-trainer doctor`."""

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import DoctorConfig

if TYPE_CHECKING:  # PyTorch loads late, so that wrong options fail at once
    from policy_trainer.doctor.findings import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not checked": "dim"}
_WIDTHS = (9, 11)


def run(arguments: list[str]) -> int:
    """Prints a table to standard error, and JSON to standard output unless that is a terminal.

    Returns 1 where something is wrong.
    """
    config = read_settings(DoctorConfig, arguments, "doctor")
    from policy_trainer.doctor.examination import examine
    from policy_trainer.doctor.findings import Verdict
    from policy_trainer.doctor.subject import Subject
    from shared.models import use_threads

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also then nothing is left behind
    use_threads(config.threads)
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        status = stack.enter_context(console.status(""))
        found = list(_printed(examine(Subject(config, stack, status.update)), console))
        status.update("end what was started")
    if not sys.stdout.isatty():  # people have read the table
        print(json.dumps([{"check": name, **vars(finding)} for name, finding in found], indent=2))
    wrong = sum(finding.verdict is Verdict.WRONG for _, finding in found)
    console.print(f"{wrong} wrong: mend it, and call the doctor again" if wrong else "the run may begin")
    return 1 if wrong else 0


def _printed(found: Iterable[tuple[str, "Finding"]], console: Console) -> Iterator[tuple[str, "Finding"]]:
    """Prints each finding as soon as it is there."""
    before = ""
    for name, finding in found:
        console.print(_row("" if name == before else name, finding))
        before = name
        yield name, finding


def _row(name: str, finding: "Finding") -> Table:
    row = Table.grid(padding=(0, 1))
    for width in _WIDTHS:
        row.add_column(width=width)
    row.add_column(overflow="fold")
    row.add_row(name, Text(finding.verdict, _COLOURS[finding.verdict]), Text(finding.seen))
    if finding.remedy:
        row.add_row("", "", Text(f"-> {finding.remedy}", "bold"))
    return row
