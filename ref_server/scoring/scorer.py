"""Computes the frozen model's log-probs; a forward that does not fit into memory is done in parts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ref_server.scoring.reference import DeviceLost, Likeliest, Scores, TooLarge
from shared.batch import TokenGroup
from shared.devices import is_out_of_memory
from shared.logprobs import ServingForward

# After one of these errors the process can never use its device again. Checked after is_out_of_memory, whose messages
# can begin like these.
_LOST = ("CUDA error", "cuDNN error")

_Part = tuple[Sequence[TokenGroup], Sequence[float]]


class Scorer:
    """A `Replica`. version, device: of the forward's weights."""

    def __init__(self, forward: ServingForward, version: int, device: str) -> None:
        self.version = version
        self.device = device
        self._forward = forward

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, likeliest: bool = False) -> Scores:
        """Scores all groups, and those with a teacher's prompt once more with that. Raises TooLarge when a single
        completion does not fit, DeviceLost."""
        scores = self._score(groups, temperatures, likeliest)
        places = [place for place, group in enumerate(groups) if group.teacher_prompt_ids is not None]
        if not places:
            return scores
        for_teacher = [groups[place].for_teacher() for place in places]
        again = self._score(for_teacher, [temperatures[place] for place in places], likeliest=False)
        by_place = dict(zip(places, again.logps, strict=True))
        teacher_logps = [by_place.get(place) for place in range(len(groups))]
        return replace(scores, splits=scores.splits + again.splits, teacher_logps=teacher_logps)

    def _score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float], likeliest: bool) -> Scores:
        """Scores all groups in one forward, or in several where memory does not suffice for one.

        A forward of several groups is halved, then one group by its completions, whose prompt is computed for each
        part again. Raises the errors of `score`.
        """
        waiting: list[_Part] = [(groups, temperatures)]
        pieces: list[tuple[np.ndarray, ...]] = []
        splits = 0
        while waiting:
            part = waiting.pop()
            piece = self._try(*part, likeliest)
            if piece is not None:
                pieces.append(piece)
                continue
            splits += 1
            torch.cuda.empty_cache()  # joins fragmented memory; does nothing without CUDA
            waiting += reversed(_halves(*part))
        ends = np.cumsum([len(group.completion_ids) for group in groups])[:-1]
        logps, *others = (np.split(np.concatenate(parts), ends) for parts in zip(*pieces, strict=True))
        pairs = [Likeliest(*pair) for pair in zip(*others, strict=True)] if likeliest else None
        return Scores(logps, self.version, splits, likeliest=pairs)

    def _try(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], likeliest: bool
    ) -> tuple[np.ndarray, ...] | None:
        """(sum of C,) log-probs, and if wanted the likeliest tokens and their log-probs; None when there is not enough
        memory: once this has returned, all of it is free."""
        try:
            with torch.inference_mode():
                if not likeliest:
                    return (self._forward(groups, temperatures).float().cpu().numpy(),)
                logps, tokens, highest = self._forward.with_likeliest(groups, temperatures)
                return logps.float().cpu().numpy(), tokens.cpu().numpy(), highest.float().cpu().numpy()
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
