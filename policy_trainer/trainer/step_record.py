"""What is recorded of a step, whether its batches were leased or recorded."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from policy_trainer.learner.step_stats import StepStats
from policy_trainer.objective.group import Group
from policy_trainer.objective.kl import teacher_kl
from policy_trainer.reporting.metrics import batch_metrics
from shared.client import Leased


def step_record(leased: Sequence[Leased], groups: Sequence[Group], stats: StepStats, step: int) -> dict[str, Any]:
    """step: its number, from 1. groups: of the batches that train."""
    return {
        "kind": "step",
        "step": step,
        **batch_metrics(leased, version=step - 1),
        **asdict(stats),
        "teacher_kl": teacher_kl(groups),
        "batch_ids": [lease.id for lease in leased],
        "groups_left_out": len(leased) - stats.groups,
    }
