"""Seconds of stages are added up, whatever ends them."""

import pytest

from policy_trainer.processes.lifecycle import timing as module
from policy_trainer.processes.lifecycle.timing import Stopwatch
from tests.policy_trainer.children import Clock


def test_stages_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    stopwatch = Stopwatch()
    for seconds in (1, 2):
        with stopwatch("learn"):
            clock.sleep(seconds)
    with pytest.raises(KeyError), stopwatch("publish"):
        clock.sleep(4)
        raise KeyError
    assert stopwatch.seconds == {"learn": 3, "publish": 4}
