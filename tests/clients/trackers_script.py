"""Writes a run of six steps, which then fails, and its resumption after the fourth, to the trackers themselves.
seen.json then has what each shows of it. In the environment of `make test-clients`, in an empty directory."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from policy_trainer.config import TrainConfig
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from policy_trainer.reporting.tracking import start_trackers
from shared.settings import from_values

COMPLETION = SampledCompletion("41", 0.0, {"accuracy": 0.0}, -0.5, 2, True)
SAMPLED = SampledGroup(3, "train", "b", "t", 7, "6*7=?", "42", (COMPLETION,))
NAMES = ["mlflow", "trackio", "wandb"]


def write(first: int, last: int, *, failed: bool) -> None:
    config = from_values(TrainConfig, model="m", run="a run", run_dir=Path.cwd(), report_to=NAMES)
    notes: list[str] = []
    trackers = start_trackers(config, first, notes.append)
    for step in range(first + 1, last + 1):
        for tracker in trackers:
            tracker.write({"kind": "step", "step": step, "kl": float(first + step), "reward/über+": 1.0})
    for tracker in trackers:
        tracker.write_samples([SAMPLED])
        tracker.close(failed=failed)
    assert not notes, notes


def mlflow_run() -> Any:
    mlflow: Any = import_module("mlflow")
    (run,) = mlflow.search_runs(experiment_names=["tandem"], output_format="list")
    return run


def in_mlflow(after_failure: str) -> dict[str, Any]:
    mlflow: Any = import_module("mlflow")
    client, run = mlflow.MlflowClient(), mlflow_run()
    history = client.get_metric_history(run.info.run_id, "train/kl")
    return {
        "kl": sorted((point.step, point.value) for point in history),
        "names": sorted(run.data.metrics),
        "beta": run.data.params["loss.beta"],
        "statuses": [after_failure, run.info.status],
        "name": run.info.run_name,
        "samples": mlflow.artifacts.load_text(f"{run.info.artifact_uri}/samples/train-3.md"),
    }


def in_trackio() -> dict[str, Any]:
    logs = import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("tandem", "a run")
    return {"kl": [(each["step"], each["train/kl"]) for each in logs if "train/kl" in each]}


def in_wandb() -> dict[str, Any]:
    """Each part of a run that was written offline has its own directory, which ends with the run's id."""
    parts = sorted(Path("wandb").glob("offline-run-*/run-*.wandb"))
    return {"runs": sorted({part.stem for part in parts}), "parts": len(parts)}


if __name__ == "__main__":
    os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(Path.cwd() / "trackio")}
    write(0, 6, failed=True)
    status = mlflow_run().info.status
    write(4, 5, failed=False)
    Path("seen.json").write_text(
        json.dumps({"mlflow": in_mlflow(status), "trackio": in_trackio(), "wandb": in_wandb()})
    )
