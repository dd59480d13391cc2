"""Training data of sampled groups, sent to the server; no failure of that stops the run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import LossConfig
from policy_trainer.learner.groups import make_group
from policy_trainer.trainer.queue_client.server import KeptSamples, trained_advantages
from shared.batch import Array, Batch, Training
from shared.client import RefServerError
from shared.client.errors import Unreachable


class Learner:
    """Log-probs of -1, -2, … for each batch's tokens, unless others are given."""

    def __init__(self, logps: Array | None = None) -> None:
        self._logps = logps

    def logps(self, batches: Sequence[Batch]) -> list[Array]:
        made = [-1 - np.arange(len(batch.group.completion_ids), dtype=np.float32) for batch in batches]
        return made if self._logps is None else [self._logps] * len(batches)


class Client(list[tuple[str, Training]]):
    """Keeps what is sent, or fails with each of these errors in turn."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self._errors = list(errors)

    def put_training(self, id: str, training: Training) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.append((id, training))


@pytest.fixture
def sampled(make_scored: Any) -> list[tuple[Batch, Group]]:
    """Two groups of two completions; the second one did not train."""
    batches = [make_scored([3], [[4, 5, 6], [7, 8]], [0.0, 1.0], number=number) for number in range(2)]
    first, second = [make_group(batch, LossConfig(beta=0)) for batch in batches]
    advantages = np.array([-1, -1, -1, 1, 1], np.float32)
    return [(batches[0], replace(first, advantages=advantages)), (batches[1], second)]


def keeper(client: Client, notes: list[str], learner: Learner | None = None) -> KeptSamples:
    return KeptSamples(cast(Any, client), cast(Any, learner or Learner()), notes.append)


def test_each_group_is_sent(sampled: Any) -> None:
    client, notes = Client(), []
    keeper(client, notes).keep(7, sampled)
    (first, training), (second, untrained) = client
    assert [first, second] == [batch.id for batch, _ in sampled]
    assert (training.step, training.logps.tolist()) == (7, [-1, -2, -3, -4, -5])
    assert training.advantages.tolist() == [-1, -1, -1, 1, 1]
    assert untrained.advantages.tolist() == [0] * 5
    assert notes == []


def test_advantages_are_zero_where_nothing_trained(sampled: Any) -> None:
    (_, group), _ = sampled
    masked = replace(group, loss_mask=np.array([True, False, True, True, True]), sequence_mask=np.array([True, False]))
    assert trained_advantages(masked).tolist() == [-1, 0, -1, 0, 0]


def test_failures_are_noted_once_and_stop_nothing(sampled: Any) -> None:
    client, notes = Client(Unreachable("http://x", "gone", passes=True, done=False), RefServerError(409, "x")), []
    kept = keeper(client, notes)
    kept.keep(1, sampled)
    kept.keep(2, sampled)
    assert len(client) == 0, "the other groups of a step that failed are not tried"
    assert len(notes) == 1 and "step 1" in notes[0] and "gone" in notes[0]
    kept.keep(3, sampled)
    assert {training.step for _, training in client} == {3}
    keeper(client, notes, Learner(np.full(5, np.nan, np.float32))).keep(4, sampled)
    assert len(client) == 2 and "logps must be finite" in notes[1]
