"""The display of a step: its metrics, and a dash for each that has no number."""

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.processes.lifecycle import timing
from policy_trainer.reporting.display import make_display
from policy_trainer.reporting.evaluating import EvaluationProgress
from tests.policy_trainer.children import Clock

STEP: dict[str, Any] = {"step": 10, "reward": 0.5, "kl": 0.00034, "entropy": 1.25, "queued": 3, "ready": 2}


def shown(record: dict[str, Any], *, terminal: bool, width: int = 200) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width, color_system=None)
    display = make_display(console, steps=20, first_step=0)
    display.start()
    display.step(record)
    display.stop()
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("record", "present", "absent"),
    [
        ({**STEP, "kl_noise_floor": 0.0002}, "0.0003 (noise floor 0.0002)", "None"),
        *(({**STEP, "kl_noise_floor": floor}, "0.0003", "noise") for floor in (None, 0.0, 3e-15, math.nan)),
        ({**STEP, "unrewarded": 3}, "unrewarded 3", "None"),
        ({**STEP, "unrewarded": 0}, "1.250", "unrewarded"),
        ({"step": 10, "reward": math.nan}, "reward -", "nan"),
        ({"step": 10, "kl": None}, "KL -", "None"),
    ],
)
def test_numbers_of_a_step(record: dict[str, Any], present: str, absent: str, terminal: bool) -> None:
    text = shown(record, terminal=terminal)
    assert present in text and absent not in text


# Figures as wide as they come.
WIDE: dict[str, Any] = {
    "step": 10, "reward": -12.345, "reward_std": 10.123, "reward/accuracy": 0.1, "reward/format": 0.2,
    "reward/a_name_that_somebody_gave_it": 0.3, "reward/fourth": 0.4, "eval_step": 8, "eval_accuracy": 0.977,
    "kl": 1.0867, "kl_noise_floor": 0.000213, "entropy": 11.932, "clip_ratio": 0.123, "frac_reward_zero_std": 1.0,
    "completion_length_mean": 12345.6, "completion_length_max": 32768, "truncated": 1.0, "tokens_per_second": 123456.7,
    "sampler_tokens_per_second": 123456.7, "waiting_share": 1.0, "sampler_waiting_share": 1.0, "staleness": 123.4,
    "staleness_max": 1234, "queued": 123, "ready": 1234,
}  # fmt: skip
FIGURES = (
    "reward -12.345 ± 10.123", "accuracy 0.100", "format 0.200", "a_name_that_somebody_gave_it ", "fourth 0.400",
    "eval accuracy 0.977 (step 8)",
    "KL 1.0867 (noise floor 0.0002)", "entropy 11.932", "clipped 0.123", "equal rewards 100%",
    "length 12346 (max 32,768)", "truncated 100%", "tokens/s 123,457 trained", "tokens/s per worker 123,457",
    "trainer waits 100%", "sampler waits 100%", "staleness 123.4 (max 1234)", "queue 123 to score, 1234 ready",
    "time left -",
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 300])
def test_the_panel_shows_all_figures_in_at_most_a_hundred_columns(width: int) -> None:
    panel, line = shown(WIDE, terminal=True, width=width), shown(WIDE, terminal=False)
    assert max(len(line) for line in panel.splitlines()) <= 100 + len("\x1b[?25h")
    assert [figure for figure in FIGURES if figure not in panel or figure not in line] == []


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_is_printed_unchanged_and_a_wait_with_its_reason(terminal: bool) -> None:
    output = io.StringIO()
    display = make_display(Console(file=output, force_terminal=terminal, width=90), steps=20, first_step=0)
    text = "step 7: kl is 2, healthy is [below] 1 nat a token: " + "lower optimizer.learning_rate " * 5
    display.note(text)
    assert text in output.getvalue()
    display.start()
    display.waiting("the reference server scores 3 batches", 31.0)
    display.stop()
    assert "waited 31 s so far: the reference server scores 3 batches" in output.getvalue()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def wait(clock: Clock, longest: float, on_wait: Callable[[float], None]) -> None:
    """Calls on_wait after each 5 s."""
    began = clock.monotonic()
    while (seconds := clock.monotonic() - began) <= longest:
        on_wait(seconds)
        clock.sleep(5)


def test_lines_name_unusual_waits_only(clock: Clock) -> None:
    """Each wait of 40 s is polled every 5 s. The first is new; then one of 40 s is usual, and one of 10 minutes not."""
    output = io.StringIO()
    display = make_display(Console(file=output, width=300), steps=50, first_step=0)
    for longest in (40, 40, 40, 600, 40):
        wait(clock, longest, partial(display.waiting, "the workers sample", recurring=True))
        wait(clock, 0.1, partial(display.waiting, "the server answers", recurring=True))  # too short to count
    waits = [line.split()[1] for line in output.getvalue().splitlines()]
    assert waits == ["30", "120", "240", "480"]


def test_an_outage_is_reported_whatever_is_usual_and_once_for_all_threads(clock: Clock) -> None:
    """Each has a wait of ten minutes for the first batches before it, and the main thread waits meanwhile."""
    output = io.StringIO()
    display = make_display(Console(file=output, width=300), steps=50, first_step=0)
    batches = partial(display.waiting, "the worker starts", recurring=True)
    outage = partial(display.waiting, "the reference server does not answer")
    for _ in range(2):
        wait(clock, 600, batches)
        for tick in range(0, 140, 2):
            clock.sleep(2)
            batches(float(tick))
            for begun in (0, 5, 20):
                if tick >= begun:
                    outage(float(tick - begun))
    outages = [line.split()[1] for line in output.getvalue().splitlines() if "does not answer" in line]
    assert outages == 2 * ["30", "60", "120"]


def test_lines_begin_with_the_first_step_of_a_process() -> None:
    output = io.StringIO()
    display = make_display(Console(file=output, width=300), steps=50, first_step=12)
    for step in range(13, 32):
        display.step({**STEP, "step": step})
    lines = output.getvalue().splitlines()
    shown_steps = [line.split(" · ")[0] for line in lines if line.startswith("step")]
    assert shown_steps == ["step 13/50", "step 20/50", "step 30/50"]
    assert "every 10 steps; docs/metrics.md" in lines[1]


@pytest.mark.parametrize(
    ("accuracy", "shows"), [(0.25, "eval accuracy 0.250 (step 4)"), (None, "eval reward 1.500 (step 4)")]
)
def test_the_evaluation_is_shown_with_its_step(accuracy: float | None, shows: str) -> None:
    line = shown({**STEP, "eval_step": 4, "eval_accuracy": accuracy, "eval_reward": 1.5}, terminal=False)
    assert shows in line and line.count("eval ") == 1


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("unrewarded", "equal", "reason"),
    [(8, 1.0, "no completion has a reward"), (0, 1.0, "the rewards of each"), (0, 0.5, "no token takes part")],
)
def test_a_step_that_trained_nothing_says_so(terminal: bool, unrewarded: int, equal: float, reason: str) -> None:
    idle = {"tokens": 0, "completions": 8, "unrewarded": unrewarded, "frac_reward_zero_std": equal}
    assert f"trained nothing: {reason}" in shown({**STEP, **idle}, terminal=terminal)
    assert "trained nothing" not in shown({**STEP, **idle, "tokens": 5}, terminal=terminal)


def test_lines_show_the_first_evaluation_at_once_and_long_ones_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("policy_trainer.reporting.evaluating.time.monotonic", lambda: now)
    output = io.StringIO()
    display = make_display(Console(file=output, width=300), steps=50, first_step=0)
    display.evaluating(EvaluationProgress(0, 0, 64, 0))
    assert output.getvalue() == "evaluating 64 held-out problems\n"
    for done in (32, 64, 0, 32, 64, 0):  # the next ones are quick, and take some time
        display.evaluating(EvaluationProgress(done, done, 64, 10 * done))
    assert output.getvalue().count("\n") == 1
    # Sixteen are sampled together. The first that ends says nothing about the others.
    for seconds, done, judged in (
        (20, 0, 0),
        (20, 1, 0),
        (10, 16, 16),
        (30, 17, 16),
        (20, 32, 32),
        (100, 48, 48),
        (5, 64, 64),
    ):
        now += seconds
        display.evaluating(EvaluationProgress(done, judged, 64, 10 * judged))
    assert output.getvalue().splitlines()[1:] == [
        "evaluating for 40 s: 1 of 64 held-out problems",
        "evaluating for 80 s: 17 of 64 held-out problems, 3 tokens/s, about 120 s left",
        "evaluating for 200 s: 48 of 64 held-out problems, 2 tokens/s, about 67 s left",
    ]


def test_the_panel_shows_how_far_an_evaluation_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("policy_trainer.reporting.evaluating.time.monotonic", lambda: now)
    output = io.StringIO()
    display = make_display(Console(file=output, force_terminal=True, width=120), steps=50, first_step=0)
    display.start()
    for seconds, done, judged in ((0, 0, 0), (10, 16, 16), (10, 17, 16)):
        now += seconds
        display.evaluating(EvaluationProgress(done, judged, 64, 10 * judged))
    display.stop()
    assert "evaluating: 17 of 64 held-out problems, 16 tokens/s, about 20 s left" in output.getvalue()


ESCAPE = "\x1b]0;owned\x07\x9b2J\u202e"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_text_of_others_cannot_control_the_terminal(terminal: bool) -> None:
    """Text such as the last output of a worker that died, or the name of a reward."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, color_system=None)
    display = make_display(console, steps=20, first_step=0)
    display.note(f"a worker died:\n{ESCAPE}")
    display.start()
    display.step({**STEP, f"reward/{ESCAPE}": 1.0})
    display.waiting(f"the server says {ESCAPE}", 100.0)
    display.stop()
    text = output.getvalue()
    assert not {"\x07", "\x9b", "\u202e"} & set(text) and "\x1b]" not in text
    assert "a worker died:\n" in text and r"\x1b]0;owned\x07\x9b2J\u202e" in text
