"""Runs of the trainer in processes, and what they have written."""

import json
from pathlib import Path
from typing import Any

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_token, read_url
from shared.client import RefServerClient
from tests.harness.processes import Process
from tests.harness.server import Server

QUICK = (
    "--threads", "1", "--sampling.num-generations", "4", "--sampling.prompts-per-round", "4", "--groups-per-step", "4",
    "--sampling.max-completion-length", "12", "--evaluation.problems", "16", "--evaluation.eval-steps", "0",
    # A random model gets the same reward everywhere: groups without variance must train, if only on the KL.
    "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "1e-4", "--checkpoint.save-steps", "5",
)  # fmt: skip


def train(model: Path | str, server: Server | None, run_dir: Path, *options: str) -> Process:
    """server: None for one that the trainer starts itself."""
    place = () if server is None else ("--server", server.url)
    return Process(
        "policy_trainer", "train", "--model", str(model), *place, "--run-dir", str(run_dir), *options,
        log=run_dir.parent / f"{run_dir.name}.log",
    )  # fmt: skip


def torchrun(ranks: int, *arguments: str, log: Path) -> Process:
    """`policy-trainer` with these arguments on several ranks."""
    launcher = ("--standalone", "--nproc-per-node", str(ranks), "-m", "policy_trainer")
    return Process("torch.distributed.run", *launcher, *arguments, log=log)


def rollout(run_dir: Path, log: Path, *options: str) -> Process:
    """A worker of the run in this directory."""
    return Process("policy_trainer", "rollout", "--config", str(run_dir / "config.toml"), *options, log=log)


def assert_trained_exactly_once(server: Server, run_dir: Path) -> None:
    """The batches in the run's metrics are those that are done on the server, each once."""
    trained = [id for record in steps_of(run_dir) for id in record["batch_ids"]]
    assert len(trained) == len(set(trained)), "a batch was trained twice"
    done = {batch["id"] for batch in server.batches(run=run_dir.name, state="done")}
    assert set(trained) == done
    assert not server.batches(run=run_dir.name, state="dead")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The step records of metrics.jsonl. A last line that is still being written is not one yet."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == "step"]


def client_of(run_dir: Path) -> RefServerClient:
    """Of the server that the run's trainer has started."""
    directory = RunDirectory(run_dir)
    return RefServerClient(str(read_url(directory)), token=read_token(directory))
