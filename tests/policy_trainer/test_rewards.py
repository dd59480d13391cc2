"""Rewards, rule by rule: what a policy under training writes is hostile sooner or later."""

import math
import re
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.rewards import (
    COMPARISONS,
    Reward,
    accuracy,
    choose_rewards,
    equal_math,
    equal_number,
    equal_text,
    format_reward,
    parse_answer,
    tags_reward,
)
from shared.refusal import Refused

NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def import_math_verify() -> None:
    """Which takes more than a second, and is no part of what is timed here."""
    equal_math("1", "1")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>\n 5 \t</answer>", "5"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
        ("5", None),
        ("", None),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer>5<answer>", None),
        ("<Answer>5</Answer>", None),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("<answer>1</answer>2</answer>", "1"),
        ("<answer>1</answer><answer>2", "1"),
    ],
)
def test_parse_answer(completion: str, answer: str | None) -> None:
    assert parse_answer(completion) == answer


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=14)


@given(PIECES)
def test_parse_answer_is_the_last_match_of_the_plain_pattern(pieces: list[str]) -> None:
    completion = "".join(pieces)
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    assert parse_answer(completion) == (answers[-1].strip() if answers else None)


WHOLE = "<think>1+1</think><answer>2</answer>"


class TestFormat:
    # completion, score of `format`, score of `tags`
    TABLE = (
        (WHOLE, 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("<think>a\nb</think>\n\n <answer>2\n</answer>", 1, 1),
        (WHOLE + "\n", 1, 1),
        (WHOLE + "\n\n", 0, 0),
        (WHOLE + " ", 0, 0),
        (" " + WHOLE, 0, 0),
        ("\n" + WHOLE, 0, 0),
        (WHOLE + " so there", 0, 0),
        ("so: " + WHOLE, 0, 0),
        ("<think>1+1</think>: <answer>2</answer>", 0, 0),
        ("<answer>2</answer>", 0, 0),
        ("<think>1+1</think>", 0, 0),
        ("<think>1+1<answer>2</answer>", 0, 0),
        ("<think>1+1</think><answer>2", 0, 0),
        ("<answer>2</answer><think>1+1</think>", 0, 0),
        ("<THINK>1</THINK><ANSWER>2</ANSWER>", 0, 0),
        ("", 0, 0),
        # The lazy pattern lets tags stand twice; `tags` does not.
        (WHOLE + WHOLE, 1, 0),
        ("<think><think>1</think><answer>2</answer>", 1, 0),
        ("<think>1</think></think><answer>2</answer>", 1, 0),
        ("<think>1</think><answer><answer>2</answer>", 1, 0),
        ("<think>1</think><answer>2</answer></answer>", 1, 0),
        ("<think><answer>1</answer></think><answer>2</answer>", 1, 0),
    )

    @pytest.mark.parametrize(("completion", "form", "tags"), TABLE)
    def test_scores(self, completion: str, form: float, tags: float) -> None:
        assert format_reward(completion, "2") == form
        assert tags_reward(completion, "2") == tags

    @given(PIECES)
    def test_is_open_r1s_pattern(self, pieces: list[str]) -> None:
        completion = "".join(pieces)
        pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
        assert format_reward(completion, "") == bool(re.match(pattern, completion, re.DOTALL))


class TestNumber:
    @pytest.mark.parametrize(
        ("answer", "gold", "expected"),
        [
            ("5", "5", 1),
            (" 5 ", "5", 1),
            ("5.0", "5", 1),
            ("5.", "5", 1),
            ("05", "5", 1),
            ("+5", "5", 1),
            ("-5", "5", 0),
            ("-5", "-5", 1),
            ("$5", "5", 1),
            ("$1,234.50", "1234.5", 1),
            ("1,234,567", "1234567", 1),
            ("1,23", "123", 0),
            ("12,34", "1234", 0),
            ("0.1", "0.10", 1),
            ("6", "5", 0),
            ("", "5", 0),
            ("five", "5", 0),
            ("5 apples", "5", 0),
            ("5 6", "5", 0),
            ("5e0", "5", 0),
            (".5", "0.5", 0),
            ("0x5", "5", 0),
            ("1_0", "10", 0),
            ("5%", "5", 0),
            ("nan", "5", 0),
            ("inf", "5", 0),
            ("Infinity", "5", 0),
            # Digits of other alphabets are none here.
            ("\u0665", "5", 0),
            ("\uff15", "5", 0),
            ("5\u00b2", "25", 0),
            # As floats these would be equal.
            ("9007199254740993", "9007199254740992", 0),
            ("1" + ",000" * 120, "2" + ",000" * 120, 0),
            ("1" + "0" * 400, "1" + "0" * 400, NAN),
            ("1" + "0" * 400, "5", 0),
            ("5", "nan", NAN),
            ("5", "inf", NAN),
            ("5", "five", NAN),
            ("5", "", NAN),
            ("5", "\u0665", NAN),
        ],
    )
    def test_table(self, answer: str, gold: str, expected: float) -> None:
        assert equal_number(answer, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [("a", "a", 1), (" a\n", "a", 1), ("a", "A", 0), ("1.0", "1", 0), ("", "a", 0), ("a b", "a  b", 0)],
)
def test_text(answer: str, gold: str, expected: float) -> None:
    assert equal_text(answer, gold) == expected


class TestMath:
    @pytest.mark.parametrize(
        ("answer", "gold", "expected"),
        [
            ("0.5", "1/2", 1),
            (r"\frac{1}{2}", "0.5", 1),
            (r"$\frac{1}{2}$", r"\frac{1}{2}", 1),
            (r"\frac{3}{4}", r"\frac{1}{2}", 0),
            ("1", r"\frac{1}{2}", 0),
            (r"\boxed{5}", "5", 1),
            ("x=5", "5", 1),
            ("1,000", "1000", 1),
            ("6", "5", 0),
            ("", "5", 0),
            ("no idea", "5", 0),
            ("((((", "5", 0),
            ("1/0", "5", 0),
            (r"\infty", "5", 0),
            ("1" * 900, "5", 0),
            ("\u0665", "5", 0),
            ("5", "", NAN),
            ("5", "???", NAN),
            ("5", "hello", NAN),
            ("inf", "inf", NAN),
            ("5", "1" * 5000, NAN),
        ],
    )
    def test_table(self, answer: str, gold: str, expected: float) -> None:
        assert equal_math(answer, gold) == pytest.approx(expected, nan_ok=True)


class TestHostile:
    """Nothing that a policy writes may be infinite, NaN, an exception, or slow."""

    COMPLETIONS = (
        "<answer>" * 20_000,
        "</answer>" * 20_000,
        "<answer>" * 10_000 + "</answer>" * 10_000,
        "<think>" + "</think><answer>" * 10_000 + "x",
        "<think>" + "</think><answer>" * 5_000 + "</answer>" * 5_000 + "x",
        "<think></think>" + " " * 200_000,
        "<think>" + ("</think>" + " " * 50) * 4_000,
        f"<answer>{'9' * 100_000}</answer>",
        f"<answer>{'9' * 1000}</answer>",
        f"<answer>{'1,111' * 200}</answer>",
        f"<answer>-{'9' * 99}.{'9' * 99}</answer>",
        "<answer>1e999</answer>",
        "<answer>" + "\u0663" * 500 + "</answer>",
        "<answer>" + "\u00b2" * 500 + "</answer>",
        f"<answer>{'(' * 1000}</answer>",
        f"<answer>{'{' * 1000}</answer>",
        "<answer>" + r"\frac{" * 150 + "</answer>",
        "<answer>\x00\x1b[2J\u202e\ufffd</answer>",
        "<answer>__import__('os').abort()</answer>",
        "<answer>inf</answer>",
        "<answer>-Infinity</answer>",
        "<answer>nan</answer>",
        "😀" * 50_000,
    )

    @pytest.mark.parametrize("rule", COMPARISONS)
    @pytest.mark.parametrize("completion", COMPLETIONS, ids=range(len(COMPLETIONS)))
    def test_scores_zero(self, completion: str, rule: str) -> None:
        for reward in choose_rewards(["accuracy", "format", "tags"], COMPARISONS[rule]).values():
            assert reward(completion, "5") == 0

    @pytest.mark.parametrize("answer", ["9**9**9**9", "$10000000!$", "$9^{9^{9^{9}}}$"])
    def test_mathematics_without_end_is_cut_off(self, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("policy_trainer.rewards._MATH_SECONDS", 1)
        started = time.monotonic()
        assert equal_math(answer, "5") == 0
        assert time.monotonic() - started < 3

    @pytest.fixture(autouse=True)
    def quick(self) -> Iterator[None]:
        """In place of the one above: a cut-off takes its second."""
        started = time.process_time()
        yield
        assert time.process_time() - started < 2

    @given(st.text(max_size=60), st.sampled_from(["5", "-1.5", "1,000"]))
    def test_any_answer_is_right_or_wrong(self, answer: str, gold: str) -> None:
        for compare in (equal_text, equal_number):
            assert accuracy(compare)(f"<answer>{answer}</answer>", gold) in (0, 1)


class TestAccuracy:
    @pytest.mark.parametrize(
        ("completion", "expected"),
        [
            (WHOLE, 1),
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
    def test_table(self, completion: str, expected: float, compare: Callable[[str, str], float]) -> None:
        assert accuracy(compare)(completion, "2") == expected

    @pytest.mark.parametrize("completion", ["no tags", "<answer>5</answer>", "<answer>" + "5" * 2000 + "</answer>"])
    @pytest.mark.parametrize("compare", [equal_number, equal_math])
    def test_an_unparsable_gold_answer_shows_whatever_the_completion(
        self, completion: str, compare: Callable[[str, str], float]
    ) -> None:
        assert math.isnan(accuracy(compare)(completion, "hello"))


class TestChoose:
    def test_by_name_in_order(self) -> None:
        chosen = choose_rewards(["tags", "accuracy"], equal_text)
        assert list(chosen) == ["tags", "accuracy"]
        reward: Reward = chosen["accuracy"]
        assert reward(WHOLE, "2") == 1

    def test_an_unknown_name_is_refused_with_those_known(self) -> None:
        with pytest.raises(Refused, match=r"rewards: 'speed' is none of accuracy, format, tags"):
            choose_rewards(["accuracy", "speed"], equal_text)

    def test_a_name_twice_is_refused(self) -> None:
        with pytest.raises(Refused, match=r"rewards: 'format' stands twice"):
            choose_rewards(["format", "accuracy", "format"], equal_text)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"2\sqrt{3}", r"$2\sqrt{3}$", "2"),
        ("x^2+1", "1+x^2", "x^2"),
        ("(1,2)", "(1, 2)", "(2, 1)"),
        (r"\frac{1}{2}", "0.5", "1"),
        (r"\pi", r"$\pi$", "3"),
        ("1/2", "0.5", "1"),
        ("49", "49", "48"),
    ],
)
def test_bare_latex_is_read_as_latex(gold: str, right: str, wrong: str) -> None:
    assert equal_math(right, gold) == 1.0
    assert equal_math(wrong, gold) == 0.0
