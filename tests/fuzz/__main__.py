"""The command `python -m tests.fuzz`: changed bodies for all decoders, by the hundred thousand."""

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.fuzz.workers import MAX_GROWTH, MAX_SECONDS, Failure, Outcome, fuzz, make

TARGETS = ("native", "images", "uploads", "leases", "legacy")
KEPT = Path("runs/fuzz")
_INTERRUPTED = 130


def main() -> int:
    options = _parse_options()
    console = Console(width=140)
    if options.only is not None:
        for name in options.names:
            print(importlib.import_module(f"tests.fuzz.{name}").judge(make(name, options.seed, options.only)))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may start background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    passed = True
    try:
        for name in options.names:
            passed &= _fuzz_one(name, options, console)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return int(not passed)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; all when none is given")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="chooses the inputs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, metavar="INDEX", help="judge this input here, with its traceback")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]!r}: choose among {', '.join(TARGETS)}")
    options.names = options.names or list(TARGETS)
    return options


def _fuzz_one(name: str, options: argparse.Namespace, console: Console) -> bool:
    total, began = Outcome(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=options.inputs)
        for outcome in fuzz(name, options.inputs, options.seed, options.processes):
            total.add(outcome)
            progress.advance(task, outcome.inputs)
    console.print(_table(name, total, time.monotonic() - began))
    _keep(name, options.seed, total.failures, console)
    return not total.failures


def _table(name: str, total: Outcome, seconds: float) -> Table:
    title = f"{name}: {total.inputs:,} inputs in {seconds:.0f} s, {total.inputs / seconds:.0f} a second"
    table = Table("accepted, or refused in", "", "share", title=title, title_justify="left")
    for stage, count in total.stages.most_common():
        table.add_row(stage, f"{count:,}", f"{count / total.inputs:.1%}")
    table.add_row("crashed, hung, too slow, too large (bar 0)", str(len(total.failures)), "")
    table.add_row(f"slowest, CPU (bar {MAX_SECONDS:.0f} s)", f"{1000 * total.slowest:.0f} ms", "")
    table.add_row(f"process grew by (bar {MAX_GROWTH / 2**20:.0f} MiB)", f"{total.growth / 2**20:.0f} MiB", "")
    return table


def _keep(name: str, seed: int, failures: Sequence[Failure], console: Console) -> None:
    for failure in failures:
        KEPT.mkdir(parents=True, exist_ok=True)
        path = KEPT / f"{name}-{seed}-{failure.index}"
        path.write_bytes(make(name, seed, failure.index))
        reason = failure.reason.strip()
        console.print(f"[red]{path}[/red]: {escape(reason[-1500:])}", highlight=False)
        console.print(f"  again: python -m tests.fuzz {name} --seed {seed} --only {failure.index}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
