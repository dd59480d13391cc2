"""The curves' units and bands are those of docs/metrics.md, and colours can be told from the page's ground."""

import re
from pathlib import Path

import pytest

from policy_trainer.report import panels
from policy_trainer.report.panels import PANELS, Panel

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^\| (step|evaluation) \| `([\w/]+)` \| (?:[^|\\]|\\\|)*\| ([^|]*)\| ([^|]*)\|$", re.MULTILINE)
ROWS = {
    (kind, name): (unit.strip(), healthy.strip())
    for kind, name, unit, healthy in _ROW.findall((ROOT / "docs/metrics.md").read_text())
}
STYLE = (Path(panels.__file__).parent / "templates" / "style.css").read_text()


def test_the_page_was_understood() -> None:
    assert ROWS["step", "entropy"][0] == "nats a token" and len(ROWS) > 60


@pytest.mark.parametrize(
    "panel", [panel for panel in PANELS if (panel.kind, panel.first) in ROWS], ids=lambda panel: panel.title
)
def test_units_and_bands_are_those_of_the_page(panel: Panel) -> None:
    unit, healthy = ROWS[panel.kind, panel.first]
    assert (panel.unit, panel.healthy) == (unit, healthy)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """WCAG AA: 4.5 for text, 3 for lines."""
    colours = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[theme]))
    for ground in (colours["ground"], colours["card"]):
        assert min(contrast(colours[name], ground) for name in ("text", "muted")) >= 4.5
        assert min(contrast(colours[f"c{place}"], ground) for place in range(6)) >= 3
