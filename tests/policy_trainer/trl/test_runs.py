"""Runs through `policy_trainer.trl`, and the same under TRL: which prompts are answered, and what rewards see."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

import policy_trainer.trl as ours
from shared.models import save_model

pytestmark = pytest.mark.slow  # whole runs


def endless() -> Iterator[dict[str, Any]]:
    yield from ({"prompt": f"{i}+{i}="} for i in count())


@pytest.fixture
def model(tmp_path: Path, make_tiny: Any, tokenizer: Any) -> str:
    directory = tmp_path / "model"
    save_model(make_tiny(vocabulary=len(tokenizer)), tokenizer, directory)
    return str(directory)


def answered(library: Any, model: str, directory: Path, rewards: Any, dataset: Any, **given: Any) -> list[str]:
    """The prompts of a run's two steps, in the order of the calls of its reward function. Ours may sample more."""
    seen: list[str] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        seen.extend(prompts)
        return rewards(completions)

    args = library.GRPOConfig(
        str(directory), max_steps=2, per_device_train_batch_size=8, num_generations=4, max_completion_length=3,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", **given,
    )  # fmt: skip
    trainer = library.GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=dataset)
    trainer.train()
    assert trainer.state.global_step == 2
    return list(dict.fromkeys(seen))[:4]


def lengths(completions: list[str]) -> list[float | None]:
    return [float(len(text)) for text in completions]


@pytest.mark.filterwarnings("ignore")  # of TRL, transformers and accelerate
def test_a_stream_trains_on_the_prompts_of_trl(model: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    rows = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(12)])
    for name, dataset, given in (
        ("endless", IterableDataset.from_generator(endless), {"shuffle_dataset": False}),
        ("shuffled", rows.to_iterable_dataset(), {}),
        ("in order", rows, {"shuffle_dataset": False}),
    ):
        expected = answered(trl, model, tmp_path / name / "trl", lengths, dataset, **given)
        got = answered(ours, model, tmp_path / name / "ours", lengths, dataset, **given)
        batches = [[sorted(each[start : start + 2]) for start in (0, 2)] for each in (expected, got)]
        assert len(expected) == len(got) == 4 and batches[0] == batches[1], name


def test_a_run_without_any_reward_goes_on(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As under TRL, which warns."""
    rows = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(12)])
    answered(ours, model, tmp_path / "run", lambda completions: [None] * len(completions), rows)
    assert "All reward functions returned None for the following kwargs" in caplog.text


def test_several_reward_models_judge(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier: Any = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name in ("one", "two"):
        save_model(classifier, tokenizer, tmp_path / name)
    args = ours.GRPOConfig(
        str(tmp_path / "out"), max_steps=1, max_completion_length=3, use_cpu=True, report_to="none",
        reward_weights=[1.0, 0.5, 0.25], save_strategy="no",
    )  # fmt: skip
    trainer = ours.GRPOTrainer(
        model=model, reward_funcs=[str(tmp_path / "one"), str(tmp_path / "two"), classifier], args=args,
        reward_processing_classes=[None, tokenizer, tokenizer],
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(3)]),
    )  # fmt: skip
    trainer.train()
    logs = trainer.state.log_history[0]
    means = [value for name, value in logs.items() if name.startswith("rewards/") and name.endswith("/mean")]
    assert len(means) == 3 and means[0] == pytest.approx(means[1]) == pytest.approx(means[2])
