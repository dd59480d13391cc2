"""Models that TRL's SFTTrainer and RewardTrainer save can be loaded here, and SFT has the same losses as TRL's."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2ForSequenceClassification

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from policy_trainer.config import RewardModelConfig, SftConfig
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.rewards.reward_model import RewardModel
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from policy_trainer.supervised.sft import sft
from shared.logprobs import choose_forward
from shared.models import load_model, load_tokenizer, save_model, tokenizer_fingerprint
from shared.settings import from_values

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # TRL sets deprecated options

ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(8)]
ARGUMENTS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
    "adam_beta2": 0.99, "weight_decay": 0.0, "max_grad_norm": 1.0,
}  # fmt: skip


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    torch.set_num_threads(1)
    return make_tokenizer()


@pytest.fixture
def train(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Trains with TRL; returns the directory of the saved model and the losses."""
    # By name, since the type checker must not depend on them; here, since `make test` imports this file too.
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")

    def train(trainer: str, config: str, model: Any, rows: list[Any], **arguments: Any) -> tuple[Path, list[float]]:
        made = getattr(trl, trainer)(
            model=model,
            args=getattr(trl, config)(output_dir=str(tmp_path / "trl"), **ARGUMENTS, **arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        made.remove_callback(PrinterCallback)
        made.train()
        made.save_model(str(tmp_path / "saved"))
        return tmp_path / "saved", [record["loss"] for record in made.state.log_history if "loss" in record]

    return train


def test_a_supervised_model(train: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(make_model(0), tokenizer, base)
    saved, losses = train("SFTTrainer", "SFTConfig", make_model(0), ROWS, max_steps=60, learning_rate=3e-3)

    model, loaded = (
        load_model(str(saved), revision=None, device="cpu", dtype="float32"),
        load_tokenizer(str(saved)),
    )
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(load_tokenizer(str(base)))
    assert loaded.chat_template == tokenizer.chat_template
    assert choose_forward(model).name == "packed"
    greedy = SamplingParams(num_generations=1, max_completion_length=8, temperature=0.0, top_p=1.0, top_k=0)
    prompts = [EncodedPrompt(loaded.encode(row["prompt"])) for row in ROWS]
    samples = sample(HFSampler(model, loaded), prompts, greedy, seed=0)
    texts = [loaded.decode(group[0].ids.tolist(), skip_special_tokens=True) for group in samples]
    assert texts == [row["completion"] for row in ROWS]
    assert all(group[0].finished for group in samples), "both end a completion with the same token"

    assert ours(base, tmp_path) == pytest.approx(losses[:10], rel=1e-3)


def ours(base: Path, directory: Path) -> list[float]:
    """The losses of the first ten steps from the same weights: each sees all rows, whatever their order."""
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = from_values(
        SftConfig,
        model=str(base),
        run_dir=directory / "run",
        data={"path": data, "eval_path": data},
        num_train_epochs=10,
        batch_size=len(ROWS),
        optimizer={"learning_rate": 3e-3, "betas": (0.9, 0.99), "min_lr_rate": 1.0},
    )
    sft(config, Console(quiet=True))
    return [record["loss"] for record in read_metrics(directory / "run" / "metrics.jsonl") if record["kind"] == "step"]


def test_a_reward_model(train: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> None:
    def messages(row: dict[str, str], completion: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": completion}]

    rows = [{"chosen": messages(row, row["completion"]), "rejected": messages(row, "no")} for row in ROWS]
    config = make_model(0).config
    config.num_labels = 1
    torch.manual_seed(0)
    saved, _ = train(
        "RewardTrainer", "RewardConfig", Qwen2ForSequenceClassification(config), rows, max_steps=20, learning_rate=1e-3
    )

    judge = RewardModel(RewardModelConfig(path=str(saved)))
    problems = [Problem("", messages=({"role": "user", "content": row["prompt"]},)) for row in ROWS]
    right = judge.scores([Sample(*pair) for pair in zip(problems, [row["completion"] for row in ROWS], strict=True)])
    wrong = judge.scores([Sample(problem, "no") for problem in problems])
    assert all(good > bad + 1 for good, bad in zip(right, wrong, strict=True))
