"""A reward model from a file of pairs to what `--rewards model` takes, in one process or resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from pydantic import ValidationError
from rich.console import Console
from transformers import BertConfig, BertModel

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.config import RewardModelConfig, RewardTrainingConfig
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.rewards.reward_model import RewardModel
from policy_trainer.supervised.reward_model.training import load_with_head, train_reward_model
from shared.errors import UserError
from shared.models import load_model, save_model
from shared.settings import from_values
from tests.policy_trainer.supervised.reward_model.models import classifier, language_model
from tests.policy_trainer.supervised_runs import documented, steps_of

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def requested(digit: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(digit)}]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Digits in words are better than in figures."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": requested(i), "chosen": word, "rejected": str(i)} for i, word in enumerate(WORDS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    return path


@pytest.fixture
def configure(data: Path, tmp_path: Path) -> Callable[..., RewardTrainingConfig]:
    def configure(pad: int | None = 0, **changes: Any) -> RewardTrainingConfig:
        model = tmp_path / f"model-{pad}"
        if not model.exists():
            language_model(model, pad, initializer_range=0.1)
        values = {
            "model": str(model), "run_dir": tmp_path / "run", "data": {"path": data, "eval_path": data},
            "batch_size": 10, "optimizer": {"learning_rate": 1e-2, "betas": (0.9, 0.99)}, "eval_steps": 2,
            "checkpoint": {"save_steps": 3}, "num_train_epochs": 2,
        }  # fmt: skip
        return from_values(RewardTrainingConfig, **{**values, **changes})

    return configure


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)


@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_a_reward_model(
    configure: Callable[..., RewardTrainingConfig], console: Console, pad: int | None, dtype: str
) -> None:
    config = configure(pad, dtype=dtype)
    result = train_reward_model(config, console)

    assert result.finished and result.steps == 8 and result.evaluation["accuracy"] == 1
    records = read_metrics(config.run_dir / "metrics.jsonl")
    hits = {record["step"]: record["accuracy"] for record in records if record["kind"] == "evaluation"}
    assert list(hits) == [0, 2, 4, 6, 8] and hits[0] < hits[8] == 1
    losses = [record["loss"] for record in steps_of(config.run_dir)]
    assert losses[-1] < losses[0] / 2
    assert set(steps_of(config.run_dir)[0]) == documented("reward-model step")

    judge = RewardModel(RewardModelConfig(path=str(config.run_dir / "model")))
    problems = [Problem("", tuple(requested(i))) for i in range(10)]
    better = judge.scores([Sample(problem, WORDS[i]) for i, problem in enumerate(problems)])
    worse = judge.scores([Sample(problem, str(i)) for i, problem in enumerate(problems)])
    assert all(single > other for single, other in zip(better, worse, strict=True))
    differences = [single - other for single, other in zip(better, worse, strict=True)]
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert result.evaluation["reward_margin"] == pytest.approx(sum(differences) / 10, rel=tolerance)


class TestModels:
    def test_a_language_model_keeps_its_body_and_gets_a_head_of_the_seed(
        self, configure: Callable[..., RewardTrainingConfig]
    ) -> None:
        config = configure()
        lm = load_model(config.model, revision=None, device="cpu", dtype="float32").state_dict()
        first, again, other = (
            load_with_head(config.model, None, configure(seed=seed)).state_dict() for seed in (0, 0, 1)
        )
        assert torch.equal(first["score.weight"], again["score.weight"]) and first["score.weight"].shape[0] == 1
        assert not torch.equal(first["score.weight"], other["score.weight"])
        assert all(torch.equal(weight, lm[name]) for name, weight in first.items() if name != "score.weight")

    def test_a_classifier_keeps_its_head(self, configure: Callable[..., RewardTrainingConfig], tmp_path: Path) -> None:
        scorer = classifier(dtype=torch.float32)
        save_model(scorer, make_tokenizer(), tmp_path / "scorer")
        hits = load_with_head(str(tmp_path / "scorer"), None, configure())
        assert torch.equal(hits.state_dict()["score.weight"], scorer.score.weight)

    def test_an_encoder(self, configure: Callable[..., RewardTrainingConfig], console: Console, tmp_path: Path) -> None:
        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        bert: Any = BertModel(
            BertConfig(vocab_size=len(tokenizer), initializer_range=0.1, **sizes), add_pooling_layer=False
        )
        save_model(bert, tokenizer, tmp_path / "bert")
        config = configure(model=str(tmp_path / "bert"))
        assert train_reward_model(config, console).evaluation["accuracy"] == 1
        RewardModel(RewardModelConfig(path=str(config.run_dir / "model")))

    def test_a_damaged_one_is_refused(self, configure: Callable[..., RewardTrainingConfig]) -> None:
        config = configure()
        file = Path(config.model) / "model.safetensors"
        kept = {name: weight for name, weight in safetensors.torch.load_file(file).items() if "layers.1" not in name}
        safetensors.torch.save_file(kept, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"model: .* is damaged: it has no model\.layers\.1"):
            load_with_head(config.model, None, config)


def test_data_is_needed() -> None:
    with pytest.raises(ValidationError, match=r"data\.path: a reward model needs pairs: give --data\.path FILE"):
        from_values(RewardTrainingConfig, model="m")
