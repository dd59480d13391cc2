"""Learning curves of every algorithm on small tasks: docs/curves.md, docs/algorithms.md, their pictures. `make curves`.

Real processes, one run at a time. Each run's result is kept in its own file, so that an interrupted `make curves`
continues where it stopped.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.curves_recipes import PAGES, RunSetup, names, recipe
from benchmarks.curves_report import Point, Result, draw, write_page
from benchmarks.processes import run_policy_trainer
from policy_trainer.config import TrainConfig
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.run_files.run_directory import RunDirectory
from shared.atomic_files import write_json
from shared.client import RefServerClient
from tests.harness.server import Server

PICTURES = {"curves": "presets.png", "algorithms": "algorithms.png"}
LEFT_OVER = ("queued", "ready", "leased")


class Servers:
    """One server for each kind of reference (base model, renewed, none), started on first use."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.snapshots = (root / "snapshots").resolve()
        self._root = root
        self._stack = stack
        self._urls: dict[str, str] = {}

    def of(self, config: TrainConfig) -> str:
        """The URL of the server that this run can share with others."""
        renewed = config.reference.sync_steps > 0
        model = config.teacher or (config.model if config.loss.beta else None)
        kind = "renewed" if renewed else Path(model).name if model else "none"
        if kind not in self._urls:
            self._urls[kind] = self._start(kind, model, renewed=renewed)
        return self._urls[kind]

    def _start(self, kind: str, model: str | None, *, renewed: bool) -> str:
        options: list[str] = []
        if renewed:
            self.snapshots.mkdir(exist_ok=True)
            options += ["--snapshot-root", str(self.snapshots)]
        directory = self._root / f"server-{kind}"
        return self._stack.enter_context(Server(Path(model) if model else None, directory, *options)).url


def run(name: str, seed: int, steps: int, root: Path, servers: Servers) -> Result:
    """Trains in separate processes and deletes everything but the result."""
    run_dir = root / f"{name.replace('+', 'p')}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = recipe(name, RunSetup(servers.snapshots, run_dir, seed, steps))
    url = servers.of(config)
    RunDirectory(run_dir).write_config(config.model_copy(update={"server": url, "teacher": None}))
    began = time.monotonic()
    run_policy_trainer("train", "--config", str(run_dir / "config.toml"))
    result = result_of(
        name, seed, config.max_steps, read_metrics(RunDirectory(run_dir).metrics), time.monotonic() - began
    )
    _drop_left_over(url, run_dir.name)
    shutil.rmtree(run_dir)
    return result


def result_of(name: str, seed: int, steps: int, records: Sequence[dict[str, Any]], seconds: float) -> Result:
    stepped = [record for record in records if record["kind"] == "step"]
    samples = dict(zip(range(1, steps + 1), accumulate(map(_sampled, stepped)), strict=True))
    curve = [
        Point(record["step"], samples.get(record["step"], 0), record["accuracy"])
        for record in records
        if record["kind"] == "evaluation"
    ]
    last = stepped[-1]
    return Result(name, seed, steps, curve, last["kl"], last["entropy"], round(seconds, 1))


def _sampled(record: dict[str, Any]) -> int:
    groups = record["groups"] + record["groups_left_out"]
    return round(record["completions"] * (1 + record["resampled_groups"] / groups))


def _drop_left_over(url: str, run: str) -> None:
    """Drops batches that were sampled ahead: they would take queue space and scoring time from the next run."""
    with RefServerClient(url) as client:
        for state in LEFT_OVER:
            for batch in list(client.batches(state=state, run=run)):
                client.drop(batch.id)


@contextmanager
def _servers(root: Path) -> Iterator[Servers]:
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with ExitStack() as stack:
        yield Servers(work, stack)
    shutil.rmtree(work, ignore_errors=True)


def _read(path: Path) -> Result:
    values = json.loads(path.read_text())
    return Result(**{**values, "curve": [Point(**point) for point in values["curve"]]})


def make(presets: Sequence[str], seeds: Sequence[int], steps: int, root: Path, console: Console) -> list[Result]:
    """The results of all runs, including those kept from earlier calls."""
    results: list[Result] = []
    with _servers(root) as servers:
        for seed in seeds:
            for name in presets:
                kept = root / f"{name}-{seed}-{steps}.json"
                if not kept.exists():
                    write_json(kept, asdict(run(name, seed, steps, root / "work", servers)))
                results.append(_read(kept))
                line = results[-1]
                console.print(f"{name}, seed {seed}: {line.before:.2f} -> {line.after:.2f} in {line.seconds} s")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=names(), choices=names(), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--root", type=Path, default=Path("runs/curves"), help="where results are kept")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where to write pages and pictures")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    results = make(options.presets, options.seeds, options.steps, options.root, Console())
    for page, picture in PICTURES.items():
        if shown := [result for result in results if result.name in PAGES[page]]:
            draw(shown, options.docs / picture)
            write_page(page, shown, options.docs / f"{page}.md", picture)


if __name__ == "__main__":
    main()
