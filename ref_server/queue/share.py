"""How much of a limit a run may use: at most as much as is free. `Shares` of `access` is the same rule in memory."""

from typing import NamedTuple

# What a run has and what all runs of its uploader have add up to at most so many times what is free.
_OF_UPLOADER = 3


class Share(NamedTuple):
    """What a run has of a limited amount: of_run of it, all runs together have of_all.

    A run alone gets half, n runs that want all get 1 / (n + 1) each, and something is always free for another run.
    Clients choose the names of runs, so the uploader counts too: of_uploader is the total of all batches uploaded with
    the same token; 0 without tokens. However many runs a token names, together they get at most three quarters.
    unit, what: for messages, as in `batches` that `wait`.
    """

    run: str
    of_run: int
    of_uploader: int
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
        if self.of_uploader and self.of_uploader + size + self.of_run + size > _OF_UPLOADER * (free - size):
            return (
                f"{has}, and {self.of_uploader} of all runs of its token; with {size} more for each, the sum would "
                f"exceed {_OF_UPLOADER} times what is free: {free} are free, {limit} is {most}. A run with a token of "
                "its own gets more"
            )
        return None

    def room(self, most: int, most_of_run: int) -> int:
        """How many more of size 1 the run may have."""
        free = most - self.of_all
        room = min(most_of_run - self.of_run, (free - self.of_run) // 2)
        if self.of_uploader:
            room = min(room, (_OF_UPLOADER * free - self.of_uploader - self.of_run) // (_OF_UPLOADER + 2))
        return max(0, room)
