"""Curves as SVG inside of a page: its colours are the page's, its text is text."""

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from policy_trainer.report.series import Series

# Lines of a panel take these in turn, then the next dash.
COLOURS = 6
DASHES = ("solid", "dashed", "dotted")
# Curves of so few points show each.
_FEW = 30
# matplotlib knows no CSS variables: each of these stands for one.
_INK = {f"#c0000{place}": f"var(--c{place})" for place in range(COLOURS)} | {
    "#0a0a0a": "var(--muted)",
    "#0b0b0b": "var(--grid)",
    "#0c0c0c": "var(--good)",
}
_TEXT, _GRID, _GOOD = list(_INK)[COLOURS:]
_SETTINGS: Mapping[Any, Any] = {"svg.fonttype": "none", "font.size": 9, "axes.formatter.use_mathtext": False}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def draw(curves: Sequence[Series], *, name: str, x: str, low: float | None = None, high: float | None = None) -> Markup:
    """An `<svg>`. name: unlike that of any other picture of the page. x: of the x axis. low, high: the healthy band."""
    with rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.6, 2.3))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.13, 0.19, 0.85, 0.71))
        for place, curve in enumerate(curves):
            _line(axes, curve, place)
        _frame(axes, x)
        _band(axes, low, high)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata=_NO_METADATA)
    return Markup(_for_html(written.getvalue()))


def _line(axes: Axes, curve: Series, place: int) -> None:
    colour, dash = list(_INK)[place % COLOURS], DASHES[place // COLOURS % len(DASHES)]
    if len(curve.low):
        axes.fill_between(curve.xs, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
    marker = "o" if np.isfinite(curve.ys).sum() <= _FEW else ""
    axes.plot(curve.xs, curve.ys, color=colour, linestyle=dash, linewidth=1.5, marker=marker, markersize=3)


def _frame(axes: Axes, x: str) -> None:
    axes.set_xlabel(x, color=_TEXT)
    left, right = axes.get_xlim()
    if right - left < 1:  # one point
        axes.set_xlim(left - 1, right + 1)
    axes.tick_params(colors=_TEXT, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.get_offset_text().set_color(_TEXT)
    axes.grid(color=_GRID, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(_GRID)


def _band(axes: Axes, low: float | None, high: float | None) -> None:
    """The healthy band, as far as the curves reach."""
    if low is None and high is None:
        return
    bottom, top = axes.get_ylim()
    axes.axhspan(bottom if low is None else low, top if high is None else high, color=_GOOD, alpha=0.1, linewidth=0)
    axes.set_ylim(bottom, top)


def _for_html(svg: str) -> str:
    """The element alone, without the styles and names that would hold for the whole page."""
    svg = re.sub(r"(?s)<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :])
    svg = re.sub(r"<svg [^>]*(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 aria-hidden="true" focusable="false">', svg)
    svg = re.sub(r"<(g|text) id=\"[^\"]*\"", r"<\1", svg).replace("xlink:href", "href")
    svg = re.sub(r' d="[^"]*"', lambda path: _shorter(path.group()), svg)
    return re.sub("|".join(_INK), lambda found: _INK[found.group()], svg)


def _shorter(path: str) -> str:
    """A path to a tenth of a point."""
    return re.sub(r"(\d\.\d)\d+", r"\1", path).replace(" \nL ", "L").replace("\n", " ")
