"""Builds the viewer's pages as one HTML file with the data of runs inside, which needs no server and loads nothing.

Its content security policy allows exactly its own scripts and styles, by hash.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from policy_trainer.report.run import RecordedRun, number
from policy_trainer.reporting.metrics import Metrics
from policy_trainer.reporting.server_metrics import settings_record

# Of a run with more than _MOST records, the newest and evenly spaced older ones are kept, about _MOST in total.
_NEWEST, _MOST = 256, 1000
_NO_SCRIPT = "<noscript>This page needs JavaScript.</noscript>"
_STYLE = re.compile(r'<link rel="stylesheet" href="dashboard/(\S+)">')
_SCRIPT = re.compile(r'<script src="dashboard/(\S+)"( defer| type="module")?></script>')
_IMPORT = re.compile(r'^import (\{ [\w, ]+ \}) from "\./(\w+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def one_page(title: str, sections: Markup, data: Mapping[str, Any]) -> str:
    """The page. sections: HTML shown until the scripts run, which then move its parts. data: see `document`."""
    # The run's texts are inserted last, so that no replacement is applied to them.
    icon = f"data:image/svg+xml;base64,{_base64(_read('icon.svg').encode())}"
    page = _read("index.html").replace('"dashboard/icon.svg"', f'"{icon}"')
    page = _STYLE.sub(lambda match: f"<style>{_read(match[1])}</style>", page)
    page = page.replace("</head>", f"<style>{_read('report.css')}</style>\n</head>")
    page = _SCRIPT.sub(_inline_script, page)
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{_policy(page)}')
    head, tail = page.replace("</body>", '<script id="recorded" type="application/json">\n</script>\n</body>').split(
        _NO_SCRIPT
    )
    head = head.replace("<title>Tandem</title>", f"<title>{escape(title)}</title>")
    # ASCII without `<`, which could end the script element.
    recorded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    tail = tail.replace('json">\n', f'json">{recorded}')
    return f"{head}{sections}{tail}"


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
        kept = _thinned(sorted({record["step"]: record for record in records}.items()))
        rows = [dict(numbers(record)) for _, record in kept]
        names = dict.fromkeys(name for row in rows for name in row)
        values = {name: [_short(row.get(name)) for row in rows] for name in names}
        columns[kind] = {"steps": [step for step, _ in kept], "values": values, "next_after": None}
    return columns


def _warning(record: Metrics) -> dict[str, Any]:
    texts = {name: str(record.get(name, "")) for name in ("name", "band", "remedy")}
    return {"kind": "health", "step": record["step"], "seen": _short(number(record, "seen")), **texts}


def _thinned(records: Sequence[tuple[int, Metrics]]) -> Sequence[tuple[int, Metrics]]:
    if len(records) <= _MOST:
        return records
    old, new = records[:-_NEWEST], records[-_NEWEST:]
    return [*old[:: math.ceil(len(old) / (_MOST - _NEWEST))], *new]


def _short(value: float | None) -> float | int | None:
    """Rounded to eight digits, more than any curve or table shows."""
    if value is None or math.isnan(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.8g}")


def _inline_script(match: re.Match[str]) -> str:
    name, kind = match[1], match[2]
    if kind == ' type="module"':
        return f'<script type="module">{_bundle(name)}</script>'
    return f"<script>{_read(name)}</script>"


def _bundle(entry: str) -> str:
    """A module and its imports as one script: each module becomes a function that returns its exports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        source = _read(name)
        for _, imported in _IMPORT.findall(source):
            if imported not in parts:
                add(imported)
        exported = ", ".join(name for _, name in _EXPORT.findall(source))
        body = _EXPORT.sub(r"\1", _IMPORT.sub(r'const \1 = modules["\2"];', source))
        parts[name] = f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'

    add(entry)
    return "const modules = {};\n" + "".join(parts.values())


def _policy(page: str) -> str:
    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{_base64(sha256(content.encode()).digest())}'" for content in contents)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta name="referrer" content="no-referrer">'
    )


def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _read(name: str) -> str:
    return (files("shared") / "viewer" / name).read_text(encoding="utf-8")
