"""What stands between a configuration and its run."""

from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import EvalConfig, RolloutConfig, TrainConfig
from policy_trainer.evaluation.standalone import evaluate_model
from policy_trainer.rollout.worker import run_worker
from policy_trainer.trainer.run import train
from shared.errors import UserError


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
