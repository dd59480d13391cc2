"""The display of a training run: a live panel on a terminal, else a line every few steps."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from policy_trainer.processes.lifecycle.timing import Patience
from policy_trainer.reporting.evaluating import EvaluationLines, EvaluationProgress
from shared.errors import printable

_LINE_EVERY = 10
# Shorter waits are not shown: the panel would flicker.
_QUIET_SECONDS = 1.0
# The largest width of the panel and of a cell; longer text is cut.
_WIDTH = 100
_CELL = 30
_GAP = 2
# A KL noise floor above this is shown. That of half precision is above it, that of float32 far below.
_SHOWN_NOISE = 1e-9


def make_display(console: Console, steps: int, first_step: int) -> "Display":
    return (LiveDisplay if console.is_terminal else Display)(console, steps, first_step)


class Display:
    """Prints progress as lines. first_step: steps trained before this process."""

    def __init__(self, console: Console, steps: int, first_step: int) -> None:
        self._console = console
        self._steps = steps
        self._first_step = first_step
        self._times: deque[tuple[int, float]] = deque(maxlen=20)
        self._waits = {recurring: Patience(recurring=recurring) for recurring in (False, True)}
        self._evaluation: EvaluationLines | None = None
        self._answered = 0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def note(self, text: str) -> None:
        """Prints a message. Text from servers, workers and models is escaped, so it cannot control the terminal."""
        self._console.print(printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows the metrics of a finished step."""
        left = self._seconds_left(record["step"])
        first = record["step"] == self._first_step + 1
        if first or record["step"] % _LINE_EVERY == 0 or record["step"] == self._steps:
            parts = (*_idle(record), *(f"{name} {value}" for name, value in _figures(record, left).items()))
            self.note(" · ".join([f"step {record['step']}/{self._steps}", *parts]))
        if first:
            self.note(f"from now on a line every {_LINE_EVERY} steps; docs/metrics.md explains each figure")

    def waiting(self, reason: str, seconds: float, *, recurring: bool = False) -> None:
        """Shows that the trainer has waited for so many seconds, and why. recurring: every step waits for this."""
        if self._waits[recurring].is_over(seconds):
            self.note(_waited(reason, seconds))

    def evaluating(self, progress: EvaluationProgress) -> None:
        """Shows how many held-out problems are answered."""
        if self._evaluation is None:  # the first may take long, and shows how long the others will
            self.note(f"evaluating {progress.total} held-out problems")
        if line := self._evaluation_of(progress).line(progress):
            self.note(line)

    def _evaluation_of(self, progress: EvaluationProgress) -> EvaluationLines:
        if self._evaluation is None or progress.done < self._answered:  # a new one
            self._evaluation = EvaluationLines()
        self._answered = progress.done
        return self._evaluation

    def _seconds_left(self, step: int) -> float | None:
        """Estimated from the time that the latest steps took."""
        self._times.append((step, time.monotonic()))
        (first, began), (last, now) = self._times[0], self._times[-1]
        return (now - began) / (last - first) * (self._steps - last) if last > first else None


class LiveDisplay(Display):
    """Shows progress in a live panel."""

    def __init__(self, console: Console, steps: int, first_step: int) -> None:
        super().__init__(console, steps, first_step)
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step)
        self._figures: dict[str, str] = {}
        self._wait = ""
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def start(self) -> None:
        self._live.start()

    def step(self, record: Mapping[str, Any]) -> None:
        self._bar.update(self._task, completed=record["step"])
        self._figures = _figures(record, self._seconds_left(record["step"]))
        self._wait = "".join(f"step {record['step']} {reason}" for reason in _idle(record))

    def waiting(self, reason: str, seconds: float, *, recurring: bool = False) -> None:
        self._wait = _waited(reason, seconds) if seconds >= _QUIET_SECONDS else ""

    def evaluating(self, progress: EvaluationProgress) -> None:
        text = self._evaluation_of(progress).text(progress)
        self._wait = f"evaluating: {text}" if progress.done < progress.total else ""

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> Panel:
        width = min(_WIDTH, self._console.width)
        columns = max(1, (width - 4 + _GAP) // (_CELL + _GAP))  # 4: the frame
        table = Table.grid(padding=(0, _GAP))
        for _ in range(columns):
            table.add_column(max_width=_CELL, no_wrap=True, overflow="ellipsis")
        cells = [Text.assemble((f"{printable(name)} ", "dim"), value) for name, value in self._figures.items()]
        for start in range(0, len(cells), columns):
            table.add_row(*cells[start : start + columns])
        wait = Text(printable(self._wait, keep="\n"), "yellow")
        return Panel(Group(self._bar, table, wait), title="tandem", title_align="left", width=width)


def _waited(reason: str, seconds: float) -> str:
    return f"waited {seconds:.0f} s so far: {reason}"


def _figures(record: Mapping[str, Any], left: float | None) -> dict[str, str]:
    """The metrics of a step as text, by label. left: seconds until the last step."""

    def number(name: str, form: str) -> str:
        value = record.get(name)
        return "-" if value is None or math.isnan(value) else format(value, form)

    floor = record.get("kl_noise_floor") or 0.0
    noise = f" (noise floor {floor:.1g})" if floor > _SHOWN_NOISE else ""
    parts = [name for name in record if name.startswith("reward/")]
    evaluated = record.get("eval_step", 0)
    measure = "reward" if record.get("eval_accuracy") is None else "accuracy"
    return {
        "reward": f"{number('reward', '.3f')} ± {number('reward_std', '.3f')}",
        **{name.removeprefix("reward/"): number(name, ".3f") for name in parts},
        **(
            {f"eval {measure}": f"{number(f'eval_{measure}', '.3f')} (step {evaluated})"}
            if evaluated is not None
            else {}
        ),
        "KL": number("kl", ".4f") + noise,
        "entropy": number("entropy", ".3f"),
        "clipped": number("clip_ratio", ".3f"),
        "equal rewards": number("frac_reward_zero_std", ".0%"),
        **({"unrewarded": str(record["unrewarded"])} if record.get("unrewarded") else {}),
        "length": f"{number('completion_length_mean', '.0f')} (max {number('completion_length_max', ',')})",
        "truncated": number("truncated", ".0%"),
        "tokens/s": f"{number('tokens_per_second', ',.0f')} trained",
        "tokens/s per worker": number("sampler_tokens_per_second", ",.0f"),
        "trainer waits": number("waiting_share", ".0%"),
        "sampler waits": number("sampler_waiting_share", ".0%"),
        "staleness": f"{number('staleness', '.1f')} (max {number('staleness_max', 'd')})",
        "queue": f"{record.get('queued') or 0} to score, {record.get('ready') or 0} ready",
        "time left": "-" if left is None else f"{left:.0f} s",
    }


def _idle(record: Mapping[str, Any]) -> tuple[str, ...]:
    """A note that the step trained nothing, and why; empty if it trained."""
    if record.get("tokens", 1):
        return ()
    if record.get("unrewarded") == record.get("completions"):
        return ("trained nothing: no completion has a reward",)
    equal = record.get("frac_reward_zero_std") == 1
    return (f"trained nothing: {'the rewards of each group are equal' if equal else 'no token takes part'}",)
