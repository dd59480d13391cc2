"""The simulation where its result is known, and its check against a run's records."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.pipeline import Stages, measured, predict

# Of one worker, one scorer and one trainer none is the slowest: each takes 8 s for a step.
EVEN = Stages(sample=1.0, score=1.0, train=8.0, groups=8)


@pytest.mark.parametrize(
    ("stages", "seconds", "busy"),
    [
        (replace(EVEN, sample=3.0), 24.0, "workers"),
        (replace(EVEN, score=3.0), 24.0, "scorers"),
        (replace(EVEN, train=24.0), 24.0, "trainer"),
    ],
)
def test_the_slowest_stage_decides(stages: Stages, seconds: float, busy: str) -> None:
    predicted = predict(stages, workers=1, scorers=1, trainers=1)
    assert predicted.seconds_per_step == pytest.approx(seconds, rel=0.02)
    shares = {name: getattr(predicted, name) for name in ("workers", "scorers", "trainer")}
    assert shares == pytest.approx({name: 1.0 if name == busy else 1 / 3 for name in shares}, abs=0.03)


def test_more_of_the_slowest_stage_help_until_another_one_is() -> None:
    slow = replace(EVEN, sample=3.0)
    steps = [predict(slow, workers=workers, scorers=1, trainers=1).seconds_per_step for workers in (1, 2, 3, 6)]
    assert steps == pytest.approx([24, 12, 8, 8], rel=0.05)


def test_a_trainer_on_two_devices_takes_half_the_time() -> None:
    slow = replace(EVEN, train=24.0)
    assert predict(slow, workers=2, scorers=2, trainers=2).seconds_per_step == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize("waiting", [8, 24, 80])
def test_groups_are_as_old_as_the_line_is_long(waiting: int) -> None:
    """Where the trainer is slowest: what waits, what is leased ahead, and what workers have in hand when they pause."""
    fast = replace(EVEN, sample=0.01, score=0.01, max_waiting=waiting)
    predicted = predict(fast, workers=1, scorers=1, trainers=1)
    assert waiting / 8 <= predicted.staleness <= (waiting + 8 + 8) / 8


def test_new_weights_cost_the_workers_time() -> None:
    loading = replace(EVEN, sample=3.0, load=6.0)
    assert predict(loading, workers=1, scorers=1, trainers=1).seconds_per_step == pytest.approx(30, rel=0.02)
    rarely = replace(loading, publish_every=4)
    assert predict(rarely, workers=1, scorers=1, trainers=1).seconds_per_step == pytest.approx(25.5, rel=0.02)


def test_what_a_run_took(tmp_path: Path) -> None:
    step = {"kind": "step", "batch_ids": ["a", "b"], "sampling_seconds": 4.0, "training_seconds": 3.0}
    records = [
        {**step, "waiting_seconds": 2.0, "server_scoring_seconds": 0.5 * number, "staleness": 1.5}
        for number in range(30)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "config.toml").write_text("publish_every = 2\n[sampling]\nprompts_per_round = 4\n")
    stages, came_to = measured(tmp_path)
    assert stages == Stages(sample=2.0, score=0.25, train=3.0, groups=2, publish_every=2, prompts_per_round=4)
    assert (came_to.seconds_per_step, came_to.staleness) == (5.0, 1.5)
    assert (came_to.workers, came_to.trainer) == (0.8, 0.6)
