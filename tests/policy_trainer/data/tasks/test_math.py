"""The formats of MATH, OpenR1-Math and GSM8K: where the gold answer is, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.config import DataConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.math import gsm8k, math
from policy_trainer.data.tasks.problem_set import THINK_THEN_ANSWER
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import DATA, write


def read(path: Path) -> list[Problem]:
    return list(math(DataConfig(path=path, eval_path=path), 0).eval_problems())


def test_gold_answers_of_math() -> None:
    problems = read(DATA / "math_like_math.jsonl")
    assert [problem.answer for problem in problems] == [
        "4",
        r"\frac{1}{2}",
        r"\{2,3\}",
        r"\left\{0,\tfrac{1}{2}\right.",
        "9",
    ]
    assert problems[1].messages == ({"role": "user", "content": "Solve $2x=1$."},) and problems[1].system_prompt


def test_gold_answers_of_open_r1() -> None:
    """The column goes before the solution, which stands in for one that is empty."""
    problems = read(DATA / "math_like_open_r1.jsonl")
    assert [problem.answer for problem in problems] == ["2", r"\sqrt{3}", "0", "4"]
    solution = r"It is $\boxed{3}$, said the author in error."
    assert [problem.extras for problem in problems] == [{"solution": solution}, {}, {"solution": r"$\boxed{0}$"}, {}]


@pytest.mark.parametrize(
    ("make", "row", "reason"),
    [
        (math, {"problem": "x", "solution": "5"}, "must have an answer, or a solution with"),
        (math, {"problem": "x", "answer": "", "solution": ""}, "must have an answer, or a solution with"),
        (math, {"problem": "x", "solution": 5}, "solution must be a text"),
        (math, {"problem": "x", "answer": ["5"]}, "answer must be a number or a text"),
        (math, {"problem": "", "answer": "5"}, "problem must be a text"),
        (gsm8k, {"question": "x", "answer": "5"}, "answer must end with #### and a number"),
        (gsm8k, {"question": "x", "answer": "#### five"}, "answer must end with #### and a number"),
        (gsm8k, {"question": "x", "answer": 5}, "answer must be a text"),
        (gsm8k, {"question": "", "answer": "#### 5"}, "question must be a text"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, make: Any, row: dict[str, Any], reason: str) -> None:
    good = {"problem": "x", "question": "x", "answer": "#### 5"}
    file = write(tmp_path / "m.jsonl", good, row)
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}:2: {reason}"):
        make(DataConfig(path=file), 0)


GSM8K = DATA / "gsm8k.jsonl"


def test_gold_answers_of_gsm8k() -> None:
    problems = gsm8k(DataConfig(path=GSM8K, eval_path=GSM8K), 0).eval_problems()
    assert [problem.answer for problem in problems] == [
        "24",
        "1250",
        "-5",
        "3.5",
        "1000000",
        "5",
        *map(str, range(19, 25)),
    ]
    assert problems[3].messages == (
        {"role": "user", "content": "A rope of 7 metres is cut in half. How long is a half?"},
    )
    assert {problem.system_prompt for problem in problems} == {THINK_THEN_ANSWER}


def test_answers_of_gsm8k_are_compared_as_mathematics() -> None:
    task = gsm8k(DataConfig(path=GSM8K, eval_path=GSM8K), 0)
    half = task.eval_problems()[3]
    scores = [task.correct(half, f"<answer>{text}</answer>") for text in ("3.5", "7/2", "$3.50$", "3", "")]
    assert scores == [1, 1, 1, 0, 0]
    assert (task.name, task.default_rewards) == ("gsm8k", ("accuracy", "format"))


def test_gsm8k_is_that_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
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
