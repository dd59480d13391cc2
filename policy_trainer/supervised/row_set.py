"""The rows of a run: training rows in their order, and held-out rows."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from policy_trainer.tasks.order import Shuffle
from policy_trainer.tasks.problem_set import EVAL_EVERY
from shared.errors import UserError

Row = TypeVar("Row")


class RowSet(Generic[Row]):
    """Training rows in batches, shuffled in each epoch by a pure function of the seed; and held-out rows."""

    def __init__(
        self, rows: Sequence[Row], eval_rows: Sequence[Row], *, epochs: int, batch_size: int, seed: int
    ) -> None:
        self.rows = rows
        self.eval_rows = eval_rows
        self._total = epochs * len(rows)
        self._batch_size = batch_size
        self._shuffle = Shuffle(len(rows), seed)

    @property
    def steps(self) -> int:
        """Steps of all epochs. The last step may have fewer rows than the others."""
        return -(-self._total // self._batch_size)

    def batch(self, step: int) -> list[Row]:
        """The rows of a step, counted from 0."""
        start = step * self._batch_size
        places = range(start, min(start + self._batch_size, self._total))
        return [self.rows[self._shuffle.place(place)] for place in places]


def every_tenth(
    found: Sequence[Row], key: Callable[[Row], str], source: str, note: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and every tenth row, held out. No key is in both.

    source: the setting to name, and its value. note: called with the number of rows that are in neither.

    Raises UserError where nothing is left to train on.
    """
    held_back = found[::EVAL_EVERY]
    held_out = {key(row) for row in held_back}
    train = [row for row in found if key(row) not in held_out]
    if not train:
        raise UserError(
            f"{source} leaves nothing to train on: one of every {EVAL_EVERY} rows, and each copy of it, is held out; "
            "add some, or name held-out ones with --data.eval-path"
        )
    if copies := len(found) - len(train) - len(held_back):
        note(
            f"{source} has {len(found)} rows: {copies} of them are left out, because they share a prompt with a "
            f"held-out row (every {EVAL_EVERY}th is held out); to train on all, name others with --data.eval-path"
        )
    return train, list(held_back)
