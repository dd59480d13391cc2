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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.chaos import clock, database, disk, engine, frozen, kill, linear, network, ranks, resume, turns, weights
from tests.chaos.stage import BACKENDS, Proof, Stage

# By name: the test, what it promises, and the stores that it is for.
CHAOS: Mapping[str, tuple[Callable[[Stage], Proof], str, Sequence[str]]] = {
    "kill": (kill.run, kill.BAR, BACKENDS),
    "pictures": (kill.run_pictures, kill.BAR, BACKENDS),
    "turns": (turns.run, turns.BAR, BACKENDS),
    "linear": (linear.run, linear.BAR, BACKENDS),
    "network": (network.run, network.BAR, BACKENDS),
    "resume": (resume.run, resume.BAR, BACKENDS),
    "resume-pictures": (resume.run_pictures, resume.BAR, BACKENDS),
    "frozen": (frozen.run, frozen.BAR, BACKENDS),
    "disk": (disk.run_full, disk.BAR_FULL, ("sqlite",)),
    "read-only": (disk.run_read_only, disk.BAR_READ_ONLY, BACKENDS),
    "clock": (clock.run, clock.BAR, BACKENDS),
    "database": (database.run, database.BAR, ("postgresql",)),
    "weights": (weights.run, weights.BAR, ("sqlite",)),
    "engine": (engine.run, engine.BAR, ("sqlite",)),
    "ranks": (ranks.run, ranks.BAR, ("sqlite",)),
}


def play(name: str, stage: Stage) -> dict[str, Any]:
    """Runs a test, and returns its line of the report; one that raises has failed."""
    run, bar, _ = CHAOS[name]
    shutil.rmtree(stage.directory, ignore_errors=True)
    stage.directory.mkdir(parents=True)
    began = time.monotonic()
    try:
        proof = run(stage)
    except Exception as error:
        (stage.directory / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        proof = Proof([f"{type(error).__name__}: {error}"], {})
    if not proof.faults:
        shutil.rmtree(stage.directory)
    outcome = {"passed": not proof.faults, "seconds": round(time.monotonic() - began, 1)}
    return {"name": name, "backend": stage.backend, "bar": bar, **asdict(proof), **outcome}


def main() -> int:
    options = _parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the child processes would stay
    console, proofs, status = Console(), list[dict[str, Any]](), 0
    try:
        for name, backend in options.chosen:
            directory = (options.report.parent / f"{name}-{backend}").resolve()
            with console.status(f"{name} on {backend}"):
                proofs.append(play(name, Stage(options.cycles, backend, directory, options.seed)))
            console.print(f"{name} on {backend}: {_verdict(proofs[-1])}")
            if not proofs[-1]["passed"]:
                console.print(f"look into {directory}", style="red")
    except KeyboardInterrupt:
        console.print("stopped")
        status = 130
    passed = len(proofs) == len(options.chosen) and all(proof["passed"] for proof in proofs)
    report = {"cycles": options.cycles, "seed": options.seed, "passed": passed, "proofs": proofs}
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(_table(proofs))
    console.print(f"report: {options.report}", highlight=False)
    return status or int(not passed)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Proves what the product promises.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CHAOS)}; all when none is given")
    parser.add_argument("--cycles", type=int, default=20, help="kills, resumes and restarts of each test")
    parser.add_argument("--seconds", type=float, help="in place of --cycles, only for linear: how long it lasts")
    parser.add_argument("--backend", choices=BACKENDS, help="only on this kind of store")
    parser.add_argument("--seed", type=int, default=0, help="decides what happens when")
    parser.add_argument("--report", type=Path, default=Path("runs/chaos/report.json"), help="where to write the JSON")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CHAOS):
        parser.error(f"there is no test {min(unknown)!r}: choose among {', '.join(CHAOS)}")
    if options.seconds is not None:
        if options.names != ["linear"]:
            parser.error("--seconds is only for linear: the other tests end after their --cycles")
        options.cycles = math.ceil(options.seconds / linear.CYCLE_SECONDS)
    options.chosen = [
        (name, backend)
        for name, (_, _, backends) in CHAOS.items()
        for backend in backends
        if name in (options.names or CHAOS) and backend == (options.backend or backend)
    ]
    if not options.chosen:
        parser.error(f"none of these tests is for {options.backend}")
    return options


def _table(proofs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("test", "backend", "bar", "verdict", "s", "figures", title="chaos", show_lines=True)
    for proof in proofs:
        figures = [f"{name} {value}" for name, value in proof["figures"].items()]
        shown = escape(", ".join([*figures, *proof["faults"][:5]]))
        table.add_row(proof["name"], proof["backend"], proof["bar"], _verdict(proof), f"{proof['seconds']:.0f}", shown)
    return table


def _verdict(proof: Mapping[str, Any]) -> str:
    return "[green]passed[/green]" if proof["passed"] else "[red]FAILED[/red]"


if __name__ == "__main__":
    sys.exit(main())
