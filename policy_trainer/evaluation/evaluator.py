"""Accuracy and rewards on held-out problems, with a confidence interval of the accuracy."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from policy_trainer.config import CommonConfig
from policy_trainer.data.pictures import data_url, small
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.prompts import EncodedPrompt, PromptEncoder, PromptTooLong, prompt_encoder, prompt_limit
from policy_trainer.environments.rollouts import Rollouts, make_rollouts
from policy_trainer.environments.sessions import RESET, Sessions
from policy_trainer.environments.single_answers import OnIdle, OpenProblem, SingleAnswers
from policy_trainer.reporting.conversations import SampledTurn, turns_of
from policy_trainer.reporting.metrics import without_nan
from policy_trainer.reporting.samples import MAX_SIDE, SampledCompletion, SampledGroup
from policy_trainer.rewards.failures import summary
from policy_trainer.rewards.judging import Groups, Judge, Judgement
from policy_trainer.rewards.registry import NOTHING, measures_correctness
from policy_trainer.sampling.sampler import Sampler, SamplingParams
from shared.errors import UserError
from shared.models import eos_token_ids
from shared.pictures import MAX_PICTURES

# The normal quantile of a two-sided 95% interval.
_Z = 1.959964
# At least so many transcripts keep their pictures.
_WITH_IMAGES = 64
# Rewards that are 1 for a right answer and 0 for a wrong one, in any task. Without one of these the task judges.
_ACCURACIES = ("accuracy", "math/accuracy")
# Of held-out problems, for the random numbers of environments: no training problem has such an index.
_FIRST_INDEX = 2**62
_NOT_SUMMARISED = ("transcripts", "failed", "failures")


@dataclass(frozen=True)
class Transcript:
    """A held-out problem and its answer. prompt: the problem's text. right: 1 or 0, NaN where the answer could not be
    judged. reward: the total. parts: of each reward. images: the problem's image files; none of later problems. turns:
    of a rollout of several, whose last is the answer."""

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
    correctness. low, high: its 95% Wilson interval. reward: mean of the weighted totals. rewards: mean of each reward
    part. Both are over the answers that could be judged, and NaN where there are none. finished: share of answers that
    were not cut off. mean_tokens: mean length of the answers. left_out: problems whose environment could not be reset,
    whose prompt was too long, or whose gold answer cannot be judged. failed: the rewards that failed on every answer,
    with their first error. failures: a sentence for each reward that failed on some, and for resets that failed.
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

    def summary(self) -> dict[str, Any]:
        """The figures as JSON values, with None for NaN."""
        figures = {name: value for name, value in asdict(self).items() if name not in _NOT_SUMMARISED}
        return without_nan(figures)

    @property
    def has_accuracy(self) -> bool:
        """Whether a reward measures correctness, and any problem has a gold answer."""
        return not math.isnan(self.accuracy)

    @property
    def scores(self) -> tuple[float, ...]:
        """What checkpoints are compared by, the first figure first; empty where nothing could be judged.

        Accuracy, then the mean reward. Where no reward measures correctness, only the mean reward.
        """
        return tuple(figure for figure in (self.accuracy, self.reward) if not math.isnan(figure))

    def __str__(self) -> str:
        """`accuracy 0.5, 95% interval 0.1 to 0.9, reward 0.7 (format 0.2)`.

        Without an accuracy only the rewards; without either only the answers' lengths.
        """
        if set(self.rewards) == {NOTHING} and not self.has_accuracy:
            return (
                f"no rewards and no gold answers: {self.finished:.0%} ended, {self.mean_tokens:.0f} tokens on average"
            )
        accuracy = [f"accuracy {self.accuracy:.3f}, 95% interval {self.low:.3f} to {self.high:.3f}"]
        known = {name: mean for name, mean in self.rewards.items() if not math.isnan(mean)}
        parts = [f"{name} {mean:.3f}" for name, mean in known.items() if name != "accuracy"]
        among = f" ({', '.join(parts)})" if parts and len(self.rewards) > 1 else ""
        total = "no answer has a reward" if math.isnan(self.reward) else f"reward {self.reward:.3f}"
        rewards = [] if set(self.rewards) == {NOTHING} else [total + among]
        return ", ".join([*(accuracy if self.has_accuracy else ()), *rewards])


class NothingAnswered(UserError):
    """No held-out problem could be answered."""


class Evaluator:
    """Samples answers to held-out problems, and judges them."""

    def __init__(
        self,
        encoder: PromptEncoder,
        judge: Judge,
        task: Task,
        *,
        batch_size: int,
        refuse_too_long: bool = False,
        rollouts: Rollouts | None = None,
    ) -> None:
        """rollouts: of several turns, with tools or environments; None: completions are single answers."""
        self._rollouts = rollouts or SingleAnswers()
        self._refuse_too_long = refuse_too_long
        self._encoder = encoder
        self._judge = judge
        self._task = task
        self._batch_size = batch_size

    def evaluate(
        self,
        sampler: Sampler,
        params: SamplingParams,
        problems: int,
        *,
        seed: int = 0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Evaluation:
        """Evaluates on the first `problems` held-out problems. params.num_generations must be 1.

        on_progress: called with the number of answered problems and the number of all, too long ones too; again and
        again while tools run. It may raise.
        """
        chosen = self._task.eval_problems()[:problems]
        too_long = ""
        answered: list[Transcript] = []
        before = self._judge.failures
        on_progress(0, len(chosen))
        # Encoded a batch at a time: tensors of all pictures could fill the memory.
        for start in range(0, len(chosen), self._batch_size):
            on_idle = partial(on_progress, len(answered), len(chosen))
            chunk, reason = self._encode(chosen[start : start + self._batch_size], start, on_idle)
            too_long = reason or too_long
            if not chunk:
                continue
            completions = self._rollouts.sample(sampler, chunk, params, seed + len(answered), on_idle)
            groups = [(opened.problem, answers) for (opened, _), answers in zip(chunk, completions, strict=True)]
            judged = self._judged(groups)
            self._rollouts.release()
            # All pictures could fill the memory, and only the first are shown.
            answered.extend(judged if len(answered) < _WITH_IMAGES else [replace(item, images=()) for item in judged])
            on_progress(len(answered), len(chosen))
        failures = self._judge.failures_since(before)
        not_reset, reason = failures.pop(RESET, (0, ""))
        resets = f"the environments of {not_reset} problems could not be reset; the first error: {summary(reason)}"
        if not answered and (too_long or not_reset):
            raise NothingAnswered(
                f"data: none of the {len(chosen)} held-out problems can be answered: {too_long or resets}"
            )
        return replace(
            _summarise(answered, params, left_out=len(chosen) - len(answered)),
            failed={name: error for name, (count, error) in failures.items() if count == len(answered)},
            failures=(
                *([resets] if not_reset else ()),
                *(
                    f"{name} failed on {count} of {len(answered)} answers; the first error: {summary(error)}"
                    for name, (count, error) in failures.items()
                ),
            ),
        )

    def _judged(self, groups: Groups) -> list[Transcript]:
        judged = self._judge.judge(groups)
        parts = judged[0].parts
        if not measures_correctness(parts):
            right = [math.nan] * len(judged)
        elif judge := next((name for name in _ACCURACIES if name in parts), None):
            right = [item.parts[judge][0] for item in judged]
        else:
            right = self._judge.right([item.samples[0] for item in judged])
        turns = [turns_of(completions[0], self._judge.decode) for _, completions in groups]
        return [
            _transcript(item, float(score), spoken) for score, item, spoken in zip(right, judged, turns, strict=True)
        ]

    def _encode(
        self, problems: Sequence[Problem], start: int, on_idle: OnIdle
    ) -> tuple[list[tuple[OpenProblem, EncodedPrompt]], str]:
        """The problems whose environments can be reset and whose prompts are not too long, and the error of one that
        is, empty if none is. start: place of the first problem."""
        opened = self._rollouts.open(dict(enumerate(problems, _FIRST_INDEX + start)), 1, on_idle)
        encoded, too_long = [], ""
        for each in filter(None, opened):
            try:
                encoded.append((each, self._encoder.encode(each.problem)))
            except PromptTooLong as error:
                each.drop()
                if self._refuse_too_long:
                    raise
                too_long = str(error)
        return encoded, too_long


def make_evaluator(
    config: CommonConfig,
    task: Task,
    judge: Judge,
    model: PreTrainedModel,
    sessions: Sessions | None = None,
    *,
    batch_size: int,
) -> Evaluator:
    """An evaluator whose prompts are at most as long as the configuration and the model's context allow.

    sessions: with the tools and environments; None if there are none. Raises UserError for a model that cannot call
    tools.
    """
    encoder = prompt_encoder(config, judge.tokenizer, limit=prompt_limit(model, config))
    return Evaluator(
        encoder,
        judge,
        task,
        batch_size=batch_size,
        refuse_too_long=config.data.too_long == "refuse",
        rollouts=make_rollouts(config, sessions, judge.tokenizer, eos_token_ids(model, judge.tokenizer)),
    )


def _summarise(answered: Sequence[Transcript], params: SamplingParams, *, left_out: int) -> Evaluation:
    graded = [item.right for item in answered if not math.isnan(item.right)]
    # A problem without a gold answer has only rewards. One whose gold answer cannot be judged is left out.
    judged = [item for item in answered if item.was_judged]
    count = len(judged)
    if not count:
        raise UserError(
            f"data: none of the {left_out + len(answered)} held-out problems can be answered and judged: "
            f"{left_out} prompts are too long (data.max_prompt_length, or the model's context less sampling."
            f"max_completion_length), {len(answered)} gold answers cannot be judged (by the task, or data.answer_rule)"
        )
    right = sum(graded)
    low, high = wilson_interval(right, len(graded)) if graded else (math.nan, math.nan)
    return Evaluation(
        decoding="greedy" if params.temperature == 0 else f"sampled at {params.temperature:g}",
        problems=count,
        accuracy=right / len(graded) if graded else math.nan,
        low=low,
        high=high,
        reward=_mean([item.reward for item in judged]),
        rewards={name: _mean([item.parts[name] for item in judged]) for name in judged[0].parts},
        finished=sum(item.finished for item in judged) / count,
        mean_tokens=sum(item.tokens for item in judged) / count,
        left_out=left_out + len(answered) - count,
        transcripts=tuple(judged),
    )


def _mean(scores: Sequence[float]) -> float:
    known = [score for score in scores if not math.isnan(score)]
    return sum(known) / len(known) if known else math.nan


def _transcript(judgement: Judgement, right: float, turns: tuple[SampledTurn, ...]) -> Transcript:
    """judgement: of one answer."""
    (sample,) = judgement.samples
    problem = sample.problem
    prompt = problem.prompt or "\n".join(message["content"] for message in problem.messages)
    return Transcript(
        prompt,
        sample.completion,
        problem.answer,
        right,
        float(judgement.rewards[0]),
        {name: float(part[0]) for name, part in judgement.parts.items()},
        sample.tokens,
        sample.finished,
        problem.task,
        problem.images,
        turns,
    )


def wilson_interval(successes: float, count: int) -> tuple[float, float]:
    """95% confidence interval of a share. Unlike the normal interval it stays within [0, 1] (Wilson 1927)."""
    share, z2 = successes / count, _Z * _Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = _Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    # Where the share is 0 or 1, rounding could put it outside the interval.
    return max(0.0, min(share, centre - spread)), min(1.0, max(share, centre + spread))


def sampled_groups(evaluation: Evaluation, step: int | None) -> Iterator[SampledGroup]:
    """A group of one completion for each problem that was answered and judged. step: None outside of a run."""
    return (_sampled_group(item, place, step) for place, item in enumerate(evaluation.transcripts))


def _sampled_group(item: Transcript, place: int, step: int | None) -> SampledGroup:
    return SampledGroup(
        step=step,
        kind="eval",
        batch=None,
        task=item.task or None,
        problem=place,
        prompt=item.prompt,
        answer=item.answer or None,
        completions=(
            SampledCompletion(
                item.completion, item.reward, item.parts, None, item.tokens, item.finished, turns=item.turns
            ),
        ),
        images=tuple(data_url(small(image, MAX_SIDE)) for image in item.images[:MAX_PICTURES]),
    )
