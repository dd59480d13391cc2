"""Tiles of tokens times vocabulary: their logits, and the loss's gradients with respect to these."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.logprobs.kept_tokens import KeptTokens

# Logits of one tile. On a CPU 4 MiB of float32, which fit its caches; a GPU needs more work per call.
_TILE_LOGITS = {"cpu": 2**20}
_GPU_TILE_LOGITS = 2**26
# Tile sizes are multiples of this: rows of logits that are not aligned to cache lines cost a third of the speed.
_ALIGNED = 64
# Tokens of one tile at most. Fewer make the matrix products slow; more leave room for only a little vocabulary.
_TILE_TOKENS = 1024


def tile_logits(device: str) -> int:
    """The largest tile on devices of this type."""
    return _TILE_LOGITS.get(device, _GPU_TILE_LOGITS)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, without a tensor in between if all have one dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


@dataclass(frozen=True, eq=False)
class Tiles:
    """Computes the logits of tiles: some tokens times a part of the vocabulary. buffer: of the largest size."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    all_targets: Tensor
    temperatures: Tensor
    softcap: float | None
    mask: KeptTokens | None
    tokens: list[slice]
    vocabulary: list[slice]
    buffer: Tensor

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        softcap: float | None,
        mask: KeptTokens | None,
    ) -> "Tiles":
        tokens = list(_slices(len(hidden), _TILE_TOKENS))
        size = tile_logits(hidden.device.type) // tokens[0].stop
        vocabulary = list(_slices(len(weight), max(1, size)))
        buffer = hidden.new_empty(tokens[0].stop * vocabulary[0].stop)
        return cls(hidden, weight, bias, targets, temperatures, softcap, mask, tokens, vocabulary, buffer)

    @staticmethod
    def shape(tokens: slice, vocabulary: slice) -> tuple[int, int]:
        return tokens.stop - tokens.start, vocabulary.stop - vocabulary.start

    def logits(self, tokens: slice, vocabulary: slice, *, in_buffer: bool) -> Tensor:
        """float32 or float64 logits of one tile, divided by the temperature. in_buffer: the next ones overwrite it."""
        hidden, weight, shape = self.hidden[tokens], self.weight[vocabulary].T, self.shape(tokens, vocabulary)
        out = self.buffer[: math.prod(shape)].view(shape) if in_buffer else None
        if self.bias is None:
            logits = torch.mm(hidden, weight, out=out)
        else:
            logits = torch.addmm(self.bias[vocabulary], hidden, weight, out=out)
        logits = logits.to(wide(hidden.dtype))
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        logits = logits.div_(self.temperatures[tokens, None])
        return logits if self.mask is None else self.mask.apply_(logits, tokens.start, vocabulary.start)

    def targets(self, tokens: slice, vocabulary: slice) -> tuple[Tensor, Tensor]:
        """bool (T,): is the token's target in this part; (T, 1): its column, arbitrary if it is not."""
        column = self.all_targets[tokens] - vocabulary.start
        size = vocabulary.stop - vocabulary.start
        return (column >= 0) & (column < size), column.clamp(0, size - 1)[:, None]

    def softcap_slope(self, logits: Tensor, tokens: slice) -> Tensor | None:
        """The derivative of the softcap at logits that have been divided by the temperature; None without a softcap."""
        if self.softcap is None:
            return None
        return (logits * (self.temperatures[tokens, None] / self.softcap)).square_().neg_().add_(1)

    def slope_(self, logits: Tensor, tokens: slice, vocabulary: slice, slopes: "TokenGradients") -> Tensor:
        """The loss's gradient with respect to the matrix product's output. Overwrites `logits`."""
        through = self.softcap_slope(logits, tokens)
        slope = slopes.of_softmax_(logits.sub_(slopes.log_sum[tokens, None]), tokens)
        inside, column = self.targets(tokens, vocabulary)
        slope.scatter_add_(1, column, torch.where(inside, slopes.of_logp[tokens], 0.0)[:, None])
        return slope if through is None else slope.mul_(through)


@dataclass(frozen=True, eq=False)
class TokenGradients:
    """What the backward pass needs for each token, (C,).

    log_sum: the log-sum-exp of its logits. of_logp, of_entropy: the loss's gradients with respect to its log-prob and
    its entropy, divided by the temperature; None where the loss has no entropy.
    """

    log_sum: Tensor
    entropy: Tensor | None
    of_logp: Tensor
    of_entropy: Tensor | None

    @classmethod
    def of(
        cls,
        temperatures: Tensor,
        log_sum: Tensor,
        entropy: Tensor | None,
        of_logps: Tensor | None,
        of_entropies: Tensor | None,
    ) -> "TokenGradients":
        """of_logps, of_entropies: autograd's gradients; None where the loss has no such term."""
        of_logp = torch.zeros_like(log_sum) if of_logps is None else of_logps / temperatures
        return cls(log_sum, entropy, of_logp, None if of_entropies is None else of_entropies / temperatures)

    def of_softmax_(self, logps: Tensor, tokens: slice) -> Tensor:
        """-p_j times the gradient of the log-prob, as d log p_k / d z_j = [j = k] - p_j of which the first is left out,
        and that of the entropy, as dH / d z_j = -p_j (log p_j + H). Overwrites `logps`, those of one tile."""
        if self.of_entropy is None or self.entropy is None:
            return logps.exp_().mul_(-self.of_logp[tokens, None])
        pull = (logps + self.entropy[tokens, None]).mul_(self.of_entropy[tokens, None]).add_(self.of_logp[tokens, None])
        return logps.exp_().mul_(pull.neg_())


def _slices(length: int, limit: int) -> Iterator[slice]:
    """Cuts [0, length) into the fewest parts of about equal size, at most `limit` (alignment may add a little)."""
    parts = -(-length // limit)
    size = -(-length // parts)
    if size > _ALIGNED:
        size += -size % _ALIGNED
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
