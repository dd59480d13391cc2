"""Countdown: generated problems have solutions and are never those held out; files have columns nums and target."""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_trainer.config import CountdownConfig, DataConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.tasks.countdown import GeneratedCountdown, countdown
from shared.errors import UserError
from tests.policy_trainer.data.tasks.formats import DATA, write

FEW = CountdownConfig(numbers=2, largest=9, operators="+*")
MANY = CountdownConfig(numbers=4, largest=30, operators="+-*/")


def generated(config: CountdownConfig, seed: int = 0) -> Task:
    return countdown(DataConfig(countdown=config), seed)


def drawn(problem: Problem) -> tuple[tuple[int, ...], int]:
    return problem.extras["numbers"], problem.extras["target"]


def key(problem: Problem) -> tuple[tuple[int, ...], int]:
    numbers, target = drawn(problem)
    return tuple(sorted(numbers)), target


def can_be_solved(numbers: Sequence[int], target: int) -> bool:
    return Fraction(target) in values([Fraction(number) for number in numbers])


def values(numbers: Sequence[Fraction]) -> Iterator[Fraction]:
    """The value of every expression that uses each number once."""
    if len(numbers) == 1:
        yield numbers[0]
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i != j:
                rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
                for value in (a + b, a - b, a * b, *([a / b] if b else [])):
                    yield from values([*rest, value])


class TestGenerated:
    @settings(max_examples=10, deadline=None)
    @given(
        st.builds(
            CountdownConfig,
            numbers=st.integers(3, 4),
            largest=st.integers(5, 99),
            operators=st.sets(st.sampled_from("+-*/"), min_size=2).map("".join),
        ),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
    )
    def test_every_problem_can_be_solved(self, config: CountdownConfig, seed: int, index: int) -> None:
        numbers, target = drawn(GeneratedCountdown(config, seed).problem(index))
        assert len(numbers) == config.numbers and all(1 <= number <= config.largest for number in numbers)
        assert target >= 1 and can_be_solved(numbers, target)

    @pytest.mark.parametrize("config", [FEW, MANY])
    def test_what_is_held_out_is_the_same_for_every_seed_and_never_drawn(self, config: CountdownConfig) -> None:
        tasks = generated(config), generated(config, 12345)
        held_out = tasks[0].eval_problems()
        assert held_out == tasks[1].eval_problems()
        eval_problems = {key(problem) for problem in held_out}
        assert len(eval_problems) == len(held_out) > (5 if config is FEW else 500)
        assert all(can_be_solved(*drawn(problem)) for problem in held_out[:50])
        for task in tasks:
            assert eval_problems.isdisjoint(key(task.problem(index)) for index in [*range(1000), 2**62])

    @pytest.mark.parametrize("operators", ["+", "-", "*", "/"])
    def test_operators_make_the_targets(self, operators: str) -> None:
        task = GeneratedCountdown(CountdownConfig(numbers=2, largest=30, operators=operators), 0)
        for (a, b), target in (drawn(task.problem(index)) for index in range(50)):
            small, large = sorted((a, b))
            assert target == {"+": a + b, "-": large - small, "*": a * b, "/": Fraction(large, small)}[operators]

    @pytest.mark.parametrize("settings", [{"numbers": 2, "largest": 1}, {"numbers": 2, "largest": 2, "operators": "+"}])
    def test_too_few_problems_are_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=r"^data\.countdown: makes too few problems; use more"):
            generated(CountdownConfig(**settings))


class TestFile:
    FILE = DATA / "countdown.jsonl"

    def test_problems(self) -> None:
        task = countdown(DataConfig(path=self.FILE, eval_path=self.FILE), 0)
        problem = task.eval_problems()[3]
        assert problem.extras == {"numbers": (44, 19, 35), "target": 98} and problem.answer == "98"
        (message,) = problem.messages
        assert message["content"].startswith("Using the numbers [44, 19, 35], create an equation that equals 98. ")
        assert "<think>" in message["content"] and "<answer>" in message["content"] and problem.system_prompt
        assert problem.assistant_prefill == "Let me solve this step by step.\n<think>"
        assert task.default_rewards == ("nano_aha/format", "nano_aha/equation")
        answers = {"19 + 35 + 44": 1, "(44+19)+35": 1, "98": 0, "44+19+34": 0, "": 0}
        scores = {answer: task.correct(problem, f"so</think>\n<answer>{answer}</answer>") for answer in answers}
        assert scores == answers

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"nums": [], "target": 5}, "nums must be a list of whole numbers"),
            ({"nums": 5, "target": 5}, "nums must be a list of whole numbers"),
            ({"nums": [1, "2"], "target": 5}, "nums must be a list of whole numbers"),
            ({"nums": [1, 2], "target": 2.5}, "target must be a whole number"),
        ],
    )
    def test_a_malformed_row_is_named(self, tmp_path: Path, row: dict[str, Any], reason: str) -> None:
        file = write(tmp_path / "c.jsonl", {"nums": [1, 2], "target": 3}, row)
        with pytest.raises(UserError, match=f"^{re.escape(str(file))}:2: {reason}"):
            countdown(DataConfig(path=file), 0)
