"""From a configuration to its run: refused rewards, and epochs as steps."""

import io
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import EvalConfig, RolloutConfig, TrainConfig
from policy_trainer.evaluation.standalone import evaluate_model
from policy_trainer.rollout.run import run_worker
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.tasks.registry import make_task
from policy_trainer.trainer import run
from policy_trainer.trainer.run import count_steps, train
from shared.errors import UserError
from shared.settings import from_values


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("speed", "rewards: 'speed' is none of"),
        ("no_such_module:reward", "rewards: no_such_module:reward cannot be imported"),
        ("model", "judging.model.path: reward `model` needs"),
    ],
)
def test_rewards_are_refused_before_minutes_of_loading(
    reward: str, message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)  # without weights: loading them would be refused
    values = {"model": str(model), "rewards": [reward], "run_dir": tmp_path / "run"}
    with pytest.raises(UserError, match=message):
        train(TrainConfig(**values), Console(quiet=True))
    with pytest.raises(UserError, match=message):
        run_worker(RolloutConfig(**values, server="http://127.0.0.1:1"))
    with pytest.raises(UserError, match=message):
        evaluate_model(EvalConfig(model=str(model), rewards=[reward]), lambda decoding, done, total: None)


class TestEpochs:
    def count(self, tmp_path: Path, **settings: Any) -> tuple[TrainConfig, TrainConfig, str]:
        """The given configuration, that with its steps, and what was printed."""
        output = io.StringIO()
        config = from_values(TrainConfig, model="m", run_dir=tmp_path / "run", groups_per_step=100, **settings)
        counted = count_steps(config, lambda: make_task(config), Console(file=output, width=200))
        return config, counted, output.getvalue()

    @pytest.mark.parametrize(
        ("settings", "steps", "message"),
        [
            ({"num_train_epochs": 2}, 180, "180 steps"),
            ({"num_train_epochs": 2, "max_steps": 7}, 7, "num_train_epochs = 2 is not used"),
            ({}, 100, ""),
        ],
    )
    def test_epochs_decide_the_steps_unless_they_are_given(
        self, settings: dict[str, Any], steps: int, message: str, tmp_path: Path
    ) -> None:
        _, counted, output = self.count(tmp_path, **settings)
        assert counted.max_steps == steps
        assert message in output and bool(message) == bool(output)

    def test_a_resumed_run_counts_the_same_steps(self, tmp_path: Path) -> None:
        config, counted, _ = self.count(tmp_path, num_train_epochs=0.5)
        RunDirectory(config.run_dir).write_config(config)
        values = tomllib.loads((config.run_dir / "config.toml").read_text())
        resumed = from_values(TrainConfig, **values)
        again = count_steps(resumed, lambda: make_task(resumed), Console(quiet=True))
        assert again.max_steps == counted.max_steps == 45

    def test_the_data_is_read_once(
        self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[TrainConfig] = []
        monkeypatch.setattr(run, "make_task", lambda config: made.append(config) or make_task(config))
        tokenizer.save_pretrained(tmp_path / "model")
        values = {"model": str(tmp_path / "model"), "rewards": ["no_such_module:reward"], "num_train_epochs": 2}
        with pytest.raises(UserError, match="no_such_module"):  # once the task is there
            train(from_values(TrainConfig, **values, run_dir=tmp_path / "run"), Console(quiet=True))
        assert len(made) == 1
