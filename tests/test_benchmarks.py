"""What users run of the benchmarks: the simulated pipeline, the recipes of the curves, the tables of a GPU on a CPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.curves_recipes import RunSetup, names, recipe
from benchmarks.pipeline import Stages, measured, predict
from policy_trainer.config.presets import PRESETS


def test_recipes_take_the_algorithm_from_the_preset_and_the_rest_from_the_demo(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.curves_recipes.base_model", lambda name: tmp_path)
    monkeypatch.setattr("benchmarks.curves_recipes.cached_teacher", lambda cache: tmp_path)
    for name in names():
        config = recipe(name, RunSetup(tmp_path, tmp_path / "run", 3, 100))
        updates = config.num_iterations * config.minibatches
        assert config.sampling.num_generations == 8
        assert config.optimizer.learning_rate * updates == pytest.approx(3e-4)
        if name in PRESETS:
            preset = PRESETS[name].config()
            assert (config.loss, updates) == (preset.loss, preset.num_iterations * preset.minibatches)
            assert bool(config.reference.sync_steps) == bool(preset.reference.sync_steps)


# One worker, one scorer and one trainer each take 8 s for a step.
EVEN = Stages(sample=1.0, score=1.0, train=8.0, groups=8)


@pytest.mark.parametrize(
    ("change", "sizes", "seconds"),
    [
        ({"sample": 3.0}, (1, 1, 1), 24),
        ({"train": 24.0}, (1, 1, 1), 24),
        ({"sample": 3.0}, (6, 1, 1), 8),
        ({"train": 24.0}, (2, 2, 2), 12),
        ({"sample": 3.0, "load": 6.0, "publish_every": 4}, (1, 1, 1), 25.5),
    ],
)
def test_the_slowest_stage_determines_a_step(change: dict, sizes: tuple[int, int, int], seconds: float) -> None:
    workers, scorers, trainers = sizes
    prediction = predict(replace(EVEN, **change), workers=workers, scorers=scorers, trainers=trainers)
    assert prediction.seconds_per_step == pytest.approx(seconds, rel=0.05)


def test_stages_are_read_from_a_run(tmp_path: Path) -> None:
    record = {"kind": "step", "batch_ids": ["a", "b"], "sampling_seconds": 4.0, "training_seconds": 3.0}
    records = [
        {**record, "waiting_seconds": 2.0, "server_scoring_seconds": 0.5 * number, "staleness": 1.5}
        for number in range(30)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "config.toml").write_text("publish_every = 2\n[sampling]\nprompts_per_round = 4\n")
    stages, observed = measured(tmp_path)
    assert stages == Stages(sample=2.0, score=0.25, train=3.0, groups=2, publish_every=2, prompts_per_round=4)
    assert (observed.seconds_per_step, observed.staleness) == (5.0, 1.5)
    assert (observed.workers, observed.trainer) == (0.8, 0.6)


@pytest.mark.long
def test_the_gpu_tables_on_a_cpu(tmp_path: Path) -> None:
    """The command as a user runs it, without compiling, which takes a minute."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", tmp_path / "figures.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and gpu.CPU_NOTE in done.stdout, done.stdout
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert list(tables) == list(gpu.TABLES)
    assert all(tables[name]["rows"] and "error" not in tables[name] for name in gpu.TABLES)
    _, packed, padded = tables["forms"]["rows"]
    assert (packed["chosen"], padded["chosen"]) == ("chosen", "")
    for row in (packed, padded):  # bfloat16 has 8 bits; gradients in float32 would be equal to 1e-6
        assert row["self-test"] < row["allowed"] and 1e-4 < row["gradients, from float32"] < 0.05
    for row in (*tables["classic"]["rows"], *tables["steps"]["rows"]):
        assert row["classic / ours"]["value"] == pytest.approx(row["classic ms"] / row["ours ms"])
