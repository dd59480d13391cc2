"""Writes a run, or several to compare, as one HTML file: the viewer's pages, and sections with data a server lacks."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from policy_trainer.reporting.report.run import RecordedRun, names_of, read_run
from policy_trainer.reporting.report.story import figure, limit_of, story, times_of, waits_of
from policy_trainer.reporting.report.viewer import document, numbers, one_page, spread
from policy_trainer.reporting.sample_views import by_reward
from policy_trainer.reporting.samples import SampledCompletion, SampledGroup
from shared.atomic_files import write_text
from shared.errors import UserError, printable

# Rows of the table of evaluations.
_EVALUATIONS = 30
# The number of steps and held-out problems with texts; characters shown of the beginning and the end of a long text.
_STEPS = 5
_PROBLEMS = 4
_HEAD, _TAIL = 3000, 1000

# A title, and completions, each with a label and its group, which has the prompt.
Chapter = tuple[str, list[tuple[str, SampledGroup, SampledCompletion]]]


def write_report(root: Path, output: Path) -> None:
    """Raises UserError if the directory contains no run or the file cannot be written."""
    run = read_run(root)
    name, times = printable(run.name), times_of(run)
    sections = _render(
        "report.html",
        title=name,
        run=run,
        sentences=story(run),
        evaluations=spread(_evaluations(run), _EVALUATIONS),
        times=times,
        limit=limit_of(waits_of(times)),
        training=training_chapters(run.groups),
        held_out=held_out_chapters(run.groups),
    )
    _write(output, one_page(name, sections, document("run", f"#/run/{quote(name, safe='')}", {name: run})))


def write_comparison(roots: Sequence[Path], output: Path) -> None:
    """Raises UserError for fewer than two different runs, and as `write_report` does."""
    if len(roots) < 2:
        raise UserError("RUN_DIR: name two or more directories of runs to compare")
    runs = {name: read_run(root) for name, root in zip(names_of(roots), roots, strict=True)}
    sections = _render(
        "compare.html",
        runs=list(runs),
        stories=[(name, story(run)) for name, run in runs.items()],
        values=last_values(list(runs.values())),
        settings=differing_settings(list(runs.values())),
    )
    # In addresses the viewer names a run LINEAGE/NAME; runs read from directories have no lineage.
    opens = "#/runs?" + urlencode([("run", f"/{name}") for name in runs])
    _write(output, one_page(" · ".join(runs), sections, document("runs", opens, runs)))


def differing_settings(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Any]]]:
    """The settings that differ, each with its value in each run; None for a run without config.toml."""
    names = dict.fromkeys(name for run in runs for name in (*run.settings.given, *run.settings.defaults))
    rows = [(name, [None if run.settings.problem else run.settings[name] for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def last_values(runs: Sequence[RecordedRun]) -> list[tuple[str, list[float]]]:
    """Each metric with its latest value in each run, NaN if it has none; evaluation metrics first."""
    evaluations = [_newest(run.evaluations) for run in runs]
    steps = [_newest(run.steps) for run in runs]
    rows = []
    for newest, suffix in ((evaluations, ", held out"), (steps, "")):
        for name in dict.fromkeys(name for numbers_of_run in newest for name in numbers_of_run):
            rows.append((name + suffix, [values.get(name, math.nan) for values in newest]))
    return rows


def training_chapters(groups: Sequence[SampledGroup]) -> list[Chapter]:
    """The best and worst completion of some of the steps that have samples, from the first to the last."""
    training = [group for group in groups if group.kind == "train"]
    steps = spread(sorted({group.step or 0 for group in training}), _STEPS)
    return [(f"Step {step}", _ends([group for group in training if group.step == step])) for step in steps]


def held_out_chapters(groups: Sequence[SampledGroup]) -> list[Chapter]:
    """Some held-out problems, each with its completions at the first, a middle and the last evaluation."""
    held_out = [group for group in groups if group.kind == "eval"]
    chapters = []
    for problem in list(dict.fromkeys((group.problem, group.prompt) for group in held_out))[:_PROBLEMS]:
        groups_of_problem = [group for group in held_out if (group.problem, group.prompt) == problem]
        answers = [(f"step {group.step}", group, group.completions[0]) for group in spread(groups_of_problem, 3)]
        chapters.append(("Held-out problem" + ("" if problem[0] is None else f" {problem[0]}"), answers))
    return chapters


def cut(text: str) -> str:
    """A long text shortened to its beginning and end."""
    left_out = len(text) - _HEAD - _TAIL
    return text if left_out <= 0 else f"{text[:_HEAD]}\n… {left_out:,} more characters …\n{text[-_TAIL:]}"


def _ends(groups: Sequence[SampledGroup]) -> list[tuple[str, SampledGroup, SampledCompletion]]:
    """The best and worst completion of the groups."""
    owner = {id(item): group for group in groups for item in group.completions}
    ranked = by_reward([item for group in groups for item in group.completions])
    ends = {"best": ranked[-1]} | ({"worst": ranked[0]} if len(ranked) > 1 else {})
    return [(label, owner[id(item)], item) for label, item in ends.items()]


def _newest(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The latest value of each metric."""
    return {name: value for record in records for name, value in numbers(record)}


def _evaluations(run: RecordedRun) -> list[dict[str, float]]:
    """The numbers of each evaluation; all rows have the same names."""
    rows = [{"step": float(record["step"])} | dict(numbers(record)) for record in run.evaluations]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, math.nan) for name in names} for row in rows]


def _write(path: Path, page: str) -> None:
    try:
        write_text(path, page)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror}", "choose another file") from error


def _render(template: str, **values: Any) -> Markup:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "cut": cut, "setting": _setting}
    return Markup(environment.get_template(template).render(**values))


def _visible(value: Any) -> Any:
    """Escapes control characters and bidirectional overrides in names, settings and texts."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _setting(value: Any) -> str:
    if value is None:
        return "not given"
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
