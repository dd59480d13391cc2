"""Reports training data of the sampled groups to the server, which keeps these batches for display."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from policy_trainer.config import SamplesConfig
from policy_trainer.learner.interface import PolicyLearner
from policy_trainer.objective.group import Group
from shared.api import QueueView
from shared.batch import Array, BatchError, RolloutBatch, Training
from shared.client import ClientError, RefServerClient


class KeepsSamples(Protocol):
    def keep(self, step: int, sampled: Sequence[tuple[RolloutBatch, Group]]) -> None:
        """Takes the sampled groups of a step, each with its batch, before they are acked; at least one.

        step: training steps done.
        """
        ...


class KeptSamples:
    """client: tries once. note: called with the first failure. No failure stops the run."""

    def __init__(self, client: RefServerClient, learner: PolicyLearner, note: Callable[[str], None]) -> None:
        self._client = client
        self._learner = learner
        self._note = note
        self._noted = False

    def keep(self, step: int, sampled: Sequence[tuple[RolloutBatch, Group]]) -> None:
        logps = self._learner.logps([batch for batch, _ in sampled])
        try:
            for (batch, group), own in zip(sampled, logps, strict=True):
                self._client.put_training(batch.id, Training(step, trained_advantages(group), own))
        except (ClientError, BatchError) as error:
            if not self._noted:
                self._note(f"the server keeps no samples of step {step}: {error}")
            self._noted = True


class NoKeptSamples:
    def keep(self, step: int, sampled: Sequence[tuple[RolloutBatch, Group]]) -> None:
        pass


def trained_advantages(group: Group) -> Array:
    """float32 (C,): the advantage of each token that trained, 0 for the others."""
    if not len(group.advantages):
        return np.zeros(len(group.mask), np.float32)
    return np.where(group.mask, group.advantages, 0).astype(np.float32)


def choose_kept_samples(
    config: SamplesConfig,
    queue: QueueView,
    connect_once: Callable[[], RefServerClient],
    learner: PolicyLearner,
    note: Callable[[str], None],
) -> KeepsSamples:
    """connect_once: makes a client that tries once. None is made for a server that keeps no samples."""
    if not config.every or not queue.limits.keep_samples:
        return NoKeptSamples()
    return KeptSamples(connect_once(), learner, note)
