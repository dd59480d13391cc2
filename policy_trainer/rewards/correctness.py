"""Ways to decide whether a completion answers its problem correctly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from policy_trainer.data.problem import Correct, Problem
from policy_trainer.data.sample import Sample
from policy_trainer.rewards.answers import Comparison, accuracy
from policy_trainer.rewards.mathematics import equal_math, read_gold, read_solution, same


@dataclass(frozen=True)
class ByAnswer:
    """A completion is correct if its last answer in tags equals the gold answer; NaN for a problem without one."""

    compare: Comparison

    def __call__(self, problem: Problem, completion: str) -> float:
        return accuracy(self.compare)(completion, problem.answer) if problem.answer else math.nan


@dataclass(frozen=True)
class ByTask:
    """Judges by the task of the mixture that the problem came from. tasks: by label."""

    tasks: Mapping[str, Correct]

    def __call__(self, problem: Problem, completion: str) -> float:
        return self.tasks[problem.task](problem, completion)


@dataclass(frozen=True)
class Accuracy:
    """The reward `accuracy`: the task's own judgement."""

    correct: Correct

    def __call__(self, sample: Sample) -> float:
        return self.correct(sample.problem, sample.completion)


def math_accuracy(sample: Sample) -> float:
    """1 if the completion holds the gold answer: boxed, else in LaTeX and called the answer, else as a bare number;
    NaN where there is no gold answer to compare with."""
    expected = read_gold(sample.problem.answer)
    return float(same(expected, read_solution(sample.completion))) if expected else math.nan


def needs_sandbox(correct: Correct) -> bool:
    """Whether the judgement uses math-verify, which may hang and must run in the sandbox."""
    if isinstance(correct, ByTask):
        return any(needs_sandbox(part) for part in correct.tasks.values())
    return isinstance(correct, ByAnswer) and correct.compare is equal_math


def reads_tags(correct: Correct) -> bool:
    """Whether the judgement reads the answer from <answer> tags."""
    if isinstance(correct, ByTask):
        return any(reads_tags(part) for part in correct.tasks.values())
    return isinstance(correct, ByAnswer)
