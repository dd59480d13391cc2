"""Throughput and learning on the demo's task at several bounds of staleness: `python -m benchmarks.lag`.

Fresher samples cost time: workers and trainer wait for each other. Prints the table of docs/scaling.md.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import run_policy_trainer
from policy_trainer.reporting.metrics import read_metrics

LAGS = (0, 1, 4, 16)
Records = Sequence[Mapping[str, Any]]
_COLUMNS = {
    "steps a second": lambda steps: f"{1 / _mean(steps, 'training_seconds', 'waiting_seconds'):.2f}",
    "trainer waits": lambda steps: f"{_share(steps, 'waiting_seconds', 'training_seconds'):.0%}",
    "worker waits": lambda steps: f"{_share(steps, 'sampler_waiting_seconds', 'sampling_seconds'):.0%}",
    "staleness, steps": lambda steps: f"{_mean(steps, 'staleness'):.1f}",
    "groups that expired": lambda steps: f"{steps[-1]['expired']}",
}


def set_up(root: Path) -> Path:
    """The demo's config.toml, next to its base model."""
    run_policy_trainer("demo-setup", "--run-dir", str(root / "demo"))
    return root / "demo" / "config.toml"


def train(config: Path, run_dir: Path, *options: str) -> tuple[Records, Records]:
    """The records of the steps and of the evaluations of a run that starts its own server and worker."""
    run_policy_trainer(
        "train", "--config", str(config), "--run-dir", str(run_dir), "--server", "inline", "--rollout", "inline",
        *options,
    )  # fmt: skip
    records = read_metrics(run_dir / "metrics.jsonl")
    steps, evaluations = ([record for record in records if record["kind"] == kind] for kind in ("step", "evaluation"))
    return steps, evaluations


def _mean(steps: Records, *names: str) -> float:
    return sum(record[name] for record in steps for name in names) / len(steps)


def _share(steps: Records, waits: str, works: str) -> float:
    return _mean(steps, waits) / _mean(steps, waits, works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| `--max-lag` |", " | ".join(_COLUMNS), "| held-out accuracy |")
    print("|---" * (2 + len(_COLUMNS)) + "|")
    with tempfile.TemporaryDirectory() as root:
        config = set_up(Path(root))
        for lag in LAGS:
            # Fresh weights after every step, and as many groups in line as may be trained.
            steps, evaluations = train(
                config, Path(root) / f"lag-{lag}", "--max-lag", str(lag), "--publish-every", "1",
                "--max-steps", str(options.steps), "--seed", str(options.seed),
            )  # fmt: skip
            figures = " | ".join(column(steps) for column in _COLUMNS.values())
            print(f"| {lag} | {figures} | {evaluations[-1]['accuracy']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
