"""Templates that make a page of its own: nothing is loaded from anywhere, and every text is shown as a text."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from policy_trainer.report.recorded import number
from policy_trainer.report.story import figure
from policy_trainer.report.texts import cut
from shared.atomic_files import write_text
from shared.errors import UserError, printable


def write_page(path: Path, template: str, **values: Any) -> None:
    """Raises UserError if the file cannot be written."""
    page = _environment().get_template(template).render(**values)
    try:
        write_text(path, page)
    except OSError as error:
        raise UserError(f"--output: {path} cannot be written: {error.strerror}; choose another file") from error


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"figure": figure, "cut": cut, "setting": _setting, "number": number}
    return found


def _visible(value: Any) -> Any:
    """Names, settings and texts may hold characters that change what stands beside them: they are shown as escapes."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _setting(value: Any) -> str:
    if value is None:
        return "not given"
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
