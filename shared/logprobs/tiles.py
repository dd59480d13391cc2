"""Logits in tiles of tokens times vocabulary, and the gradient of a loss with respect to them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits of one tile. On a CPU 4 MiB of float32, which fit its caches; a GPU needs more work per call.
_TILE_LOGITS = {"cpu": 2**20}
_TILE_LOGITS_ELSEWHERE = 2**26
# Tile sizes are multiples of this: rows of logits that are not aligned to cache lines cost a third of the speed.
_ALIGNED = 64
# Tokens of one tile at most. Fewer make the matrix products slow; more leave room for only a little vocabulary.
_TILE_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Tiles:
    """Computes the logits of tiles: some tokens times a part of the vocabulary."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    all_targets: Tensor
    temperatures: Tensor
    softcap: float | None
    tokens: list[slice]
    vocabulary: list[slice]

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        softcap: float | None,
    ) -> "Tiles":
        tokens = list(_slices(len(hidden), _TILE_TOKENS))
        size = _TILE_LOGITS.get(hidden.device.type, _TILE_LOGITS_ELSEWHERE) // tokens[0].stop
        return cls(
            hidden, weight, bias, targets, temperatures, softcap, tokens, list(_slices(len(weight), max(1, size)))
        )

    def logits(self, tokens: slice, vocabulary: slice) -> Tensor:
        """Logits of one tile, divided by the temperature: float32 or float64."""
        bias = None if self.bias is None else self.bias[vocabulary]
        logits = F.linear(self.hidden[tokens], self.weight[vocabulary], bias).to(wide(self.hidden.dtype))
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperatures[tokens, None])

    def targets(self, tokens: slice, vocabulary: slice) -> tuple[Tensor, Tensor]:
        """bool (T,): is the token's target in this part; (T, 1): its column, arbitrary if it is not."""
        column = self.all_targets[tokens] - vocabulary.start
        size = vocabulary.stop - vocabulary.start
        return (column >= 0) & (column < size), column.clamp(0, size - 1)[:, None]

    def slope_(self, logits: Tensor, tokens: slice, vocabulary: slice, slopes: "Slopes") -> Tensor:
        """The loss's gradient with respect to the matrix product's output. Overwrites `logits`."""
        through = None
        if self.softcap is not None:
            through = 1 - (logits * (self.temperatures[tokens, None] / self.softcap)).square()
        slope = slopes.of_softmax_(logits.sub_(slopes.log_sum[tokens, None]), tokens)
        inside, column = self.targets(tokens, vocabulary)
        slope.scatter_add_(1, column, torch.where(inside, slopes.of_logp[tokens], 0.0)[:, None])
        return slope if through is None else slope.mul_(through)


@dataclass(frozen=True, eq=False)
class Slopes:
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
    ) -> "Slopes":
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
