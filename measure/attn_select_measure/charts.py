"""Charts of times as SVG text, drawn by matplotlib: lines over one quantity.

They are drawn in placeholders of colours: ``in_page`` makes CSS variables of them, so that the page decides, and a dark
page has other colours than a light one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from attn_select.backends.distributions import known_backends
from attn_select.backends.spec import BackendSpec

# Of backends, on a light and on a dark page; each has a contrast of at least 4.5 with its page. None is a red, which
# says that something is wrong.
COLOURS = (
    ("#0a66c2", "#6cb2ff"),
    ("#b34700", "#ff9f5a"),
    ("#1a7f37", "#5fd47c"),
    ("#8250df", "#c9a6ff"),
    ("#a8117a", "#ff8ad4"),
    ("#006b75", "#4fd1dc"),
    ("#7a5c00", "#e3c04d"),
    ("#4f5b66", "#aab8c6"),
)
# Of backends, so that colour is not all that tells them apart: matplotlib's markers, each with its shape in an SVG of
# 12 by 12. No cross is among them, which says that something is wrong.
SIGNS = {
    "o": '<circle cx="6" cy="6" r="4.6"/>',
    "s": '<rect x="1.8" y="1.8" width="8.4" height="8.4"/>',
    "^": '<polygon points="6,1.4 10.9,10.2 1.1,10.2"/>',
    "D": '<polygon points="6,0.8 11.2,6 6,11.2 0.8,6"/>',
    "v": '<polygon points="1.1,1.8 10.9,1.8 6,10.6"/>',
    "p": '<polygon points="6,1 10.9,4.6 9.1,10.4 2.9,10.4 1.1,4.6"/>',
    "*": '<polygon points="6,0.5 7.5,4.2 11.5,4.4 8.4,6.9 9.4,10.8 6,8.6 2.6,10.8 3.6,6.9 0.5,4.4 4.5,4.2"/>',
    "h": '<polygon points="6,0.8 10.5,3.4 10.5,8.6 6,11.2 1.5,8.6 1.5,3.4"/>',
}
_MARKERS = [*SIGNS]
_SIZE = (4.6, 3.3)
# Of a chart, with room for numbers of six digits. A layout that fits them would draw each chart twice.
_MARGINS = {"left": 0.17, "bottom": 0.15, "right": 0.97, "top": 0.97}
# The colour of a series; those of text and axes, and of the grid, follow.
_PLACEHOLDER = re.compile(r"#fa00(\d\d)")
INK, GRID = "#fa0101", "#fa0102"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attn-select",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def looks(specs: Mapping[str, BackendSpec]) -> dict[str, int]:
    """Return the index of each backend's colour and sign. A chart shows backends of one sort, which all differ."""
    brought, by_sort = known_backends(), dict[str, list[str]]()
    for name in (*filter(specs.__contains__, brought), *sorted(specs.keys() - brought.keys())):
        sort = min(capabilities.sort for capabilities in specs[name].capabilities.values())
        by_sort.setdefault(sort, []).append(name)
    return {name: index % len(COLOURS) for names in by_sort.values() for index, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class Line:
    """A series of points."""

    name: str
    points: Sequence[tuple[float, float]]  # (x, y), in the order of x
    look: int | None  # index of the series' colour and sign; None for a reference line, dashed and without signs


def lines(series: Sequence[Line], x_label: str, y_label: str) -> str:
    """Return a chart of ``series`` over logarithmic axes."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE)
        figure.subplots_adjust(**_MARGINS)
        axes = figure.add_subplot()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for each in series:
            x, y = zip(*each.points, strict=True)
            look: dict[str, Any] = {"linestyle": "--", "color": INK, "linewidth": 1}
            if each.look is not None:
                look = {"color": f"#fa00{each.look:02d}", "linewidth": 1.4, "markersize": 4}
                look["marker"] = _MARKERS[each.look]
            axes.plot(x, y, label=each.name, **look)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=9))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.legend(fontsize=8, frameon=False)
        return _svg(figure)


def in_page(svg: str, name: str, text: str) -> str:
    """Return a chart as an element of a page."""
    found = svg[svg.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    found = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", found)
    found = _PLACEHOLDER.sub(lambda match: f"var(--series-{int(match[1])})", found)
    found = found.replace(INK, "var(--ink)").replace(GRID, "var(--line)")
    # A presentation attribute takes no variable: matplotlib writes styles, except these.
    found = re.sub(r'\b(fill|stroke)="(var\([^"]*\))"', r'style="\1: \2"', found)
    label = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', found, count=1)


def _tokens(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()
