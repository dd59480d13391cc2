"""The completions of one problem, as a worker sampled and judged them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policy_trainer.data.completion import Completion
from policy_trainer.data.problem import Problem
from policy_trainer.objective.group import RewardParts, compared_rewards, has_variance
from policy_trainer.rewards.judging import Judgement
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
class SampledGroup:
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
        """What a batch's `sample` says of the group for people: the problem's index, its gold answer, and the
        beginning of the answer that stood in the prompt, which rewards saw, too."""
        answer, start = self.drawn.problem.answer, self.judgement.samples[0].start
        texts = {"answer": answer[:_ANSWER_CHARACTERS], "start": start[-_START_CHARACTERS:]}
        return {"index": self.drawn.index, **{name: text for name, text in texts.items() if text}}

    @property
    def tokens(self) -> int:
        return sum(len(completion.ids) for completion in self.completions)

    def with_later(self, later: "SampledGroup") -> "SampledGroup":
        """Both groups' completions of the same problem, whose steps are not judged."""
        ours, theirs = self.judgement, later.judgement
        return SampledGroup(
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

    def only(self, places: Sequence[int]) -> "SampledGroup":
        """The completions at these places, whose steps are not judged."""
        judged = self.judgement
        return SampledGroup(
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
