"""Forwards over right-padded rows of similar length: correct for every causal model, as none attends to the right."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs.forward import HiddenForward, body_of
from shared.logprobs.head import target_logps, target_logps_and_entropies, target_logps_and_likeliest
from shared.logprobs.kept_tokens import kept_tokens
from shared.logprobs.tiles import wide
from shared.logprobs.vision import Vision, vision_of

# Most tokens of a padded micro-batch, unless a single row has more.
ROW_TOKENS = 4096


# A group, and the ids of its prompt and one completion.
_Row = tuple[TokenGroup, np.ndarray]


class PaddedForward(HiddenForward):
    """Hidden states of padded rows. Only those that predict a completion token go through the tiled head."""

    name = "padded"

    def _hidden(self, groups: Sequence[TokenGroup]) -> Tensor:
        def states(**inputs: Any) -> Tensor:
            return body_of(self._model)(**inputs).last_hidden_state

        return torch.cat(_by_row(self._model, self._vision, _rows(groups), states))


class PlainForward:
    """Uses the model's own logits, so it is correct for any head. Not tiled, so it needs more memory."""

    name = "plain"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._vision = vision_of(model)

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return torch.cat([target_logps(*parts) for parts in self._parts(groups, temperatures)])

    def with_entropy(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        rows = [target_logps_and_entropies(*part) for part in self._parts(groups, temperatures)]
        logps, entropies = zip(*rows, strict=True)
        entropy = torch.cat(entropies)
        return torch.cat(logps), entropy if entropy_grad else entropy.detach()

    def with_likeliest(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = [target_logps_and_likeliest(*part) for part in self._parts(groups, temperatures)]
        logps, tokens, highest = zip(*rows, strict=True)
        return torch.cat(logps), torch.cat(tokens), torch.cat(highest)

    def _parts(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> list[tuple[Tensor, Tensor, float]]:
        """For each completion: (T, V) logits, (T,) target tokens, temperature."""
        rows = _rows(groups)
        logits = _by_row(self._model, self._vision, rows, lambda **inputs: self._model(**inputs).logits)
        targets = [torch.tensor(ids[len(group.prompt_ids) :], device=self._model.device) for group, ids in rows]
        if (mask := kept_tokens(groups, self._model.device)) is not None:
            starts = [0, *accumulate(map(len, targets))]
            # A copy: the backward of the model needs its output.
            copies = [row.to(wide(row.dtype), copy=True) for row in logits]
            logits = [mask.apply_(copy, start, 0) for copy, start in zip(copies, starts, strict=False)]
        per_row = np.repeat(temperatures, [group.size for group in groups]).tolist()
        return list(zip(logits, targets, per_row, strict=True))


def rope_depends_on_length(model: PreTrainedModel) -> bool:
    """True if a forward's longest row sets the rotary frequencies of all rows. Then each row needs its own forward."""
    return not _rope_types(model).isdisjoint(("dynamic", "longrope"))


def _rope_types(model: PreTrainedModel) -> set[str | None]:
    rope: dict[str, Any] = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one per layer type
    return {kind.get("rope_type") for kind in kinds}


def micro_batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Row indexes sorted by length, in micro-batches of at most `limit` padded tokens, or of one longer row."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Sorted by length, so the last row is the longest and sets the padded length.
        if batch and (len(batch) + 1) * lengths[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _rows(groups: Sequence[TokenGroup]) -> list[_Row]:
    return [
        (group, np.concatenate([group.prompt_ids, completion]))
        for group in groups
        for completion in group.completions()
    ]


def _by_row(
    model: PreTrainedModel, vision: Vision | None, rows: Sequence[_Row], states: Callable[..., Tensor]
) -> list[Tensor]:
    """The output of `states` at the positions that predict each row's completion: (T, h) or (T, V) per row."""
    outputs: dict[int, Tensor] = {}
    limit = 1 if rope_depends_on_length(model) else ROW_TOKENS
    for batch in micro_batches([len(ids) for _, ids in rows], limit):
        tokens = [torch.tensor(rows[index][1], device=model.device) for index in batch]
        ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        extra = vision.inputs([rows[index][0].images for index in batch], ids) if vision else {}
        states_of_rows = states(input_ids=ids, attention_mask=mask, use_cache=False, **extra)
        for index, row_states in zip(batch, states_of_rows, strict=True):
            group, row = rows[index]
            outputs[index] = row_states[len(group.prompt_ids) - 1 : len(row) - 1]
    return [outputs[index] for index in range(len(rows))]
