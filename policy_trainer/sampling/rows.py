"""What has been sampled so far."""

import torch
from torch import Tensor

from policy_trainer.data.completion import Completion

# Rows that have ended leave when they are so large a share: to move the others each time that one ends would cost more.
_LEAVING_SHARE = 0.125


class Rows:
    """R completions that grow together, by one token each, until one after the other ends.

    Rows that have ended go on for a while, unread, until enough of them can leave.
    """

    def __init__(self, rows: int, max_completion_length: int, device: torch.device) -> None:
        self._ids = torch.zeros(rows, max_completion_length, dtype=torch.long, device=device)
        self._logps = torch.zeros(rows, max_completion_length, device=device)
        self._lengths = torch.full((rows,), max_completion_length, device=device)
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._length = 0
        # Of the B rows that are computed: which they are, and which of them have not ended.
        self._rows = torch.arange(rows, device=device)
        self._growing = torch.ones(rows, dtype=torch.bool, device=device)
        self._left = rows

    @property
    def done(self) -> bool:
        """Whether all have ended, or are as long as they may be."""
        return self._left == 0 or self._length == self._ids.shape[1]

    def append(self, tokens: Tensor, logps: Tensor) -> None:
        """(B,) int64 tokens of the rows that are computed and their float32 (B,) log-probs."""
        self._ids[self._rows, self._length] = tokens
        self._logps[self._rows, self._length] = logps
        self._length += 1

    def end(self, ended: Tensor) -> None:
        """bool (B,): which have ended by themselves, with the token that they were just given or before."""
        ending = self._rows[ended & self._growing]
        if len(ending):
            self._lengths[ending] = self._length
            self._finished[ending] = True
            self._growing &= ~ended
            self._left -= len(ending)

    def leave(self) -> Tensor | None:
        """The (B',) places of the rows that stay, once it is worth it that the others leave.

        The last take the places of those that leave, so that few rows move.
        """
        if len(self._rows) - self._left <= _LEAVING_SHARE * len(self._rows):
            return None
        staying = self._growing.nonzero()[:, 0]
        places = torch.arange(self._left, device=staying.device)
        places[~self._growing[: self._left]] = staying[staying >= self._left]
        self._rows = self._rows[places]
        self._growing = self._growing[places]
        return places

    def tails(self, tokens: int) -> list[list[int]]:
        """The last tokens of each row that is computed, as many or all that there are."""
        return self._ids[self._rows, max(0, self._length - tokens) : self._length].tolist()

    def completions(self, eos: Tensor) -> list[Completion]:
        """eos: int64 (E,), the ids that end a completion."""
        ids, logps = self._ids.cpu().numpy(), self._logps.cpu().numpy()
        last = self._ids.gather(1, self._lengths[:, None] - 1)[:, 0]
        ends = zip(self._lengths.tolist(), self._finished.tolist(), torch.isin(last, eos).tolist(), strict=True)
        return [
            Completion(ids[row, :length].copy(), logps[row, :length].copy(), finished, ended_with_eos)
            for row, (length, finished, ended_with_eos) in enumerate(ends)
        ]
