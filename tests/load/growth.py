"""Whether a value that is sampled over time still grows after its warm-up."""

from collections.abc import Sequence

import numpy as np


def warm(values: Sequence[float]) -> np.ndarray:
    """The values after the first third."""
    return np.asarray(values[len(values) // 3 :], dtype=np.float64)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Growth after the warm-up, by a least-squares line, and the mean level.

    A single peak changes the line less than it would change the difference of the last and the first value.
    """
    settled = warm(values)
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    return slope * (len(settled) - 1), float(settled.mean())


def peaks(values: Sequence[float]) -> tuple[float, float]:
    """The largest value of the second third, and of the last."""
    settled = warm(values)
    middle = len(settled) // 2
    return float(settled[:middle].max()), float(settled[middle:].max())
