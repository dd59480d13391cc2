"""Several runs beside each other as one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policy_trainer.report.curves import laid_over, last_values
from policy_trainer.report.page import write_page
from policy_trainer.report.recorded import RecordedRun, read_run
from policy_trainer.report.story import story
from shared.errors import UserError


def write_comparison(roots: Sequence[Path], output: Path) -> None:
    """Raises UserError for fewer than two runs, and as `write_report` does."""
    if len({root.resolve() for root in roots}) < max(2, len(roots)):
        raise UserError("RUN_DIR: name two or more different directories of runs to compare")
    runs = [read_run(root) for root in roots]
    names = names_of(roots)
    labelled = list(zip(names, runs, strict=True))
    samples = [run.samples_at() for run in runs]
    write_page(
        output,
        "compare.html",
        title=" · ".join(names),
        names=names,
        stories=[(name, story(run)) for name, run in labelled],
        by_step=laid_over(labelled, "step", [None] * len(runs)),
        by_samples=laid_over(labelled, "completions sampled", samples) if any(samples) else [],
        values=last_values(runs),
        settings=differing_settings(runs),
    )


def names_of(roots: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart: of most runs the directory's own name."""
    paths = [root.resolve().parts for root in roots]
    ends = (["/".join(path[-length:]) for path in paths] for length in range(1, max(map(len, paths)) + 1))
    return next(names for names in ends if len(set(names)) == len(names))


def differing_settings(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Any]]]:
    """Setting -> its value in each run, for those that are not alike. A run whose config.toml is not there has none."""
    names = dict.fromkeys(name for run in runs for name in (*run.settings.given, *run.settings.defaults))
    rows = [(name, [None if run.settings.problem else run.settings[name] for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
