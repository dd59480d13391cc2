"""The rewards of nano-aha-moment and GRPO:Zero on Countdown."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.data.problem import Problem, Score
from policy_trainer.rewards import Reward, Sample
from policy_trainer.rewards.recipes import (
    grpo_zero_equation,
    grpo_zero_format,
    nano_aha_equation,
    nano_aha_format,
)
from shared.errors import UserError

WHOLE = "so\n</think>\n<answer>{}</answer>"


def scored(reward: Reward, completion: str, numbers: Any = (1, 2, 3), target: Any = 9) -> Score:
    return reward(Sample(Problem(str(target), extras={"numbers": numbers, "target": target}), completion))


# completion, nano-aha-moment's format, GRPO:Zero's; `<think>` is in the prompt
FORMS = (
    (WHOLE.format("(1+2)*3"), 1, 1),
    (WHOLE.format("(1+2)*3") + "\n", 1, 1),
    (WHOLE.format("nine"), 0.5, 1),
    (WHOLE.format("\u0663"), 1, 1),
    ("<think>so</think>\n<answer>1</answer>", 0, 1),
    ("so</think><answer>1</answer>", 0, 0.6),
    ("so</think>\n<answer>1</answer>\n\n", 0, 0.6),
    ("so</think>\n<answer>1</answer></answer>", 0.5, 1),
    ("", 0, 0),
)


@pytest.mark.parametrize(("completion", "aha", "zero"), FORMS)
def test_forms(completion: str, aha: float, zero: float) -> None:
    assert scored(nano_aha_format, completion) == aha
    assert scored(grpo_zero_format, completion) == pytest.approx(zero)


# answer, score by nano-aha-moment, by GRPO:Zero
EQUATIONS = (
    ("(1+2)*3", 1, 1),
    (" (1 + 2) * 3 ", 1, 1),
    ("(1+2)*3\n", 0, 1),  # not in a single line; `$` also matches before a final line end
    ("(1+2)*3\r", 1, 0),
    ("(1+2)*3 = 9", 0, 0),
    ("9", 0, 0),
    ("(1+2)*3*1", 0, 0),
    ("3**2", 0, 0),
    ("(1+2)*3//1", 0, 0),
    ("(01+2)*3", 0, 0),
    ("(1+2)*\u0663", 0, 0),
    ("(1+2)(3)", 0, 0),
    ("", 0, 0),
    ("98**99**97", 0, 0),
)


@pytest.mark.parametrize(("answer", "aha", "zero"), EQUATIONS)
def test_equations(answer: str, aha: float, zero: float) -> None:
    completion = WHOLE.format(answer)
    assert (scored(nano_aha_equation, completion), scored(grpo_zero_equation, completion)) == (aha, zero)


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "aha", "zero"),
    [
        ("1.5*2", (1, 2, 5), 3, 1, 0),  # its integers are 1, 5 and 2
        ("3-1/3", (1, 3, 3), 2.666667, 1, 1),
        ("3-1/3", (1, 3, 3), 2.6667, 0, 0),
        ("1/(1-1)", (1, 1, 1), 0, 0, 0),
        ("2+2", (2, 2), 4, 1, 1),
        ("2+2", (2,), 4, 0, 0),
        ("1-10", (1, 10), -9, 1, 1),
        ("1" * 999, (1,), 1, 0, 0),
        ("1" * 1_001, (int("1" * 1_001),), 1, 0, 0),
        ("9", ["9"], "9", 1, 1),
        ("9", (9,), "nine", math.nan, math.nan),
        ("9", None, 9, math.nan, math.nan),
    ],
)
def test_numbers_and_targets(answer: str, numbers: Any, target: Any, aha: float, zero: float) -> None:
    completion = WHOLE.format(answer)
    assert scored(nano_aha_equation, completion, numbers, target) == pytest.approx(aha, nan_ok=True)
    assert scored(grpo_zero_equation, completion, numbers, target) == pytest.approx(zero, nan_ok=True)


@pytest.mark.parametrize(
    ("completion", "aha", "zero"),
    [
        ("<answer>\n9</answer><answer>9</answer>", 1, 0),
        ("<answer>9</answer><answer>8</answer>", 1, 1),
        ("<answer>8</answer><answer>9</answer>", 0, 0),
        ("<answer>8\n</answer>\n<answer>9</answer>", 1, 0),
    ],
)
def test_the_first_answer_counts(completion: str, aha: float, zero: float) -> None:
    assert scored(nano_aha_equation, completion, (9,)) == aha
    assert scored(grpo_zero_equation, completion, (9,)) == zero


def test_problems_without_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="need problems with numbers and target"):
        nano_aha_equation(Sample(Problem("9"), WHOLE.format("9")))


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "\n", "<answer>", "</answer>", "9", "8+1", "x"]), max_size=12)


@given(PIECES)
def test_forms_are_the_plain_patterns(pieces: list[str]) -> None:
    completion = "".join(pieces)
    text = "<think>" + completion
    block = re.search(r"^<think>((?:(?!</?think>).)*)</think>\n<answer>(.*?)</answer>$", text, re.DOTALL)
    arithmetic = block and re.match(r"^[\d+\-*/().\s]+$", block[2].strip())
    assert scored(nano_aha_format, completion) == (1 if arithmetic else 0.5 if block else 0)
    if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL):
        expected = 1.0
    else:
        think = re.search("<think>.*?</think>", text, re.DOTALL)
        answer = re.search("<answer>.*?</answer>", text, re.DOTALL)
        expected = 0.1 * bool(think) + 0.5 * bool(answer)
    assert scored(grpo_zero_format, completion) == expected


@given(PIECES)
def test_equations_look_where_the_plain_patterns_do(pieces: list[str]) -> None:
    completion = "".join(pieces)
    line = re.search("<answer>(.*?)</answer>", completion)
    assert scored(nano_aha_equation, completion, (9,)) == bool(line and line[1].strip() == "9")
    block = re.search("<answer>(.*?)</answer>", completion, re.DOTALL)
    assert scored(grpo_zero_equation, completion, (9,)) == bool(block and block[1] == "9")
