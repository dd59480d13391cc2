"""How much of a limit a run may use: at most as much as is free. `Shares` of `access` is the same rule in memory."""

from typing import NamedTuple


class Share(NamedTuple):
    """What a run has of a limited amount: of_run of it, all runs together have of_all.

    A run alone gets half, n runs that want all get 1 / (n + 1) each, and something is always free for another run.
    unit, what: for messages, as in `batches` that `wait`.
    """

    run: str
    of_run: int
    of_all: int
    unit: str
    what: str

    def refusal(self, size: int, most: int, limit: str, most_of_run: int) -> str | None:
        """Why the run may not have `size` more; None if it may. limit: the name of `most`."""
        has = f"{self.of_run} {self.unit} of run {self.run!r} {self.what}"
        if self.of_run + size > most_of_run:
            return f"{has}, this is {size} more and {limit}_per_run is {most_of_run}"
        free = most - self.of_all
        if self.of_run + size > free - size:
            return f"{has}, this is {size} more, and at most as many as are free may: {free} are, {limit} is {most}"
        return None

    def room(self, most: int, most_of_run: int) -> int:
        """How many more of size 1 the run may have."""
        return max(0, min(most_of_run - self.of_run, (most - self.of_all - self.of_run) // 2))
