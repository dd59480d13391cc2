"""Builds the viewer's pages as one HTML file with the data of runs inside, which needs no server and loads nothing.

It is the page that the dashboard serves, with the contents of its files in the place of their addresses.
"""

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, TypeVar

from markupsafe import Markup, escape

from policy_trainer.reporting.metrics import Metrics
from policy_trainer.reporting.report.run import RecordedRun, number
from policy_trainer.reporting.server_metrics import settings_record

_VIEWER = files("shared") / "viewer"
# Of a run with more than _MOST records, the newest and evenly spaced older ones are kept, _MOST in total.
_NEWEST, _MOST = 256, 1000
_NO_SCRIPT = "<noscript>This page needs JavaScript.</noscript>"
_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Modules import each other by a relative address, which an address that is the content itself does not have.
_RELATIVE, _NAMED = ' from "./', ' from "viewer/'

T = TypeVar("T")


def one_page(title: str, sections: Markup, data: Mapping[str, Any]) -> str:
    """The page. sections: HTML shown until the scripts run, which then move its parts. data: see `document`.

    Its content security policy allows its own scripts and styles, which have a nonce that no text of a run can know.
    """
    nonce, page = token_urlsafe(16), _read("index.html")
    addresses = {name: _address(name) for name in _names()}
    linked = {name for name in addresses if f'"dashboard/{name}"' in page}
    modules = {f"viewer/{name}": url for name, url in addresses.items() if name.endswith(".js") and name not in linked}
    first = f'{_policy(nonce)}\n<script type="importmap">{json.dumps({"imports": modules})}</script>'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{first}')
    for tag in ("<script ", '<link rel="stylesheet" '):
        page = page.replace(tag, f'{tag}nonce="{nonce}" ')
    for name in linked:
        page = page.replace(f'"dashboard/{name}"', f'"{addresses[name]}"')
    page = page.replace("<title>Tandem</title>", f"<title>{escape(title)}</title>")
    # ASCII without `<`, which could end the script element.
    recorded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    # The run's texts are inserted last, so that no replacement is applied to them.
    head, tail = page.split(_NO_SCRIPT)
    tail, end = tail.split("</body>")
    return f'{head}{sections}{tail}<script id="recorded" type="application/json">{recorded}</script>\n</body>{end}'


def _last_step(run: RecordedRun) -> int:
    return max((record["step"] for record in (*run.steps, *run.evaluations)), default=0)


def document(view: str, opens: str, runs: Mapping[str, RecordedRun]) -> dict[str, Any]:
    """The data that replaces a server's responses; shared/viewer/recorded.js documents its fields.

    view, opens: the first view and its address. runs: by their displayed names.
    """
    return {
        "view": view,
        "opens": opens,
        "runs": [{"run": name, "lineage": "", "step": _last_step(run)} for name, run in runs.items()],
        "metrics": {name: _metrics(run) for name, run in runs.items()},
        "warnings": {name: [_warning(record) for record in run.warnings] for name, run in runs.items()},
        "settings": {name: settings_record(run.settings.given, run.settings.defaults) for name, run in runs.items()},
    }


def numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record except its step; nested ones are named `rewards/tags`, as on the server."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif math.isfinite(metric := number(record, name)) and prefix + name != "step":
            yield prefix + name, metric


def _metrics(run: RecordedRun) -> dict[str, Any]:
    """The metrics of each kind of record, as columns."""
    columns = {}
    for kind, records in {"step": run.steps, "evaluation": run.evaluations, "health": run.warnings}.items():
        by_step = sorted({record["step"]: record for record in records}.items())
        kept = [*spread(by_step[:-_NEWEST], _MOST - _NEWEST), *by_step[-_NEWEST:]]
        rows = [dict(numbers(record)) for _, record in kept]
        names = dict.fromkeys(name for row in rows for name in row)
        values = {name: [_short(row.get(name)) for row in rows] for name in names}
        columns[kind] = {"steps": [step for step, _ in kept], "values": values, "next_after": None}
    return columns


def _warning(record: Metrics) -> dict[str, Any]:
    texts = {name: str(record.get(name, "")) for name in ("name", "band", "remedy")}
    return {"kind": "health", "step": record["step"], "seen": _short(number(record, "seen")), **texts}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items: the first, the last, and evenly spaced ones in between."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _short(value: float | None) -> float | int | None:
    """Rounded to eight digits, more than any curve or table shows."""
    if value is None or math.isnan(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.8g}")


def _policy(nonce: str) -> str:
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta name="referrer" content="no-referrer">'
    )


def _address(name: str) -> str:
    """A data: URL, the content of a file as its address."""
    content = b64encode(_read(name).replace(_RELATIVE, _NAMED).encode()).decode()
    return f"data:{_MEDIA_TYPES[Path(name).suffix]};base64,{content}"


def _names() -> list[str]:
    """The viewer's files, but for its page."""
    return sorted(file.name for file in _VIEWER.iterdir() if Path(file.name).suffix in _MEDIA_TYPES)


def _read(name: str) -> str:
    return (_VIEWER / name).read_text(encoding="utf-8")
