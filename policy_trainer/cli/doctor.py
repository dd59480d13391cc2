"""The command `policy-trainer doctor`."""

import json
import signal
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
    """Prints a table, or with --json the findings as JSON. Returns 1 if there is a problem.

    With --json the table goes to standard error.
    """
    # Not a setting: then POLICY_TRAINER_JSON in the environment would belong to every command of the run.
    as_json = "--json" in arguments
    config = read_settings(DoctorConfig, [argument for argument in arguments if argument != "--json"], "doctor")
    from policy_trainer.doctor.examination import examine
    from policy_trainer.doctor.findings import Verdict
    from policy_trainer.doctor.subject import Subject
    from shared.models import use_threads

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also then nothing is left behind
    use_threads(config.threads)
    console = Console(stderr=as_json, highlight=False)
    with ExitStack() as stack:
        status = stack.enter_context(console.status(""))
        found = list(_printed(examine(Subject(config, stack, status.update)), console))
        status.update("end what was started")
    if as_json:
        print(json.dumps([{"check": name, **vars(finding)} for name, finding in found], indent=2))
    problems = sum(finding.verdict is Verdict.WRONG for _, finding in found)
    counted = f"{problems} problem{'s' if problems > 1 else ''}: fix {'them' if problems > 1 else 'it'}"
    console.print(f"{counted} and run doctor again" if problems else "the run may begin")
    return 1 if problems else 0


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
