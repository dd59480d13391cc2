"""Completions as rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig
from policy_trainer.rewards import Sample
from policy_trainer.rewards.apart import Apart, ApartRewards
from policy_trainer.rewards.model import RewardModel
from policy_trainer.rewards.registry import Rule, accuracy_rule, choose_rewards
from policy_trainer.sampling.interface import Completion
from policy_trainer.tasks.interface import Problem, Task

_GIB = 2**30


@dataclass(frozen=True, eq=False)
class Judgement:
    """rewards: float32 (G,) weighted totals, NaN where a part that weighs could not be judged. parts: float32 (G,)."""

    rewards: np.ndarray
    parts: dict[str, np.ndarray]


class Judge:
    """Completions -> rewards by name and their weighted sum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: Task, config: CommonConfig) -> None:
        """Raises Refused for rewards that cannot be used."""
        self._tokenizer = tokenizer
        self._rewards = choose_rewards(config, task)
        self._accuracy = accuracy_rule(task)
        rules = {"accuracy": self._accuracy, **{name: chosen.rule for name, chosen in self._rewards.items()}}
        apart = {name: rule for name, rule in rules.items() if isinstance(rule, Apart)}
        limits = {"seconds": config.judging.seconds, "memory": int(config.judging.memory_gib * _GIB)}
        self._apart = ApartRewards(apart, **limits) if apart else None

    def judge(self, problem: Problem, completions: Sequence[Completion]) -> Judgement:
        return self.score([self.sample(problem, completion) for completion in completions])

    def score(self, samples: Sequence[Sample]) -> Judgement:
        """The same, of completions of any problems."""
        parts = {name: self._scores(name, chosen.rule, samples) for name, chosen in self._rewards.items()}
        total = np.zeros(len(samples), dtype=np.float32)
        for name, chosen in self._rewards.items():
            if chosen.weight:  # what is only logged must not make a completion unjudged
                total += chosen.weight * parts[name]
        return Judgement(total, parts)

    def right(self, samples: Sequence[Sample]) -> np.ndarray:
        """float32 (G,): 1 where a completion is right by the task's own judgement, else 0; NaN where there is none."""
        return self._scores("accuracy", self._accuracy, samples)

    def sample(self, problem: Problem, completion: Completion) -> Sample:
        return Sample(problem, self.text(completion), len(completion.ids), completion.finished)

    @property
    def failures(self) -> dict[str, int]:
        """How many completions a reward could not judge so far because it failed: those that may, by name."""
        return dict(self._apart.failures) if self._apart else {}

    def text(self, completion: Completion) -> str:
        """For judging and reading only: nothing is ever tokenised again. Without the EOS, be it special or not."""
        ids = completion.ids.tolist()
        return self.decode(ids[:-1] if completion.eos else ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _scores(self, name: str, rule: Rule, samples: Sequence[Sample]) -> np.ndarray:
        if isinstance(rule, RewardModel):
            scores = rule.scores(samples)
        elif isinstance(rule, Apart):
            assert self._apart is not None
            scores = self._apart.scores(name, samples)
        else:
            scores = [rule(sample) for sample in samples]
        return np.array(scores, dtype=np.float32)
