"""Throughput and learning on the demo's task at several bounds of staleness: `python -m tests.bench.lag`.

Fresher samples cost time: workers and trainer wait for each other. Prints the table of docs/scaling.md.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policy_trainer.reporting.metrics import read_metrics
from shared.lifetime import child_environment

LAGS = (0, 1, 4, 16)
_COLUMNS = {
    "steps a second": lambda steps: f"{1 / _mean(steps, 'training_seconds', 'waiting_seconds'):.2f}",
    "trainer waits": lambda steps: f"{_share(steps, 'waiting_seconds', 'training_seconds'):.0%}",
    "worker waits": lambda steps: f"{_share(steps, 'sampler_waiting_seconds', 'sampling_seconds'):.0%}",
    "staleness, steps": lambda steps: f"{_mean(steps, 'staleness'):.1f}",
    "groups that expired": lambda steps: f"{steps[-1]['expired']}",
    "held-out accuracy": lambda steps: f"{steps[-1]['eval_accuracy']:.3f}",
}


def train(root: Path, lag: int, steps: int, seed: int) -> list[Mapping[str, Any]]:
    """The step records of a run with fresh weights after every step, and as many groups in line as may be trained."""
    _run("demo-setup", "--run-dir", str(root / "demo"))
    config, run_dir = root / "demo" / "config.toml", root / f"lag-{lag}"
    _run(
        "train", "--config", str(config), "--run-dir", str(run_dir), "--server", "inline", "--rollout", "inline",
        "--max-lag", str(lag), "--publish-every", "1", "--max-steps", str(steps), "--seed", str(seed),
    )  # fmt: skip
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "step"]


def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "policy_trainer", *arguments]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def _mean(steps: Sequence[Mapping[str, Any]], *names: str) -> float:
    return sum(record[name] for record in steps for name in names) / len(steps)


def _share(steps: Sequence[Mapping[str, Any]], waits: str, works: str) -> float:
    return _mean(steps, waits) / _mean(steps, waits, works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print("| `--max-lag` |", " | ".join(_COLUMNS), "|")
    print("|---" * (1 + len(_COLUMNS)) + "|")
    for lag in LAGS:
        with tempfile.TemporaryDirectory() as root:
            steps = train(Path(root), lag, asked.steps, asked.seed)
        print(f"| {lag} |", " | ".join(column(steps) for column in _COLUMNS.values()), "|", flush=True)


if __name__ == "__main__":
    main()
