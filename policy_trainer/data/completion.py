"""What a sampler returns, and how it is packed for the wire."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.batch import TokenGroup


@dataclass(frozen=True, eq=False)
class Completion:
    """ids: int64 (T,), with the EOS if it was sampled. logps: float32 (T,), at the sampling temperature.

    finished: True if an EOS token or a stop text ended it, False if it was cut off at the length limit. eos: whether
    the last id is an EOS token, which is not part of the text.
    """

    ids: np.ndarray
    logps: np.ndarray
    finished: bool
    eos: bool = False


def group_tokens(prompt: Sequence[int], completions: Sequence[Completion]) -> tuple[TokenGroup, np.ndarray, np.ndarray]:
    """Packs a prompt and its completions: the tokens, float32 (C,) log-probs, and bool (G,) finished."""
    tokens = TokenGroup(
        np.array(prompt, dtype=np.int64),
        np.concatenate([completion.ids for completion in completions]),
        np.array([len(completion.ids) for completion in completions], dtype=np.int64),
    )
    logps = np.concatenate([completion.logps for completion in completions])
    return tokens, logps, np.array([completion.finished for completion in completions])
