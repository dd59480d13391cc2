"""Judges completions by the configured rewards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem, Task
from policy_trainer.rewards import Sample
from policy_trainer.rewards.registry import Rule, accuracy_reward, choose_rewards
from policy_trainer.rewards.reward_model import RewardModel
from policy_trainer.rewards.sandbox.sandbox import Sandbox, Sandboxed

_GIB = 2**30


@dataclass(frozen=True, eq=False)
class Judgement:
    """rewards: float32 (G,) weighted totals, NaN where a reward with a weight other than 0 could not be judged.

    parts: float32 (G,) scores of each reward, by name.
    """

    rewards: np.ndarray
    parts: dict[str, np.ndarray]


class Judge:
    """Completions -> rewards by name and their weighted sum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: Task, config: CommonConfig) -> None:
        """Raises UserError if a reward cannot be used."""
        self._tokenizer = tokenizer
        chosen = choose_rewards(config, task)
        self._weights = {name: reward.weight for name, reward in chosen.items()}
        rules = {"accuracy": accuracy_reward(task), **{name: reward.rule for name, reward in chosen.items()}}
        sandboxed = {name: rule for name, rule in rules.items() if isinstance(rule, Sandboxed)}
        limits = {"seconds": config.judging.seconds, "memory": int(config.judging.memory_gib * _GIB)}
        self._sandbox = Sandbox(sandboxed, **limits)
        self._scorers = {name: _scorer(name, rule, self._sandbox) for name, rule in rules.items()}

    def judge(self, problem: Problem, completions: Sequence[Completion]) -> Judgement:
        return self.score([self.sample(problem, completion) for completion in completions])

    def score(self, samples: Sequence[Sample]) -> Judgement:
        """Like `judge`, for samples of any problems."""
        parts = {name: self._scores(name, samples) for name in self._weights}
        total = np.zeros(len(samples), dtype=np.float32)
        for name, weight in self._weights.items():
            if weight:  # a NaN in a reward that is only logged must not make the completion unrewarded
                total += weight * parts[name]
        return Judgement(total, parts)

    def right(self, samples: Sequence[Sample]) -> np.ndarray:
        """float32 (G,): 1 where the task judges a completion correct, else 0; NaN where it could not be judged."""
        return self._scores("accuracy", samples)

    def sample(self, problem: Problem, completion: Completion) -> Sample:
        return Sample(problem, self.text(completion), len(completion.ids), completion.finished)

    @property
    def failures(self) -> dict[str, int]:
        """Number of completions so far on which each sandboxed reward failed, by name."""
        return dict(self._sandbox.failures)

    def text(self, completion: Completion) -> str:
        """Text for rewards and logs, never tokenised again. The EOS is left out, even if it is no special token."""
        ids = completion.ids.tolist()
        return self.decode(ids[:-1] if completion.eos else ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _scores(self, name: str, samples: Sequence[Sample]) -> np.ndarray:
        return np.array(self._scorers[name](samples), dtype=np.float32)


def _scorer(name: str, rule: Rule, sandbox: Sandbox) -> Callable[[Sequence[Sample]], list[float]]:
    """A function that scores samples by one rule, in this process or in the sandbox."""
    if isinstance(rule, RewardModel):
        return rule.scores
    if isinstance(rule, Sandboxed):
        return partial(sandbox.scores, name)
    return lambda samples: [rule(sample) for sample in samples]
