"""Learners with a few settings, and groups as a step makes them of its batches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from policy_trainer.algorithms.objective.advantages import advantages
from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import LossConfig, OptimizerConfig, ReferenceConfig, SamplingConfig, TrainConfig
from policy_trainer.learner.groups import make_group, trains, with_old_logps
from policy_trainer.learner.learner import Learner
from shared.batch import Array, Batch
from shared.logprobs import PackedForward


def make_learner(
    model: PreTrainedModel,
    forward: Any = None,
    *,
    loss: LossConfig,
    optimizer: OptimizerConfig | None = None,
    max_completion_length: int = 10,
    reference: Any = "server",
    part_weights: Mapping[str, float] | None = None,
    **settings: Any,
) -> Learner:
    """settings: others of TrainConfig; they are not checked against each other."""
    config = TrainConfig.model_construct(
        loss=loss,
        optimizer=optimizer or OptimizerConfig(),
        sampling=SamplingConfig(max_completion_length=max_completion_length),
        reference=ReferenceConfig.model_construct(source=reference),
        **{"max_steps": 10, "micro_batch_tokens": 10_000, **settings},
    )
    return Learner(model, PackedForward(model) if forward is None else forward, config, part_weights=part_weights)


def ready_groups(batches: Sequence[Batch], loss: LossConfig) -> list[Group]:
    """Those that train, with old log-probs and advantages; nothing may have to be recomputed for them."""

    def recompute(groups: Sequence[Group]) -> list[Array]:
        raise AssertionError("no model is at hand")

    groups = [group for group in (make_group(batch, loss) for batch in batches) if trains(group, loss)]
    groups = with_old_logps(groups, loss, recompute)
    values = advantages(groups, loss)
    return [replace(group, advantages=computed) for group, computed in zip(groups, values, strict=True)]


def assert_near(got: Mapping[str, Any], expected: Mapping[str, Any], **bounds: float) -> None:
    """Statistics of a step as dicts, with those of its updates; bounds: of pytest.approx."""
    (of_step, updates), (expected_of_step, expected_updates) = (
        (
            {name: value for name, value in each.items() if name not in ("each_update", "metrics")} | each["metrics"],
            each["each_update"],
        )
        for each in (got, expected)
    )
    assert of_step == pytest.approx(expected_of_step, nan_ok=True, **bounds)
    for update, expected_update in zip(updates, expected_updates, strict=True):
        assert update == pytest.approx(expected_update, nan_ok=True, **bounds)
