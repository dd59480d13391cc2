"""What a person sees of a step: figures that are there, and a dash for those that are not."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from policy_trainer.display import make_display

STEP: dict[str, Any] = {"step": 10, "reward": 0.5, "kl": 0.00034, "entropy": 1.25, "queued": 3, "ready": 2}


def shown(record: dict[str, Any], *, terminal: bool) -> str:
    output = io.StringIO()
    display = make_display(Console(file=output, force_terminal=terminal, width=200), steps=20, first_step=0)
    display.start()
    display.step(record)
    display.stop()
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
class TestStep:
    def test_a_noise_floor_stands_beside_the_kl(self, terminal: bool) -> None:
        words = shown({**STEP, "kl_noise_floor": 0.0002}, terminal=terminal)
        assert "0.0003 (noise floor 0.0002)" in words and "1.250" in words

    @pytest.mark.parametrize("floor", [None, 0.0, 3e-15, math.nan])
    def test_without_noise_it_stands_alone(self, terminal: bool, floor: float | None) -> None:
        words = shown({**STEP, "kl_noise_floor": floor}, terminal=terminal)
        assert "0.0003" in words and "noise" not in words

    def test_what_is_not_known_is_a_dash(self, terminal: bool) -> None:
        words = shown({"step": 10, "reward": math.nan, "kl": None}, terminal=terminal)
        assert "nan" not in words and "None" not in words
