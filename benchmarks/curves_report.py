"""The page and the picture of the curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.curves_recipes import (
    ALGORITHMS,
    COUNTDOWN,
    COUNTDOWN_STEPS,
    MINIBATCHES,
    OVERLONG_TOKENS,
    PROBLEMS,
    RENEW_EVERY,
)
from policy_trainer.config.presets import PRESETS
from policy_trainer.trainer.evaluation.results import wilson_interval

COLUMNS = 5
_HEAD = (
    "| algorithm | accuracy before | after | samples | to 0.5 | to 0.9 | KL at the end | entropy | remarks |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Point:
    """An evaluation. samples: completions sampled for the steps until then, including discarded ones."""

    step: int
    samples: int
    accuracy: float


@dataclass(frozen=True)
class Result:
    """kl: of the last step, to the reference; None without one. entropy: of the last step; None where nothing trained.
    seconds: of the process."""

    name: str
    seed: int
    steps: int
    curve: list[Point]
    kl: float | None
    entropy: float | None
    seconds: float

    @property
    def before(self) -> float:
        return self.curve[0].accuracy

    @property
    def after(self) -> float:
        return self.curve[-1].accuracy

    def samples_to(self, accuracy: float) -> int | None:
        """Samples until the first evaluation that reached `accuracy`; None if none did."""
        return next((point.samples for point in self.curve if point.accuracy >= accuracy), None)


def by_name(results: Sequence[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(result.name for result in results)
    return {name: [result for result in results if result.name == name] for name in names}


def draw(results: Sequence[Result], path: Path) -> None:
    """A panel for each algorithm: the mean over the seeds, and the band from the lowest to the highest."""
    runs_by_name = by_name(results)
    rows = -(-len(runs_by_name) // COLUMNS)
    figure = Figure(figsize=(15, 2.7 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False).flatten()
    for panel, (name, runs) in zip(panels, runs_by_name.items(), strict=False):
        _draw_panel(panel, name, runs)
    for panel in panels[len(runs_by_name) :]:
        panel.set_axis_off()
    figure.supxlabel("completions sampled")
    figure.supylabel("accuracy on held-out problems, greedy")
    figure.savefig(path, dpi=80)


def _draw_panel(panel: Axes, name: str, runs: Sequence[Result]) -> None:
    points = list(zip(*(run.curve for run in runs), strict=True))
    samples = [mean(point.samples for point in at) for at in points]
    accuracies = [[point.accuracy for point in at] for at in points]
    panel.fill_between(samples, [min(at) for at in accuracies], [max(at) for at in accuracies], alpha=0.25, linewidth=0)
    panel.plot(samples, [mean(at) for at in accuracies])
    panel.set_title(name, fontsize=10)
    panel.set_ylim(0, 1.02)
    panel.grid(alpha=0.3)


def write_page(page: str, results: Sequence[Result], path: Path, picture: str) -> None:
    """page: a name of `PAGES`."""
    runs_by_name = by_name(results)
    rows = [_row(name, runs) for name, runs in runs_by_name.items()]
    steps = min(result.steps for result in results)
    seeds = len({result.seed for result in results})
    values = {"steps": steps, "factor": COUNTDOWN_STEPS, "seeds": seeds, "problems": PROBLEMS, "picture": picture}
    table, finding = "\n".join([_HEAD, *rows]), _finding(runs_by_name)
    path.write_text(_TEXTS[page].format(**values, finding=finding, table=table))


def _finding(runs_by_name: Mapping[str, Sequence[Result]]) -> str:
    """Counts the algorithms that learned with every seed and names the others.

    Learned means that the 95% interval of the final accuracy lies above the initial accuracy.
    """
    lifted = [
        name
        for name, runs in runs_by_name.items()
        if all(wilson_interval(run.after * PROBLEMS, PROBLEMS)[0] > run.before for run in runs)
    ]
    others = [f"`{name}`" for name in runs_by_name if name not in lifted]
    end = f"; {', '.join(others)} did not." if others else "."
    return f"**{len(lifted)} of these {len(runs_by_name)} lift accuracy with every seed**{end}"


def _row(name: str, runs: Sequence[Result]) -> str:
    kls = [run.kl for run in runs if run.kl is not None]
    entropies = [run.entropy for run in runs if run.entropy is not None]
    cells = [
        f"{name}, default GRPO" if name == COUNTDOWN else f"`{name}`",
        _spread([run.before for run in runs], "{:.2f}"),
        _spread([run.after for run in runs], "{:.2f}"),
        _spread([run.curve[-1].samples for run in runs], "{:,.0f}"),
        _reached(runs, 0.5),
        _reached(runs, 0.9),
        _spread(kls, "{:.3f}") if kls else "-",
        _spread(entropies, "{:.3f}") if entropies else "-",
        _remarks(name),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float], form: str) -> str:
    """The mean, and the range if the values differ."""
    low, high, middle = form.format(min(values)), form.format(max(values)), form.format(mean(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def _reached(runs: Sequence[Result], accuracy: float) -> str:
    reached = [samples for run in runs if (samples := run.samples_to(accuracy)) is not None]
    if not reached:
        return "-"
    return _spread(reached, "{:,.0f}") + (f", {len(reached)} of {len(runs)}" if len(reached) < len(runs) else "")


def _remarks(name: str) -> str:
    if name == COUNTDOWN:
        return "3 numbers from 1 to 9, + and -"
    if name in ALGORITHMS:
        return f"{MINIBATCHES} updates a step"
    config = PRESETS[name].config()
    updates = config.num_iterations * config.minibatches
    remarks = [
        (updates > 1, f"{updates} updates a step"),
        (config.publish_every > 1, f"published every {config.publish_every} steps"),
        (bool(config.reference.sync_steps), f"reference renewed every {RENEW_EVERY} steps"),
        (bool(config.sampling.max_resamples), "groups without variance resampled"),
        ("soft_overlong" in config.rewards, f"overlong penalty over {OVERLONG_TOKENS} tokens"),
        (config.judging.steps, "a reward for each step"),
    ]
    return ", ".join(text for holds, text in remarks if holds)


_PRESETS = """# Learning curves

Every preset's algorithm on the demo's task, addition of two numbers up to 99, for {steps} steps of 16 groups of 8,
and the default GRPO on countdown for {factor} times as many; {seeds} seeds. `make curves` trains them with real
processes and writes this page and its picture; after an interruption it continues.

Each run takes its algorithm from the preset: advantage, surrogate, KL, aggregation, old log-probs, filters, updates per
step, publishing and penalties. All share base model, rewards (accuracy and tags), 40 tokens, temperature 1, AdamW at
3e-4 per step with 10 steps of warm-up and decay to a tenth, and a gradient norm of at most 1. The table therefore shows
that each algorithm learns, not which is best.

The updates of a step share that rate. With the full rate in each update (100 steps, one seed), `dapo` (16 updates)
ended at an accuracy of 0.04 and `cispo` (16) at 0.01; `gspo` (4) still learned.

Countdown is sensitive to its settings: we tried five base models, and publishing after every step, until one seed
learned, and selected by the same 256 problems.

"""

_ALGORITHMS = """# Learning curves of algorithms that no preset uses

The names are those of `benchmarks/curves_recipes.py`, which has the settings of each. The task is the demo's,
addition of two numbers up to 99, for {steps} steps of 16 groups of 8; {seeds} seeds. Base model, rewards and rate
are those of [curves.md](curves.md), so the table shows that each learns, not which is best.
[choosing.md](choosing.md) explains their uses, [mathematics.md](mathematics.md) their formulas. `make curves`
trains them.

"""

_RESULTS = """{finding} Accuracy is greedy, on {problems} held-out problems. Ranges are over the
seeds. Samples are completions, including those of discarded groups; "to 0.5" is their number up to the first
evaluation that reached it.

![Curves]({picture})

{table}
"""

_TEXTS: Mapping[str, str] = {"curves": _PRESETS + _RESULTS, "algorithms": _ALGORITHMS + _RESULTS}
