"""Supervised fine-tuning from a file to a trained model, in one process or resumed."""

import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from policy_trainer.cli.demo.base_model import make_model
from policy_trainer.config import SftConfig
from policy_trainer.processes.lifecycle.endings import RunFailed
from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.rollout.sampling.hf import HFSampler
from policy_trainer.rollout.sampling.sampler import SamplingParams, sample
from policy_trainer.supervised.sft import SupervisedLearner, sft
from shared.models import load_model, load_tokenizer, save_model
from shared.settings import from_values
from tests.policy_trainer.rollout.sampling.architectures import texts
from tests.policy_trainer.supervised_runs import assert_same_run, documented, steps_of, stop_after

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# For a model of two layers with random weights.
FAST = {"learning_rate": 3e-3, "betas": (0.9, 0.99)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The demo's architecture with random weights."""
    directory = tmp_path_factory.mktemp("models") / "random"
    save_model(make_model(0), tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten digits and their names, eight times over."""
    path = tmp_path_factory.mktemp("data") / "digits.jsonl"
    rows = [{"messages": [{"role": "user", "content": str(i)}], "completion": word} for i, word in enumerate(WORDS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    return path


@pytest.fixture
def configure(model: Path, data: Path, tmp_path: Path) -> Callable[..., SftConfig]:
    def configure(**changes: Any) -> SftConfig:
        values = {
            "model": str(model), "run_dir": tmp_path / "run", "data": {"path": data, "eval_path": data},
            "batch_size": 10, "optimizer": FAST, "eval_steps": 4, "checkpoint": {"save_steps": 3},
        }  # fmt: skip
        return from_values(SftConfig, **{**values, **changes})

    return configure


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)


def test_the_model_learns_the_completions(configure: Callable[..., SftConfig], console: Console) -> None:
    config = configure(num_train_epochs=8)
    result = sft(config, console)

    assert result.finished and result.steps == 64
    records = read_metrics(config.run_dir / "metrics.jsonl")
    eval_losses = {record["step"]: record["eval_loss"] for record in records if record["kind"] == "evaluation"}
    assert list(eval_losses) == list(range(0, 65, 4))
    assert eval_losses[0] > 2 and eval_losses[64] == result.evaluation["eval_loss"] < 0.05
    losses = [record["loss"] for record in steps_of(config.run_dir)]
    assert losses[-1] < 0.05 < losses[0]
    assert set(steps_of(config.run_dir)[0]) == documented("sft step")
    assert [path.name for path in config.run_dir.iterdir() if path.name.startswith(".")] == []

    path = str(config.run_dir / "model")
    trained, tokenizer = load_model(path, revision=None, device="cpu", dtype="float32"), load_tokenizer(path)
    prompts = [tokenizer.encode(f"<|user|>{i}<|end|><|assistant|>") for i in range(10)]
    greedy = SamplingParams(num_generations=1, max_completion_length=10, temperature=0.0, top_p=1.0, top_k=0)
    answers = [group[0] for group in sample(HFSampler(trained, tokenizer), texts(prompts), greedy, seed=0)]
    assert [tokenizer.decode(item.ids.tolist(), skip_special_tokens=True) for item in answers] == list(WORDS)
    assert all(item.finished for item in answers)


@pytest.mark.parametrize("steps", [3, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 5))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_weights(
    configure: Callable[..., SftConfig],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: str,
    steps: int,
) -> None:
    whole = configure(dtype=dtype, run_dir=tmp_path / "whole")
    sft(whole, console)

    with monkeypatch.context() as patch:
        stop_after(steps, SupervisedLearner, patch)
        stopped = sft(configure(dtype=dtype), console)
    assert not stopped.finished and stopped.steps == steps
    again = configure(dtype=dtype, resume=True)
    assert not (again.run_dir / "model").exists()
    assert sft(again, console).finished

    assert_same_run(again.run_dir, whole.run_dir)


def test_a_log_without_a_terminal_says_how_far_it_is(
    configure: Callable[..., SftConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    sft(configure(num_train_epochs=1), Console(file=written))
    assert "left" not in written.getvalue()  # it takes seconds
    monkeypatch.setattr("policy_trainer.supervised.training._LINE_SECONDS", 0.0)
    written.truncate(0)
    sft(configure(num_train_epochs=1, run_dir=str(configure().run_dir) + "-2"), Console(file=written))
    lines = re.findall(r"step (\d)/8 · loss \d+\.\d{4} · about \d+ s left", written.getvalue())
    assert lines == ["1", "2", "3", "4", "5", "6", "7"]


def test_stopped_before_the_first_step(configure: Callable[..., SftConfig], console: Console) -> None:
    """There is nothing to save, and a resumed run begins at step 0."""
    with pytest.MonkeyPatch.context() as patch:
        measure = SupervisedLearner.evaluate
        patch.setattr(
            SupervisedLearner, "evaluate", lambda *args: (signal.raise_signal(signal.SIGINT), measure(*args))[1]
        )
        stopped = sft(configure(), console)
    assert not stopped.finished and stopped.steps == 0
    config = configure(resume=True)
    assert sft(config, console).finished
    assert [record["step"] for record in read_metrics(config.run_dir / "metrics.jsonl")] == [
        0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8,
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_ends_the_run(configure: Callable[..., SftConfig], console: Console) -> None:
    config = configure(optimizer={"learning_rate": 1e30})
    with pytest.raises(RunFailed, match=r"loss or gradient of step \d is not finite; lower"):
        sft(config, console)
    assert not (config.run_dir / "model").exists()


def test_a_last_step_that_spoils_the_weights_ends_the_run(
    configure: Callable[..., SftConfig], console: Console
) -> None:
    config = configure(optimizer={"learning_rate": 1e30}, batch_size=80, checkpoint={"save_steps": 1})
    with pytest.raises(RunFailed, match=r"held-out loss after step 1 is not finite; lower optimizer.learning_rate"):
        sft(config, console)
    assert not (config.run_dir / "model").exists() and not list(config.run_dir.glob("checkpoints/*"))
