"""Answers to held-out problems: sampled, and judged."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from policy_trainer.config import CommonConfig, TrainConfig
from policy_trainer.data.left_out import LeftOut
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.prompts import (
    EncodedPrompt,
    PromptEncoder,
    PromptTooLong,
    UnusablePrompt,
    prompt_encoder,
    prompt_limit,
)
from policy_trainer.reporting.conversations import turns_of
from policy_trainer.reporting.evaluating import EvaluationProgress
from policy_trainer.rewards.failures import summary
from policy_trainer.rewards.judging import Groups, RewardScorer
from policy_trainer.rewards.registry import measures_correctness
from policy_trainer.rollout.environments.rollouts import Rollouts, make_rollouts
from policy_trainer.rollout.environments.sessions import RESET, Sessions
from policy_trainer.rollout.environments.single_answers import OnProgress, OpenProblem, SingleAnswers
from policy_trainer.rollout.sampling.sampler import Sampler, SamplingParams, sampling_params
from policy_trainer.trainer.evaluation.results import Evaluation, Transcript, summarise, transcripts
from shared.errors import UserError
from shared.models import eos_token_ids

# At least so many problems keep their pictures.
_WITH_IMAGES = 64
# Rewards that are 1 for a right answer and 0 for a wrong one, in any task. Without one of these the task judges.
_ACCURACIES = ("accuracy", "math/accuracy")
# Of held-out problems, for the random numbers of environments: no training problem has such an index.
_FIRST_INDEX = 2**62


class NothingAnswered(UserError):
    """No held-out problem could be answered."""


class Evaluator:
    """Samples answers to held-out problems, and judges them."""

    def __init__(
        self,
        encoder: PromptEncoder,
        judge: RewardScorer,
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
        self._left_out = LeftOut("a held-out problem is left out")  # by every evaluation

    def evaluate(
        self,
        sampler: Sampler,
        params: SamplingParams,
        problems: int | None,
        *,
        seed: int = 0,
        on_progress: Callable[[EvaluationProgress], None] = lambda progress: None,
    ) -> Evaluation:
        """Evaluates on the first `problems` held-out problems, or all, with params.num_generations answers to each.

        on_progress: called again and again while answers are sampled; problems that are too long count among all. It
        may raise.
        """
        chosen = self._task.eval_problems()[:problems]
        unusable = ""
        answered: list[tuple[Transcript, ...]] = []
        size = params.num_generations
        batch_size = max(1, self._batch_size // size)
        before = self._judge.failures
        tokens = 0

        def on_sampled(completions: int) -> None:
            judged = len(answered)
            on_progress(EvaluationProgress(judged + completions // size, judged, len(chosen), tokens))

        on_sampled(0)
        # Encoded a batch at a time: tensors of all pictures could fill the memory.
        for start in range(0, len(chosen), batch_size):
            chunk, reason = self._encode(chosen[start : start + batch_size], start, size, on_sampled)
            unusable = reason or unusable
            if not chunk:
                continue
            prompts = [*chunk.values()]
            completions = self._rollouts.sample(sampler, prompts, params, seed + len(answered), on_sampled)
            groups = [(opened.problem, answers) for (opened, _), answers in zip(prompts, completions, strict=True)]
            judged = self._judged(groups, [*chunk])
            self._rollouts.release()
            if len(answered) >= _WITH_IMAGES:  # all pictures could fill the memory, and only the first are shown
                judged = [tuple(replace(item, images=()) for item in group) for group in judged]
            answered.extend(judged)
            tokens += sum(item.tokens for group in judged for item in group)
            on_sampled(0)
        failures = self._judge.failures_since(before)
        not_reset, reason = failures.pop(RESET, (0, ""))
        resets = (
            f"the environments of {not_reset // size} problems could not be reset; the first error: {summary(reason)}"
        )
        if not answered and (unusable or not_reset):
            raise NothingAnswered(
                f"data: none of the {len(chosen)} held-out problems can be answered: {unusable or resets}"
            )
        return replace(
            summarise(answered, params, left_out=len(chosen) - len(answered)),
            failed={name: error for name, (count, error) in failures.items() if count == len(answered) * size},
            failures=(
                *([resets] if not_reset else ()),
                *(
                    f"{name} failed on {count} of {len(answered) * size} answers; the first error: {summary(error)}"
                    for name, (count, error) in failures.items()
                ),
            ),
        )

    def _judged(self, groups: Groups, places: Sequence[int]) -> list[tuple[Transcript, ...]]:
        """Judges the answers to each problem. places: the problems' positions in the held-out set."""
        judged = self._judge.judge(groups)
        parts = judged[0].parts
        if not measures_correctness(parts):
            right = [[math.nan] * len(item.samples) for item in judged]
        elif judge := next((name for name in _ACCURACIES if name in parts), None):
            right = [item.parts[judge].tolist() for item in judged]
        else:
            scores = iter(self._judge.right([sample for item in judged for sample in item.samples]))
            right = [[float(next(scores)) for _ in item.samples] for item in judged]
        turns = [[turns_of(completion, self._judge.decode) for completion in group] for _, group in groups]
        return [transcripts(*each) for each in zip(places, judged, right, turns, strict=True)]

    def _encode(
        self, problems: Sequence[Problem], start: int, size: int, on_progress: OnProgress
    ) -> tuple[dict[int, tuple[OpenProblem, EncodedPrompt]], str]:
        """Returns the problems whose environments can be reset and whose prompts are usable, by their position in the
        held-out set, and the error of an unusable prompt, empty if there is none. start: the position of the first
        problem. size: answers per problem."""
        opened = self._rollouts.open(dict(enumerate(problems, _FIRST_INDEX + start)), size, on_progress)
        encoded, unusable = {}, ""
        for place, each in enumerate(opened, start):
            if each is None:
                continue
            try:
                encoded[place] = each, each.encode(self._encoder)
            except UnusablePrompt as error:
                each.drop()
                if self._refuse_too_long and isinstance(error, PromptTooLong):
                    raise
                unusable = str(error)
                if not isinstance(error, PromptTooLong):
                    self._left_out.note(error)
        return encoded, unusable


def evaluation_params(config: TrainConfig) -> SamplingParams:
    """Of evaluations while training: greedy, or sampled where a problem gets several answers."""
    count = config.evaluation.num_generations
    return sampling_params(config.sampling, num_generations=count, temperature=0 if count == 1 else None)


def make_evaluator(
    config: CommonConfig,
    task: Task,
    judge: RewardScorer,
    model: PreTrainedModel,
    sessions: Sessions | None = None,
    *,
    batch_size: int,
) -> Evaluator:
    """An evaluator whose prompts are at most as long as the configuration and the model's context allow.

    sessions: with the tools and environments; None if there are none. Raises UserError for a model that cannot call
    tools.
    """
    encoder = prompt_encoder(config, judge.tokenizer, model, limit=prompt_limit(model, config))
    return Evaluator(
        encoder,
        judge,
        task,
        batch_size=batch_size,
        refuse_too_long=config.data.too_long == "refuse",
        rollouts=make_rollouts(config, sessions, judge.tokenizer, eos_token_ids(model, judge.tokenizer)),
    )
