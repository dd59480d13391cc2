"""The LM head and the log-softmax, in tiles of tokens times vocabulary: (C, V) logits are never in memory as a whole.

A tile is upcast before its softmax: in bf16 a softmax errs by up to 0.05 nats. The backward keeps a fixed number of
logits and recomputes the other tiles: keeping all of them would cost the memory that the tiles save.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from shared.logprobs.kept_tokens import KeptTokens

# Logits of one tile. On a CPU 4 MiB of float32, which fit its caches; a GPU needs more work per call.
_TILE_LOGITS = {"cpu": 2**20}
_GPU_TILE_LOGITS = 2**26
# Tile sizes are multiples of this: rows of logits that are not aligned to cache lines cost a third of the speed.
_ALIGNED = 64
# Tokens of one tile at most. Fewer make the matrix products slow; more leave room for only a little vocabulary.
_TILE_TOKENS = 1024
# Logits kept for the backward, 512 MiB of float32. Each kept tile saves a quarter of its matrix products.
KEPT_LOGITS = 2**27


def tile_logits(device: str) -> int:
    """The largest tile on devices of this type."""
    return _TILE_LOGITS.get(device, _GPU_TILE_LOGITS)


@dataclass(frozen=True, eq=False)
class LMHead:
    """logits = hidden weight^T + bias, then softcap * tanh(logits / softcap) if the model has a softcap (Gemma 2).

    weight: (V, h). bias: (V,) or None. scale: of the model's logits (Granite, Cohere, Falcon-H1), for the caller to
    divide its temperatures by.
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LMHead":
        """The head of a model. Raises NotImplementedError if it is not a plain nn.Linear."""
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:  # a subclass may quantise, or add adapters
            raise NotImplementedError(f"the LM head is {type(head).__name__}, not Linear")
        config = model.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None)
        scales = getattr(config, "logit_scale", None), getattr(config, "lm_head_multiplier", None)
        scale = math.prod(scale for scale in scales if scale) / (getattr(config, "logits_scaling", None) or 1)
        return cls(head.weight, head.bias, softcap or None, scale)

    def logps(self, hidden: Tensor, targets: Tensor, temperatures: Tensor, mask: KeptTokens | None = None) -> Tensor:
        """(C, h) hidden states, (C,) targets and temperatures -> (C,) log-probs, float32 or float64.

        mask: the tokens of the distribution at each position, the target among them; None for all tokens.
        """
        return self._apply(hidden, targets, temperatures, mask, with_entropy=False)[0]

    def logps_and_entropy(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, mask: KeptTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and the (C,) entropies in nats. Their gradient costs nothing where the loss does not use them."""
        return self._apply(hidden, targets, temperatures, mask, with_entropy=True)

    @torch.no_grad()
    def logps_and_likeliest(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, mask: KeptTokens | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probs, and for each position the token with the highest, int64 (C,), with that log-prob.

        Where it is the target, both log-probs are the same to the last bit. The logits are computed a second time.
        """
        logps = self.logps(hidden, targets, temperatures, mask)
        inputs = hidden.to(self.weight.dtype), self.weight, self.bias, targets, temperatures
        tiles = Tiles.of(*inputs, self.softcap, mask)
        target, highest = torch.zeros_like(logps), torch.full_like(logps, -math.inf)
        tokens_with_it = torch.zeros_like(targets)
        for vocabulary in tiles.vocabulary:
            for tokens in tiles.tokens:
                logits = tiles.logits(tokens, vocabulary, in_buffer=True)
                inside, column = tiles.targets(tokens, vocabulary)
                target[tokens] += torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
                values, columns = logits.max(dim=1)
                higher = values > highest[tokens]
                highest[tokens] = torch.where(higher, values, highest[tokens])
                tokens_with_it[tokens] = torch.where(higher, columns + vocabulary.start, tokens_with_it[tokens])
        return logps, tokens_with_it, logps + (highest - target)

    def _apply(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, mask: KeptTokens | None, *, with_entropy: bool
    ) -> tuple[Tensor, Any]:
        # autograd disables gradients inside `forward`, so whether a backward may follow is decided here.
        options = self.softcap, mask, with_entropy, KEPT_LOGITS if torch.is_grad_enabled() else 0
        inputs = hidden.to(self.weight.dtype), self.weight, self.bias, targets, temperatures
        return _TiledLogps.apply(*inputs, options)  # type: ignore[return-value]


def target_logps(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """(C, V) logits that predict (C,) targets -> (C,) log-probs, untiled."""
    return _of_targets(logits.to(wide(logits.dtype)) / temperature, targets)


def target_logps_and_likeliest(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the (C,) likeliest tokens with their log-probs."""
    logits = logits.to(wide(logits.dtype)) / temperature
    likeliest = logits.argmax(dim=1)
    return _of_targets(logits, targets), likeliest, _of_targets(logits, likeliest)


def target_logps_and_entropies(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same, and the (C,) entropies in nats."""
    logits = logits.to(wide(logits.dtype)) / temperature
    return _of_targets(logits, targets), _Entropies.apply(logits)  # type: ignore[return-value]


def _of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)


class _Entropies(torch.autograd.Function):
    """Of whole logits. Keeps for its backward what the log-probs' keeps anyway."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logps = logits.log_softmax(dim=1)
        entropy = -torch.linalg.vecdot(logps.exp(), logps)
        ctx.save_for_backward(logits, entropy)
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # type: ignore[override]
        logits, entropy = ctx.saved_tensors
        logps = logits.log_softmax(dim=1)
        return (logps + entropy[:, None]).mul_(-grad_outputs[0][:, None]).mul_(logps.exp_())


class _TiledLogps(torch.autograd.Function):
    """options: (softcap, mask, with_entropy, logits_to_keep).

    logits_to_keep: logits kept in memory for the backward instead of being recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        options: tuple[float | None, KeptTokens | None, bool, int],
    ) -> tuple[Tensor, Tensor | None]:
        softcap, mask, with_entropy, logits_to_keep = options
        tiles = Tiles.of(hidden, weight, bias, targets, temperatures, softcap, mask)
        shape = (len(tiles.vocabulary), len(hidden))
        # For each part of the vocabulary: the log-sum-exp, and the expected logit.
        sums, expected = hidden.new_zeros((2, *shape), dtype=wide(hidden.dtype))
        target = torch.zeros_like(sums[0])
        # One for all tiles: memory that is new costs as much as the log-softmax itself.
        buffer = torch.empty_like(tiles.buffer, dtype=sums.dtype)
        kept: dict[tuple[int, int], Tensor] = {}
        for part, vocabulary in enumerate(tiles.vocabulary):
            for tokens in tiles.tokens:
                keeps = logits_to_keep >= math.prod(tiles.shape(tokens, vocabulary))
                logits = tiles.logits(tokens, vocabulary, in_buffer=not keeps)
                logps = torch.log_softmax(logits, dim=1, out=buffer[: logits.numel()].view_as(logits))
                # logits - logps is the log-sum-exp in every column; at the largest logit it is the most precise.
                sums[part, tokens] = logits.amax(dim=1) - logps.amax(dim=1)
                if with_entropy:
                    expected[part, tokens] = torch.linalg.vecdot(logps.exp_(), logits)
                inside, column = tiles.targets(tokens, vocabulary)
                target[tokens] += torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
                if keeps:
                    kept[vocabulary.start, tokens.start] = logits
                    logits_to_keep -= logits.numel()
        log_sum = sums.logsumexp(dim=0)
        entropy = log_sum - (sums.softmax(dim=0) * expected).sum(dim=0) if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_sum, entropy)
        ctx.softcap, ctx.mask, ctx.kept = softcap, mask, kept
        ctx.set_materialize_grads(False)
        return target - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, temperatures, log_sum, entropy = ctx.saved_tensors
        tiles = Tiles.of(hidden, weight, bias, targets, temperatures, ctx.softcap, ctx.mask)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        slopes = TokenGradients.of(temperatures, log_sum, entropy, *grad_outputs)
        for vocabulary in tiles.vocabulary:
            # The gradient of a weight tile is summed over all tokens in float32, if the weight is that in place, and
            # rounded once.
            tile_weight = None if grad_weight is None else grad_weight[vocabulary].to(log_sum.dtype)
            tile_bias = log_sum.new_zeros(vocabulary.stop - vocabulary.start) if wants_bias else None
            for tokens in tiles.tokens:
                # pop: `slope_` overwrites the tile, and its memory is freed afterwards.
                logits = ctx.kept.pop((vocabulary.start, tokens.start), None)
                if logits is None:
                    logits = tiles.logits(tokens, vocabulary, in_buffer=True)
                slope = tiles.slope_(logits, tokens, vocabulary, slopes)
                if tile_bias is not None:
                    tile_bias += slope.sum(dim=0)
                slope = slope.to(weight.dtype)
                if grad_hidden is not None:
                    _add_product_(grad_hidden[tokens], slope, weight[vocabulary])
                if tile_weight is not None:
                    _add_product_(tile_weight, slope.T, hidden[tokens])
            if grad_weight is not None and tile_weight is not None and tile_weight.dtype != weight.dtype:
                grad_weight[vocabulary] = tile_weight
            if grad_bias is not None and tile_bias is not None:
                grad_bias[vocabulary] = tile_bias
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
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

    def slope_(self, logits: Tensor, tokens: slice, vocabulary: slice, slopes: "TokenGradients") -> Tensor:
        """The loss's gradient with respect to the matrix product's output. Overwrites `logits`."""
        through = None
        if self.softcap is not None:
            through = 1 - (logits * (self.temperatures[tokens, None] / self.softcap)).square()
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
