"""Regrouping: groups made of completions of several rounds.

A group whose rewards are all equal teaches nothing. It is kept, its problem is sampled again in later rounds, and as
soon as the rewards differ a group is drawn from all of the problem's completions, as Simple-GRPO's regroup_ver does.
"""

from dataclasses import dataclass

import numpy as np

from policy_trainer.config import SamplingConfig
from policy_trainer.rollout.sampled_group import Drawn, SampledGroup
from policy_trainer.weights.publication import Publication


@dataclass(frozen=True, eq=False)
class Kept:
    """All completions of a problem so far. since: the round of the first."""

    group: SampledGroup
    since: int


class Pool:
    """The problems of a worker that wait for rewards that differ. It lives in memory: a killed worker loses it."""

    def __init__(self, config: SamplingConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._kept: dict[int, Kept] = {}
        self._round = 0
        self._of: tuple[str, int] | None = None

    def again(self, publication: Publication) -> list[Drawn]:
        """The problems to sample again in this round, those first that have waited longest. One place of the round is
        always left to a new problem. Completions of another lineage or epoch are forgotten: no batch may mix them."""
        if self._of != (publication.lineage, publication.epoch):
            self._kept.clear()
            self._of = publication.lineage, publication.epoch
        return [kept.group.drawn for kept in self._kept.values()][: self._config.prompts_per_round - 1]

    def sift(self, groups: list[SampledGroup]) -> list[SampledGroup]:
        """The groups to train on after a round: of those that were sampled, and of those that are kept no longer. All
        have num_generations completions and stand in the order of their problems; the other ones are kept."""
        self._round += 1
        for group in groups:
            earlier = self._kept.pop(group.drawn.index, None)
            now = Kept(group, self._round) if earlier is None else Kept(earlier.group.with_later(group), earlier.since)
            self._kept[group.drawn.index] = now
        ready = sorted(index for index, kept in self._kept.items() if self._is_ready(kept))
        return [self._choose(self._kept.pop(index).group) for index in ready]

    def _is_ready(self, kept: Kept) -> bool:
        return kept.group.has_variance or self._round - kept.since >= self._config.regroup

    def _choose(self, group: SampledGroup) -> SampledGroup:
        """num_generations of a problem's completions: with rewards that differ if there are such, else the newest."""
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
