"""The part that limits a run is named, by the bounds that the dashboard has."""

import re
from pathlib import Path

import pytest

from policy_trainer.report.story import limit_of

WAITS = Path(__file__).parents[3] / "shared" / "viewer" / "waits.js"


def verdict(workers: float, server: float, trainer: float) -> str:
    return limit_of({"Rollout workers": workers, "Reference server": server, "Policy trainer": trainer})


@pytest.mark.parametrize(
    ("waits", "beginning"),
    [
        ((0.0, 0.9, 0.8), "Sampling limited"),
        ((0.8, 0.1, 0.9), "Scoring limited"),
        ((0.5, 0.8, 0.05), "Training limited"),
        ((0.1, 0.2, 0.9), "The run was balanced"),
        ((0.5, 0.4, 0.9), "Every part waited"),
    ],
)
def test_the_part_that_hardly_waits_limits(waits: tuple[float, float, float], beginning: str) -> None:
    assert verdict(*waits).startswith(beginning)


def test_too_little_is_known_of_one_part() -> None:
    assert limit_of({"Policy trainer": 0.0}) == ""


def test_the_dashboard_has_the_same_bounds() -> None:
    bounds = dict(re.findall(r"^const (BUSY|CLEAR) = ([\d.]+);$", WAITS.read_text(), re.MULTILINE))
    busy, clear = float(bounds["BUSY"]), float(bounds["CLEAR"])
    small = 1e-6
    assert verdict(busy, 1, 1).startswith("Sampling") and verdict(busy + small, 1, 1).startswith("Every part")
    assert verdict(0, clear + small, 1).startswith("Sampling") and verdict(0, clear - small, 1).startswith(
        "The run was"
    )
