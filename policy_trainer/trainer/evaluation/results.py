"""What an evaluation found: its figures, with a confidence interval of the accuracy, and every answer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from policy_trainer.data.messages import as_text
from policy_trainer.data.pictures import data_url, small
from policy_trainer.reporting.conversations import SampledTurn
from policy_trainer.reporting.metrics import without_nan
from policy_trainer.reporting.samples import MAX_SIDE, SampledCompletion, SampledGroup
from policy_trainer.rewards.judging import Judgement
from policy_trainer.rewards.registry import NOTHING, measures_correctness
from policy_trainer.rollout.sampling.sampler import SamplingParams
from shared.errors import UserError
from shared.pictures import MAX_PICTURES

# The normal quantile of a two-sided 95% interval.
_Z = 1.959964
_NOT_SUMMARISED = ("transcripts", "failed", "failures")
# Only of several answers to a problem.
_OF_SEVERAL = ("num_generations", "pass_at_n")


@dataclass(frozen=True)
class Transcript:
    """A held-out problem and an answer to it. prompt: the problem's text. right: 1 or 0, NaN where the answer could not
    be judged. reward: the total. parts: of each reward. images: the problem's image files; none of later problems.
    turns: of a rollout of several, whose last is the answer. logged: numbers that rewards logged for it, by name.
    place: the problem's position in the held-out set."""

    prompt: str
    completion: str
    answer: str
    right: float
    reward: float
    parts: Mapping[str, float]
    tokens: int
    finished: bool
    task: str
    images: tuple[bytes, ...] = field(default=(), repr=False)
    turns: tuple[SampledTurn, ...] = field(default=(), repr=False)
    logged: Mapping[str, float] = field(default_factory=dict, repr=False)
    place: int = 0

    @property
    def correct(self) -> bool:
        return self.right == 1

    @property
    def was_judged(self) -> bool:
        """False where the answer had to be compared with a gold answer, and could not."""
        return not (math.isnan(self.right) and self.answer and measures_correctness(self.parts))


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    decoding: greedy, or sampled at a temperature. problems: problems that were answered and judged. accuracy: share of
    right answers among those to problems with a gold answer, NaN where no problem has one and where no reward judges
    correctness. low, high: its 95% Wilson interval, over problems, since answers to one are not independent. reward:
    mean of the weighted totals. rewards: mean of each reward part. Both are over the answers that could be judged, and
    NaN where there are none. finished: share of answers that were not cut off. mean_tokens: mean length of the answers.
    left_out: problems whose environment could not be reset, whose prompt was too long or unusable, or whose gold answer
    cannot be judged. transcripts: the answers, grouped by problem. failed: the rewards that failed on
    every answer, with their first error. failures: a sentence for each reward that failed on some answers, and one for
    failed resets.
    num_generations: answers to each problem. pass_at_n: share of the problems with a gold answer that have a right one.
    logged: the numbers that rewards logged with `log_metric`, each a mean over the answers that have it.
    """

    decoding: str
    problems: int
    accuracy: float
    low: float
    high: float
    reward: float
    rewards: dict[str, float]
    finished: float
    mean_tokens: float
    left_out: int
    transcripts: tuple[Transcript, ...] = field(default=(), repr=False)
    failed: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    num_generations: int = 1
    pass_at_n: float = math.nan
    logged: Mapping[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The figures as JSON values, with None for NaN."""
        left_out = (*_NOT_SUMMARISED, *(_OF_SEVERAL if self.num_generations == 1 else ()))
        left_out += () if self.logged else ("logged",)
        figures = {name: value for name, value in asdict(self).items() if name not in left_out}
        return without_nan(figures)

    @property
    def has_accuracy(self) -> bool:
        """Whether a reward measures correctness, and any problem has a gold answer."""
        return not math.isnan(self.accuracy)

    @property
    def is_unrewarded(self) -> bool:
        """Whether rewards judged several answers, and all got the same, 0 or less."""
        rewards = {item.reward for item in self.transcripts}
        several = len(self.transcripts) > 1 and len(rewards) == 1
        return several and max(rewards) <= 0 and any(name != NOTHING for name in self.rewards)

    @property
    def scores(self) -> tuple[float, ...]:
        """What checkpoints are compared by, the first figure first; empty where nothing could be judged.

        Accuracy, then the mean reward. Where no reward measures correctness, only the mean reward.
        """
        return tuple(figure for figure in (self.accuracy, self.reward) if not math.isnan(figure))

    def __str__(self) -> str:
        """`accuracy 0.5, 95% interval 0.1 to 0.9, pass@4 0.8, reward 0.7 (format 0.2)`.

        Without an accuracy only the rewards; without either only the answers' lengths.
        """
        if set(self.rewards) == {NOTHING} and not self.has_accuracy:
            return (
                f"no rewards and no gold answers: {self.finished:.0%} ended, {self.mean_tokens:.0f} tokens on average"
            )
        accuracy = [f"accuracy {self.accuracy:.3f}, 95% interval {self.low:.3f} to {self.high:.3f}"]
        accuracy += [f"pass@{self.num_generations} {self.pass_at_n:.3f}"] if self.num_generations > 1 else []
        known = {name: mean for name, mean in self.rewards.items() if not math.isnan(mean)}
        parts = [f"{name} {mean:.3f}" for name, mean in known.items() if name != "accuracy"]
        among = f" ({', '.join(parts)})" if parts and len(self.rewards) > 1 else ""
        total = "no answer has a reward" if math.isnan(self.reward) else f"reward {self.reward:.3f}"
        rewards = [] if set(self.rewards) == {NOTHING} else [total + among]
        return ", ".join([*(accuracy if self.has_accuracy else ()), *rewards])


def summarise(answered: Sequence[Sequence[Transcript]], params: SamplingParams, *, left_out: int) -> Evaluation:
    """answered: of each problem its answers. left_out: problems that were not answered. Raises UserError if nothing
    could be judged."""
    # A problem without a gold answer has only rewards. One whose gold answer cannot be judged is left out.
    judged = [group for group in answered if all(item.was_judged for item in group)]
    if not judged:
        raise UserError(
            f"data: none of the {left_out + len(answered)} held-out problems can be answered and judged: "
            f"{left_out} prompts are too long (data.max_prompt_length, or the model's context less sampling."
            f"max_completion_length) or unusable, {len(answered)} gold answers cannot be judged (by the task, or "
            "data.answer_rule)"
        )
    graded = [[item.right for item in group] for group in judged if not math.isnan(group[0].right)]
    right = sum(map(_mean, graded))
    low, high = wilson_interval(right, len(graded)) if graded else (math.nan, math.nan)
    items = [item for group in judged for item in group]
    return Evaluation(
        decoding="greedy" if params.temperature == 0 else f"sampled at {params.temperature:g}",
        problems=len(judged),
        accuracy=right / len(graded) if graded else math.nan,
        low=low,
        high=high,
        reward=_mean([item.reward for item in items]),
        rewards={name: _mean([item.parts[name] for item in items]) for name in items[0].parts},
        finished=sum(item.finished for item in items) / len(items),
        mean_tokens=sum(item.tokens for item in items) / len(items),
        left_out=left_out + len(answered) - len(judged),
        transcripts=tuple(items),
        num_generations=params.num_generations,
        pass_at_n=_mean([float(max(scores) == 1) for scores in graded]),
        logged=logged_means(items),
    )


def logged_means(items: Sequence[Transcript]) -> dict[str, float]:
    """Averages the numbers that rewards logged, each over the answers that have it."""
    return {
        name: _mean([item.logged.get(name, math.nan) for item in items])
        for name in dict.fromkeys(name for item in items for name in item.logged)
    }


def _mean(scores: Sequence[float]) -> float:
    known = [score for score in scores if not math.isnan(score)]
    return sum(known) / len(known) if known else math.nan


def transcripts(
    place: int, judgement: Judgement, right: Sequence[float], turns: Sequence[tuple[SampledTurn, ...]]
) -> tuple[Transcript, ...]:
    """Returns the answers to one problem. place: its position in the held-out set."""
    return tuple(
        Transcript(
            sample.problem.prompt or as_text(sample.problem.messages),
            sample.completion,
            sample.problem.answer,
            right[number],
            float(judgement.rewards[number]),
            {name: float(part[number]) for name, part in judgement.parts.items()},
            sample.tokens,
            sample.finished,
            sample.problem.task,
            sample.problem.images,
            turns[number],
            judgement.logged[number].metrics if judgement.logged else {},
            place,
        )
        for number, sample in enumerate(judgement.samples)
    )


def wilson_interval(successes: float, count: int) -> tuple[float, float]:
    """95% confidence interval of a share. Unlike the normal interval it stays within [0, 1] (Wilson 1927)."""
    share, z2 = successes / count, _Z * _Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = _Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    # Where the share is 0 or 1, rounding could put it outside the interval.
    return max(0.0, min(share, centre - spread)), min(1.0, max(share, centre + spread))


def sampled_groups(evaluation: Evaluation, step: int | None) -> Iterator[SampledGroup]:
    """A group for each problem that was answered and judged. step: None outside of a run."""
    items, size = evaluation.transcripts, evaluation.num_generations
    return (_sampled_group(items[start : start + size], step) for start in range(0, len(items), size))


def _sampled_group(items: Sequence[Transcript], step: int | None) -> SampledGroup:
    """items: the answers to one problem."""
    problem = items[0]
    return SampledGroup(
        step=step,
        kind="eval",
        batch=None,
        task=problem.task or None,
        problem=problem.place,
        prompt=problem.prompt,
        answer=problem.answer or None,
        completions=tuple(
            SampledCompletion(
                item.completion, item.reward, item.parts, None, item.tokens, item.finished, turns=item.turns
            )
            for item in items
        ),
        images=tuple(data_url(small(image, MAX_SIDE)) for image in problem.images[:MAX_PICTURES]),
    )
