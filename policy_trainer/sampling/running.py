"""A running batch with transformers: rows that are sampled together, and join and leave at any time.

A row that joins is prefilled with what it has so far, and then decoded with the others. How many columns attention
reads in a step is up to the longest row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.sampling.decoders import (
    JoiningDecoder,
    RepeatedCacheDecoder,
    fill_slots,
)
from policy_trainer.sampling.drawing import has_stop_text, sample_tokens, tail_length
from policy_trainer.sampling.kv_cache import PrefilledPrompts, prefill
from policy_trainer.sampling.sampler import SamplingParams
from shared.logprobs.attention import attention_of, set_attention
from shared.logprobs.vision import vision_of

# Tokens of a prefill, with its padding. Without a limit many rows that join together could fill the memory.
_PREFILL_TOKENS = 2**16

# (B, V) logits, and a function that returns int64 (B, T) earlier tokens -> int64 (B,) tokens, float32 (B,) log-probs.
Draw = Callable[[Tensor, Callable[[], Tensor]], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Row:
    """A completion. number: the caller's. limit: of the ids. ids, logps: what was sampled so far."""

    number: int
    prompt: EncodedPrompt
    limit: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)


@dataclass(frozen=True, eq=False)
class _NewRows:
    """Rows that will continue the same tokens."""

    prompt: EncodedPrompt
    rows: list[_Row]


@dataclass(frozen=True, eq=False)
class Endings:
    """What ends a completion before its limit: an id of `eos` or `stop_token_ids`, or a text of `stop`."""

    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    def reached(self, ids: list[int]) -> bool:
        """Whether the last of a completion's ids ends it."""
        if ids[-1] in self.eos or ids[-1] in self.stop_token_ids:
            return True
        return bool(self.stop) and has_stop_text(self.tokenizer, ids[-tail_length(self.stop) :], self.stop)


class HFRunningBatch:
    """Samples a token for each row in every call of `advance`.

    All rows are one batch if the model takes decoding attention. Other models, with sliding windows or
    recurrent layers, keep the rows that joined together as a batch of their own, and a call computes a forward for each
    of them. They are few, since small ones begin again with the rows that join: for R rows that join one by one there
    are at most log2(R) + 1, and each row is prefilled about as often.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos: Tensor,
        params: SamplingParams,
        seed: int,
        *,
        joins: bool,
    ) -> None:
        """eos: int64 (E,), the ids that end a completion. joins: whether the model supports decoding attention."""
        self._model = model
        self._vision = vision_of(model)
        self._attention = attention_of(model)
        self._joins = joins
        self._endings = Endings(tokenizer, frozenset(eos.tolist()), params.stop, params.stop_token_ids)
        forbidden = torch.tensor(self._vision.placeholders if self._vision else (), dtype=torch.long)
        self._forbidden = forbidden.to(model.device)
        self._params = params
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._new: list[_NewRows] = []
        self._batches: list[_Rows] = []

    def __len__(self) -> int:
        return sum(len(each.rows) for each in (*self._new, *self._batches))

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        self._new.append(_NewRows(prompt, [_Row(number, prompt, max_tokens) for number in rows]))

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Completion]]:
        if self._new and not self._joins:
            self._begin_again()
        for batch in self._batches:
            self._use(batch.attention)
            batch.step()
        if self._new:
            self._use(self._attention)
            self._join()
        ended = [self._completed(row) for batch in self._batches for row in batch.sample(self._draw, self._endings)]
        self._batches = [batch for batch in self._batches if batch.rows]
        return ended

    def _draw(self, logits: Tensor, earlier: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        return sample_tokens(logits, self._params, self._generator, earlier, self._forbidden)

    def _use(self, attention: str) -> None:
        if attention_of(self._model) != attention:  # setting it visits all modules
            set_attention(self._model, attention)

    def _begin_again(self) -> None:
        """Restarts batches no larger than the new rows together with them, as far as a prefill allows."""
        count = sum(len(each.rows) for each in self._new)
        longest = max(len(each.prompt) for each in self._new)
        for batch in sorted(self._batches, key=lambda batch: len(batch.rows)):
            longest = max(longest, *map(len, batch.rows))
            if len(batch.rows) > count or (count + len(batch.rows)) * longest > _PREFILL_TOKENS:
                break
            self._batches.remove(batch)
            count += len(batch.rows)
            for row in batch.rows:
                so_far = replace(row.prompt, ids=[*row.prompt.ids, *row.ids])
                self._new.append(_NewRows(so_far, [row]))

    def _join(self) -> None:
        """Prefills what joins, as far as the limit of a prefill allows; the rest joins in later calls."""
        widths = accumulate((len(each.prompt) for each in self._new), max)
        count = sum(number * width <= _PREFILL_TOKENS for number, width in enumerate(widths, 1)) or 1
        joining, self._new = self._new[:count], self._new[count:]
        prefilled = prefill(self._model, [each.prompt for each in joining], self._vision)
        if not self._joins:
            self._batches.append(_Rows(RepeatedCacheDecoder(self._model, prefilled, 1)))
        elif not self._batches:
            self._batches.append(_Rows(JoiningDecoder(self._model, prefilled)))
        self._batches[-1].join(prefilled, joining)

    def _completed(self, row: _Row) -> tuple[int, Completion]:
        ids, logps = np.array(row.ids, np.int64), np.array(row.logps, np.float32)
        finished = self._endings.reached(row.ids)
        return row.number, Completion(ids, logps, finished, row.ids[-1] in self._endings.eos)


class _Rows:
    """B rows that are computed in one forward."""

    def __init__(self, decoder: JoiningDecoder | RepeatedCacheDecoder) -> None:
        self.rows: list[_Row] = []
        self.attention = decoder.attention
        self._decoder = decoder
        # Of each row the logits (B, V) of its next token, its last token (B,), and int64 (B, T) its prompt and tokens,
        # filled on the left with tokens of theirs, so that no other token is penalised.
        self._logits: Tensor
        self._tokens: Tensor
        self._earlier: Tensor

    def step(self) -> None:
        """Computes the logits of the next tokens."""
        self._logits = self._decoder.step(self._tokens)

    def join(self, prompts: PrefilledPrompts, joining: Sequence[_NewRows]) -> None:
        """Adds rows after these prompts. Their logits are known."""
        counts = torch.tensor([len(each.rows) for each in joining], device=prompts.mask.device)
        groups = torch.arange(len(joining), device=counts.device).repeat_interleave(counts)
        earlier = _filled([each.prompt.ids for each in joining], counts.device)[groups]
        logits = prompts.logits[groups]
        if isinstance(self._decoder, JoiningDecoder):
            self._decoder.join(prompts, groups)
        else:
            self._decoder.select(groups)
        if self.rows:
            logits = torch.cat([self._logits, logits])
            earlier = _stacked(self._earlier, earlier)
        self._logits, self._earlier = logits, earlier
        self.rows += [row for each in joining for row in each.rows]

    def sample(self, draw: Draw, endings: Endings) -> list[_Row]:
        """Samples a token for each row. Returns the rows that have ended, which leave."""
        tokens, logps = draw(self._logits, lambda: self._earlier)
        for row, token, logp in zip(self.rows, tokens.tolist(), logps.tolist(), strict=True):
            row.ids.append(token)
            row.logps.append(logp)
        self._tokens = tokens
        self._earlier = torch.cat([self._earlier, tokens[:, None]], dim=1)
        ended = [len(row.ids) >= row.limit or endings.reached(row.ids) for row in self.rows]
        gone = [row for row, has_ended in zip(self.rows, ended, strict=True) if has_ended]
        if gone:
            self._keep(fill_slots(~torch.tensor(ended, device=tokens.device), len(ended) - len(gone)))
        return gone

    def _keep(self, kept: Tensor) -> None:
        """kept: int64 (B',), the rows that stay, in their new order."""
        self.rows = [self.rows[place] for place in kept.tolist()]
        if self.rows:
            self._decoder.select(kept)
            longest = max(map(len, self.rows))
            self._tokens, self._earlier = self._tokens[kept], self._earlier[kept, -longest:]


def _filled(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 (n, P): the prompts, filled on the left."""
    width = max(map(len, prompts))
    return torch.tensor([[*[ids[0]] * (width - len(ids)), *ids] for ids in prompts], device=device)


def _stacked(above: Tensor, below: Tensor) -> Tensor:
    """The rows of both, filled on the left."""
    width = max(above.shape[1], below.shape[1])
    wide = [torch.cat([each[:, :1].expand(-1, width - each.shape[1]), each], dim=1) for each in (above, below)]
    return torch.cat(wide)
