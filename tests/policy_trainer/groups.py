"""Groups for tests of formulas: rewards and lengths are what matters, the tokens are made up."""

from typing import Any

import numpy as np

from policy_trainer.algorithms.objective.group import Group
from shared.batch import Array, TokenGroup


def make_group(rewards: Array, lengths: Array | None = None, **fields: Any) -> Group:
    """A group with these rewards, of completions of one token each where lengths are not given."""
    lengths = np.ones(len(rewards), np.int64) if lengths is None else lengths
    tokens = TokenGroup(np.array([1]), np.ones(lengths.sum(), np.int64), lengths)
    return Group(tokens=tokens, rewards=rewards, sequence_mask=~np.isnan(rewards), **fields)
