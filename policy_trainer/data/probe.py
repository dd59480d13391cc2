"""Tokens whose log-probs learner and sampler compare: whoever samples must have the weights that were published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from shared.batch import TokenGroup

TokenId = Annotated[int, Field(ge=0, lt=2**31)]

# Short, so that neither the learner nor the sampler spends time on it.
_COMPLETIONS = 4
_TOKENS = 32


class LogpDifference(NamedTuple):
    """|sampler's - learner's| log-prob of the probe's tokens, in nats."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Probe:
    """A prompt, the beginnings of completions, and the learner's log-prob of each of their tokens at temperature 1."""

    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    completions: list[Annotated[list[TokenId], Field(min_length=1)]]
    logps: list[float]

    def __post_init__(self) -> None:
        if len(self.logps) != sum(map(len, self.completions)):
            raise ValueError("a probe has one log-prob for each token of its completions")

    @property
    def group(self) -> TokenGroup:
        return _group(self.prompt_ids, self.completions)

    def difference(self, logps: np.ndarray) -> LogpDifference:
        """logps: (C,) of the sampler, at temperature 1."""
        apart = np.abs(logps.astype(np.float64) - self.logps)
        return LogpDifference(float(apart.mean()), float(apart.max()))


def probe_tokens(group: TokenGroup) -> TokenGroup:
    """The part of a group that makes a probe."""
    return _group(group.prompt_ids.tolist(), [ids[:_TOKENS].tolist() for ids in group.completions()[:_COMPLETIONS]])


def _group(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> TokenGroup:
    return TokenGroup(
        np.array(prompt, np.int64),
        np.concatenate([np.array(ids, np.int64) for ids in completions]),
        np.array([len(ids) for ids in completions], np.int64),
    )
