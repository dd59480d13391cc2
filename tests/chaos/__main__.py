"""`python -m tests.chaos`: tests of the product under kills, faults and full disks, reported as a table and as JSON.

Each test gets a directory of its own; it is kept when the test fails, with the logs and the history that show why.
"""

import argparse
import json
import math
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.chaos import clock, database, disk, engine, frozen, kill, linear, network, ranks, resume, weights
from tests.chaos.proof import BACKENDS, Proof

_REPORT = Path("runs/chaos/report.json")
_CYCLES = 20
_INTERRUPTED = 130


@dataclass(frozen=True)
class Chaos:
    """One test and its stores. run: called with cycles, backend, an empty directory and seed."""

    run: Callable[[int, str, Path, int], Proof]
    backends: Sequence[str] = BACKENDS


CHAOS: Mapping[str, Chaos] = {
    "kill": Chaos(kill.run),
    "linear": Chaos(linear.run),
    "network": Chaos(network.run),
    "resume": Chaos(resume.run),
    "frozen": Chaos(frozen.run),
    "disk": Chaos(disk.run_full, ("sqlite",)),
    "read-only": Chaos(disk.run_read_only),
    "clock": Chaos(clock.run),
    "database": Chaos(database.run, ("postgresql",)),
    "weights": Chaos(weights.run, ("sqlite",)),
    "engine": Chaos(engine.run, ("sqlite",)),
    "ranks": Chaos(ranks.run, ("sqlite",)),
}


@dataclass(frozen=True)
class Played:
    """One test on one backend. directory: kept if it failed."""

    proof: Proof
    seconds: float
    directory: Path


def play(name: str, backend: str, cycles: int, seed: int, directory: Path) -> Played:
    """Runs a test; one that raises has failed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    began = time.monotonic()
    try:
        proof = CHAOS[name].run(cycles, backend, directory, seed)
    except Exception as error:
        (directory / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        proof = Proof(name, backend, "runs to its end", False, {"error": f"{type(error).__name__}: {error}"})
    except KeyboardInterrupt:
        shutil.rmtree(directory)
        raise
    if proof.passed:
        shutil.rmtree(directory)
    return Played(proof, time.monotonic() - began, directory)


def main() -> int:
    options = _parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the child processes would stay
    console = Console()
    played: list[Played] = []
    status = 0
    try:
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        ) as progress:
            for name, backend in options.chosen:
                task = progress.add_task(f"{name} on {backend}", total=1)
                directory = (options.report.parent / f"{name}-{backend}").resolve()
                played.append(play(name, backend, options.cycles, options.seed, directory))
                verdict = _verdict(played[-1].proof)
                progress.update(task, completed=1, description=f"{name} on {backend}: {verdict}")
    except KeyboardInterrupt:
        console.print("stopped")
        status = _INTERRUPTED
    _write_report(options, played)
    console.print(_table(played))
    for each in played:
        if not each.proof.passed:
            console.print(f"{each.proof.name} on {each.proof.backend} failed: look into {each.directory}", style="red")
    console.print(f"report: {options.report}", highlight=False)
    return status or int(not all(each.proof.passed for each in played))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Proves what the product promises.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CHAOS)}; all when none is given")
    parser.add_argument("--cycles", type=int, default=_CYCLES, help="kills, resumes and restarts of each test")
    parser.add_argument("--seconds", type=float, help="in place of --cycles, for linear alone: how long it lasts")
    parser.add_argument("--backend", choices=BACKENDS, help="only on this kind of store")
    parser.add_argument("--seed", type=int, default=0, help="decides what happens when")
    parser.add_argument("--report", type=Path, default=_REPORT, help="where to write the JSON")
    options = parser.parse_args()
    for name in options.names:
        if name not in CHAOS:
            parser.error(f"there is no test {name!r}: choose among {', '.join(CHAOS)}")
    if options.seconds is not None:
        if options.names != ["linear"]:
            parser.error("--seconds is for linear alone: the other tests end after their --cycles")
        options.cycles = math.ceil(options.seconds / linear.CYCLE_SECONDS)
    options.chosen = [
        (name, backend)
        for name, chaos in CHAOS.items()
        for backend in chaos.backends
        if name in (options.names or CHAOS) and backend == (options.backend or backend)
    ]
    if not options.chosen:
        parser.error(f"none of these tests is for {options.backend}")
    return options


def _write_report(options: argparse.Namespace, played: Sequence[Played]) -> None:
    report = {
        "cycles": options.cycles,
        "seed": options.seed,
        "passed": len(played) == len(options.chosen) and all(each.proof.passed for each in played),
        "proofs": [{**asdict(each.proof), "seconds": round(each.seconds, 1)} for each in played],
    }
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _table(played: Sequence[Played]) -> Table:
    table = Table(title="chaos", show_lines=True)
    for column in ("test", "backend", "bar", "verdict", "s", "figures"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for each in played:
        proof = each.proof
        figures = ", ".join(f"{name} {value}" for name, value in proof.figures.items())
        seconds = f"{each.seconds:.0f}"
        table.add_row(proof.name, proof.backend, proof.bar, _verdict(proof), seconds, escape(figures))
    return table


def _verdict(proof: Proof) -> str:
    return "[green]passed[/green]" if proof.passed else "[red]FAILED[/red]"


if __name__ == "__main__":
    sys.exit(main())
