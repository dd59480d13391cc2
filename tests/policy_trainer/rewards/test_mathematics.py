"""Answers compared as mathematics."""

import math
from functools import partial

import pytest

from policy_trainer.config import JudgingConfig
from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample, equal_math
from policy_trainer.rewards.answers import ByAnswer, task_accuracy
from policy_trainer.rewards.mathematics import library
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed

# gold answer, what equals it, what does not
TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # numbers
    (
        "5",
        (r"\boxed{5}", "5.", "5.0", "+5", "$5$", "x=5", "x = 5"),
        ("", "6", "no idea", "((((", "1/0", r"\infty", "-5"),
    ),
    ("5", ("$5 dollars", "€5", "5°"), ("1" * 900, "\u0665", "5x", "5 + 1", "55", "5/3", "3, 5", "x=6")),
    (
        "1/2",
        ("0.5", r"\frac{1}{2}", r"$\frac{1}{2}$", r"\frac12", "50%", "0.50"),
        ("1", "2", "1, 2", "0.6", r"\frac{3}{4}"),
    ),
    ("0.5", (r"\frac{1}{2}", "1/2", "2/4"), ("5", "0.05")),
    (r"\frac{1}{2}", ("0.5", "1/2"), ("1", "2")),
    ("1/3", ("0.333333", "2/6"), ("0.33", "3")),
    ("7 3/4", ("7 3/4", "7.75", r"7\frac{3}{4}", "31/4"), ("5/2", "9 3/4", "3/4", "7", "3")),
    ("-7 3/4", ("-7.75",), ("7.75", "-6.25")),
    ("- 3", ("-3", "- 3", "\u22123"), ("3",)),
    ("-3", ("- 3",), ("3", "5 or -3")),
    ("3", ("3",), ("- 3", "-3", "\u22123")),
    ("1000", ("1,000", "1 000", r"1\,000", "1{,}000", "10^3"), ("0", "1", "1, 000", "100")),
    ("1 000", ("1000", "1,000"), ("0", "1")),
    ("1,234,567", ("1234567", "1 234 567"), ("1", "567", "1, 234, 567")),
    ("1234.5", ("1,234.5",), ("1, 234.5", "12345")),
    ("50%", ("50%", "0.5", "50 %", r"50\%", "50"), ("40%", "5")),
    (r"50\%", ("50%", "1/2", "50"), ("20%",)),
    ("12.5", ("12.5%", r"12.5\%", "12.5 %."), ("1.25%", "3, 12.5%")),
    (r"12.5\%", ("12.5%", "12.5", "0.125", "1/8"), ("1.25",)),
    ("-5", ("-5%",), ("5%",)),
    ("49", ("49",), ("48",)),
    # with units, in prose
    (
        "18",
        ("18 dollars", "$18", r"\$18", "18.00", "the answer is 18", "It is 18.", "18 km"),
        ("81 dollars", "18 and 17"),
    ),
    ("18 dollars", ("18", "18 dollars", "$18"), ("17 dollars", "dollars", "81")),
    (r"\$18", ("18", "$18", r"\$18"), ("17", "")),
    ("12 apples", ("12", "12 apples"), ("21",)),
    ("10 cm", ("10", "10 cm", r"10\text{ cm}"), ("20 cm",)),
    ("2 hours and 30 minutes", ("2 hours and 30 minutes",), ("30", "2", "2 hours and 20 minutes")),
    ("12:30", ("12:30",), ("11:30", "12", "30")),
    (r"90^\circ", ("90", "90°"), ("91",)),
    # lists and sets in any order, tuples and intervals in theirs
    (
        "1, 2",
        ("1, 2", "2, 1", "$1, 2$", "1,2", "1 and 2", r"\{1, 2\}"),
        ("7, 2", "1, 7", "2", "1", "12", "1, 2, 3", "1.2"),
    ),
    ("2, 5, 7", ("7, 5, 2",), ("3, 5, 7", "7", "2, 5")),
    ("3 and 4", ("4, 3", "3 or 4"), ("5 and 4", "4")),
    ("5 or -5", ("-5 or 5", "5, -5", r"\pm 5"), ("-5", "5", "4 or -5")),
    (r"\{1,2\}", ("2, 1", r"\{2, 1\}", "{1,2}"), ("1", "1, 3")),
    ("(1,2)", ("(1, 2)", r"\left(1,2\right)"), ("(2, 1)", "[1,2]", "1, 3", "2")),
    ("(2,1,3)", ("(2, 1, 3)",), ("(1,2,3)", "3")),
    ("[1,2)", ("[1, 2)",), ("(1,2]", "(1,2)", "2")),
    (r"(-\infty, 3]", (r"(-\infty,3]",), (r"(-\infty,3)", "3")),
    ("1: 2", ("1:2", "1/2", "2:4"), ("3: 2", "2")),
    # formulas, with delimiters or without
    (r"2\sqrt{3}", (r"$2\sqrt{3}$", "2√3", "2 sqrt(3)", r"\sqrt{12}"), ("2", "3", "2√5")),
    ("2√3", (r"2\sqrt{3}",), ("2", "2√5")),
    ("2", ("2",), ("2√3", "2 sqrt(3)", "2·3", "2x", "2xy", "7, 2")),
    ("√13", (r"\sqrt{13}",), ("3", "13")),
    ("6", ("2·3", "2\u00d73"), ("2", "3")),
    ("x^2+1", ("1+x^2", "$x^2+1$"), ("x^2", "y^2+1")),
    (r"\pi", (r"$\pi$", "π"), ("3",)),
    ("2xy", ("2yx", "2 x y"), ("2", "2x")),
    (r"x \cdot y", ("xy", "yx"), ("x",)),
    ("x=5", ("5", "x=5", "$x = 5$"), ("y=5", "x=6", "6")),
    ("y=2x+1", ("y=2x+1", "2x+1", "y = 1 + 2x"), ("y=2x", "2", "1")),
    ("x>3", ("x>3", "x > 3", "3<x"), ("x<3", "y>3", "x>5", "3", r"x \geq 3")),
    ("x≤3", (r"x \le 3", "x<=3"), ("x<3", "x≥3")),
    # upright constants, after which math-verify drops everything
    (r"1 - \frac{1}{\mathrm{e}}", (r"1-\frac1e", "1-1/e"), (r"1 + \frac{1}{\mathrm{e}}", "1")),
    (r"2\mathrm{i}", ("2i", r"2\text{i}"), ("2", r"3\mathrm{i}", "i")),
    (r"\pi\mathrm{i}", (r"\pi i", r"i\pi"), (r"\pi", "i")),
    (r"\mathrm{e}x + 1", ("ex+1", "1+ex"), ("e", "1", "x+1")),
    # Unicode symbols, full-width characters, words of languages without spaces
    (
        "1000",
        ("10³", "1e3", "1.0E+3", "\uff11\uff10\uff10\uff10", "\uff11\uff0c\uff10\uff10\uff10"),
        ("10²", "10³³", "1e4"),
    ),
    ("10", ("10",), ("10³", "10⁻³", "1e10")),
    ("0.001", ("10⁻³", "1e-3"), ("10³",)),
    ("5/2", ("2½", "2.5"), ("½", "2", "2¼")),
    ("x^2+1", ("x²+1", "1 + x²"), ("x³+1", "x2+1")),
    ("(x+1)^2", ("(x+1)²",), ("(x+1)³",)),
    ("25", ("25 cm²", "25 m²", "25 km³"), ("5³", "5² cm²")),
    (r"(-\infty, 3]", ("(-∞, 3]", "\uff08-∞\uff0c3\uff3d"), ("(-∞, 3)", "(∞, 3]")),
    ("∞", (r"\infty", "∞"), (r"-\infty", "-∞", "8")),
    (r"\varnothing", (r"\emptyset", "∅"), ("0", r"\{0\}")),
    ("6", ("答案是6", "答案\uff1a6", "共有6个苹果", "6元"), ("答案是-6", "答案是7")),
    # Markdown around an answer
    (
        "73",
        ("**73**", "*73*", "`73`", "***73***", "The answer is **73**.", r"\boxed{**73**}"),
        ("**37**", "**", "7**3**"),
    ),
    ("**73**", ("73", "**73**"), ("-73", "3")),
    ("24", ("2*3*4", "(2)*3*(4)"), ("234", "2", "4")),
    ("even", ("**even**", "`Even`"), ("**odd**",)),
    ("B", ("**B**", "**(B)**"), ("**A**",)),
    # very small values, and values with very small parts, which math-verify all takes for 0
    (r"\frac{1}{2^{99}}", (r"2^{-99}", r"\frac{2}{2^{100}}"), (r"\frac{1}{2^{98}}", "0", r"\frac{1}{3^{99}}")),
    (
        r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}",
        (r"\frac{1+2^{2005}}{6 \cdot 2^{2005}}",),
        (r"\frac{1}{3 \cdot 2^{2006}}",),
    ),
    (r"\frac{3^{100}}{3^{99}}", ("3",), ("2", r"\frac{2^{100}}{2^{99}}")),
    (r"e^{-100}", (r"\frac{1}{e^{100}}",), (r"e^{-101}", "0")),
    (r"9.1\times 10^{-31}", ("9.1e-31", r"0.91\times 10^{-30}"), (r"6.6\times 10^{-34}", "9.1e-30", "0")),
    ("0.00000012", ("1.2e-7", "0.00000012"), ("0.0000003", "0", "0.00000013")),
    # letters: multiple choice, variables
    ("A", ("A", "(A)", "a", "A.", "$A$", r"\text{A}", r"\textbf{(A)}"), ("B", "(B)", "A, B", "", "5")),
    ("(B)", ("B", "(B)"), ("A",)),
    ("E", ("E",), ("D",)),
    ("A, C", ("C, A", "A and C"), ("A", "C", "A, B")),
    ("x", ("x", "$x$"), ("y", "2x")),
    # words
    (
        "even",
        ("even", "Even.", "$even$", r"\text{even}", r"$\text{Even}$", r"\boxed{\text{even}}"),
        ("odd", "neve", "not even"),
    ),
    ("listen", ("listen",), ("silent", "$silent$", r"\text{silent}", "lis ten", "$s i l e n t$")),
    (r"\text{listen}", ("listen", r"\mathrm{listen}"), ("silent", "$silent$")),
    ("no", ("No",), ("on", "$on$", r"\text{on}", "5")),
    (
        "no solution",
        ("no  solution", r"\text{no solution}", r"\text{No} \text{ solution}"),
        ("on solution", "solution", "0"),
    ),
    ("red, blue", ("red, blue",), ("red", "der, blue")),
    ("2024-01-02", ("2024-01-02", r"\text{2024-01-02}", "**2024-01-02**"), ("2024-02-01", "2021", "2024-01-03")),
    ("2021", ("2021",), ("2024-01-02",)),
    ("brother-in-law", ("brother-in-law",), ("brother",)),
    ("xy", ("xy", "$xy$"), ("yx", "x")),
    ("true", ("True",), ("false",)),
    ("inf", ("inf",), ("5",)),
    ("日本", ("日本",), ("日", "本日")),
)


@pytest.mark.parametrize(("gold", "right", "wrong"), TABLE, ids=[f"{i}-{row[0]}" for i, row in enumerate(TABLE)])
def test_table(gold: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert {answer: equal_math(answer, gold) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: equal_math(answer, gold) for answer in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\begin{pmatrix}0.25\\1\end{pmatrix}"),
        (r"\begin{bmatrix}0.5 & 1\\2 & 3\end{bmatrix}", r"\begin{bmatrix}0.5 & 1\\2 & 4\end{bmatrix}"),
        ("(0.5, 1)", "(0.25, 1)"),
        ("(0.5, 1, 2)", "(0.5, 1, 3)"),
        (r"\{0.5, 1\}", r"\{0.25, 1\}"),
        ("[0.5, 1)", "[0.25, 1)"),
        (r"(0.5,1)\cup(2,3)", r"(0.25,1)\cup(2,3)"),
        ("x=0.5", "x=0.25"),
        (r"0.5\cdot 10^{400}", r"0.25\cdot 10^{400}"),
    ],
)
def test_decimals_inside_of_other_values_than_numbers(gold: str, wrong: str) -> None:
    assert (equal_math(gold, gold), equal_math(wrong, gold)) == (1, 0)


@pytest.mark.parametrize("gold", ["", " ", "???", "...", "-", "((((", "$$", "1" * 5000])
def test_a_gold_answer_with_nothing_to_compare_is_unrewarded(gold: str) -> None:
    assert all(math.isnan(equal_math(answer, gold)) for answer in ("5", "", gold))


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    """Where math-verify's own limit, an alarm, interrupts nobody else."""
    rule = Sandboxed(partial(task_accuracy, ByAnswer(equal_math)), library, cut_off=0.0)
    return Sandbox({"math": rule}, seconds=JudgingConfig().seconds, memory=0)


@pytest.mark.parametrize("gold", ["5", "1, 2", "x^2+1", "even", "A"])
@pytest.mark.parametrize(
    "answer",
    [
        "because the first train leaves at noon, the second one later, they meet in the town of Aachen",
        "the quick brown fox jumps over it and we say it is a very fine thing that it did so late",
        "abcdefghijklmnopqrstuvwxyz" * 3,
        "(" * 99,
    ],
)
def test_prose_is_wrong_within_the_time_limit(answer: str, gold: str, sandbox: Sandbox) -> None:
    assert sandbox.scores("math", [Sample(Problem(gold), f"<answer>{answer}</answer>")]) == [0]
    assert sandbox.failures.counts == {"math": 0}
