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

# Longer texts are cut in a batch's `sample`, which is for people and limited in size: gold answers behind these
# characters, beginnings of answers in front of them.
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
        """The rewards that the learner compares: those of steps if steps are judged, several apart for gdpo, else those
        of completions."""
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
        ours, theirs = self.judgement, later.judgement
        return JudgedGroup(
            self.drawn,
            [*self.completions, *later.completions],
            Judgement(
                np.concatenate([ours.rewards, theirs.rewards]),
                {name: np.concatenate([part, theirs.parts[name]]) for name, part in ours.parts.items()},
                [*ours.samples, *theirs.samples],
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


@dataclass(frozen=True, eq=False)
class Kept:
    """All completions of a problem so far. since: the round of the first."""

    group: JudgedGroup
    since: int


class Pool:
    """A worker's problems that wait for rewards that differ. Kept in memory only: a killed worker loses it."""

    def __init__(self, config: SamplingConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._kept: dict[int, Kept] = {}
        self._round = 0
        self._source: tuple[str, int] | None = None

    def again(self, publication: Publication) -> list[Drawn]:
        """The problems to sample again in this round, the longest waiting first. One place of the round is always left
        for a new problem. Completions of another lineage or epoch are dropped: no batch may mix them."""
        if self._source != (publication.lineage, publication.epoch):
            self._kept.clear()
            self._source = publication.lineage, publication.epoch
        return [kept.group.drawn for kept in self._kept.values()][: self._config.prompts_per_round - 1]

    def sift(self, groups: list[JudgedGroup]) -> list[JudgedGroup]:
        """The groups to train on after a round: from the groups just sampled and those no longer kept. All have
        num_generations completions, in the order of their problems; the other groups are kept."""
        self._round += 1
        for group in groups:
            earlier = self._kept.pop(group.drawn.index, None)
            now = Kept(group, self._round) if earlier is None else Kept(earlier.group.with_later(group), earlier.since)
            self._kept[group.drawn.index] = now
        ready = sorted(index for index, kept in self._kept.items() if self._is_ready(kept))
        return [self._choose(self._kept.pop(index).group) for index in ready]

    def _is_ready(self, kept: Kept) -> bool:
        return kept.group.has_variance or self._round - kept.since >= self._config.regroup

    def _choose(self, group: JudgedGroup) -> JudgedGroup:
        """num_generations of a problem's completions: with differing rewards if possible, else the newest."""
        size, wanted = len(group.completions), self._config.num_generations
        if size <= wanted:
            return group
        if not group.has_variance:
            return group.only(range(size - wanted, size))
        chance = np.random.default_rng((self._seed, group.drawn.index))
        while True:
            chosen = group.only(np.sort(chance.choice(size, wanted, replace=False)).tolist())
            if chosen.has_variance:
                return chosen
