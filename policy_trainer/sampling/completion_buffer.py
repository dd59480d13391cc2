"""The tokens sampled so far."""

import torch
from torch import Tensor

from policy_trainer.data.completion import Completion

# Finished rows are dropped once they are more than this share of the batch: dropping moves the other rows.
_DROP_SHARE = 0.125


class CompletionBuffer:
    """R completions that grow by one token per step. The model still computes B of them, the active batch.

    A finished completion stays in the batch, its new tokens ignored, until enough can be dropped together.
    """

    def __init__(self, rows: int, max_completion_length: int, device: torch.device) -> None:
        self._ids = torch.zeros(rows, max_completion_length, dtype=torch.long, device=device)
        self._logps = torch.zeros(rows, max_completion_length, device=device)
        self._lengths = torch.full((rows,), max_completion_length, device=device)
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._length = 0
        # (B,): the completion of each batch row, and whether it is unfinished.
        self._rows = torch.arange(rows, device=device)
        self._unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self._left = rows

    @property
    def done(self) -> bool:
        """Whether all completions are finished, or have the maximum length."""
        return self._left == 0 or self._length == self._ids.shape[1]

    def append(self, tokens: Tensor, logps: Tensor) -> None:
        """int64 (B,) tokens and float32 (B,) log-probs of the batch."""
        self._ids[self._rows, self._length] = tokens
        self._logps[self._rows, self._length] = logps
        self._length += 1

    def finish(self, ended: Tensor) -> None:
        """ended: bool (B,), rows that have ended by an EOS or stop text, at their last token or an earlier one."""
        ending = self._rows[ended & self._unfinished]
        if len(ending):
            self._lengths[ending] = self._length
            self._finished[ending] = True
            self._unfinished &= ~ended
            self._left -= len(ending)

    def drop_finished(self) -> Tensor | None:
        """int64 (B',) batch rows that are kept, in their new order; None while too few are finished to drop.

        Tail rows fill the freed slots, so that few rows move.
        """
        if len(self._rows) - self._left <= _DROP_SHARE * len(self._rows):
            return None
        kept = self._unfinished.nonzero()[:, 0]
        slots = torch.arange(self._left, device=kept.device)
        slots[~self._unfinished[: self._left]] = kept[kept >= self._left]
        self._rows = self._rows[slots]
        self._unfinished = self._unfinished[slots]
        return slots

    def last_tokens(self, count: int) -> list[list[int]]:
        """Up to `count` of the last tokens of each batch row."""
        return self._ids[self._rows, max(0, self._length - count) : self._length].tolist()

    def completions(self, eos: Tensor) -> list[Completion]:
        """All R completions. eos: int64 (E,), the ids that end a completion."""
        ids, logps = self._ids.cpu().numpy(), self._logps.cpu().numpy()
        last = self._ids.gather(1, self._lengths[:, None] - 1)[:, 0]
        ends = zip(self._lengths.tolist(), self._finished.tolist(), torch.isin(last, eos).tolist(), strict=True)
        return [
            Completion(ids[row, :length].copy(), logps[row, :length].copy(), finished, ended_with_eos)
            for row, (length, finished, ended_with_eos) in enumerate(ends)
        ]
