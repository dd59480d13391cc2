"""The LM head and the log-softmax, in tiles of tokens times vocabulary: (C, V) logits are never in memory as a whole.

A tile is upcast before its softmax: in bf16 a softmax errs by up to 0.05 nats. The backward keeps a fixed number of
logits and recomputes the other tiles: keeping all of them would cost the memory that the tiles save. Where the head is
frozen, as with adapters, the forward makes the gradients of the log-probs too, and the backward needs no logits.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from shared.logprobs.kept_tokens import KeptTokens
from shared.logprobs.tiles import Tiles, TokenGradients, add_product_, wide

# Logits kept for the backward, 512 MiB of float32. Each kept tile saves a quarter of its matrix products.
KEPT_LOGITS = 2**27


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
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        mask: KeptTokens | None = None,
        *,
        entropy_grad: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The same, and the (C,) entropies in nats. entropy_grad: whether these have a gradient. It costs nothing where
        the loss does not use it, except if the head is frozen."""
        return self._apply(hidden, targets, temperatures, mask, with_entropy=True, entropy_grad=entropy_grad)

    @torch.no_grad()
    def logps_and_likeliest(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, mask: KeptTokens | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probs, and for each position the token with the highest, int64 (C,), with that log-prob.

        Where it is the target, both log-probs are the same to the last bit.
        """
        likeliest = LikeliestTokens.of(targets, wide(self.weight.dtype))
        logps, _ = self._apply(hidden, targets, temperatures, mask, with_entropy=False, likeliest=likeliest)
        return logps, likeliest.tokens, likeliest.values

    def _apply(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        mask: KeptTokens | None,
        *,
        with_entropy: bool,
        entropy_grad: bool = False,
        likeliest: "LikeliestTokens | None" = None,
    ) -> tuple[Tensor, Any]:
        # autograd disables gradients inside `forward`, so whether a backward may follow is decided here.
        options = _Options(self.softcap, mask, with_entropy, entropy_grad, torch.is_grad_enabled(), likeliest)
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


@dataclass(frozen=True, eq=False)
class _Options:
    """may_backward: whether a backward may follow. likeliest: is filled in, unless it is None."""

    softcap: float | None
    mask: KeptTokens | None
    with_entropy: bool
    entropy_grad: bool
    may_backward: bool
    likeliest: "LikeliestTokens | None"


class _TiledLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        with_entropy, likeliest = options.with_entropy, options.likeliest
        only_hidden_trains = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        at_once = options.may_backward and only_hidden_trains and not options.entropy_grad
        logits_to_keep = KEPT_LOGITS if options.may_backward and not at_once else 0
        tiles = Tiles.of(hidden, weight, bias, targets, temperatures, options.softcap, options.mask)
        shape = (len(tiles.vocabulary), len(hidden))
        # For each part of the vocabulary: the log-sum-exp, and the expected logit.
        sums, expected = hidden.new_zeros((2, *shape), dtype=wide(hidden.dtype))
        target = torch.zeros_like(sums[0])
        gradients = HiddenGradients.of(tiles) if at_once else None
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
                inside, column = tiles.targets(tokens, vocabulary)
                if likeliest is not None:
                    likeliest.add_(logits, tokens, vocabulary)
                probs = logps.exp_() if with_entropy or gradients is not None else logps
                if with_entropy:
                    expected[part, tokens] = torch.linalg.vecdot(probs, logits)
                if gradients is not None:  # overwrites probs
                    gradients.add_(probs, logits, sums[part, tokens], inside, column, tokens, vocabulary)
                target[tokens] += torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
                if keeps:
                    kept[vocabulary.start, tokens.start] = logits
                    logits_to_keep -= logits.numel()
        log_sum = sums.logsumexp(dim=0)
        entropy = log_sum - (sums.softmax(dim=0) * expected).sum(dim=0) if with_entropy else None
        if likeliest is not None:
            likeliest.values.sub_(log_sum)
        ctx.options, ctx.at_once, ctx.kept = options, at_once, kept
        ctx.set_materialize_grads(False)
        if entropy is not None and not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        if gradients is not None:
            ctx.dtype = hidden.dtype
            ctx.save_for_backward(gradients.finish_(target, log_sum))
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, temperatures, log_sum, entropy)
        return target - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_logps, of_entropies = grad_outputs
        if ctx.at_once:
            [gradients] = ctx.saved_tensors
            grad_hidden = None if of_logps is None else (gradients * of_logps[:, None]).to(ctx.dtype)
            return grad_hidden, None, None, None, None, None
        hidden, weight, bias, targets, temperatures, log_sum, entropy = ctx.saved_tensors
        tiles = Tiles.of(hidden, weight, bias, targets, temperatures, ctx.options.softcap, ctx.options.mask)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        slopes = TokenGradients.of(temperatures, log_sum, entropy, of_logps, of_entropies)
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
                    add_product_(grad_hidden[tokens], slope, weight[vocabulary])
                if tile_weight is not None:
                    add_product_(tile_weight, slope.T, hidden[tokens])
            if grad_weight is not None and tile_weight is not None and tile_weight.dtype != weight.dtype:
                grad_weight[vocabulary] = tile_weight
            if grad_bias is not None and tile_bias is not None:
                grad_bias[vocabulary] = tile_bias
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


@dataclass(frozen=True, eq=False)
class LikeliestTokens:
    """tokens: int64 (C,), with the highest logit so far. values: (C,) that logit; at the end its log-prob."""

    tokens: Tensor
    values: Tensor

    @classmethod
    def of(cls, targets: Tensor, dtype: torch.dtype) -> "LikeliestTokens":
        return cls(torch.zeros_like(targets), torch.full_like(targets, -math.inf, dtype=dtype))

    def add_(self, logits: Tensor, tokens: slice, vocabulary: slice) -> None:
        """The logits of one tile."""
        values, columns = logits.max(dim=1)
        higher = values > self.values[tokens]
        self.values[tokens] = torch.where(higher, values, self.values[tokens])
        self.tokens[tokens] = torch.where(higher, columns + vocabulary.start, self.tokens[tokens])


@dataclass(frozen=True, eq=False)
class HiddenGradients:
    """Of log-probs with respect to the hidden states, made with the log-probs: (W_t - sum_j p_j W_j) / temperature.
    With a softcap each W_j is multiplied by its slope at that logit.

    rows: (C, h), the sum over the vocabulary except the target, scaled by exp(log_sum - highest): an online softmax.
    highest: (C,), the largest log-sum-exp of a part of the vocabulary so far.
    """

    tiles: Tiles
    rows: Tensor
    highest: Tensor

    @classmethod
    def of(cls, tiles: Tiles) -> "HiddenGradients":
        rows = torch.zeros_like(tiles.hidden, dtype=wide(tiles.hidden.dtype))
        return cls(tiles, rows, rows.new_full((len(rows),), -math.inf))

    def add_(
        self,
        probs: Tensor,
        logits: Tensor,
        log_sum: Tensor,
        inside: Tensor,
        column: Tensor,
        tokens: slice,
        vocabulary: slice,
    ) -> None:
        """One tile: its softmax, which is overwritten, its logits, their log-sum-exp, and its targets."""
        # The target's part is (1 - p) W_t: where p is almost 1, rounding would leave little of W_t - p W_t.
        probs.scatter_(1, column, torch.where(inside[:, None], 0.0, probs.gather(1, column)))
        if (slope := self.tiles.softcap_slope(logits, tokens)) is not None:
            probs.mul_(slope)
        before = self.highest[tokens]
        highest = torch.maximum(before, log_sum)
        probs.mul_((log_sum - highest).exp_()[:, None])
        weight = self.tiles.weight[vocabulary]
        rows = self.rows[tokens].mul_((before - highest).exp_()[:, None])
        add_product_(rows, probs.to(weight.dtype), weight)
        self.highest[tokens] = highest

    def finish_(self, target: Tensor, log_sum: Tensor) -> Tensor:
        """(C, h), after all tiles. (C,) target: its logit; log_sum: of all logits."""
        of_target = -(target - log_sum).expm1()[:, None]
        if (slope := self.tiles.softcap_slope(target[:, None], slice(None))) is not None:
            of_target *= slope
        rows = self.rows.mul_((self.highest - log_sum).exp_()[:, None])
        target_rows = of_target * self.tiles.weight[self.tiles.all_targets]
        return torch.sub(target_rows, rows, out=rows).div_(self.tiles.temperatures[:, None])
