"""The reference's log-probs: those that came with a batch, or those of the policy's own model without its adapters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedModel

from policy_trainer.config import ReferenceSource
from policy_trainer.learner.adapters import adapters_off
from policy_trainer.learner.old_logps import Recompute
from policy_trainer.objective.group import Group


class Reference(Protocol):
    def with_logps(self, groups: Sequence[Group], recompute: Recompute) -> list[Group]:
        """The groups with ref_logps, where they are known."""
        ...


class ServerReference:
    """They came with the batch, from a server with a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        pass

    def with_logps(self, groups: Sequence[Group], recompute: Recompute) -> list[Group]:
        return list(groups)


class FrozenWeights:
    """The weights that the adapters of `model` stand beside: no second model is loaded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def with_logps(self, groups: Sequence[Group], recompute: Recompute) -> list[Group]:
        if not groups:
            return []
        with adapters_off(self._model):
            logps = recompute(groups)
        return [replace(group, ref_logps=own) for group, own in zip(groups, logps, strict=True)]


_SOURCES: Mapping[ReferenceSource, type[ServerReference] | type[FrozenWeights]] = {
    "server": ServerReference,
    "adapter-off": FrozenWeights,
}


def choose_reference(source: ReferenceSource, model: PreTrainedModel) -> Reference:
    """source: where the KL penalty's log-probs come from; `server` where there is no penalty."""
    return _SOURCES[source](model)
