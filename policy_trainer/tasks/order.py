"""The order in which problems are drawn."""

from collections.abc import Sequence

import numpy as np

from shared.errors import UserError

# Indexes in one round of a mixture, so weights have a resolution of 1/1000.
ROUND = 1000


class Shuffle:
    """Endless passes over `size` places, each pass shuffled anew; a pure function of (seed, index)."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def place(self, index: int) -> int:
        number, offset = divmod(index, self._size)
        if number != self._pass:  # only the last order is kept: indexes nearly always come in sequence
            self._order = np.random.default_rng((self._seed, number)).permutation(self._size)
            self._pass = number
        return int(self._order[offset])


class Schedule:
    """Assigns indexes to sources. Each round of 1,000 indexes has every source in proportion to its weight, shuffled.

    The k-th index of a source, counted from 0, is its own index k: no problem is skipped or repeated, however indexes
    are divided among workers. A pure function of (seed, index).
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts = _counts(weights)
        self._slots = np.repeat(np.arange(len(weights)), self.counts)
        self._seed = seed
        self._round, self._order = -1, self._slots

    def place(self, index: int) -> tuple[int, int]:
        """(source, index within the source)."""
        number, offset = divmod(index, ROUND)
        if number != self._round:  # only the last order is kept: indexes nearly always come in sequence
            self._order = np.random.default_rng((self._seed, number, ROUND)).permutation(self._slots)
            self._round = number
        source = int(self._order[offset])
        earlier = int(np.count_nonzero(self._order[:offset] == source))
        return source, number * self.counts[source] + earlier


def _counts(weights: Sequence[float]) -> list[int]:
    """How often each source occurs in a round: its share of the weights, rounded by the largest-remainder method."""
    shares = [weight / sum(weights) * ROUND for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: ROUND - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise UserError(f"data.mixture: a weight of {weights[counts.index(0)]:g} is less than one of {ROUND} problems")
    return counts
