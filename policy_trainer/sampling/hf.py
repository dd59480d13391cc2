"""Sampling with any Hugging Face causal LM: each prompt is computed once for its group, and finished rows leave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from policy_trainer.publish import load_weights
from policy_trainer.sampling.interface import Completion, SamplingParams
from shared.models import eos_token_ids
from shared.refusal import Refused

# Rows leave the batch when so large a share of it has ended: copying the cache each time one ends would cost more.
_COMPACT_SHARE = 0.125


class HFSampler:
    """Holds a model of its own, so that it can sample while another process trains."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._eos = torch.tensor(eos_token_ids(model, tokenizer), device=model.device)

    def load(self, weights: Path) -> None:
        load_weights(self._model, weights)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        generator = torch.Generator(self._model.device).manual_seed(seed)
        rows = [_Row() for _ in range(len(prompts) * params.group_size)]
        active = list(range(len(rows)))
        state = self._prefill(prompts, params.group_size)
        for step in range(params.max_new_tokens):
            tokens, logps = _draw(state.logits, params, generator)
            ended = self._append(rows, active, tokens, logps, params.stop)
            if len(ended) == len(active) or step + 1 == params.max_new_tokens:
                break
            # Ended rows run on unread until enough of them have gathered.
            active = [-1 if place in ended else row for place, row in enumerate(active)]
            keep = [place for place, row in enumerate(active) if row >= 0]
            if not keep:
                break
            if len(active) - len(keep) >= _COMPACT_SHARE * len(active):
                state, tokens = state.select(keep), tokens[torch.tensor(keep, device=tokens.device)]
                active = [active[place] for place in keep]
            state = self._advance(state, tokens)
        completions = [row.completion() for row in rows]
        size = params.group_size
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    def _prefill(self, prompts: Sequence[Sequence[int]], group_size: int) -> "_State":
        """Prompts left-padded to one length, so that all rows continue at the same column."""
        device, width = self._model.device, max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
        )
        if getattr(output, "past_key_values", None) is None:
            raise Refused(f"model: {type(self._model).__name__} keeps no key-value cache to sample with")
        output.past_key_values.batch_repeat_interleave(group_size)
        return _State(
            output.logits[:, -1].repeat_interleave(group_size, 0),
            output.past_key_values,
            mask.repeat_interleave(group_size, 0),
            positions[:, -1:].repeat_interleave(group_size, 0),
        )

    def _advance(self, state: "_State", tokens: Tensor) -> "_State":
        mask = torch.cat([state.mask, state.mask.new_ones(len(tokens), 1)], dim=1)
        positions = state.positions + 1
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=state.cache,
            use_cache=True,
        )
        return _State(output.logits[:, -1], output.past_key_values, mask, positions)

    def _append(
        self, rows: list["_Row"], active: list[int], tokens: Tensor, logps: Tensor, stop: tuple[str, ...]
    ) -> set[int]:
        """Adds one token to each active row; the places of those that have ended, now or before."""
        ended = torch.isin(tokens, self._eos).tolist()
        places = set()
        for place, (row, token, logp) in enumerate(zip(active, tokens.tolist(), logps.tolist(), strict=True)):
            if row < 0:
                places.add(place)
                continue
            rows[row].ids.append(token)
            rows[row].logps.append(logp)
            rows[row].finished = ended[place] or (bool(stop) and self._stops(rows[row].ids, stop))
            if rows[row].finished:
                places.add(place)
        return places

    def _stops(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether a stop text stands in the end of the row. A token is at least a byte, so the tail is long enough."""
        tail = ids[-max(len(text.encode()) for text in stop) - 1 :]
        text = self._tokenizer.decode(tail)
        return any(part in text for part in stop)


@dataclass(frozen=True, eq=False)
class _State:
    """logits (B, V) of the next token; the cache; mask (B, L) of the positions that count; positions (B, 1)."""

    logits: Tensor
    cache: "object"
    mask: Tensor
    positions: Tensor

    def select(self, keep: list[int]) -> "_State":
        index = torch.tensor(keep, device=self.mask.device)
        self.cache.batch_select_indices(index)  # type: ignore[attr-defined]
        return _State(self.logits[index], self.cache, self.mask[index], self.positions[index])


@dataclass
class _Row:
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finished: bool = False

    def completion(self) -> Completion:
        return Completion(np.array(self.ids, np.int64), np.array(self.logps, np.float32), self.finished)


def _draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(B, V) logits -> (B,) tokens and their log-probs at the temperature, before top-p and top-k renormalise."""
    greedy = params.temperature == 0
    logps = torch.log_softmax(logits.float() / (1.0 if greedy else params.temperature), dim=-1)
    if greedy:
        tokens = logps.argmax(dim=-1)
    else:
        warped = _warpers(params)(logps.new_empty(0), logps)  # type: ignore[arg-type]
        tokens = torch.multinomial(warped.softmax(dim=-1), 1, generator=generator)[:, 0]
    return tokens, logps.gather(1, tokens[:, None])[:, 0]


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers
