"""Computes the frozen model's log-probs; a forward that does not fit into memory is done in parts."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ref_server.scoring.reference import DeviceLost, Scores, TooLarge
from shared.batch import TokenGroup
from shared.devices import is_out_of_memory

# After one of these errors the process can never use its device again. Checked after is_out_of_memory, whose messages
# can begin like these.
_LOST = ("CUDA error", "cuDNN error")

_Part = tuple[Sequence[TokenGroup], Sequence[float]]


class Scorer:
    """A `Replica`. forward: a `LogprobForward`, called for its log-probs. version, device: of its weights."""

    def __init__(
        self, forward: Callable[[Sequence[TokenGroup], Sequence[float]], Tensor], version: int, device: str
    ) -> None:
        self.version = version
        self.device = device
        self._forward = forward

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Scores:
        """Scores all groups in one forward, or in several where memory does not suffice for one.

        A forward of several groups is halved, then one group by its completions, whose prompt is computed for each
        part again. Raises TooLarge when a single completion does not fit, DeviceLost.
        """
        waiting: list[_Part] = [(groups, temperatures)]
        pieces: list[np.ndarray] = []
        splits = 0
        while waiting:
            part = waiting.pop()
            logps = self._try(*part)
            if logps is not None:
                pieces.append(logps)
                continue
            splits += 1
            torch.cuda.empty_cache()  # joins fragmented memory; does nothing without CUDA
            waiting += reversed(_halves(*part))
        ends = np.cumsum([len(group.completion_ids) for group in groups])[:-1]
        return Scores(np.split(np.concatenate(pieces), ends), self.version, splits)

    def _try(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> np.ndarray | None:
        """float32 (sum of C,), or None when there is not enough memory: once this has returned, all of it is free."""
        try:
            with torch.inference_mode():
                return self._forward(groups, temperatures).float().cpu().numpy()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            if isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _LOST):
                raise DeviceLost(f"the device cannot be used any more: {error}") from error
            raise


def _halves(groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> list[_Part]:
    """Two parts whose completions, one after the other, are those of the whole. Raises TooLarge."""
    if len(groups) > 1:
        cut = len(groups) // 2
        return [(groups[:cut], temperatures[:cut]), (groups[cut:], temperatures[cut:])]
    (group,) = groups
    if group.size == 1:
        raise TooLarge(
            "completion_lengths",
            f"and the prompt make a row of {group.tokens} tokens, for which the memory of the device does not suffice",
        )
    return [([half], temperatures) for half in group.halves()]
