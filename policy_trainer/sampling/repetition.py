"""Repetition penalty: tokens that the prompt or the completion has already become less likely."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor


class Repetition(Protocol):
    """Knows the tokens of each row of the batch."""

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B, V) logits to draw from."""
        ...

    def append(self, tokens: Tensor) -> None:
        """int64 (B,): the tokens that were just sampled."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows, int64 (B',), in this order."""
        ...


class Unpenalised:
    """Repetitions cost nothing."""

    def __call__(self, logits: Tensor) -> Tensor:
        return logits

    def append(self, tokens: Tensor) -> None:
        pass

    def select(self, rows: Tensor) -> None:
        pass


class RepetitionPenalty:
    """Divides the positive logits of earlier tokens by the penalty and multiplies the negative ones, as transformers
    and vLLM do (CTRL, arXiv 1909.05858)."""

    def __init__(
        self, penalty: float, prompts: Sequence[Sequence[int]], num_generations: int, device: torch.device
    ) -> None:
        """Row i continues prompt i // num_generations."""
        self._penalise = RepetitionPenaltyLogitsProcessor(penalty)
        width = max(map(len, prompts))
        # Padded with a token of the prompt itself: another one would be penalised.
        padded = [[*prompt, *[prompt[0]] * (width - len(prompt))] for prompt in prompts]
        self._earlier = torch.tensor(padded, device=device).repeat_interleave(num_generations, 0)

    def __call__(self, logits: Tensor) -> Tensor:
        return self._penalise(self._earlier, logits.float())  # type: ignore[arg-type]

    def append(self, tokens: Tensor) -> None:
        self._earlier = torch.cat([self._earlier, tokens[:, None]], dim=1)

    def select(self, rows: Tensor) -> None:
        self._earlier = self._earlier[rows]


def make_repetition(
    penalty: float, prompts: Sequence[Sequence[int]], num_generations: int, device: torch.device
) -> Repetition:
    """The penalty; 1 turns it off."""
    return Unpenalised() if penalty == 1 else RepetitionPenalty(penalty, prompts, num_generations, device)
