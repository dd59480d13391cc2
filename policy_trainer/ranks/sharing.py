"""Shares the groups of a step out to the ranks by what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from transformers import PreTrainedModel

from policy_trainer.learner.micro_batches import cut
from policy_trainer.learner.ranks import Part
from shared.batch import TokenGroup


@dataclass(frozen=True)
class Costs:
    """Floating-point operations of a forward. token: of one token in all layers and the head. pair: of a query and a
    key that it attends to, in all layers."""

    token: float
    pair: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        config = model.config.get_text_config()
        embedding: Any = model.get_input_embeddings().weight
        head: Any = model.get_output_embeddings()
        looked_up = 0 if head is None or head.weight is embedding else embedding.numel()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            token=2.0 * (parameters - looked_up),
            pair=4.0 * config.num_hidden_layers * config.num_attention_heads * width,
        )

    def forward(self, group: TokenGroup) -> float:
        """Of the prompt once, and of completions that attend to it and to themselves."""
        prompt, lengths = len(group.prompt_ids), group.completion_lengths.astype(np.float64)
        pairs = prompt**2 / 2 + float((lengths * (prompt + lengths / 2)).sum())
        return self.token * group.tokens + self.pair * pairs


def share(groups: Sequence[TokenGroup], ranks: int, costs: Costs) -> list[list[int]]:
    """The places of each rank's groups. The costliest group first, to the rank that has the least to do (Graham's LPT,
    at most 4/3 of the best). The same on every rank."""
    weights = [costs.forward(group) for group in groups]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(groups)), key=lambda place: (-weights[place], place)):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += weights[place]
    return [sorted(own) for own in shares]


def parts_of_rank(groups: Sequence[TokenGroup], rank: int, ranks: int, limit: int, costs: Costs) -> list[Part]:
    """A rank's forwards. Each rank has as many: those that it lacks repeat the smallest group, and do not count."""
    cuts = [
        [[own[place] for place in range(part.start, part.stop)] for part in cut([groups[i].tokens for i in own], limit)]
        for own in share(groups, ranks, costs)
    ]
    smallest = min(range(len(groups)), key=lambda place: groups[place].tokens)
    missing = max(map(len, cuts)) - len(cuts[rank])
    return [*map(Part, cuts[rank]), *[Part([smallest], counts=False)] * missing]
