"""The auxiliary loss of a mixture of experts, which keeps its experts equally busy: `loss.router_aux_loss_coef`.

Switch Transformer (arXiv 2101.03961, eq. 4 to 6), by transformers' own function. It is computed for each group by
itself, so that it does not depend on how groups are joined in micro-batches; of an update it is the groups' mean,
weighted by their completions that train. TRL computes it for each micro-batch: the two agree where a micro-batch is one
group. A prompt counts once for each of its completions, as in TRL, although it is computed once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from policy_trainer.algorithms.objective.aggregation import Totals
from policy_trainer.algorithms.objective.group import Group
from shared.errors import UserError
from shared.logprobs import LogprobForward, PackedForward
from shared.logprobs.forward import body_of

# One call of the model: (tokens, experts) logits of each layer, and the mask of padded rows.
_Call = tuple[Sequence[Tensor], Tensor]
# One group: a tuple of each layer's (tokens, experts) logits, and (1, tokens) weights: how often each token counts.
_Tokens = tuple[Any, Tensor]


class Routing:
    """Has the model return the logits of its routers in forwards with a gradient, and computes the loss of the latest.

    Raises UserError for a model without routers.
    """

    def __init__(self, model: PreTrainedModel, forward: LogprobForward, coef: float) -> None:
        """coef: the weight of the loss."""
        self.coef = coef
        config: Any = model.config.get_text_config()
        if not hasattr(config, "output_router_logits"):
            name = type(model).__name__
            raise UserError(f"loss.router_aux_loss_coef: {name} is not a mixture-of-experts model", "set it to 0")
        self._experts = getattr(config, "num_experts", None) or config.num_local_experts
        self._top_k: int = config.num_experts_per_tok
        self._packed = isinstance(forward, PackedForward)
        self._calls: list[_Call] = []
        body_of(model).register_forward_pre_hook(_ask, with_kwargs=True)
        body_of(model).register_forward_hook(self._keep, with_kwargs=True)

    def loss(self, groups: Sequence[Group], total: Totals) -> Float[Tensor, ""]:
        """With a gradient: what these groups, those of the latest forward, contribute to the update's loss."""
        calls, self._calls = self._calls, []
        of_groups = _packed_tokens(calls, groups) if self._packed else _padded_tokens(calls, groups)
        losses = []
        for group, (layers, weights) in zip(groups, of_groups, strict=True):
            share = int(group.sequence_mask.sum()) / max(total.completions, 1)
            losses.append(share * load_balancing_loss_func(layers, self._experts, self._top_k, weights))
        return torch.stack(losses).sum()

    def forget(self) -> None:
        """Frees the activations of a forward for which no loss was computed."""
        self._calls = []

    def _keep(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            self._calls.append((output.router_logits, kwargs["attention_mask"]))


def _packed_tokens(calls: Sequence[_Call], groups: Sequence[Group]) -> Iterator[_Tokens]:
    """From a packed forward, which has each prompt once."""
    (layers, _), sizes = calls[0], [group.tokens.tokens for group in groups]
    for group, parts in zip(groups, zip(*(layer.split(sizes) for layer in layers), strict=True), strict=True):
        weights = torch.ones(1, len(parts[0]), device=parts[0].device)
        weights[:, : len(group.tokens.prompt_ids)] = len(group.lengths)
        yield parts, weights


def _padded_tokens(calls: Sequence[_Call], groups: Sequence[Group]) -> Iterator[_Tokens]:
    """From a forward of padded rows, each a prompt and one completion, sorted by length."""
    lengths = [len(group.tokens.prompt_ids) + int(length) for group in groups for length in group.lengths]
    place = {row: number for number, row in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__))}
    by_layer = []
    for layers in zip(*(layers for layers, _ in calls), strict=True):
        masks = (mask.flatten().bool() for _, mask in calls)
        tokens = torch.cat([layer[mask] for layer, mask in zip(layers, masks, strict=True)])
        by_layer.append(tokens.split(sorted(lengths)))
    first = 0
    for group in groups:
        rows = [place[first + number] for number in range(len(group.lengths))]
        first += len(rows)
        parts = tuple(torch.cat([layer[row] for row in rows]) for layer in by_layer)
        yield parts, torch.ones(1, len(parts[0]), device=parts[0].device)


def router_aux_loss_coef(config: Any, coef: float | str) -> float:
    """The weight of the loss for a model with this text config. coef: `loss.router_aux_loss_coef`."""
    if coef != "model":
        return float(coef)
    return getattr(config, "router_aux_loss_coef", 0.0) if hasattr(config, "output_router_logits") else 0.0


def routing_of(model: PreTrainedModel, forward: LogprobForward, coef: float | str) -> Routing | None:
    """None where the loss has no weight. coef: `loss.router_aux_loss_coef`."""
    weight = router_aux_loss_coef(model.config.get_text_config(), coef)
    return Routing(model, forward, weight) if weight else None


def _ask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "output_router_logits": torch.is_grad_enabled()}
