"""Rows that begin alike are scored as groups, so that what they share is computed once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ref_server.scoring.reference import group_of
from shared.batch import TokenGroup

# Rows that are compared at once: `_best` calls itself up to so many times, one inside of the other.
MOST_ROWS = 128


@dataclass(frozen=True)
class Row:
    """A sequence of at least two token ids, of which those from index `first` on want a log-prob. first >= 1."""

    ids: list[int]
    first: int = 1


@dataclass(frozen=True)
class _Cluster:
    """Rows, by index, whose first `shared` >= 1 tokens are the same. scored: whether one wants log-probs of those."""

    rows: Sequence[int]
    shared: int
    scored: bool


class SharedPrefixes:
    """groups: what is to be scored instead of the rows, one after the other.

    A group's prompt has no log-probs. Where a row wants those of the shared tokens, they are scored once more, as a
    completion of the first token.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._clusters = _cluster(rows)
        self.groups = [group for cluster in self._clusters for group in self._groups(cluster)]

    def by_row(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """values: (C,) of each group, one for each completion token. Returns (length - 1,) of each row: those of its
        tokens but the first; zeros before index `first`, where nothing was computed."""
        by_index: dict[int, np.ndarray] = {}
        remaining = iter(values)
        for cluster in self._clusters:
            of_completions = next(remaining)
            unscored = np.zeros(cluster.shared - 1, of_completions.dtype)
            of_shared = next(remaining) if cluster.scored else unscored
            ends = np.cumsum([len(self._rows[index].ids) - cluster.shared for index in cluster.rows])
            for index, rest in zip(cluster.rows, np.split(of_completions, ends[:-1]), strict=True):
                by_index[index] = np.concatenate([of_shared, rest])
        return [by_index[index] for index in range(len(self._rows))]

    def _groups(self, cluster: _Cluster) -> Iterator[TokenGroup]:
        rows = [self._rows[index].ids for index in cluster.rows]
        prefix = rows[0][: cluster.shared]
        yield group_of(prefix, [ids[cluster.shared :] for ids in rows])
        if cluster.scored:
            yield group_of(prefix[:1], [prefix[1:]])


def _cluster(rows: Sequence[Row]) -> list[_Cluster]:
    """The clusters with which the fewest tokens are computed."""
    order = sorted(range(len(rows)), key=lambda index: rows[index].ids)
    clusters = []
    for start in range(0, len(order), MOST_ROWS):
        part = order[start : start + MOST_ROWS]
        clusters += _best(
            rows, part, [_common(rows[index].ids, rows[following].ids) for index, following in pairwise(part)]
        )[1]
    return clusters


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens two rows have in common at their beginning, without the last of either."""
    most = min(len(first), len(second)) - 1
    different = np.flatnonzero(np.array(first[:most]) != np.array(second[:most]))
    return int(different[0]) if len(different) else most


def _best(rows: Sequence[Row], order: Sequence[int], shared: Sequence[int]) -> tuple[int, list[_Cluster]]:
    """(how many tokens are not computed, the clusters) of rows in the order of their tokens: all as one cluster, or
    divided where neighbours share the least. shared: of each row with the next, in tokens."""
    if len(order) == 1:
        return 0, [_Cluster(order, 1, scored=False)]
    least = min(shared)
    scored = least > 1 and any(rows[index].first < least for index in order)
    cuts = [0, *(index + 1 for index, common in enumerate(shared) if common == least), len(order)]
    parts = [_best(rows, order[start:end], shared[start : end - 1]) for start, end in pairwise(cuts)]
    saved = sum(part[0] for part in parts)
    together = (len(order) - 1) * least - least * scored
    if together > saved:
        return together, [_Cluster(order, least, scored)]
    return saved, [cluster for part in parts for cluster in part[1]]
