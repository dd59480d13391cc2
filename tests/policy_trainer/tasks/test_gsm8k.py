"""The format of GSM8K: where the gold answer is, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import DataConfig
from policy_trainer.tasks.math import gsm8k
from policy_trainer.tasks.problem_set import THINK_THEN_ANSWER
from shared.errors import UserError
from tests.policy_trainer.tasks.formats import DATA, rows, write

FILE = DATA / "gsm8k.jsonl"
GOLD = ["24", "1250", "-5", "3.5", "1000000", "5", *map(str, range(19, 25))]


def test_gold_answers() -> None:
    problems = gsm8k(DataConfig(path=FILE, eval_path=FILE), 0).eval_problems()
    assert [problem.answer for problem in problems] == GOLD
    assert problems[3].messages == (
        {"role": "user", "content": "A rope of 7 metres is cut in half. How long is a half?"},
    )
    assert {problem.system_prompt for problem in problems} == {THINK_THEN_ANSWER}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x", "answer": "5"}, "answer must end with #### and a number"),
        ({"question": "x", "answer": "#### five"}, "answer must end with #### and a number"),
        ({"question": "x", "answer": 5}, "answer must be a text"),
        ({"question": "", "answer": "#### 5"}, "question must be a text"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    file = write(tmp_path / "g.jsonl", rows("gsm8k")[0], row)
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}:2: {reason}"):
        gsm8k(DataConfig(path=file), 0)


def test_answers_are_compared_as_mathematics() -> None:
    task = gsm8k(DataConfig(path=FILE, eval_path=FILE), 0)
    half = task.eval_problems()[3]
    scores = [task.correct(half, f"<answer>{text}</answer>") for text in ("3.5", "7/2", "$3.50$", "3", "")]
    assert scores == [1, 1, 1, 0, 0]
    assert (task.name, task.default_rewards) == ("gsm8k", ("accuracy", "format"))


def test_its_own_dataset_is_that_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def refuse(*arguments: Any, **options: Any) -> None:
        calls.append((*arguments, options))
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(
        UserError, match=r"data\.dataset: openai/gsm8k, subset main, split train cannot be loaded: no net"
    ):
        gsm8k(DataConfig(), 0)
    with pytest.raises(UserError, match=r"data\.dataset: a/copy, split train cannot be loaded"):
        gsm8k(DataConfig(dataset="a/copy"), 0)
    with pytest.raises(UserError, match="subset socratic, split train"):
        gsm8k(DataConfig(subset="socratic"), 0)
    train = {"split": "train"}
    assert calls == [
        ("openai/gsm8k", "main", train), ("a/copy", None, train), ("openai/gsm8k", "socratic", train),
    ]  # fmt: skip
