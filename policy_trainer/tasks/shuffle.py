"""The order in which problems are drawn."""

import numpy as np


class Shuffle:
    """Pass after pass over `size` places, each pass in an order of its own; a pure function of (seed, index)."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def place(self, index: int) -> int:
        number, offset = divmod(index, self._size)
        if number != self._pass:  # only the newest order is kept: drawing is nearly always in sequence
            self._order = np.random.default_rng((self._seed, number)).permutation(self._size)
            self._pass = number
        return int(self._order[offset])
