"""What a sampler returns, and how it is packed for the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from policy_trainer.data.conversation import Conversation
from shared.batch import Array, StepRewards, TokenGroup
from shared.sampling_mask import SamplingMask

if TYPE_CHECKING:  # the commands that read samples need no PyTorch
    from policy_trainer.data.prompts import EncodedPrompt


@dataclass(frozen=True, eq=False)
class Completion:
    """ids: int64 (T,), with the EOS if it was sampled. logps: float32 (T,), at the sampling temperature.

    finished: True if an EOS token or a stop text ended it, False if it was cut off at the length limit. eos: whether
    the last id is an EOS token, which is not part of the text. sampling_mask: the tokens among which each was drawn,
    over which its log-prob is normalised; None for all. conversation: of a rollout of several turns; its ids and logps
    then include the tokens between the turns, whose log-probs are 0.
    """

    ids: np.ndarray
    logps: np.ndarray
    finished: bool
    eos: bool = False
    sampling_mask: SamplingMask | None = None
    conversation: Conversation | None = None

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled: all but those between the turns."""
        return len(self.ids) if self.conversation is None else int(self.conversation.mask.sum())


def loss_mask(completions: Sequence[Completion]) -> np.ndarray | None:
    """bool (C,): false for tokens that the model did not sample. None if it sampled all."""
    masks = [completion.conversation.mask for completion in completions if completion.conversation]
    return np.concatenate(masks) if masks else None


def turn_rewards(completions: Sequence[Completion], totals: np.ndarray) -> StepRewards:
    """The rewards that environments gave after turns of a group's rollouts, and the total rewards, (G,), at their ends.

    A turn's reward stands at its last sampled token.
    """
    rows: list[dict[int, float]] = []
    for completion, total in zip(completions, totals.tolist(), strict=True):
        assert completion.conversation
        ends = completion.conversation.turn_ends.tolist()
        row = dict(zip(ends, completion.conversation.step_rewards, strict=False))
        rows.append({**row, ends[-1]: row.get(ends[-1], 0.0) + total})
    return StepRewards(
        rewards=np.array([reward for row in rows for reward in row.values()], np.float32),
        ends=np.array([end for row in rows for end in row], np.int64),
        counts=np.array([len(row) for row in rows], np.int64),
    )


def group_tokens(
    prompt: "EncodedPrompt", completions: Sequence[Completion]
) -> tuple[TokenGroup, np.ndarray, np.ndarray]:
    """Packs a prompt and its completions: the tokens, float32 (C,) log-probs, and bool (G,) finished."""
    masks = [completion.sampling_mask for completion in completions]
    lengths = [len(completion.ids) for completion in completions]
    mask = SamplingMask.join(masks, lengths)
    ids = [completion.ids for completion in completions]
    tokens = _group(prompt.ids, ids, prompt.images, mask, prompt.teacher_ids)
    logps = np.concatenate([completion.logps for completion in completions])
    return tokens, logps, np.array([completion.finished for completion in completions])


TokenId = Annotated[int, Field(ge=0, lt=2**31)]

# Short, so that neither the learner nor the sampler spends time on it.
_COMPLETIONS = 4
_TOKENS = 32


@dataclass(frozen=True)
class Probe:
    """A prompt, the beginnings of completions, and the learner's log-prob of each of their tokens at temperature 1."""

    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    completions: list[Annotated[list[TokenId], Field(min_length=1)]]
    logps: list[float]

    def __post_init__(self) -> None:
        if len(self.logps) != sum(map(len, self.completions)):
            raise ValueError("a probe has one log-prob for each token of its completions")

    @property
    def group(self) -> TokenGroup:
        return _group(self.prompt_ids, self.completions)

    def difference(self, logps: np.ndarray) -> tuple[float, float]:
        """(C,) log-probs of the sampler at temperature 1 -> how far they are from the learner's: mean and largest."""
        distances = np.abs(logps.astype(np.float64) - self.logps)
        return float(distances.mean()), float(distances.max())


def probe_tokens(group: TokenGroup) -> TokenGroup:
    """The part of a group that makes a probe, a text: images would be large, so a completion's token replaces a prompt
    that has any."""
    prompt = group.completion_ids[:1] if group.images else group.prompt_ids
    return _group(prompt.tolist(), [ids[:_TOKENS].tolist() for ids in group.completions()[:_COMPLETIONS]])


def _group(
    prompt: Sequence[int],
    completions: Sequence[Sequence[int] | np.ndarray],
    images: Mapping[str, Array] = MappingProxyType({}),
    sampling_mask: SamplingMask | None = None,
    teacher_prompt: Sequence[int] = (),
) -> TokenGroup:
    return TokenGroup(
        np.array(prompt, np.int64),
        np.concatenate([np.array(ids, np.int64) for ids in completions]),
        np.array([len(ids) for ids in completions], np.int64),
        images,
        sampling_mask,
        np.array(teacher_prompt, np.int64) if teacher_prompt else None,
    )
