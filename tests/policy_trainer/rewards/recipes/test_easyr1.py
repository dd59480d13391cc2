"""The rewards of EasyR1: mathematics and geometry in pictures."""

import math
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Reward, Sample
from policy_trainer.rewards.mathematics import grader
from policy_trainer.rewards.recipes import (
    easyr1_math_accuracy,
    easyr1_math_format,
    easyr1_r1v_accuracy,
    easyr1_r1v_format,
)
from policy_trainer.rewards.registry import RULES, SUMS
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed
from shared.errors import UserError


def scored(reward: Reward, completion: str, gold: str = "12") -> float:
    score = reward(Sample(Problem(gold), completion))
    assert score is not None
    return score


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        (r"<think>so</think>\boxed{12}", "12", 1),
        (r"\boxed{12}", "12", 1),
        (r"\boxed{3} or \boxed{12}", "12", 1),  # the last box counts
        (r"\boxed{12} or \boxed{3}", "12", 0),
        (r"\boxed{\frac{3}{4}}", "3/4", 1),  # braces are counted
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{6/8}", "3/4", 0),  # fractions must be reduced
        (r"\boxed{12.0}", "12", 1),
        (r"\boxed{24/2}", "12", 0),  # a whole number must be written as one
        (r"\boxed{\sqrt{884}}", r"2\sqrt{221}", 1),
        (r"\boxed{2 \sqrt { 221 }}", r"2\sqrt{221}", 1),
        (r"\boxed{145^\circ}", "145", 1),
        (r"\boxed{12\text{ cm}}", "12", 1),
        (r"\boxed{(1,2)}", "(1, 2)", 1),
        (r"\boxed{(2,1)}", "(1, 2)", 0),
        (r"\boxed{1 < 2}", "1<2", 1),
        (r"\boxed{ 3 / 4 }", "3/4", 1),  # EasyR1 takes the white space around / away
        (r"\boxed{12", "12", 0),
        (r"\boxed 12", "12", 0),
        ("12", "12", 0),
        ("12", "None", 1),  # what mathruler finds without a box
        ("", "12", 0),
        (r"\boxed{12}", "", math.nan),
    ],
)
def test_math_accuracy(completion: str, gold: str, expected: float) -> None:
    assert scored(easyr1_math_accuracy, completion, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"<think>a</think>\boxed{12}", 1),
        ("<think>a\nb</think>\n\nSo it is\n" + r"\boxed{12}." + "\n", 1),
        (r"< think >a< / think > \boxed{12}", 1),
        (r"<think></think>\boxed{}", 1),
        (r"<think>a</think>\boxed{12", 0),
        (r"<think>\boxed{12}</think>", 0),
        (r"<think>a\boxed{12}", 0),
        (r"So <think>a</think>\boxed{12}", 0),
        (r"a</think>\boxed{12}", 0),
        ("\n" + r"<think>a</think>\boxed{12}", 1),
        (r"<think>a</think>\boxed {12}", 0),
        (r"<Think>a</Think>\boxed{12}", 0),
    ],
)
def test_math_format(completion: str, expected: float) -> None:
    assert scored(easyr1_math_format, completion) == expected


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("<think>so</think><answer>12</answer>", "12", 1),
        ("<answer> 12 </answer>", " 12 ", 1),
        ("<answer>12</answer><answer>3</answer>", "12", 1),  # the first answer counts
        ("<answer>3</answer><answer>12</answer>", "12", 0),
        ("<answer>3\n</answer><answer>12</answer>", "12", 1),  # of those in one line
        ("<answer>\n12\n</answer>", "12", 0),
        ("12", "12", 1),  # without one, the whole text
        ("It is 12", "12", 0),
        ("<answer>145°</answer>", "145°", 1),
        (r"<answer>\frac{3}{4}</answer>", "0.75", 1),
        (r"<answer>\boxed{12}</answer>", "12", 1),
        ("<answer></answer>", "12", 0),
        ("<answer>12</answer>", "", math.nan),
    ],
)
def test_r1v_accuracy(completion: str, gold: str, expected: float) -> None:
    assert scored(easyr1_r1v_accuracy, completion, gold) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>12</answer>", 1),
        ("<think>a\nb</think>\n\t<answer>\n12\n</answer>", 1),
        ("<think>a</think><answer>12</answer>\n", 0),
        ("\n<think>a</think><answer>12</answer>", 0),
        ("<think>a</think> so <answer>12</answer>", 0),
        ("<answer>12</answer>", 0),
    ],
)
def test_r1v_format(completion: str, expected: float) -> None:
    assert scored(easyr1_r1v_format, completion) == expected


PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "x", " ", "\n", "\u2003", "\x1c", "<", "/", ">",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14))
def test_formats_are_the_plain_patterns(pieces: list[str]) -> None:
    text = "".join(pieces)
    tight = re.sub(r"\s*(<|>|/)\s*", r"\1", text)
    box = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", tight, re.DOTALL)
    answer = re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL)
    assert (scored(easyr1_math_format, text), scored(easyr1_r1v_format, text)) == (bool(box), bool(answer))


def test_weights_are_those_of_the_recipe() -> None:
    """A format_weight of 0.1 and of 0.5."""
    right, wrong = r"<think>a</think>\boxed{12}", r"<think>a</think>\boxed{3}"
    assert [_total("easyr1/math", text) for text in (right, wrong, r"\boxed{12}", "12")] == [1, 0.1, 0.9, 0]
    right, wrong = "<think>a</think><answer>12</answer>", "<think>a</think><answer>3</answer>"
    assert [_total("easyr1/r1v", text) for text in (right, wrong, "12", "3")] == [1, 0.5, 0.5, 0]


def _total(name: str, completion: str) -> float:
    rules = {part: RULES[part] for part in SUMS[name]}
    scores = {part: rule.score if isinstance(rule, Sandboxed) else rule for part, rule in rules.items()}
    return sum(weight * scored(scores[part], completion) for part, weight in SUMS[name].items())  # type: ignore[arg-type]


# A gold answer that has no whole number as its value is compared by sympy.
GOLD = r"2\sqrt{3}"
# What a policy may write to keep sympy busy, to take all memory, or to have its text run.
BUSY = ("9**9**9**9", "(9**9)**(9**9)", "99!!!!", "1e9!", "(9**99999)**9999", "[0]*9**9")
HOSTILE = (
    "{" * 10_000 + "}" * 10_000,
    "{" * 10_000,
    "(" * 10_000 + "1" + ")" * 10_000,
    "-" * 100_000 + "1",
    "1+" * 100_000 + "1",
    "9" * 2**20,
    "1,000" * 200_000,
    r"\frac{" * 10_000,
    r"\sqrt{" * 10_000 + "}" * 10_000,
    " " * 2**20,
    "__import__('os').abort()",
    "().__class__.__bases__",
    "1/0",
    "zoo",
    "\x00\ud800\u202e",
    "^" * 1000,
    "",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["easyr1_math/accuracy", pytest.param("easyr1_r1v/accuracy", marks=pytest.mark.long)])
def test_hostile_answers_get_the_failing_score_and_cost_no_other_answer(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule, Sandboxed)
    form = r"<think>\boxed{{7}}</think>\boxed{{{}}}" if "math" in name else "<think>a</think><answer>{}</answer>"
    texts = [form.format(text) for text in (*BUSY, *HOSTILE)]
    samples = [Sample(Problem(GOLD), text) for hostile in texts for text in (hostile, form.format(GOLD))]
    scores = Sandbox({name: rule}, seconds=3, memory=2**30).scores(name, samples)
    assert scores == [0.0, 1.0] * len(texts)


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    grader.cache_clear()
    monkeypatch.setitem(sys.modules, "mathruler", None)
    with pytest.raises(UserError, match=r"need mathruler, .*; pip install 'tandem-grpo\[vision\]'"):
        grader()


def test_other_rewards_import_none_of_its_packages() -> None:
    code = (
        "import sys, policy_trainer.rewards.recipes; assert not {'mathruler', 'pylatexenc', 'sympy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
