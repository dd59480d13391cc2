"""Forwards over whole groups in one packed sequence: each prompt is computed once, nothing is padded."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs.attention import Packing, PackingContext, SpanAttention, pack_attention
from shared.logprobs.forked import fork_states
from shared.logprobs.forward import HiddenForward, body_of
from shared.logprobs.layout import PackedLayout
from shared.logprobs.stacked import StackedAttention
from shared.logprobs.varlen import VarlenAttention


class PackedForward(HiddenForward):
    """Log-probs from one packed sequence, in which all completions of a group attend to a single copy of their prompt.

    Requires attention through transformers' attention interface, and a plain nn.Linear head.
    """

    name = "packed"
    _attention: ClassVar[type[SpanAttention]] = StackedAttention

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        pack_attention(model)
        self._with_state = fork_states(model)

    def _hidden(self, groups: Sequence[TokenGroup]) -> Tensor:
        """(C, hidden size) at the positions that predict the completion tokens of all groups."""
        device = self._model.device
        packed = np.concatenate([part for group in groups for part in (group.prompt_ids, group.completion_ids)])
        layout = PackedLayout.of(groups, self._vision.linked(packed) if self._vision else None)
        ids = torch.tensor(packed, device=device)[None]
        # (1, N), or (3, 1, N) where each token has three positions.
        positions = torch.tensor(self._positions(layout, groups), device=device).unsqueeze(-2)
        packing = Packing(layout, self._attention, self._model.dtype)
        with PackingContext(packing):
            hidden: Tensor = body_of(self._model)(
                input_ids=ids,
                position_ids=positions,
                # Without it transformers would take positions that go back for the start of another sequence.
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                **(self._vision.inputs([group.images for group in groups], ids) if self._vision else {}),
            ).last_hidden_state[0]
        if missed := self._with_state - packing.forked:
            names = ", ".join(sorted({type(module).__name__ for module in missed}))
            raise NotImplementedError(f"{names} cannot be computed in a packed sequence")
        return hidden.index_select(0, torch.tensor(layout.predictors(), device=hidden.device))

    def _positions(self, layout: PackedLayout, groups: Sequence[TokenGroup]) -> np.ndarray:
        if self._vision is None:
            return layout.positions()
        return layout.positions([self._vision.positions(group.prompt_ids, group.images) for group in groups])


class VarlenForward(PackedForward):
    """The same with one attention call for all spans. Half precision on CUDA only."""

    name = "packed-varlen"
    _attention = VarlenAttention
