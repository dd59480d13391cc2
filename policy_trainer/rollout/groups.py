"""The completions of one problem, as a worker sampled and judged them, and groups made of several rounds' completions.

Regrouping: a group whose rewards are all equal teaches nothing. It is kept, its problem is sampled again in later
rounds, and as soon as the rewards differ a group is drawn from all of the problem's completions, as Simple-GRPO's
regroup_ver does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policy_trainer.config import SamplingConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.objective.group import RewardParts, compared_rewards, has_variance
from policy_trainer.rewards.judging import Judgement
from policy_trainer.weights.publication import Publication
from shared.batch import StepRewards

# Longer texts are cut in a batch's `sample`, which is for people and limited in size: gold answers keep their first
# characters, beginnings of answers their last.
_ANSWER_CHARACTERS = 1000
_START_CHARACTERS = 200


@dataclass(frozen=True, eq=False)
class Drawn:
    """A problem that will be sampled, its index and the token ids of its prompt."""

    index: int
    problem: Problem
    ids: list[int]


@dataclass(frozen=True, eq=False)
class JudgedGroup:
    """The completions of one problem and their rewards. versions: int64 (G,), of the weights that sampled them."""

    drawn: Drawn
    completions: list[Completion]
    judgement: Judgement
    steps: StepRewards | None
    versions: np.ndarray
    parts: RewardParts | None = None

    @property
    def compared_rewards(self) -> np.ndarray:
        """The rewards that the learner compares: of steps if steps are judged, of each part for gdpo, else of
        completions."""
        return compared_rewards(self.judgement.rewards, self.steps, self.parts)

    @property
    def has_variance(self) -> bool:
        return has_variance(self.compared_rewards)

    @property
    def about(self) -> dict[str, Any]:
        """The group's part of a batch's `sample`, for people: the problem's index, its gold answer, and the beginning
        of the answer that was part of the prompt, which rewards also see."""
        answer, start = self.drawn.problem.answer, self.judgement.samples[0].start
        texts = {"answer": answer[:_ANSWER_CHARACTERS], "start": start[-_START_CHARACTERS:]}
        return {"index": self.drawn.index, **{name: text for name, text in texts.items() if text}}

    @property
    def tokens(self) -> int:
        return sum(len(completion.ids) for completion in self.completions)

    def with_later(self, later: "JudgedGroup") -> "JudgedGroup":
        """Both groups' completions of the same problem, whose steps are not judged."""
        first, second = self.judgement, later.judgement
        return JudgedGroup(
            self.drawn,
            [*self.completions, *later.completions],
            Judgement(
                np.concatenate([first.rewards, second.rewards]),
                {name: np.concatenate([part, second.parts[name]]) for name, part in first.parts.items()},
                [*first.samples, *second.samples],
            ),
            None,
            np.concatenate([self.versions, later.versions]),
            self.parts and later.parts and self.parts.with_later(later.parts),
        )

    def only(self, places: Sequence[int]) -> "JudgedGroup":
        """The completions at these places, whose steps are not judged."""
        judged = self.judgement
        return JudgedGroup(
            self.drawn,
            [self.completions[place] for place in places],
            Judgement(
                judged.rewards[places],
                {name: part[places] for name, part in judged.parts.items()},
                [judged.samples[place] for place in places],
            ),
            None,
            self.versions[places],
            self.parts and self.parts.only(places),
        )


class Pool:
    """A worker's problems that wait for rewards that differ. Kept in memory only: a killed worker loses it."""

    def __init__(self, config: SamplingConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        # By index: all completions of a problem so far, and the round of the first.
        self._kept: dict[int, tuple[JudgedGroup, int]] = {}
        self._round = 0
        self._source: tuple[str, int] | None = None

    def again(self, publication: Publication) -> list[Drawn]:
        """The problems to sample again in this round, the longest waiting first. One place of the round is always left
        for a new problem. Completions of another lineage or epoch are dropped: no batch may mix them."""
        if self._source != (publication.lineage, publication.epoch):
            self._kept.clear()
            self._source = publication.lineage, publication.epoch
        return [group.drawn for group, _ in self._kept.values()][: self._config.prompts_per_round - 1]

    def sift(self, groups: list[JudgedGroup]) -> list[JudgedGroup]:
        """The groups to train on after a round: from the groups just sampled and those no longer kept. All have
        num_generations completions, in the order of their problems; the other groups are kept."""
        self._round += 1
        for group in groups:
            earlier, since = self._kept.pop(group.drawn.index, (None, self._round))
            self._kept[group.drawn.index] = (earlier.with_later(group) if earlier else group, since)
        ready = [
            index
            for index, (group, since) in self._kept.items()
            if group.has_variance or self._round - since >= self._config.regroup
        ]
        return [self._choose(self._kept.pop(index)[0]) for index in sorted(ready)]

    def _choose(self, group: JudgedGroup) -> JudgedGroup:
        """num_generations of a problem's completions: with differing rewards if possible, else the newest."""
        size, wanted = len(group.completions), self._config.num_generations
        if size <= wanted:
            return group
        if not group.has_variance:
            return group.only(range(size - wanted, size))
        generator = np.random.default_rng((self._seed, group.drawn.index))
        while True:
            chosen = group.only(np.sort(generator.choice(size, wanted, replace=False)).tolist())
            if chosen.has_variance:
                return chosen
