"""The auxiliary loss of a mixture of experts, which keeps its experts equally busy: `loss.router_aux_loss_coef`.

Switch Transformer (arXiv 2101.03961, eq. 4 to 6), by transformers' own function. It is computed for each group by
itself, so that it does not depend on how groups are joined in micro-batches; of an update it is the groups' mean,
weighted by their completions that train. TRL computes it for each micro-batch: the two agree where a micro-batch is one
group. A prompt counts once for each of its completions, as in TRL, although it is computed once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from policy_trainer.objective.aggregation import Totals
from policy_trainer.objective.group import Group
from shared.errors import UserError
from shared.logprobs import LogprobForward, PackedForward
from shared.logprobs.padded import row_batches


class Routing:
    """Has the model return the logits of its routers in forwards with a gradient, and computes the loss of the latest.

    Raises UserError for a model without routers.
    """

    def __init__(self, model: PreTrainedModel, forward: LogprobForward, coef: float) -> None:
        """coef: the weight of the loss."""
        self.coef = coef
        config: Any = model.config.get_text_config()
        where = "loss.router_aux_loss_coef:"
        if not hasattr(config, "output_router_logits"):
            raise UserError(f"{where} {type(model).__name__} is not a mixture-of-experts model: set it to 0")
        self._model, self._is_packed = model, isinstance(forward, PackedForward)
        self._experts = getattr(config, "num_experts", None) or config.num_local_experts
        self._top_k: int = config.num_experts_per_tok
        # Of each call of the model: a packed forward is one call, a padded one several.
        self._logits: list[tuple[Tensor, ...]] = []
        model.base_model.register_forward_pre_hook(_ask, with_kwargs=True)
        model.base_model.register_forward_hook(self._keep)

    def loss(self, groups: Sequence[Group], total: Totals) -> Tensor:
        """A scalar with a gradient: the part of these groups, which the latest forward was of, in the update's loss."""
        parts = self._packed(groups) if self._is_packed else self._padded(groups)
        self.forget()
        losses = []
        for group, layers in zip(groups, parts, strict=True):
            weights = torch.ones(1, len(layers[0]), device=layers[0].device)
            if self._is_packed:
                weights[:, : len(group.tokens.prompt_ids)] = len(group.lengths)
            share = int(group.sequence_mask.sum()) / max(total.completions, 1)
            losses.append(share * load_balancing_loss_func(layers, self._experts, self._top_k, weights))
        return torch.stack(losses).sum()

    def _packed(self, groups: Sequence[Group]) -> list[Any]:
        """Of each group the logits of its tokens, (T, experts) of each layer."""
        (logits,) = self._logits
        sizes = [group.tokens.tokens for group in groups]
        return list(zip(*(layer.split(sizes) for layer in logits), strict=True))

    def _padded(self, groups: Sequence[Group]) -> list[Any]:
        """The same, where each completion is a row with the prompt."""
        lengths = [len(group.tokens.prompt_ids) + int(length) for group in groups for length in group.lengths]
        rows: dict[int, list[Tensor]] = {}
        for batch, logits in zip(row_batches(self._model, lengths), self._logits, strict=True):
            layers = [layer.reshape(len(batch), -1, layer.shape[-1]) for layer in logits]
            for place, row in enumerate(batch):
                rows[row] = [layer[place, : lengths[row]] for layer in layers]
        ordered = iter([rows[row] for row in range(len(lengths))])
        of_groups = [[next(ordered) for _ in group.lengths] for group in groups]
        return [tuple(map(torch.cat, zip(*of_group, strict=True))) for of_group in of_groups]

    def forget(self) -> None:
        """Frees the activations of a forward after which no loss was computed."""
        self._logits = []

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._logits.append(output.router_logits)


def routing_of(model: PreTrainedModel, forward: LogprobForward, coef: float | str) -> Routing | None:
    """None where the loss has no weight. coef: `loss.router_aux_loss_coef`."""
    if coef == "model":
        config: Any = model.config.get_text_config()
        coef = getattr(config, "router_aux_loss_coef", 0.0) if hasattr(config, "output_router_logits") else 0.0
    return Routing(model, forward, float(coef)) if coef else None


def _ask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "output_router_logits": torch.is_grad_enabled()}
