"""Each recipe's rules compared with the functions of its repository, on many random completions.

Their code is no part of this repository: without it these tests are skipped. With `TANDEM_RECIPES=DIR` they read
DIR/open-r1, DIR/simple_GRPO, DIR/EasyR1, DIR/nano-aha-moment, DIR/GRPO-Zero and DIR/theLMbook, checkouts of
huggingface/open-r1, lsdefine/simple_GRPO, hiyouga/EasyR1, McGill-NLP/nano-aha-moment, policy-gradient/GRPO-Zero and
aburkov/theLMbook on github.com. `TANDEM_RECIPES_CASES` (100000) is the number of completions. The other tests of this
folder have the most telling ones.
"""

import ast
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.data.problem import Problem, Sample, Score
from policy_trainer.rewards.registry import RULES, SUMS
from policy_trainer.rewards.sandbox import Sandboxed

CHECKOUTS = os.environ.get("TANDEM_RECIPES")
CASES = int(os.environ.get("TANDEM_RECIPES_CASES", "100000"))
pytestmark = pytest.mark.skipif(CHECKOUTS is None, reason="TANDEM_RECIPES names no checkouts")

Function = Callable[..., Any]

SPACE = ("\n", " ", "\r\n", "\t", "\n\n", "\f", "\x0b", "\u2028", "\u00a0", "")
DIGITS = (
    "3", "4", "12", "0", "12.0", "0.75", "1,200", "-12", ".5", "5.", "3/4", "12/1", "24/2", "012", "1e1", "\u0663",
    "\uff11\uff12", "\u00b2", "12.00000000000000001",
)  # fmt: skip
SIGNS = ("+", "-", "*", "/", "(", ")", "//", " ", "=", ".", ",", "_")
TAGS = (
    "<think>", "</think>", "<answer>", "</answer>", "<reasoning>", "</reasoning>", "<think>\n", "\n</think>\n",
    "<answer>\n", "\n</answer>", "\n<answer>\n", "</think>\n<answer>", "</think><answer>", "< think>", "<Think>",
    "</answer", "<",
)  # fmt: skip
WORDS = ("so", "the answer is", "...", "twelve", "$12$", "12 apples", "é", "\U0001f600", "####", "$", "%", "x = 12")
GENERAL = (TAGS, SPACE, DIGITS, SIGNS, WORDS)
FORMS = (
    "<think>{}</think>{}<answer>{}</answer>", "<think>{}</think>\n<answer>{}</answer>\n", "{}",
    "<think>\n{}\n</think>\n<answer>\n{}\n</answer>",
)  # fmt: skip
GOLDS = ("12", "3/4", "0.75", "1,200", "12.0", "5.", "-12")

EXPRESSIONS = (
    "12-3*4", "3*4-12", "(12-3*4)", "12 / 4 - 3", "12/(4)-3", "12/4-3.", "12/4-3\n", " 12-4*3 ", "+12-3*4", "--12-3*4",
    "12/4-03", "((12-3)*4", "12-3(4)",
)  # fmt: skip
COUNTDOWN = (*GENERAL, EXPRESSIONS, EXPRESSIONS)
COUNTDOWN_FORMS = (
    "so</think>\n<answer>{}</answer>", "{}</think>\n<answer>{}</answer>", "{}<answer>12-3*4</answer>{}", "{}",
    *(f"so</think>\n<answer>{single}</answer>" for single in EXPRESSIONS),
)  # fmt: skip

LATEX = (
    r"\boxed{12}", r"\boxed{\frac{24}{2}}", r"\boxed{12", r"\boxed 12", r"\boxed{}", r"\boxed{1,2}", r"\boxed{x=12}",
    "$12$", r"$\frac{24}2$", r"\(12\)", r"\[12\]", "$$12$$", r"$\sqrt{144}$", r"\boxed{\text{12}}",
    r"\boxed{12}\boxed{3}", "$x = 12$", "$3$", r"\boxed{12\%}", r"\boxed{1200}", r"\frac{24}{2}", r"$\frac1{2}$",
    r"$\fracfoo$", r"\boxed{12\,\text{cm}}", r"$12^\circ$", r"\boxed{\{12\}}", r"\boxed{(12)}", "12", "so 12.",
)  # fmt: skip
SOLUTIONS = (
    r"It is \boxed{12}.", "12", "$12$", r"\boxed{\frac{24}{2}}", "so $x=12$", "???", r"\frac{24}{2}", "twelve",
    r"\boxed{1,2}", "",
)  # fmt: skip


# Nothing that sympy would compute for long.
GEOMETRY = (
    "12", "12.0", "24/2", "3/4", "6/8", r"\frac{3}{4}", r"\frac34", r"\dfrac{6}{8}", "0.75", ".75", r"2\sqrt{221}",
    r"2 \sqrt { 221 }", r"\sqrt{884}", "2√221", "145^\\circ", "145°", "145", "145 degrees", r"12\text{ cm}", "12 cm",
    "(1,2)", "(2, 1)", "[1,2)", "x = 12", "x+1", "1+x", r"6\pi", "pi*6", "1,200", "1200", "50%", r"50\%", "7 3/4",
    "None", "-12", "+12", "{12}", "{", "}", r"\boxed{", r"\boxed{}", "A", "a", r"\text{Yes}", "yes", "2^{3}", "2^3",
)  # fmt: skip
GEOMETRY_GOLDS = (
    "12", "3/4", "0.75", r"2\sqrt{221}", "145", "145°", "(1,2)", "x+1", r"6\pi", "1,200", "50%", "7 3/4", "None", "A",
    " 12 ", "8",
)  # fmt: skip
EASYR1_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "< think >", "< / think>", "</think> ", "<", ">", "/")
EASYR1_FORMS = (
    r"<think>{}</think>\boxed{X}", "<think>{}</think>\n\n\\boxed{X}.\n", "< think >{}< / think >{}\\boxed{ X }",
    "<think>{}</think><answer>X</answer>", "<think>{}</think>\n<answer> X </answer>", "<answer>X</answer>", "X",
    "{}X{}", r"\boxed{X}{}\boxed{X}",
)  # fmt: skip


def completions(pieces: Sequence[Sequence[str]], forms: Sequence[str], cases: int = CASES) -> Iterator[str]:
    """Pieces in any order, and forms that are nearly right: with a piece put in, or a character lost."""
    chance = random.Random(0)

    def some(most: int) -> str:
        return "".join(chance.choice(chance.choice(pieces)) for _ in range(chance.randrange(most)))

    for _ in range(cases):
        if chance.random() < 0.3:
            yield some(12)
            continue
        text = chance.choice(forms)
        while "{}" in text:
            text = text.replace("{}", some(4), 1)
        for _ in range(chance.choice((0, 0, 1, 1, 2))):
            place = chance.randrange(len(text) + 1)
            text = text[:place] + some(2) + text[place + chance.randrange(2) :]
        yield text


def samples(texts: Iterator[str], golds: Sequence[str]) -> Iterator[Sample]:
    chance = random.Random(1)
    return (Sample(Problem(chance.choice(golds)), text) for text in texts)


def functions(file: str, *names: str, **known: Any) -> list[Function]:
    """The functions of these names in a file of a checkout, however deep in it, compiled without the rest."""
    tree = ast.parse((Path(CHECKOUTS or "") / file).read_text())
    result = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] == "_"]
    space: dict[str, Any] = {"re": re, **known}
    exec(compile(ast.Module([*_lazy_annotations(), *helpers, *result], []), file, "exec"), space)
    return [space[name] for name in names]


def _lazy_annotations() -> list[ast.stmt]:
    return ast.parse("from __future__ import annotations").body


def differences(cases: Iterator[Sample], theirs: Mapping[str, Function]) -> list[tuple[str, Sample, Score, Score]]:
    """(rule, sample, ours, theirs) where they differ. theirs: by the name of our rule; each takes the sample."""
    ours = {name: _rule(name) for name in theirs}
    result, seen = [], {name: set[Score]() for name in theirs}
    for sample in cases:
        for name, original in theirs.items():
            local, other = ours[name](sample), original(sample)
            seen[name].add(other)
            same = local is other if local is None or other is None else abs(local - other) < 1e-9
            if not same and not _excused(name, sample):
                result.append((name, sample, local, other))
    assert all(len(scores) > 1 for scores in seen.values()), seen  # right ones and wrong ones were among them
    return result


def _rule(name: str) -> Function:
    chosen = RULES[name]
    score = chosen.score if isinstance(chosen, Sandboxed) else chosen
    assert callable(score)
    return score


def _excused(name: str, sample: Sample) -> bool:
    """`**` and `//`, which eval knows; docs/rewards.md says that they are failures here."""
    return name.endswith("/equation") and ("**" in sample.completion or "//" in sample.completion)


def output(sample: Sample) -> list[list[dict[str, str]]]:
    """A list of one completion, as TRL gives it."""
    return [[{"role": "assistant", "content": sample.completion}]]


def test_simple_grpo() -> None:
    import math_verify

    kinds = [math_verify.ExprExtractionConfig()]
    parse = lru_cache(maxsize=None)(lambda text: math_verify.parse(text, extraction_config=kinds))
    correct, form = functions(
        "simple_GRPO/grpo_vllm_one.py", "reward_correct", "reward_format",
        parse=lambda text, extraction_config: parse(text), verify=math_verify.verify, ExprExtractionConfig=lambda: None,
    )  # fmt: skip
    theirs = {
        "simple_grpo/accuracy": lambda sample: correct({"A": sample.problem.answer}, sample.completion),
        "simple_grpo/format": lambda sample: form({}, sample.completion),
    }
    assert differences(samples(completions(GENERAL, FORMS), GOLDS), theirs) == []


def test_lm_book() -> None:
    correct, form = functions("theLMbook/GRPO.py", "correctness_reward", "format_reward")
    theirs = {
        "lm_book/correct": lambda sample: correct([], output(sample), [sample.problem.answer])[0],
        "lm_book/tags": lambda sample: form(output(sample))[0],
    }
    forms = ("<reasoning>{}</reasoning><answer>{}</answer>", "<answer>{}</answer>", "<answer>12.0</answer>", "{}")
    assert differences(samples(completions(GENERAL, forms), GOLDS), theirs) == []


def open_r1(*names: str) -> list[Function]:
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    known = {name: getattr(math_verify, name) for name in ("parse", "verify", "LatexExtractionConfig")}
    return functions("open-r1/src/open_r1/rewards.py", *names, NormalizationConfig=NormalizationConfig, **known)


def test_open_r1_forms() -> None:
    form, tags = open_r1("format_reward", "tag_count_reward")
    theirs = {
        "open_r1/format": lambda sample: form(output(sample))[0],
        "open_r1/tag_count": lambda sample: tags(output(sample))[0],
    }
    assert differences(samples(completions(GENERAL, FORMS), GOLDS), theirs) == []


def test_open_r1_accuracy() -> None:
    (accuracy,) = open_r1("accuracy_reward")

    def original(sample: Sample) -> Score:
        with redirect_stdout(None):
            return accuracy(output(sample), [sample.problem.extras["solution"]])[0]

    chance = random.Random(1)
    texts = completions((LATEX, LATEX, WORDS, SPACE, TAGS), FORMS)
    cases = (Sample(Problem("", extras={"solution": chance.choice(SOLUTIONS)}), text) for text in texts)
    assert differences(cases, {"open_r1/accuracy": original}) == []


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("cases", [2000, pytest.param(CASES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["math", "r1v"])
def test_easyr1(name: str, cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """mathruler is the same in both. So that most of the time is not sympy's, each pair of texts is graded once."""
    from mathruler import grader

    monkeypatch.setattr(grader, "grade_answer", lru_cache(maxsize=None)(grader.grade_answer))
    known = {"grade_answer": grader.grade_answer, "extract_boxed_content": grader.extract_boxed_content, "Any": Any}
    (score,) = functions(f"EasyR1/examples/reward_function/{name}.py", "compute_score", **known)

    def original(sample: Sample) -> dict[str, float]:
        given = {"response": sample.completion, "ground_truth": sample.problem.answer}
        return score([given])[0] if name == "math" else score(given)

    weights = SUMS[f"easyr1/{name}"]
    rules = {part: _rule(part) for part in weights}
    chance, seen, different = random.Random(2), set[tuple[float, ...]](), []
    for sample in samples(completions((EASYR1_TAGS, SPACE, GEOMETRY, WORDS), EASYR1_FORMS, cases), GEOMETRY_GOLDS):
        filled = replace(sample, completion=re.sub("X", lambda _: chance.choice(GEOMETRY), sample.completion))
        ours, theirs = [rule(filled) for rule in rules.values()], original(filled)
        seen.add(tuple(ours))
        total = sum(weight * score for weight, score in zip(weights.values(), ours, strict=True))
        if [*ours, round(total, 9)] != [theirs["accuracy"], theirs["format"], round(theirs["overall"], 9)]:
            different.append((filled, ours, theirs))
    assert different == []
    assert len(seen) == 4  # right or wrong, in the form or not


def countdown() -> Iterator[Sample]:
    problem = Problem("0", extras={"numbers": (3, 4, 12), "target": 0})
    return (Sample(problem, text) for text in completions(COUNTDOWN, COUNTDOWN_FORMS))


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_nano_aha() -> None:
    names = ("format_reward_func", "equation_reward_func")
    form, equation = functions("nano-aha-moment/nano_r1_script.py", *names)
    theirs = {
        "nano_aha/format": lambda sample: form(sample.completion, "<|endoftext|>"),
        "nano_aha/equation": lambda sample: equation(sample.completion, [3, 4, 12], 0),
    }
    assert differences(countdown(), theirs) == []


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_grpo_zero() -> None:
    form, equation = functions("GRPO-Zero/countdown_task.py", "format_reward_function", "answer_reward_function")
    theirs = {
        "grpo_zero/format": lambda sample: form(f"<think>{sample.completion}"),
        "grpo_zero/equation": lambda sample: equation(sample.completion, [3, 4, 12], 0),
    }
    assert differences(countdown(), theirs) == []
