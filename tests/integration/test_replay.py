"""A recorded run, replayed: the same weights to the bit."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.processes import Process, steps_of
from tests.integration.runs import QUICK

# Rewards differ, so that a random model learns something.
OPTIONS = (
    *QUICK,
    "--device",
    "cpu",
    "--rewards",
    "tests.integration.own_rewards:letters",
    "--optimizer.learning-rate",
    "1e-3",
)


def test_a_recorded_run_is_replayed_to_the_bit(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir, recorded = tmp_path / "run", tmp_path / "recorded"

    def command(name: str, *options: str) -> None:
        process = start(Process("policy_trainer", name, *options, log=tmp_path / "log"))
        assert process.wait() == 0, process.output()

    own = ("--model", str(random_model), "--run-dir", str(run_dir), *OPTIONS, "--record", str(recorded))
    command("train", *own, "--max-steps", "2")
    command("train", "--resume", "--run-dir", str(run_dir), "--max-steps", "2")  # it was the last: nothing is recorded
    settings = ("--config", str(run_dir / "config.toml"), "--batches", str(recorded))
    command("replay", *settings, "--run-dir", str(tmp_path / "same"))
    changed = ("--loss.surrogate", "reinforce", "--loss.beta", "0.5")
    command("replay", *settings, "--run-dir", str(tmp_path / "other"), *changed)
    trained, same, other = (
        load_file(path / "model" / "model.safetensors") for path in (run_dir, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    before = load_file(random_model / "model.safetensors")
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    names = ("loss", "grad_norm", "kl", "reward", "batch_ids", "staleness")
    told, again, otherwise = (
        [[record[name] for name in names] for record in steps_of(path)]
        for path in (run_dir, tmp_path / "same", tmp_path / "other")
    )
    assert told == again and told[-1][0] != otherwise[-1][0]
    assert any(not torch.equal(trained[name], other[name]) for name in trained)
