"""A running batch with transformers: rows that are sampled together, and join and leave at any time.

A row that joins is prefilled with what it has so far, except for what all prompts begin with, and then decoded with the
others. The longest row determines how many columns attention reads in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, repeat

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.decoders import (
    CopiedPromptDecoder,
    Decoder,
    Decoding,
    SharedPromptDecoder,
    fill_slots,
    make_decoder,
)
from policy_trainer.rollout.sampling.drawing import has_stop_text, sample_tokens, tail_length
from policy_trainer.rollout.sampling.kv_cache import PrefilledPrompts, prefill, together
from policy_trainer.rollout.sampling.prefix_cache import PrefixCache
from policy_trainer.rollout.sampling.sampler import SamplingParams
from shared.logprobs.attention import attention_of, set_attention
from shared.logprobs.vision import vision_of
from shared.sampling_mask import SamplingMask

# Most tokens of a prefill, its padding included. Without a limit many rows that join together could fill the memory.
_PREFILL_TOKENS = 2**16
# Ended rows are dropped once they are more than this share of a batch: dropping moves the other rows.
_DROP_SHARE = 0.125

# (B, V) logits, and a function that returns int64 (B, T) earlier tokens -> int64 (B,) tokens, float32 (B,) log-probs,
# and bool (B, V) kept tokens if completions have sampling masks.
Draw = Callable[[Tensor, Callable[[], Tensor]], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(eq=False)
class _Row:
    """A completion that is being sampled. number: the caller's number of it. limit: most tokens that it may have. ids,
    logps: what was sampled until it ended. kept: int32, for each of these the tokens among which it was drawn; empty
    without sampling masks."""

    number: int
    prompt: EncodedPrompt
    limit: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    ended: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)


@dataclass(frozen=True, eq=False)
class _NewRows:
    """Rows that will continue the same tokens."""

    prompt: EncodedPrompt
    rows: list[_Row]


@dataclass(frozen=True, eq=False)
class Endings:
    """What ends a completion before its limit: a token of `eos` or `stop_token_ids`, or a text of `stop`."""

    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    @cached_property
    def ids(self) -> frozenset[int]:
        """The ids that end a completion."""
        return self.eos.union(self.stop_token_ids)

    def reached(self, ids: list[int]) -> bool:
        """Whether the last of a completion's ids ends it."""
        if ids[-1] in self.ids:
            return True
        return bool(self.stop) and has_stop_text(self.tokenizer, ids[-tail_length(self.stop) :], self.stop)


class HFRunningBatch:
    """Samples a token for each row in every call of `advance`.

    All rows are one batch: rows that begin together share their prompts, and get copies once others join. Models that
    only transformers' own cache serves keep the rows that joined together as a batch of their own, and a call computes
    a forward for each of them. They are few, since small ones are prefilled again together with the rows that join:
    for R rows that join one by one there are at most log2(R) + 1, and each row is prefilled about as often.

    Each call draws a random number for each row of its batch, in their order, and for ended rows that are not dropped
    yet. So with the same calls of `add` and `advance` a seed decides all completions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos: Tensor,
        params: SamplingParams,
        seed: int,
        decoding: Decoding,
    ) -> None:
        """eos: int64 (E,), the ids that end a completion. decoding: what the model supports."""
        self._model = model
        self._vision = vision_of(model)
        self._attention = self._used = attention_of(model)
        self._decoding = decoding
        self._prefix = PrefixCache(model) if decoding.joins and self._vision is None else None
        self._endings = Endings(tokenizer, frozenset(eos.tolist()), params.stop, params.stop_token_ids)
        forbidden = torch.tensor(self._vision.placeholders if self._vision else (), dtype=torch.long)
        self._forbidden = forbidden.to(model.device)
        self._params = params
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._new: list[_NewRows] = []
        self._batches: list[_Rows] = []

    def __len__(self) -> int:
        return sum(len(each.rows) for each in self._new) + sum(map(len, self._batches))

    def add(self, rows: Sequence[int], prompt: EncodedPrompt, max_tokens: int) -> None:
        self._new.append(_NewRows(prompt, [_Row(number, prompt, max_tokens) for number in rows]))

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Completion]]:
        if self._new and not self._decoding.joins:
            self._begin_again()
        for batch in self._batches:
            self._use(batch.attention)
            batch.step(joining=self._decoding.joins and bool(self._new))
        if self._new:
            self._use(self._attention)
            self._join()
        ended = [self._completed(row) for batch in self._batches for row in batch.sample(self._draw, self._endings)]
        self._batches = [batch for batch in self._batches if len(batch)]
        return ended

    def _draw(self, logits: Tensor, earlier: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        return sample_tokens(logits, self._params, self._generator, earlier, self._forbidden)

    def _use(self, attention: str) -> None:
        if self._used != attention:  # setting it visits all modules, and asking takes 1% of a small model's step
            set_attention(self._model, attention)
            self._used = attention

    def _begin_again(self) -> None:
        """Restarts batches no larger than the new rows together with them, as far as a prefill allows."""
        count = sum(len(each.rows) for each in self._new)
        longest = max(len(each.prompt) for each in self._new)
        for batch in sorted(self._batches, key=len):
            longest = max(longest, *map(len, batch.rows()))
            if len(batch) > count or (count + len(batch)) * longest > _PREFILL_TOKENS:
                break
            self._batches.remove(batch)
            count += len(batch)
            for row in batch.rows():
                so_far = replace(row.prompt, ids=[*row.prompt.ids, *row.ids])
                self._new.append(_NewRows(so_far, [row]))

    def _join(self) -> None:
        parts = []
        while self._new:
            widths = accumulate((len(each.prompt) for each in self._new), max)
            count = sum(number * width <= _PREFILL_TOKENS for number, width in enumerate(widths, 1)) or 1
            joining, self._new = self._new[:count], self._new[count:]
            parts.append((self._prefilled([each.prompt for each in joining]), joining))
        if self._decoding.joins:
            parts = [(together([part for part, _ in parts]), [each for _, joining in parts for each in joining])]
        for prompts, joining in parts:
            counts = torch.tensor([len(each.rows) for each in joining], device=prompts.mask.device)
            groups = torch.arange(len(joining), device=counts.device).repeat_interleave(counts)
            rows = [row for each in joining for row in each.rows]
            if self._decoding.joins and self._batches:
                self._batches[0].join(prompts, groups, rows)
            else:
                decoder = make_decoder(self._model, prompts, groups, self._decoding)
                self._batches.append(_Rows(decoder, prompts.logits[groups], rows))

    def _prefilled(self, prompts: Sequence[EncodedPrompt]) -> PrefilledPrompts:
        return self._prefix.prefill(prompts) if self._prefix else prefill(self._model, prompts, self._vision)

    def _completed(self, row: _Row) -> tuple[int, Completion]:
        ids, logps = np.array(row.ids, np.int64), np.array(row.logps, np.float32)
        finished = self._endings.reached(row.ids)
        mask = SamplingMask.of(row.kept) if row.kept else None
        return row.number, Completion(ids, logps, finished, row.ids[-1] in self._endings.eos, mask)


class _Rows:
    """B rows that are computed in one forward. Those that have ended stay, their new tokens ignored, until they are
    dropped together."""

    def __init__(self, decoder: Decoder, logits: Tensor, rows: Sequence[_Row]) -> None:
        """logits: (B, V), of each row's next token."""
        self._decoder = decoder
        self._logits = logits
        self._rows = [*rows]
        self._left = len(rows)
        self._tokens: Tensor  # int64 (B,), the last of each row
        self._past: Tensor | None = None  # what `_earlier` has returned, while the rows are the same

    def __len__(self) -> int:
        """The number of unfinished rows."""
        return self._left

    def rows(self) -> list[_Row]:
        """The unfinished rows."""
        return [row for row in self._rows if not row.ended]

    @property
    def attention(self) -> str:
        return self._decoder.attention

    def step(self, *, joining: bool) -> None:
        """Computes the logits of the next tokens. joining: whether rows are about to join."""
        ended = len(self._rows) - self._left
        if ended > _DROP_SHARE * len(self._rows) or (joining and ended):
            self._drop()
        self._logits = self._decoder.step(self._tokens)

    def join(self, prompts: PrefilledPrompts, groups: Tensor, rows: Sequence[_Row]) -> None:
        """Adds rows after these prompts, whose logits are known. groups: int64 (R,), the prompt of each row."""
        if isinstance(self._decoder, SharedPromptDecoder):
            self._decoder = self._decoder.copied()
        assert isinstance(self._decoder, CopiedPromptDecoder)
        self._decoder.join(prompts, groups)
        self._logits = torch.cat([self._logits, prompts.logits[groups]])
        self._rows += rows
        self._left += len(rows)
        self._past = None

    def sample(self, draw: Draw, endings: Endings) -> list[_Row]:
        """Samples a token for each row. Returns the rows that have ended."""
        tokens, logps, kept = draw(self._logits, self._earlier)
        masks = repeat(None) if kept is None else _ids(kept)
        gone = []
        for row, token, logp, mask in zip(self._rows, tokens.tolist(), logps.tolist(), masks, strict=False):
            if row.ended:
                continue
            ids = row.ids
            ids.append(token)
            row.logps.append(logp)
            if mask is not None:
                row.kept.append(mask)
            # Not only `reached`: a call for each token would cost as much as all else here.
            if token in endings.ids or len(ids) >= row.limit or (endings.stop and endings.reached(ids)):
                row.ended = True
                gone.append(row)
        self._left -= len(gone)
        self._tokens = tokens
        return gone

    def _drop(self) -> None:
        kept = fill_slots(torch.tensor([not row.ended for row in self._rows], device=self._tokens.device), self._left)
        self._rows = [self._rows[place] for place in kept.tolist()]
        self._decoder.select(kept)
        self._tokens = self._tokens[kept]
        self._past = None

    def _earlier(self) -> Tensor:
        """int64 (B, T): the tokens of each row, filled with one of its own, so that no other token is penalised. Called
        at most once for each token."""
        if self._past is None:
            tokens = [[*row.prompt.ids, *row.ids] for row in self._rows]
            width = max(map(len, tokens))
            filled = [[*ids, *[ids[0]] * (width - len(ids))] for ids in tokens]
            self._past = torch.tensor(filled, device=self._logits.device)
        else:
            self._past = torch.cat([self._past, self._tokens[:, None]], dim=1)
        return self._past


def _ids(kept: Tensor) -> list[np.ndarray]:
    """bool (B, V) -> for each row the ids of its kept tokens, int32."""
    counts = kept.sum(dim=1).cpu().numpy()
    return np.split(kept.nonzero()[:, 1].int().cpu().numpy(), np.cumsum(counts)[:-1])
