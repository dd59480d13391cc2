"""A run, or several to compare, as one HTML file: the viewer's page, and sections on what a server does not know."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from policy_trainer.report.run import RecordedRun, read_run
from policy_trainer.report.story import figure, limit_of, story, times_of, waits_of
from policy_trainer.report.texts import cut, held_out_chapters, spread, training_chapters
from policy_trainer.report.viewer import document, numbers, one_page
from shared.atomic_files import write_text
from shared.errors import UserError, printable

# Rows of the table of evaluations.
_EVALUATIONS = 30


def write_report(root: Path, output: Path) -> None:
    """Raises UserError for a directory that holds no run, and for a file that cannot be written."""
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
    """Raises UserError for fewer than two runs, and as `write_report` does."""
    if len({root.resolve() for root in roots}) < max(2, len(roots)):
        raise UserError("RUN_DIR: name two or more different directories of runs to compare")
    runs = {printable(name): read_run(root) for name, root in zip(names_of(roots), roots, strict=True)}
    sections = _render(
        "compare.html",
        runs=list(runs),
        stories=[(name, story(run)) for name, run in runs.items()],
        values=last_values(list(runs.values())),
        settings=differing_settings(list(runs.values())),
    )
    # The viewer names a run in an address by its lineage, of which a directory has none, and its name.
    opens = "#/runs?" + urlencode([("run", f"/{name}") for name in runs])
    _write(output, one_page(" · ".join(runs), sections, document("runs", opens, runs)))


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


def last_values(runs: Sequence[RecordedRun]) -> list[tuple[str, list[float]]]:
    """Metric -> its newest number in each run, those of evaluations first. NaN where a run has none."""
    evaluations = [_newest(run.evaluations) for run in runs]
    steps = [_newest(run.steps) for run in runs]
    rows = []
    for newest, suffix in ((evaluations, ", held out"), (steps, "")):
        for name in dict.fromkeys(name for numbers_of_run in newest for name in numbers_of_run):
            rows.append((name + suffix, [values.get(name, math.nan) for values in newest]))
    return rows


def _newest(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last number of each metric."""
    return {name: value for record in records for name, value in numbers(record)}


def _evaluations(run: RecordedRun) -> list[dict[str, float]]:
    """The numbers of each evaluation, all with the same names."""
    rows = [{"step": float(record["step"])} | dict(numbers(record)) for record in run.evaluations]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, math.nan) for name in names} for row in rows]


def _write(path: Path, page: str) -> None:
    try:
        write_text(path, page)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror}; choose another file") from error


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
    """Names, settings and texts may hold characters that change what stands beside them: they are shown as escapes."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _setting(value: Any) -> str:
    if value is None:
        return "not given"
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
