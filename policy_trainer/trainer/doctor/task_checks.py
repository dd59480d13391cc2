"""Checks of the task and of its rewards: what is asked, and whether a right answer gets more than a wrong one."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import shorten
from typing import Any

import numpy as np
import structlog

from policy_trainer.config import ENVIRONMENT
from policy_trainer.data.problem import Problem, Sample
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.rewards.answers import reads_tags
from policy_trainer.rewards.judging import RewardScorer
from policy_trainer.rewards.registry import NOTHING, part_weights
from policy_trainer.trainer.doctor.findings import Finding, Subject, Verdict, ok, refused, warning, wrong
from shared.errors import UserError
from shared.models import decode
from shared.spelling import spell_setting

# Forms of an answer that tasks and rewards look for. The first satisfies most.
_FORMS = (
    "<think>I work it out.</think>\n<answer>{}</answer>",
    "<think>I work it out.</think>\n<answer>\\boxed{{{}}}</answer>",
    "\\boxed{{{}}}",
    "#### {}",
    "{}",
)
# In front of a wrong answer, so that penalties for length and repetition have something to find.
_RAMBLING = "I am not sure about this. " * 20
_KINDS = ("the gold answer", "an empty one", "a wrong one")
_REPAIR = "fix the reward: it must give a number for any text, an empty one too (docs/rewards.md)"


def problems(subject: Subject) -> Iterator[Finding]:
    """Raises UserError for data that cannot be read."""
    drawn = subject.drawn
    if subject.task.name == ENVIRONMENT:
        yield ok("the environment shows its problems when it is reset: `one group` has rollouts with it")
        return
    for problem in drawn:
        answer = f"gold answer {_short(problem.answer, 60)}" if problem.answer else "no gold answer"
        yield ok(f"{_short(_question(problem), 100)}: {answer}")
    if len({(_question(problem), problem.images) for problem in drawn}) == 1:
        yield warning("three draws gave the same problem", "give the task more problems: a run needs many")


def _question(problem: Problem) -> str:
    return problem.prompt or problem.messages[-1]["content"]


def _short(text: str, most: int) -> str:
    return repr(shorten(text, most, placeholder=" …"))


def rewards(subject: Subject) -> Iterator[Finding]:
    """Each by itself, on three samples of the first problem."""
    if subject.config.environment:
        yield ok("judged in `one group`: made-up samples have no environment")
        return
    answers = _Answers(subject)
    for name, weight in part_weights(subject.config, subject.task).items():
        try:
            yield _reward(name, weight, answers)
        except UserError as error:
            yield refused(error)


@dataclass(frozen=True)
class _Trial:
    """scores: float32 (3,) of `_KINDS`. failures: of the three; error: the last one's words."""

    scores: np.ndarray
    seconds: float
    failures: int
    error: str

    @property
    def tells_apart(self) -> bool:
        return bool(self.scores[0] > self.scores[2])


class _Answers:
    """Samples of the first problem: with its gold answer, empty, and wrong."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._problem = subject.drawn[0]
        self._start = PromptEncoder(subject.tokenizer, subject.config.data).answer_start(self._problem)

    def samples(self, form: str) -> list[Sample]:
        gold, longest = self._problem.answer or "1", self._subject.config.sampling.max_completion_length
        others = [problem.answer for problem in self._subject.drawn[1:]]
        other = next((other for other in others if other not in ("", self._problem.answer)), "no idea")
        return [
            self._sample(form.format(gold)),
            self._sample(""),
            self._sample(_RAMBLING + form.format(other), tokens=longest, finished=False),
        ]

    def _sample(self, text: str, *, tokens: int | None = None, finished: bool = True) -> Sample:
        if self._start.strip().endswith("<think>"):  # it stands in the prompt
            text = text.removeprefix("<think>")
        ids = tuple(self._subject.tokenizer.encode(text, add_special_tokens=False))
        count = len(ids) + 1 if tokens is None else tokens
        judged = decode(self._subject.tokenizer, ids, skip_special_tokens=True)  # what rewards see of it
        return Sample(self._problem, self._start + judged, count, finished, start=self._start, ids=ids)

    @cached_property
    def has_gold(self) -> bool:
        """Whether the gold answer is one that a completion may give. In some tasks it is a target, as in countdown."""
        if not self._problem.answer:
            return False
        judge = self.judge([NOTHING])
        return reads_tags(self._subject.task.correct) or any(
            judge.right(self.samples(form)[:1])[0] == 1 for form in _FORMS
        )

    def judge(self, names: Sequence[str]) -> RewardScorer:
        changed = {"rewards": list(names), "reward_weights": []}
        return RewardScorer(
            self._subject.tokenizer, self._subject.task, self._subject.config.model_copy(update=changed)
        )


def _reward(name: str, weight: float, answers: _Answers) -> Finding:
    if name == NOTHING:
        return ok(f"{name}: 0 for every answer, as it should")
    judge = answers.judge([name])
    trials = []
    for form in _FORMS if answers.has_gold else _FORMS[:1]:
        trials.append(_try(name, judge, answers.samples(form)))
        if trials[-1].tells_apart or trials[-1].failures:
            break
    trial = next((each for each in trials if each.tells_apart or each.failures), trials[0])
    finding = _judged(name, trial, answers.has_gold)
    if finding.verdict is Verdict.WRONG and not weight:
        return warning(finding.seen, finding.remedy)  # it is logged and teaches nothing
    return finding


def _try(name: str, judge: RewardScorer, samples: Sequence[Sample]) -> _Trial:
    before, began = judge.failures.get(name, 0), time.monotonic()
    with structlog.testing.capture_logs() as events:
        scores = judge.score(samples).parts[name]
    failures = judge.failures.get(name, 0) - before
    return _Trial(scores, time.monotonic() - began, failures, _error(events))


def _error(events: Sequence[Any]) -> str:
    """The last line of what a failed reward logged."""
    words = [str(event.get("exception") or event.get("reason") or "") for event in events]
    lines = [line.strip() for text in words for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"


def _judged(name: str, trial: _Trial, has_gold: bool) -> Finding:
    kinds = _KINDS if has_gold else ("a short answer", *_KINDS[1:])
    given = ", ".join(f"{kind} {_number(score)}" for kind, score in zip(kinds, trial.scores, strict=True))
    values = f"{name}: {given}" if has_gold else f"{name}: {given} (no gold answer to try)"
    if trial.failures:
        failed = f"{name} failed on {trial.failures} of 3 samples: {trial.error}"
        remedy = (
            f"lower its work, or raise {spell_setting('judging.seconds')}"
            if "took more than" in trial.error
            else _REPAIR
        )
        return (wrong if trial.failures == len(trial.scores) else warning)(failed, remedy)
    if np.isnan(trial.scores).all():
        return wrong(f"{name} could not judge any of 3 samples (NaN)", f"see that gold answers are there; {_REPAIR}")
    if not has_gold:
        return ok(f"{values}; {trial.seconds:.2f} s")
    if len(set(trial.scores.tolist())) == 1:
        return warning(f"{values}: all are equal, and a reward teaches only where it differs", _READS)
    if not trial.tells_apart:
        return warning(f"{values}: the gold answer gets no more than a wrong one", _READS)
    return ok(f"{values}; {trial.seconds:.2f} s")


_READS = "see where and in which form it reads the answer, and whether its sign is right (docs/rewards.md)"


def _number(score: float) -> str:
    return "not judged" if math.isnan(score) else f"{score:.3g}"
