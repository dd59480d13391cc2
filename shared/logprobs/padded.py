"""Right-padded rows of about one length: right for every architecture, as causal models never look to the right."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs.head import LMHead, entropies, target_logps

# Tokens of a padded micro-batch at most, unless one row alone has more.
ROW_TOKENS = 4096


class Row(NamedTuple):
    """One completion behind its prompt, of `prompt` tokens."""

    prompt: int
    ids: np.ndarray
    temperature: float


class PaddedForward:
    """Hidden states of padded rows, and of those only what predicts a completion token through the tiled head."""

    name = "padded"

    def __init__(self, model: PreTrainedModel) -> None:
        self._head = LMHead.of(model)
        self._model = model

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return self._head.logps(*self._hidden(groups, temperatures))

    def with_entropy(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        return self._head.logps_and_entropy(*self._hidden(groups, temperatures))

    def _hidden(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        rows, device = _rows(groups, temperatures), self._model.device
        hidden = _by_row(self._model, rows, lambda **inputs: self._model.base_model(**inputs).last_hidden_state)
        targets = np.concatenate([row.ids[row.prompt :] for row in rows])
        per_token = np.repeat(temperatures, [len(group.completion_ids) for group in groups])
        return (
            torch.cat(hidden),
            torch.tensor(targets, device=device),
            torch.tensor(per_token, dtype=torch.float32, device=device),
        )


class PlainForward:
    """The model's own logits, for whatever it does to them; they exist as a whole for the rows of a micro-batch."""

    name = "plain"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        rows, logits = self._logits(groups, temperatures)
        return torch.cat([_row_logps(row, own) for row, own in zip(rows, logits, strict=True)])

    def with_entropy(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        rows, logits = self._logits(groups, temperatures)
        logps = [_row_logps(row, own) for row, own in zip(rows, logits, strict=True)]
        entropy = [entropies(own, row.temperature) for row, own in zip(rows, logits, strict=True)]
        return torch.cat(logps), torch.cat(entropy)

    def _logits(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[list[Row], list[Tensor]]:
        rows = _rows(groups, temperatures)
        return rows, _by_row(self._model, rows, lambda **inputs: self._model(**inputs).logits)


def rope_depends_on_length(model: PreTrainedModel) -> bool:
    """Whether the longest row of a forward sets the rotary frequencies of all, so that rows must go one by one."""
    rope: dict[str, Any] = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one, or one for each layer type
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def micro_batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Row indexes sorted by length, cut so that a padded micro-batch holds at most `limit` tokens or one row."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Sorted upwards: the newest row is the longest and sets the padding of all.
        if batch and (len(batch) + 1) * lengths[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _rows(groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> list[Row]:
    return [
        Row(len(group.prompt_ids), np.concatenate([group.prompt_ids, completion]), temperature)
        for group, temperature in zip(groups, temperatures, strict=True)
        for completion in group.completions()
    ]


def _by_row(model: PreTrainedModel, rows: Sequence[Row], states: Callable[..., Tensor]) -> list[Tensor]:
    """What `states` gives at the positions that predict each row's completion: (T, h) or (T, V) for each row."""
    found: dict[int, Tensor] = {}
    limit = 1 if rope_depends_on_length(model) else ROW_TOKENS
    for batch in micro_batches([len(row.ids) for row in rows], limit):
        ids, mask = (
            nn.utils.rnn.pad_sequence([torch.tensor(part, device=model.device) for part in parts], batch_first=True)
            for parts in ([rows[i].ids for i in batch], [np.ones(len(rows[i].ids), np.int64) for i in batch])
        )
        for index, row_states in zip(batch, states(input_ids=ids, attention_mask=mask, use_cache=False), strict=True):
            row = rows[index]
            found[index] = row_states[row.prompt - 1 : len(row.ids) - 1]
    return [found[index] for index in range(len(rows))]


def _row_logps(row: Row, logits: Tensor) -> Tensor:
    return target_logps(logits, torch.tensor(row.ids[row.prompt :], device=logits.device), row.temperature)
