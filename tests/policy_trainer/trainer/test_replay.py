"""A replay of recorded batches: the same each time, changed by other settings, refused for unusable batches."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from policy_trainer.config import ReplayConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.run_files.recording import record
from policy_trainer.trainer.replay import replay
from shared.batch import Batch
from shared.errors import UserError
from shared.models import save_model
from shared.settings import from_values

STEPS = 3


@pytest.fixture
def model(make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def recorded(make_scored: Callable[..., Batch], tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        completions = random.integers(5, 60, size=(2, 4, 6)).tolist()
        batches = [
            make_scored([7, 8, step], rows, [0.0, 1.0, 0.5, 0.0], number=10 * step + place, version=step - 1)
            for place, rows in enumerate(completions)
        ]
        record(tmp_path / "recorded", step, batches)
    return tmp_path / "recorded"


def replayed(model: Path, recorded: Path, run_dir: Path, **settings: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Records and weights."""
    values = {"model": str(model), "batches": recorded, "run_dir": run_dir, "device": "cpu", "threads": 1}
    config = from_values(ReplayConfig, **{**values, "max_steps": STEPS, **settings})
    result = replay(config, Console(file=StringIO()))
    assert result.finished and result.steps == len(read_metrics(run_dir / "metrics.jsonl"))
    return read_metrics(run_dir / "metrics.jsonl"), load_file(run_dir / "model" / "model.safetensors")


def test_the_same_settings_give_the_same_weights(model: Path, recorded: Path, tmp_path: Path) -> None:
    settings = {"optimizer": {"learning_rate": 1e-3}, "loss": {"beta": 0.1}}
    first, weights = replayed(model, recorded, tmp_path / "a", **settings)
    again, same = replayed(model, recorded, tmp_path / "b", **settings)
    assert [record["step"] for record in first] == [1, 2, 3]
    assert [record["batch_ids"] for record in first] == [record["batch_ids"] for record in again]
    assert first[0]["kl"] > 0 and first[0]["staleness"] == 0 and first[0]["reward"] == 0.375
    begun = load_file(model / "model.safetensors")
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert any(not torch.equal(weights[name], begun[name]) for name in weights)


def test_batches_that_cannot_be_trained_on(model: Path, make_scored: Callable[..., Batch], tmp_path: Path) -> None:
    rollout = make_scored([7], [[5, 6], [8]], [0.0, 1.0]).without_scores()
    record(tmp_path / "recorded", 1, [rollout])
    with pytest.raises(UserError, match=r"^batches: .* of step 1 .* no ref_logps.*; .*--loss.beta 0"):
        replayed(model, tmp_path / "recorded", tmp_path / "a", loss={"beta": 0.1})
    replayed(model, tmp_path / "recorded", tmp_path / "b", loss={"beta": 0}, max_steps=1)
    record(tmp_path / "other", 1, [make_scored([7], [[5, 600], [8]], [0.0, 1.0])])
    with pytest.raises(UserError, match=r"^batches: .* the policy's vocabulary"):
        replayed(model, tmp_path / "other", tmp_path / "c")


def test_groups_that_do_not_train(model: Path, make_scored: Callable[..., Batch], tmp_path: Path) -> None:
    record(tmp_path / "recorded", 1, [make_scored([7], [[5, 6], [8]], [1.0, 1.0])])
    with pytest.raises(RunFailed, match=r"trained no token"):
        replayed(model, tmp_path / "recorded", tmp_path / "a")
