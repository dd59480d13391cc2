"""Health: a healthy run gets no warning, each trouble has its remedy, and nothing is reported twice."""

import math
from typing import Any

import pytest

from policy_trainer.config import LossConfig
from policy_trainer.metrics import LONG, STEP_METRICS, WINDOW
from policy_trainer.reporting.health import Health, diagnose, health_record
from tools.metrics_page import PAGE, SCRIPT, script, written

WELL: dict[str, Any] = {
    "kind": "step",
    "reward": 0.5,
    "reward_std": 0.4,
    "clip_ratio": 0.02,
    "advantage_std": 0.93,
    "kl": 0.05,
    "entropy": 0.5,
    "truncated": 0.05,
    "frac_reward_zero_std": 0.2,
    "effective_sample_size": 1.0000001,
    "masked_ratio": 0.0,
    "probe_logp_difference": 0.01,
    "staleness": 3.0,
    "updates": 1,
    "unrewarded": 0,
    "completions": 64,
    "reference_version_max": 0,
}


def run(steps: int, **figures: Any) -> list[dict[str, Any]]:
    return [{**WELL, **figures, "step": step} for step in range(1, steps + 1)]


def names(first: list[dict[str, Any]], recent: list[dict[str, Any]], **loss: Any) -> list[str]:
    return [trouble.name for trouble in diagnose(first, recent, LossConfig(**loss))]


def sick(name: str, value: Any, *, steps: int = WINDOW, **loss: Any) -> list[str]:
    """Names of the troubles of a run that was healthy at first and whose latest steps have this value."""
    return names(run(WINDOW), [*run(WINDOW), *run(steps, **{name: value})][-LONG:], **loss)


def test_a_healthy_run_gets_no_warning() -> None:
    assert names(run(WINDOW), run(LONG)) == []


BANDS = [
    ("clip_ratio", 0.29, 0.31, "optimizer.learning_rate"),
    ("advantage_std", 0.55, 0.45, "advantage_eps"),
    ("advantage_std", 1.45, 1.55, "outweigh"),
    ("kl", 0.14, 1.01, "loss.beta"),
    ("kl", 0.14, 0.21, "loss.beta"),  # it was 0.05
    ("entropy", 0.051, 0.049, "epsilon_high"),
    ("truncated", 0.149, 0.151, "max_completion_length"),
    ("frac_reward_zero_std", 0.79, 0.81, "max_resamples"),
    ("effective_sample_size", 0.51, 0.49, "correction"),
    ("masked_ratio", 0.49, 0.51, "loss.mask"),
    ("probe_logp_difference", 0.09, 0.11, "restart the workers"),
    ("staleness", 16, 17, "publish_every"),
    ("unrewarded", 3, 4, "judging.seconds"),
]


@pytest.mark.parametrize(("name", "well", "ill", "remedy"), BANDS)
def test_each_band(name: str, well: float, ill: float, remedy: str) -> None:
    assert sick(name, well) == []
    (trouble,) = diagnose(run(WINDOW), [*run(WINDOW), *run(WINDOW, **{name: ill})], LossConfig())
    assert trouble.name == name and remedy in trouble.remedy and trouble.band == STEP_METRICS[name].healthy
    assert trouble.seen == pytest.approx(ill / 64 if name == "unrewarded" else ill)
    assert trouble.remedy in str(trouble) and trouble.band in str(trouble) and f"{trouble.seen:.3g}" in str(trouble)


def test_all_that_is_watched_is_tested() -> None:
    assert {name for name, metric in STEP_METRICS.items() if metric.watched} == {name for name, *_ in BANDS}


def test_pages_have_the_ranges() -> None:
    """Both files are as policy_trainer/metrics.py writes them."""
    page = PAGE.read_text(encoding="utf-8")
    assert (page, SCRIPT.read_text(encoding="utf-8")) == (written(page), script()), (
        "run: .venv/bin/python -m tools.metrics_page"
    )


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_metric_without_a_number_is_no_trouble(value: float | None) -> None:
    empty = {name: value for name in WELL if name not in ("kind", "staleness", "updates")}
    assert names(run(WINDOW, **empty), run(LONG, **empty)) == []


def test_nothing_is_reported_before_a_whole_window() -> None:
    assert names(run(WINDOW - 1), run(WINDOW - 1, kl=9.0)) == []
    assert names(run(WINDOW), run(WINDOW, kl=9.0)) == ["kl"]


class TestInertRatio:
    def test_zero_for_long(self) -> None:
        assert sick("clip_ratio", 0.0, steps=LONG) == ["clip_ratio"]
        assert sick("clip_ratio", 0.0, steps=LONG - 1) == []
        assert sick("clip_ratio", 0.0, steps=LONG, old_logps="log_linear") == ["clip_ratio"]

    @pytest.mark.parametrize(
        ("figures", "loss"),
        [
            ({"staleness": 0.0}, {}),
            ({}, {"old_logps": "recomputed"}),
            ({"staleness": 0.0}, {"old_logps": "log_linear"}),
            ({}, {"old_logps": "current"}),
            ({}, {"surrogate": "reinforce"}),
        ],
    )
    def test_by_construction_is_no_trouble(self, figures: dict[str, Any], loss: dict[str, Any]) -> None:
        assert names(run(WINDOW), run(LONG, clip_ratio=0.0, **figures), **loss) == []

    def test_it_is_told_once_whatever_comes_between(self) -> None:
        steps = [{**WELL, "clip_ratio": float(step == 100) / 1000, "step": step} for step in range(1, 400)]
        health = Health(LossConfig())
        reports = [health_record(trouble, record["step"]) for record in steps for trouble in health.observe(record)]
        assert [record["name"] for record in reports] == ["clip_ratio"]
        later = Health(LossConfig(), past=[*steps[:150], *reports])
        assert [trouble for record in steps[150:] for trouble in later.observe(record)] == []

    def test_several_updates_make_a_ratio_possible(self) -> None:
        still = run(LONG, clip_ratio=0.0, staleness=0.0, updates=4)
        assert names(run(WINDOW), still, old_logps="recomputed") == ["clip_ratio"]


@pytest.mark.parametrize(
    ("name", "value", "loss"),
    [
        *(
            ("advantage_std", value, loss)
            for value in (0.1, 9.0)
            for loss in ({"advantage": "rloo"}, {"advantage": "process"}, {"scale_rewards": "none"})
        ),
        ("kl", 9.0, {"beta": 0.0}),
        ("frac_reward_zero_std", 1.0, {"distillation_coef": 0.1}),
        ("advantage_std", 9.0, {"distillation_coef": 0.1}),
    ],
)
def test_a_loss_without_a_band_has_no_trouble(name: str, value: float, loss: dict[str, Any]) -> None:
    """Unscaled advantages have any deviation, nothing bounds the KL without a penalty, and a teacher needs no
    variance."""
    assert sick(name, value) == [name] and sick(name, value, **loss) == []


def test_groups_without_variance_lower_it_where_they_stay() -> None:
    """Three quarters of the advantages are 0, so that a deviation of a half is 1 for the others."""
    recent = run(WINDOW, frac_reward_zero_std=0.75, advantage_std=0.4)
    assert names(run(WINDOW), recent, drop_zero_variance=False) == []
    assert names(run(WINDOW), recent, drop_zero_variance=True) == ["advantage_std"]


def test_a_renewed_reference_begins_at_0_again() -> None:
    renewed = run(WINDOW, kl=0.3, reference_version_max=1)
    assert names(run(WINDOW), [*run(WINDOW), *renewed]) == []
    assert names(run(WINDOW), [*run(WINDOW, reference_version_max=1), *renewed]) == ["kl"]


def test_groups_without_variance_are_reported_by_their_cause() -> None:
    cut_off = run(WINDOW, frac_reward_zero_std=1.0, truncated=1.0)
    (trouble,) = diagnose(cut_off, cut_off, LossConfig())
    assert trouble.name == "frac_reward_zero_std" and "max_completion_length" in trouble.remedy
    nothing = run(WINDOW, frac_reward_zero_std=1.0, unrewarded=64)
    assert names(nothing, nothing) == ["unrewarded"]


def test_entropy_may_fall_where_the_reward_rises() -> None:
    recent = run(WINDOW, entropy=0.02, reward=0.9)
    assert names(run(WINDOW), recent) == []
    assert names(run(WINDOW), run(WINDOW, entropy=0.004, reward=0.9)) == ["entropy"]
    assert names(run(WINDOW), run(WINDOW, entropy=0.02, reward=0.55)) == ["entropy"]


class TestReporting:
    def reported(self, health: Health, records: list[dict[str, Any]], start: int) -> list[int]:
        """The steps at which something was reported."""
        steps = [{**record, "step": start + i} for i, record in enumerate(records)]
        return [record["step"] for record in steps if health.observe(record)]

    def test_once_and_again_after_it_was_gone(self) -> None:
        assert self.reported(Health(LossConfig()), run(40, staleness=100.0), 1) == [WINDOW]
        health = Health(LossConfig())
        assert self.reported(health, run(30), 1) == []
        first = self.reported(health, run(100, staleness=100.0), 31)
        assert len(first) == 1
        assert self.reported(health, run(2), 131) == []  # a flicker
        assert self.reported(health, run(20, staleness=100.0), 133) == []
        assert self.reported(health, run(3 * WINDOW), 153) == []
        assert len(self.reported(health, run(100, staleness=100.0), 213)) == 1

    def test_a_resumed_run_remembers_how_it_began(self) -> None:
        past = [*run(WINDOW), {"kind": "evaluation", "step": WINDOW}, {"kind": "health", "name": "kl", "step": 1}]
        health = Health(LossConfig(), past)
        assert len(self.reported(health, run(WINDOW, entropy=0.01), WINDOW + 1)) == 1
        assert self.reported(Health(LossConfig()), run(WINDOW, entropy=0.01), WINDOW + 1) == []

    @pytest.mark.parametrize("steps", [WINDOW, 3 * WINDOW])
    def test_a_resumed_run_does_not_repeat_it(self, steps: int) -> None:
        past = run(steps, clip_ratio=0.5)
        first = Health(LossConfig())
        assert [trouble.name for record in past for trouble in first.observe(record)] == ["clip_ratio"]
        assert Health(LossConfig(), past).observe({**past[-1], "step": steps + 1}) == []

    def test_the_record_names_the_step(self) -> None:
        (trouble,) = diagnose(run(WINDOW), run(WINDOW, staleness=20.0), LossConfig())
        about = {"name": "staleness", "seen": 20.0, "band": trouble.band, "remedy": trouble.remedy}
        assert health_record(trouble, 7) == {"kind": "health", "step": 7, **about}
