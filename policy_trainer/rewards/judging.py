"""Judges completions by the configured rewards, a whole round in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.conversation import Conversation
from policy_trainer.data.problem import Problem, Score, Task
from policy_trainer.data.prompts import PromptEncoder
from policy_trainer.rewards import Sample
from policy_trainer.rewards.answers import needs_sandbox
from policy_trainer.rewards.call_log import CallLogs, Logged
from policy_trainer.rewards.failures import Failures
from policy_trainer.rewards.function_server import CallerReward
from policy_trainer.rewards.http_reward import HttpReward
from policy_trainer.rewards.registry import Rule, accuracy_reward, choose_rewards, part_weights
from policy_trainer.rewards.reward_model import RewardModel
from policy_trainer.rewards.sandbox import Sandbox, Sandboxed
from shared.batch import MAX_REWARD
from shared.errors import UserError
from shared.models import decode

_GIB = 2**30

# The problems of a round, each with its completions.
Groups = Sequence[tuple[Problem, Sequence[Completion]]]
Scorer = Callable[[Sequence[Sample]], Sequence[Score]]


@dataclass(frozen=True, eq=False)
class Judgement:
    """samples: the G completions as they were judged.

    rewards: float32 (G,) weighted totals, NaN where a reward with a weight other than 0 could not be judged, where none
    of them applied, and where the rollout's environment was lost. parts: float32 (G,) scores of each reward, by name;
    NaN for none. logged: what the rewards logged about each completion.
    """

    rewards: np.ndarray
    parts: dict[str, np.ndarray]
    samples: Sequence[Sample] = ()
    logged: Sequence[Logged] = ()

    def part(self, start: int, end: int) -> "Judgement":
        """The judgement of some completions of it."""
        parts = {name: scores[start:end] for name, scores in self.parts.items()}
        return Judgement(self.rewards[start:end], parts, self.samples[start:end], self.logged[start:end])


class RewardScorer:
    """Completions -> rewards by name and their weighted sum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: Task, config: CommonConfig) -> None:
        """Raises UserError if a reward cannot be used."""
        self.tokenizer = tokenizer
        self._prompts = PromptEncoder(tokenizer, config.data)
        self._config = config.judging
        self._task = task
        self._weights = part_weights(config, task)
        self._failures: list[Failures] = []
        self._logs: list[CallLogs] = []
        self._scorers = self._make_scorers(choose_rewards(config, task))

    def judge(self, groups: Groups) -> list[Judgement]:
        """One judgement for each problem. A reward that takes many completions gets all of them in one call."""
        samples = [self.samples(problem, completions) for problem, completions in groups]
        judged = self.score([sample for group in samples for sample in group])
        ends = accumulate((len(group) for group in samples), initial=0)
        return [judged.part(start, end) for start, end in pairwise(ends)]

    def score(self, samples: Sequence[Sample]) -> Judgement:
        """The judgement of samples of any problems."""
        scores = {name: scorer(samples) for name, scorer in self._scorers.items()}
        parts = {name: np.array(values, dtype=np.float32) for name, values in scores.items()}  # None becomes NaN
        total = np.zeros(len(samples), dtype=np.float32)
        applies = np.zeros(len(samples), dtype=np.bool_)
        for name, weight in self._weights.items():
            if weight:  # a NaN in a reward that is only logged must not make the completion unrewarded
                given = np.array([score is not None for score in scores[name]], dtype=np.bool_)
                total += np.where(given, weight * parts[name], 0)
                applies |= given
        if (np.abs(total) > MAX_REWARD).any():
            raise UserError(
                f"reward_weights: a completion's weighted total is {np.nanmax(np.abs(total)):g} in magnitude; a batch "
                f"takes {MAX_REWARD:g} at most",
                "give smaller weights, or scale the rewards",
            )
        applies &= ~np.array([sample.environment_lost for sample in samples], dtype=np.bool_)
        return Judgement(np.where(applies, total, np.float32(np.nan)), parts, samples, self._logged(samples))

    def _logged(self, samples: Sequence[Sample]) -> list[Logged]:
        taken = zip(*(logs.take(samples) for logs in self._logs), strict=True)
        return [reduce(Logged.with_later, each) for each in taken] or [Logged()] * len(samples)

    def right(self, samples: Sequence[Sample]) -> np.ndarray:
        """float32 (G,): 1 where the task judges a completion correct, else 0; NaN where it could not be judged."""
        if needs_sandbox(self._task.correct) and not any(sample.problem.answer for sample in samples):
            return np.full(len(samples), np.nan, dtype=np.float32)  # no process is started in vain
        return np.array(self._accuracy(samples), dtype=np.float32)

    def samples(self, problem: Problem, completions: Sequence[Completion]) -> list[Sample]:
        """Completions of one problem as rewards see them: with the beginning of the answer that the prompt contains."""
        start = self._prompts.answer_start(problem)
        return [
            Sample(
                (talk and talk.problem) or problem,
                start + self.text(completion),
                completion.sampled,
                completion.finished,
                start=start,
                ids=tuple(completion.ids[talk.first_turn if talk else 0 :].tolist()),
                **({} if talk is None else _of_conversation(talk)),
            )
            for completion in completions
            for talk in [completion.conversation]
        ]

    @property
    def failures(self) -> dict[str, int]:
        """Number of completions so far that rewards judged elsewhere (sandbox, caller, server, environment) failed on,
        by name."""
        return {name: count for each in self._failures for name, count in each.counts.items()}

    def include(self, failures: Failures) -> None:
        """Reports these failures together with those of the rewards."""
        self._failures.append(failures)

    def failures_since(self, before: Mapping[str, int]) -> dict[str, tuple[int, str]]:
        """Of each reward that has failed since `failures` was `before`: on how many completions, and its first error
        ever, as a traceback or a reason."""
        errors = {name: error for each in self._failures for name, error in each.errors.items()}
        counts = {name: count - before.get(name, 0) for name, count in self.failures.items()}
        return {name: (count, errors[name]) for name, count in counts.items() if count}

    def text(self, completion: Completion) -> str:
        """Text for rewards and logs, never tokenised again. The EOS is left out, even if it is no special token.

        Of a rollout of several turns, the last one's.
        """
        ids = completion.ids.tolist()
        if completion.conversation:
            ids = ids[completion.conversation.last_turn :]
        return self.decode(ids[:-1] if completion.eos else ids)

    def decode(self, ids: list[int]) -> str:
        return decode(self.tokenizer, ids, skip_special_tokens=True)

    @cached_property
    def _accuracy(self) -> Scorer:
        """Made when it is first needed: a task's judgement may want a process of its own."""
        if "accuracy" in self._scorers:
            return self._scorers["accuracy"]
        return self._make_scorers({"accuracy": accuracy_reward(self._task)})["accuracy"]

    def _make_scorers(self, rules: dict[str, Rule]) -> dict[str, Scorer]:
        """Functions that score samples by these rules, in this process or in a sandbox that they share."""
        sandboxed = {name: rule for name, rule in rules.items() if isinstance(rule, Sandboxed)}
        limits = {"seconds": self._config.seconds, "memory": int(self._config.memory_gib * _GIB)}
        sandbox = Sandbox(sandboxed, **limits, workers=self._config.workers)
        counting = [sandbox, *(rule for rule in rules.values() if isinstance(rule, CallerReward | HttpReward))]
        self._failures += [each.failures for each in counting]
        self._logs += [each.logs for each in counting if not isinstance(each, HttpReward)]
        return {name: _scorer(name, rule, sandbox) for name, rule in rules.items()}


def _of_conversation(talk: Conversation) -> dict[str, Any]:
    """A sample's fields that only rollouts of several turns have."""
    return {
        "messages": talk.messages,
        "environment": talk.environment,
        "environment_reward": talk.reward,
        "environment_lost": talk.environment_lost,
    }


def _scorer(name: str, rule: Rule, sandbox: Sandbox) -> Scorer:
    if isinstance(rule, Sandboxed):
        return partial(sandbox.scores, name)
    if isinstance(rule, CallerReward | HttpReward | RewardModel):
        return rule.scores
    return lambda samples: [rule(sample) for sample in samples]
