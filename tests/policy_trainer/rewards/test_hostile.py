"""Whatever a policy writes is judged in time, and never better than it deserves: not NaN, not infinite, no exception.

Judged apart, so that what takes too long is killed and shows as a failure.
"""

from collections.abc import Mapping
from functools import partial

import pytest
import torch

from policy_trainer.config import PenaltyConfig
from policy_trainer.data.problem import Problem
from policy_trainer.rewards import COMPARISONS, Reward, Sample, equal_math
from policy_trainer.rewards.answers import ByAnswer, task_accuracy
from policy_trainer.rewards.mathematics import library
from policy_trainer.rewards.registry import RULES, repetition_penalty
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed

MEGABYTE = 2**20
requested = Problem("5", extras={"numbers": (1, 2, 3), "target": 9})


def megabyte(piece: str) -> str:
    return piece * (MEGABYTE // len(piece))


COMPLETIONS = (
    megabyte("<think>"),
    megabyte("</think>"),
    megabyte("<answer>"),
    megabyte("</answer>"),
    megabyte("<answer>") + "</answer>" + megabyte("<answer>"),
    megabyte("<answer>") + megabyte("</answer>"),
    megabyte("<answer>\n") + megabyte("</answer>\n"),
    "<think>" + megabyte("</think><answer>") + "x",
    "<think>" + megabyte("</think><answer>") + megabyte("</answer>") + "x",
    "<think>" + megabyte("</think>\n<answer>") + megabyte("</answer>\n") + "x",
    "<think>\n" + megabyte("\n</think>\n<answer>\n") + megabyte("\n</answer>x"),
    "<think></think>" + megabyte(" "),
    "<think>" + megabyte("</think>" + " " * 50),
    "<think>" + megabyte("<"),
    "<think>" + megabyte("<" * 6 + "think>"),
    megabyte(" \n<"),
    "<think></think>" + megabyte(r"\boxed{"),
    megabyte("9"),
    megabyte("9."),
    megabyte("9/"),
    megabyte("-"),
    megabyte("1 "),
    megabyte("\u0663"),
    f"<answer>{megabyte('9')}</answer>",
    f"<answer>{megabyte('1+')}</answer>",
    f"<answer>{megabyte('(')}</answer>",
    f"<answer>{'(' * 999}</answer>",
    f"<answer>{'1/(' * 333}</answer>",
    f"<answer>{'-' * 999}9</answer>",
    f"<answer>{'9' * 999}</answer>",
    f"<answer>{'1,111' * 200}</answer>",
    f"<answer>-{'9' * 99}.{'9' * 99}</answer>",
    "<answer>98**99**97</answer>",
    "<answer>(1+2)*3**1</answer>",
    "<answer>1e999</answer>",
    "<answer>" + "\u0663" * 500 + "</answer>",
    "<answer>" + "\u00b2" * 500 + "</answer>",
    "<answer>\uff16 apples</answer>",
    f"<answer>{'{' * 1000}</answer>",
    "<answer>" + r"\frac{" * 150 + "</answer>",
    "<answer>\x00\x1b[2J\u202e\ufffd\ud800</answer>",
    "<answer>__import__('os').abort()</answer>",
    "<answer>inf</answer>",
    "<answer>-Infinity</answer>",
    "<answer>nan</answer>",
    megabyte("😀"),
    megabyte("1 000 "),
    megabyte("7 3/4 "),
    "1" + megabyte(" "),
    megabyte("√("),
    "sqrt(" + megabyte("x"),
    megabyte(r"\text{"),
    f"<answer>{'word ' * 190}</answer>",
    f"<answer>{'the answer is ' * 7}</answer>",
    f"<answer>{'abcdefghij' * 9}</answer>",
    f"<answer>6 {'abc ' * 20}+</answer>",
)

# What may keep math-verify busy for ever.
BUSY = ("9**9**9**9", "$10000000!$", "$9^{9^{9^{9}}}$", "$98^{99^{97}}$", "98^{99^{97}}", "10000000!", "9^9^9^9")

# The best that a wrong answer in no form can have: some rules count tags one by one.
BEST: Mapping[str, float] = {
    "none": 0,
    "format": 0,
    "tags": 0,
    "simple_grpo/format": -1,
    "lm_book/correct": 0,
    "lm_book/tags": 0.4,
    "open_r1/format": 0,
    "open_r1/tag_count": 0.5,
    "easyr1_math/format": 0,
    "easyr1_r1v/format": 0,
    "nano_aha/format": 0,
    "nano_aha/equation": 0,
    "grpo_zero/format": 0.6,
    "grpo_zero/equation": 0,
    "exact": 0,
    "number": 0,
}
_ACCURACY: Mapping[str, Reward] = {
    name: partial(task_accuracy, ByAnswer(COMPARISONS[name])) for name in ("exact", "number")
}
# The environment's reward reads no text.
_READING = {name: rule for name, rule in RULES.items() if name != "environment"}
BOUNDED = {name: rule for name, rule in {**_READING, **_ACCURACY}.items() if not isinstance(rule, Sandboxed)}


@pytest.fixture(scope="module")
def bounded() -> Sandbox:
    memory = 2**30 if torch.version.cuda is None else 2**32  # its import maps 3 GB in a build for CUDA
    return Sandbox({name: Sandboxed(rule) for name, rule in BOUNDED.items()}, seconds=3, memory=memory)


@pytest.mark.parametrize("name", BOUNDED)
def test_rules_that_are_judged_here_are_bounded(bounded: Sandbox, name: str) -> None:
    scores = bounded.scores(name, [Sample(requested, completion) for completion in COMPLETIONS])
    assert not bounded.failures.counts[name]
    assert all(score is not None and score <= BEST[name] for score in scores), scores


APART = {name: rule for name, rule in RULES.items() if isinstance(rule, Sandboxed)}
APART["math"] = Sandboxed(partial(task_accuracy, ByAnswer(equal_math)), library, cut_off=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_rules_that_are_judged_apart_give_the_failing_score(name: str) -> None:
    rule = APART[name]
    rewards = Sandbox({name: rule}, seconds=3, memory=2**30)
    for text in (*(form.format(part) for part in BUSY for form in ("{}", "<answer>{}</answer>")), *COMPLETIONS[17:]):
        assert rewards.scores(name, [Sample(requested, text)]) == [rule.cut_off], text[:40]


def test_repetition_is_bounded() -> None:
    penalty = repetition_penalty(PenaltyConfig())
    assert all(-1 <= (penalty(Sample(requested, completion)) or 0) <= 0 for completion in COMPLETIONS)
