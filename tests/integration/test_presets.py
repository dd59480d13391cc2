"""Every preset trains a tiny model: its own algorithm, rewards and kind of data, in overridden sizes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import RolloutConfig, TrainConfig
from policy_trainer.config.presets import PRESETS
from policy_trainer.rollout.run import run_worker
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.run import train
from policy_trainer.weights.published.directory import WeightsDirectory
from tests.harness.processes import until
from tests.harness.runs import steps_of
from tests.harness.server import Server

# Problems that the base model sometimes solves, in the form of each recipe's data.
DATA: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"{i}+{i + 7}=?", "answer": f"Add them.\n#### {2 * i + 7}"} for i in range(10, 40)],
    "math": [{"problem": f"{i}+{i + 7}=?", "solution": f"It is $\\boxed{{{2 * i + 7}}}$."} for i in range(10, 40)],
    "dataset": [
        {"source_prompt": [{"role": "user", "content": f"{i}+{i + 7}=?"}], "solution": str(2 * i + 7)}
        for i in range(10, 40)
    ],
    "countdown": [{"nums": [i % 9 + 1, i % 7 + 1, 3], "target": i % 9 + i % 7 + 5} for i in range(30)],
}
SIZES = (
    "--threads", "1", "--max-steps", "2", "--groups-per-step", "4", "--sampling.prompts-per-round", "4",
    "--sampling.max-completion-length", "32", "--evaluation.problems", "4", "--evaluation.eval-steps", "0",
    "--data.max-prompt-length", "900", "--judging.penalty.overlong-tokens", "16",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's base model with a longer context: its positions are rotary, so no weights change."""
    directory = tmp_path_factory.mktemp("long") / "base"
    shutil.copytree(base_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return directory


@pytest.fixture(scope="module")
def queue_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server without a reference, for presets without a KL."""
    server = Server(None, tmp_path_factory.mktemp("queue"))
    yield server.url
    server.kill()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all presets: a reference that one preset has renewed is the next one's first reference."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "snapshots").mkdir()
    server = Server(model, directory, "--snapshot-root", str(directory / "snapshots")).until_ready()
    yield server
    server.kill()


def options_of(name: str, model: Path, server: Server, queue_alone: str, run_dir: Path) -> list[str]:
    settings = PRESETS[name].values_with({})
    loss = settings.get("loss", {})
    scored = loss.get("beta", 0.04) or loss.get("advantage") == "distill"
    url = server.url if scored else queue_alone
    group = min(settings.get("sampling", {}).get("num_generations", 8), 4)
    options = [*SIZES, "--preset", name, "--model", str(model), "--server", url, "--run-dir", str(run_dir)]
    options += ["--expect-reference", "different"]  # an earlier preset may have renewed it
    options += ["--sampling.num-generations", str(group), "--minibatches", str(min(settings.get("minibatches", 1), 4))]
    if "reference.sync_steps" in PRESETS[name].settings:
        options += ["--reference.sync-steps", "1", "--reference.snapshot-root", str(server.directory / "snapshots")]
    if settings.get("loss", {}).get("advantage") == "process":
        return [*options, "--task", "arithmetic"]  # the task that rewards steps
    if loss.get("advantage") != "distill":
        # The models of some processors give every completion the same reward, and nothing would be learnt without a KL.
        options += ["--rewards", *settings.get("rewards", ["accuracy", "tags"]), "tests.integration.varied:varied"]
        if weights := settings.get("reward_weights"):
            options += ["--reward-weights", *map(str, [*weights, 1])]
    return options + local_data(settings.get("task"), run_dir.parent)


def local_data(task: str | None, directory: Path) -> list[str]:
    for kind, rows in DATA.items():
        (directory / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {kind: str(directory / f"{kind}.jsonl") for kind in DATA}
    if task == "mixture":
        return ["--data.mixture", json.dumps([{"task": kind, "path": files[kind]} for kind in ("gsm8k", "math")])]
    if task == "geometry3k":  # pictures need another model
        return ["--task", "math", "--data.path", files["math"]]
    return ["--data.path", files[task]] if task else []


def assert_trained(run_dir: Path, model: Path) -> None:
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == [1, 2]
    assert not any(record["not_finite"] for record in steps)
    assert all(abs(record["loss"]) < 1e6 for record in steps)
    before, after = (load_file(directory / "model.safetensors") for directory in (model, run_dir / "model"))
    assert before.keys() == after.keys() and all(tensor.isfinite().all() for tensor in after.values())
    assert any((before[key] != after[key]).any() for key in before), "no weight has changed"


def sample(config: RolloutConfig) -> None:
    # Once the trainer has its model: transformers loads one at a time in a process.
    until(lambda: WeightsDirectory(config.run_dir / "weights").newest(), "the trainer to publish")
    run_worker(config)


@pytest.mark.parametrize("name", PRESETS)
def test_trains(name: str, model: Path, server: Server, queue_alone: str, tmp_path: Path) -> None:
    run_dir = tmp_path / name.replace("+", "p")
    options = options_of(name, model, server, queue_alone, run_dir)
    config = read_settings(TrainConfig, [*options, "--rollout", "external"], "train")
    # Both in this process, which saves starting two others for each preset.
    RunDirectory(run_dir).write_config(config)
    file = ["--config", str(run_dir / "config.toml")]
    worker = Thread(target=sample, args=(read_settings(RolloutConfig, file, "rollout"),), daemon=True)
    worker.start()
    assert train(config, Console(quiet=True)).finished
    worker.join(60)
    assert not worker.is_alive()
    assert_trained(run_dir, model)
    if "reference.sync_steps" in PRESETS[name].settings:
        assert {record["reference_version_max"] for record in steps_of(run_dir)} != {0}
