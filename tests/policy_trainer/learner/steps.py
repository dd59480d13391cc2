"""Groups as a step of the learner makes them of its batches."""

from collections.abc import Sequence
from dataclasses import replace

from policy_trainer.config import LossConfig
from policy_trainer.learner.groups import Batch, make_group, trains
from policy_trainer.learner.old_logps import with_old_logps
from policy_trainer.objective.advantages import advantages
from policy_trainer.objective.group import Group
from shared.batch import Array


def ready_groups(batches: Sequence[Batch], loss: LossConfig) -> list[Group]:
    """Those that train, with old log-probs and advantages; nothing may have to be recomputed for them."""

    def recompute(groups: Sequence[Group]) -> list[Array]:
        raise AssertionError("no model is at hand")

    groups = [group for group in (make_group(batch, loss) for batch in batches) if trains(group, loss)]
    groups = with_old_logps(groups, loss, recompute)
    values = advantages(groups, loss)
    return [replace(group, advantages=own) for group, own in zip(groups, values, strict=True)]
