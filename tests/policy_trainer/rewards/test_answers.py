"""Answers in tags, compared as text and as numbers."""

import math
import pickle
import re
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample, accuracy, equal_math, equal_number, equal_text, parse_answer
from policy_trainer.rewards.answers import (
    PLACES,
    ByAnswer,
    format_reward,
    last_boxed,
    math_accuracy,
    reads_tags,
    tags_reward,
)

NAN = math.nan


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=14))
def test_parse_answer_is_the_last_match_of_the_plain_pattern(pieces: list[str]) -> None:
    completion = "".join(pieces)
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    assert parse_answer(completion) == (answers[-1].strip() if answers else None)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("5", "5", 1),
        ("5.0", "5", 1),
        ("5.", "5", 1),
        ("05", "5", 1),
        ("-5", "5", 0),
        ("$1,234.50", "1234.5", 1),
        ("1,234,567", "1234567", 1),
        ("1,23", "123", 0),
        ("0.1", "0.10", 1),
        ("five", "5", 0),
        ("5 apples", "5", 0),
        ("5e0", "5", 0),
        (".5", "0.5", 1),
        ("-$5", "-5", 1),
        (r"\$5", "5", 1),
        ("\N{MINUS SIGN}5", "-5", 1),
        ("1{,}000", "1000", 1),
        ("1..5", "1.5", 0),
        ("0x5", "5", 0),
        ("5%", "5", 0),
        ("nan", "5", 0),
        # Digits of other alphabets are none here.
        ("\u0665", "5", 0),
        ("5\u00b2", "25", 0),
        # As floats these would be equal.
        ("9007199254740993", "9007199254740992", 0),
        ("1" + ",000" * 120, "2" + ",000" * 120, 0),
        ("1" + "0" * 400, "1" + "0" * 400, NAN),
        ("5", "nan", NAN),
        ("5", "five", NAN),
        ("5", "\u0665", NAN),
    ],
)
def test_numbers(answer: str, gold: str, expected: float) -> None:
    assert equal_number(answer, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [("a", "a", 1), (" a\n", "a", 1), ("a", "A", 0), ("1.0", "1", 0), ("", "a", 0), ("a b", "a  b", 0)],
)
def test_text(answer: str, gold: str, expected: float) -> None:
    assert equal_text(answer, gold) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>1+1</think><answer>2</answer>", 1),
        ("<answer>2</answer>", 1),
        ("<answer>3</answer>", 0),
        ("2", 0),
        ("", 0),
        ("<answer>2</answer><answer>3</answer>", 0),
        ("<answer>" + " " * 2000 + "2</answer>", 1),
        ("<answer>" + "0" * 2000 + "2</answer>", 0),
    ],
)
@pytest.mark.parametrize("compare", [equal_text, equal_number, equal_math])
def test_accuracy(completion: str, expected: float, compare: Callable[[str, str], float]) -> None:
    assert accuracy(compare)(completion, "2") == expected


@pytest.mark.parametrize("completion", ["no tags", "<answer>5</answer>", "<answer>" + "5" * 2000 + "</answer>"])
@pytest.mark.parametrize("compare", [equal_number, equal_math])
def test_an_unparsable_gold_answer_shows_whatever_the_completion(
    completion: str, compare: Callable[[str, str], float]
) -> None:
    assert math.isnan(accuracy(compare)(completion, "???"))


WHOLE = "<think>1+1</think><answer>2</answer>"
# completion, score of `format`, score of `tags`
TABLE = (
    (WHOLE, 1, 1),
    ("<think>a\nb</think>\n\n <answer>2\n</answer>", 1, 1),
    (WHOLE + "\n", 1, 1),
    (WHOLE + "\n\n", 0, 0),
    (" " + WHOLE, 0, 0),
    (WHOLE + " so there", 0, 0),
    ("<think>1+1</think>: <answer>2</answer>", 0, 0),
    ("<answer>2</answer><think>1+1</think>", 0, 0),
    ("<THINK>1</THINK><ANSWER>2</ANSWER>", 0, 0),
    # The lazy pattern lets tags stand twice; `tags` does not.
    (WHOLE + WHOLE, 1, 0),
    ("<think><think>1</think><answer>2</answer>", 1, 0),
    ("<think>1</think><answer>2</answer></answer>", 1, 0),
    ("<think><answer>1</answer></think><answer>2</answer>", 1, 0),
)


@pytest.mark.parametrize(("completion", "form", "tags"), TABLE)
def test_scores(completion: str, form: float, tags: float) -> None:
    sample = Sample(Problem("2"), completion)
    assert (format_reward(sample), tags_reward(sample)) == (form, tags)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=14))
def test_format_is_the_plain_pattern(pieces: list[str]) -> None:
    completion = "".join(pieces)
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    assert format_reward(Sample(Problem(""), completion)) == bool(re.match(pattern, completion, re.DOTALL))


R1_ANSWER = "<think>\n1+1\n</think>\n<answer>\n{}\n</answer>"


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (R1_ANSWER.format("2"), "2", 1),
        (R1_ANSWER.format(r"$\frac{4}{2}$"), "2", 1),
        (R1_ANSWER.format(r"\boxed{2}"), "2", 1),
        (r"It is \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1),
        (r"$1$, so \boxed{2}", "2", 1),
        (r"\boxed{x^2+1}", "1+x^2", 1),
        (r"\boxed{2", "2", 0),
        ("no answer", "2", 0),
        (r"\boxed{2}", "", math.nan),
        (r"\boxed{2}", "two", 0),
        (r"\boxed{\text{Two}}", "two", 1),
        (r"$\text{listen}$, no: \boxed{\text{silent}}", "listen", 0),
        (r"It is \boxed{\text{no solution}}.", "no solution", 1),
        (r"\boxed{1, 2}", "1, 2", 1),
        (r"\boxed{1\,000}", "1000", 1),
        (r"\boxed{7 3/4}", "7.75", 1),
        (r"\boxed{2√3}", "2", 0),
        (r"\boxed{\$18}", r"\$18", 1),
        ("So 489 - 416 = 73.\n\n---\n\nFinal answer: **73**", "73", 1),
        ("So 489 - 416 = 73.\n\n---\n\nFinal answer: **73**", "489", 0),
        (r"\boxed{2i}", r"2\mathrm{i}", 1),
        (r"\boxed{2}", r"2\mathrm{i}", 0),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0),
    ],
)
def test_math_accuracy(completion: str, gold: str, expected: float) -> None:
    assert math_accuracy(Sample(Problem(gold), completion)) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("place", "completion", "answer"),
    [
        ("tags", "<answer>1</answer> or <answer> 2 </answer>", "2"),
        ("boxed", r"so \boxed{1}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{72} dollars", "72"),
        ("boxed", r"\boxed{7", None),
        ("boxed", r"\\boxed {7}", "7"),
        ("boxed", "72", None),
        ("last_number", "Natalia sold 48/2 = 24 clips in May.\n#### 72", "72"),
        ("last_number", "It costs $1,234.50.", "1,234.50"),
        ("last_number", "3 - 5 = -2, or 5-3", "3"),
        ("last_number", "the answer is -2.", "-2"),
        ("last_number", "in 2024,2025", "2025"),
        ("last_number", "none", None),
        ("last_number", "a loss of -$5", "-5"),
        ("last_number", r"it is \$1{,}000 today.", "1,000"),
        ("last_number", "x = \N{MINUS SIGN}5", "-5"),
        ("last_number", "a share of .5", ".5"),
        ("last_number", "version 1.2.3", "3"),
        ("text", " 72\n", "72"),
    ],
)
def test_where_the_answer_is(place: str, completion: str, answer: str | None) -> None:
    assert PLACES[place](completion) == answer


def test_settings_name_each_place() -> None:
    assert get_args(SourceConfig.model_fields["answer_in"].annotation) == tuple(PLACES)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\fbox{5}", "5"),
        (r"\fboxed{5}", None),
        (r"\boxed 5.", "5"),
        (r"$\boxed\pi$", r"\pi"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{\\}", r"\\"),
        (r"\boxed{\text{a \boxed{b}}}", "b"),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


# Texts with balanced braces.
balanced = st.recursive(
    st.sampled_from(["", "x", "1,2", r"\pi", r"\{", r"\}", "é"]),
    lambda inner: st.builds("{{{}}}".format, inner) | st.builds("{}{}".format, inner, inner),
    max_leaves=12,
)


@given(balanced, balanced, balanced)
def test_a_box_holds_whatever_is_balanced(before: str, inside: str, after: str) -> None:
    assert last_boxed(rf"{before} \boxed{{7}} {after} \boxed{{{inside}}} {after}") == inside


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", [r"\boxed{", "{", "1,111", "1", "-", "<answer>", "</answer>"])
def test_places_read_long_texts_at_once(place: str, part: str) -> None:
    """A quadratic search would take minutes."""
    PLACES[place](part * 300_000)


@pytest.mark.parametrize(
    ("place", "right", "wrong"),
    [
        ("boxed", r"\boxed{1,000}", "1000"),
        ("last_number", "= 1,000 dollars", "1000 or 1001"),
        ("text", "1000", "= 1000"),
    ],
)
def test_rows_of_ones_own_are_judged_where_their_answers_are(place: str, right: str, wrong: str) -> None:
    correct = ByAnswer(equal_number, PLACES[place])
    assert [correct(Problem("1000"), text) for text in (right, wrong)] == [1, 0]
    assert not reads_tags(correct) and reads_tags(ByAnswer(equal_number))
    assert pickle.loads(pickle.dumps(correct)) == correct, "it goes to the sandbox"
