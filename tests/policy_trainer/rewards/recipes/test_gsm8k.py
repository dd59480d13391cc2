"""The rewards of Simple-GRPO and of the Language Models Book."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.data.problem import Problem, Score
from policy_trainer.rewards import Reward, Sample
from policy_trainer.rewards.recipes import (
    last_number,
    lm_book_correct,
    lm_book_tags,
    simple_grpo_accuracy,
    simple_grpo_format,
)

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n", "\t"]), max_size=14)


def scored(reward: Reward, completion: str, gold: str = "72") -> Score:
    return reward(Sample(Problem(gold), completion))


class TestSimpleGrpoAccuracy:
    @pytest.mark.parametrize(
        ("completion", "gold", "expected"),
        [
            ("72", "72", 1),
            ("72 or 71", "72", -1),
            ("0.5", "1/2", 1),
            ("1/2", "0.5", 1),
            ("1/0", "72", -1),
            ("-72", "72", 1),  # signs are no part of a number
            ("1,072", "1072", -1),  # nor are commas: the last number is 072
            ("", "72", -1),
            ("\uff17\uff12", "72", -1),  # a number of other digits is the last one, and math-verify reads none
            ("9" * 1001, "9" * 1001, -1),  # over the limit
            ("98**99**97", "72", -1),
            ("72", "seventy-two", math.nan),
        ],
    )
    def test_table(self, completion: str, gold: str, expected: float) -> None:
        assert scored(simple_grpo_accuracy, completion, gold) == pytest.approx(expected, nan_ok=True)

    @given(st.text(alphabet="019./ x\u0663", max_size=16))
    def test_the_last_number_is_the_plain_patterns(self, text: str) -> None:
        numbers = re.findall(r"\d+\.\d+|\d+/\d+|\d+", text)
        assert last_number(text) == (numbers[-1] if numbers else None)


class TestSimpleGrpoFormat:
    @pytest.mark.parametrize(
        ("completion", "expected"),
        [
            ("<think>a</think><answer>b</answer>", 1.25),
            ("<think>a\nb</think>\n\n <answer>b\n</answer>\n", 1.25),
            ("<think>a</think>\t<answer>b</answer>", -1),
            ("<think>a<think></think><answer>b</answer>", -1),
            ("<think>a</think><answer>b</answer>.", -1),
        ],
    )
    def test_table(self, completion: str, expected: float) -> None:
        assert scored(simple_grpo_format, completion) == expected

    @given(PIECES)
    def test_is_the_plain_pattern_and_two_tags_of_each_kind(self, pieces: list[str]) -> None:
        text = "".join(pieces)
        whole = re.match(r"^<think>.*?</think>[\n ]*<answer>.*?</answer>$", text, re.DOTALL)
        two = len(re.findall("</?think>", text)) == len(re.findall("</?answer>", text)) == 2
        assert scored(simple_grpo_format, text) == (1.25 if whole and two else -1)


class TestLmBookCorrect:
    @pytest.mark.parametrize(
        ("completion", "gold", "expected"),
        [
            ("<answer>72</answer>", "72", 2),
            ("<answer>\n72\r\n</answer>", "72", 2),
            ("<answer>72</answer><answer>71</answer>", "72", 0),
            ("<answer>72 apples</answer>", "72", 1.5),
            ("<answer>$72.00</answer>", "72", 1.5),
            ("<answer>-.5</answer>", "-0.5", 1.5),
            ("<answer>72 or 71</answer>", "72", 0),
            ("<answer>1,000</answer>", "1000", 0),
            ("<answer>\uff17\uff12</answer>", "72", 1.5),
            ("<answer>9007199254740993</answer>", "9007199254740992", 1.5),  # equal as floats
            ("<answer>...</answer>", "...", 0),
            ("72", "72", 0),
            ("<answer>red</answer>", "red", 2),
            ("<answer>" + "9" * 1001 + "</answer>", "72", 0),
            ("<answer>" + "so " * 1001 + "72</answer>", "72", 1.5),
        ],
    )
    def test_table(self, completion: str, gold: str, expected: float) -> None:
        assert scored(lm_book_correct, completion, gold) == expected

    @given(
        st.lists(st.sampled_from(["<answer>", "</answer>", "7", ".", "-", " ", "x", "..."]), max_size=10),
        st.sampled_from(["7", "-.7", "x"]),
    )
    def test_is_the_book(self, pieces: list[str], gold: str) -> None:
        text = "".join(pieces)
        assert scored(lm_book_correct, text, gold) == _book(text, gold)


def _book(text: str, gold: str) -> float:
    after = text.split("<answer>")[1:][-1:]
    answers = [part.split("</answer>")[0].strip() for part in after if "</answer>" in part]
    if not answers or answers[0] == "...":
        return 0
    numbers = [[float(n) for n in re.findall(r"-?\d*\.?\d+", side)] for side in (answers[0], gold)]
    return 2 if answers[0] == gold else 1.5 if numbers[0] == numbers[1] and len(numbers[0]) == 1 else 0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<reasoning>a</reasoning><answer>b</answer>", 0.8),
        ("</answer></reasoning><answer><reasoning>", 0.8),
        ("<reasoning>", 0.2),
    ],
)
def test_lm_book_tags(completion: str, expected: float) -> None:
    assert scored(lm_book_tags, completion) == pytest.approx(expected)
