"""The curve of an example: the held-out rewards of its runs, one for each seed, as data and as a picture next to it.

    for seed in 0 1 2; do policy-trainer train --config run.toml --seed $seed --run-dir runs/words-$seed; done
    python -m benchmarks.examples runs/words-* --out curve.json

For rewards of 0 and 1, of which 95% intervals over the problems are computed.
"""

import json
import tomllib
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.trainer.evaluation.results import wilson_interval


def curve(run_dir: Path) -> dict[str, Any]:
    """The evaluations of a run: completions that it trained on, seconds of training, and held-out reward."""
    config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    evaluations = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "evaluation"]
    names = {"step": "step", "completions": "completions_total", "seconds": "runtime_seconds", "reward": "reward"}
    points = [{ours: round(record[theirs], 4) for ours, theirs in names.items()} for record in evaluations]
    return {"seed": config.get("seed", 0), "problems": evaluations[0]["problems"], "points": points}


def intervals(curves: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """Of each evaluation: the mean reward of all seeds, and its interval. All seeds have the same held-out problems, so
    that more seeds do not narrow it."""
    problems = curves[0]["problems"]
    columns = zip(*([point["reward"] for point in run["points"]] for run in curves), strict=True)
    means = [fmean(column) for column in columns]
    return [(mean, *wilson_interval(mean * problems, problems)) for mean in means]


def draw(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Each run as a line, and the interval of all as a band, over completions."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    completions = [point["completions"] for point in curves[0]["points"]]
    means, lows, highs = zip(*intervals(curves), strict=True)
    panel.fill_between(completions, lows, highs, alpha=0.2, linewidth=0)
    for run in curves:
        panel.plot(completions, [point["reward"] for point in run["points"]], "C0", linewidth=0.8)
    panel.plot(completions, means, "C0", linewidth=2)
    panel.set(xlabel="completions", ylabel="held-out problems right, greedy", ylim=(0, 1))
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = ArgumentParser(prog="benchmarks.examples", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", help="runs of one configuration with different seeds")
    parser.add_argument("--out", type=Path, required=True, help="data; the picture goes next to it")
    options = parser.parse_args()
    curves = [curve(run_dir) for run_dir in options.run_dirs]
    options.out.write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, options.out.with_suffix(".png"))
    for name, (mean, low, high) in zip(("before", "after"), (intervals(curves)[0], intervals(curves)[-1]), strict=True):
        print(f"{name}: {mean:.3f}, 95% interval {low:.3f} to {high:.3f}")
    print("seconds:", ", ".join(f"{run['points'][-1]['seconds']:.0f}" for run in curves))


if __name__ == "__main__":
    main()
