"""One round of a worker: it draws problems, samples them together, and judges the completions.

Dynamic sampling (DAPO, arXiv 2503.14476, 3.2): a group whose rewards are all equal has zero advantages. It is replaced
by the group of another problem, at most sampling.max_resamples times.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from policy_trainer.config import RolloutConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.prompts import PromptEncoder, PromptTooLong
from policy_trainer.data.steps import step_judge, step_rewards
from policy_trainer.objective.group import RewardParts
from policy_trainer.reporting.metrics import WastedSamples
from policy_trainer.rewards import Sample
from policy_trainer.rewards.judging import Judge
from policy_trainer.rewards.registry import part_weights
from policy_trainer.rollout.groups import Drawn, JudgedGroup, Pool
from policy_trainer.sampling.sampler import Sampler, sampling_params
from policy_trainer.weights.publication import Publication
from shared.batch import StepRewards
from shared.errors import UserError

# After this many too long prompts in a row the worker gives up.
_MAX_DROPPED_IN_A_ROW = 10_000


@dataclass
class Round:
    """The groups of a round, in the order in which their problems were drawn, and counts of wasted samples.

    failures: rewards that failed in this round, as from `Judge.failures_since`.
    """

    groups: list[JudgedGroup]
    wasted: WastedSamples = field(default_factory=WastedSamples)
    judging_seconds: float = 0.0
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop_without_variance(self) -> int:
        """Drops the groups whose rewards are all equal; returns how many there were."""
        dropped = [group for group in self.groups if not group.has_variance]
        self.groups = [group for group in self.groups if group not in dropped]
        self.wasted.resampled_groups += len(dropped)
        self.wasted.resampled_tokens += sum(group.tokens for group in dropped)
        return len(dropped)


class Rounds:
    """Samples rounds. task_name: of the task that the problems are drawn from."""

    def __init__(
        self, config: RolloutConfig, sampler: Sampler, encoder: PromptEncoder, judge: Judge, task: Task
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._encoder = encoder
        self._judge = judge
        self._task = task
        self._params = sampling_params(config.sampling)
        self._apart = config.loss.advantage == "gdpo"
        self.task_name = task.name
        self._weights = part_weights(config, task)
        self._pool = Pool(config.sampling, config.seed)

    def next(self, draw: Callable[[], int], publication: Publication) -> Round:
        """The groups of prompts_per_round problems, at least one. draw: returns the index of this worker's next
        problem. publication: of the weights that the sampler has.

        Raises UserError for data that cannot be used.
        """
        current, before = Round([]), self._judge.failures
        while not current.groups:
            again = self._pool.again(publication)
            count = self._config.sampling.prompts_per_round - len(again)
            self._sample(current, [*self._draw(draw, count, current), *again], publication)
            self._resample(current, draw, publication)
            current.groups = self._pool.sift(current.groups)
        current.failures = self._judge.failures_since(before)
        return current

    def _resample(self, current: Round, draw: Callable[[], int], publication: Publication) -> None:
        """Dynamic sampling."""
        for _ in range(self._config.sampling.max_resamples):
            dropped = current.drop_without_variance()
            if not dropped:
                break
            self._sample(current, self._draw(draw, dropped, current), publication)

    def _sample(self, current: Round, drawn: list[Drawn], publication: Publication) -> None:
        """Adds the groups of these problems to a round. The first one is new: its index makes the seed."""
        seed = _sampling_seed(self._config.seed, drawn[0].index)
        sampled = self._sampler.sample([item.ids for item in drawn], self._params, seed)
        began = time.monotonic()
        problems = [item.problem for item in drawn]
        judged = self._judge.judge([*zip(problems, sampled, strict=True)])
        for item, completions, judgement in zip(drawn, sampled, judged, strict=True):
            steps = self._steps(item.problem, judgement.samples)
            versions = np.full(len(completions), publication.version, np.int64)
            parts = RewardParts.of(judgement.parts, self._weights) if self._apart else None
            current.groups.append(JudgedGroup(item, completions, judgement, steps, versions, parts))
        current.judging_seconds += time.monotonic() - began

    def _steps(self, problem: Problem, samples: Sequence[Sample]) -> StepRewards | None:
        judge = step_judge(self._task) if self._config.judging.steps else None
        if judge is None:
            return None
        rows = [judge(problem, sample.completion) for sample in samples]
        ids = [np.array(sample.ids) for sample in samples]
        return step_rewards(rows, ids, self._judge.decode, start=samples[0].start)

    def _draw(self, draw: Callable[[], int], count: int, current: Round) -> list[Drawn]:
        """The next `count` problems whose prompts are not too long."""
        drawn: list[Drawn] = []
        dropped_in_a_row = 0
        while len(drawn) < count:
            index = draw()
            problem = self._task.problem(index)
            try:
                drawn.append(Drawn(index, problem, self._encoder.encode(problem)))
                dropped_in_a_row = 0
            except PromptTooLong as error:
                if self._config.data.too_long == "refuse":
                    raise UserError(f"problem {index}: {error}; raise it, or set data.too_long = drop") from None
                current.wasted.dropped_prompts += 1
                dropped_in_a_row += 1
                if dropped_in_a_row > _MAX_DROPPED_IN_A_ROW:
                    raise UserError(f"{dropped_in_a_row} prompts in a row were too long: {error}") from None
        return drawn


def _sampling_seed(seed: int, index: int) -> int:
    """The seed of the sampler call whose first problem has this index."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
