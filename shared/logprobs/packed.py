"""Forwards over whole groups in one packed sequence: each prompt is computed once, nothing is padded."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs.attention import PACKED_ATTENTION, SpanAttention, set_attention
from shared.logprobs.forward import HiddenForward
from shared.logprobs.layout import PackedLayout
from shared.logprobs.stacked import StackedAttention
from shared.logprobs.varlen import VarlenAttention


class PackedForward(HiddenForward):
    """Log-probs from one packed sequence, in which all completions of a group attend to a single copy of their prompt.

    Requires full attention through transformers' attention interface, and a plain nn.Linear head.
    """

    name = "packed"
    _attention: ClassVar[Callable[..., SpanAttention]] = StackedAttention

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        set_attention(model, PACKED_ATTENTION)

    def _hidden(self, groups: Sequence[TokenGroup]) -> Tensor:
        """(C, hidden size) at the positions that predict the completion tokens of all groups."""
        device = self._model.device
        layout = PackedLayout.of(groups)

        @cache
        def attention_on(where: torch.device) -> SpanAttention:  # made when the first layer there asks
            return type(self)._attention(layout, dtype=self._model.dtype, device=where)

        def attend(query: Tensor, *others: Any) -> Tensor:
            return attention_on(query.device)(query, *others)

        packed = np.concatenate([part for group in groups for part in (group.prompt_ids, group.completion_ids)])
        ids = torch.tensor(packed, device=device)[None]
        # (1, N), or (3, 1, N) where each token has three positions.
        positions = torch.tensor(self._positions(layout, groups), device=device).unsqueeze(-2)
        hidden: Tensor = self._model.base_model(
            input_ids=ids,
            position_ids=positions,
            # Ignored by packed attention. Given a 4D mask, transformers does not build an (N, N) one.
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
            use_cache=False,
            span_attention=attend,
            longest_row=layout.longest_row,
            **(self._vision.inputs([group.images for group in groups], ids) if self._vision else {}),
        ).last_hidden_state[0]
        return hidden.index_select(0, torch.tensor(layout.predictors(), device=hidden.device))

    def _positions(self, layout: PackedLayout, groups: Sequence[TokenGroup]) -> np.ndarray:
        if self._vision is None:
            return layout.positions()
        return layout.positions([self._vision.positions(group.prompt_ids, group.images) for group in groups])


class VarlenForward(PackedForward):
    """The same with one attention call for all spans. Half precision on CUDA only."""

    name = "packed-varlen"
    _attention = VarlenAttention
