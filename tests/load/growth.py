"""Whether something that is sampled over time still grows once it has warmed up."""

from collections.abc import Sequence

import numpy as np


def warm(values: Sequence[float]) -> np.ndarray:
    """What comes after the first third."""
    return np.asarray(values[len(values) // 3 :], dtype=np.float64)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Growth over the measured span by the line that fits best, and the mean level, after the warm-up.

    A line through all samples and not the last less the first, so that one peak decides nothing.
    """
    settled = warm(values)
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    return slope * (len(settled) - 1), float(settled.mean())


def peaks(values: Sequence[float]) -> tuple[float, float]:
    """The largest value of the second third, and of the last."""
    settled = warm(values)
    middle = len(settled) // 2
    return float(settled[:middle].max()), float(settled[middle:].max())
