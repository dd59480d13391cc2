"""How many groups a step asks for."""

from types import SimpleNamespace
from typing import Any

import pytest

from policy_trainer.config import TrainConfig
from policy_trainer.trainer.demand import Demand


@pytest.fixture
def watch() -> Any:
    return SimpleNamespace(depth={"dead": None})


@pytest.fixture
def feed() -> Any:
    return SimpleNamespace(gone=0)


def demand(watch: Any, feed: Any, max_lag: int | None = 0) -> Demand:
    return Demand(TrainConfig(model="m", task="arithmetic", groups_per_step=4, max_lag=max_lag), watch, feed)


def test_lost_groups_are_asked_for_once(watch: Any, feed: Any) -> None:
    made = demand(watch, feed)
    assert made.groups(0) == 4 and not made.grows()
    watch.depth["dead"] = 7  # what the server says first: they are of an earlier process
    assert not made.grows()
    watch.depth["dead"] = 8
    assert made.grows() and not made.grows() and made.groups(0) == 5
    made.lose(1)
    feed.gone = 2
    assert made.grows() and not made.grows() and made.groups(0) == 8
    assert made.groups(1) == 4 and not made.grows()  # the next step has lost nothing so far
    watch.depth["dead"] = 9
    assert made.grows() and made.groups(1) == 5


def test_workers_that_sample_all_the_time_are_asked_for_nothing(watch: Any, feed: Any) -> None:
    made = demand(watch, feed, max_lag=1)
    made.lose(3)
    assert made.groups(0) is None and not made.grows()
