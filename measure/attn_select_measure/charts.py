"""Charts of times as SVG text, drawn by matplotlib: lines over one quantity, and bars with their spread.

A figure of its own has real colours. A figure within a page has ``PAGE``'s: ``in_page`` makes CSS variables of them, so
that the page decides, and a dark page has other colours than a light one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLOURS = (
    ("#0a66c2", "#6cb2ff"),
    ("#b34700", "#ff9f5a"),
    ("#1a7f37", "#5fd47c"),
    ("#8250df", "#c9a6ff"),
    ("#a8117a", "#ff8ad4"),
    ("#006b75", "#4fd1dc"),
    ("#7a5c00", "#e3c04d"),
    ("#a40e26", "#ff8a8a"),
)
"""Of series, on a light and on a dark page; each has a contrast of at least 4.5 with its page."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Of series, so that colour is not all that tells them apart."""
_SIZE = (4.6, 3.3)
_MARGINS = {"left": 0.17, "bottom": 0.15, "right": 0.97, "top": 0.97}
"""Of charts of lines, with room for numbers of six digits. A layout that fits them would draw each chart twice."""
_PLACEHOLDER = re.compile(r"#fa00(\d\d)")
_NAMED = {"#fa0101": "var(--ink)", "#fa0102": "var(--line)"}


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of series, of text and axes, of the grid; any that matplotlib knows."""

    series: Sequence[str]
    ink: str
    grid: str


FILE = Theme([light for light, _ in COLOURS], "#1b1f24", "#d0d7de")
PAGE = Theme([f"#fa00{index:02d}" for index in range(len(COLOURS))], "#fa0101", "#fa0102")


@dataclass(frozen=True, slots=True)
class Line:
    """A series of points.

    Attributes:
        name: in the legend.
        points: (x, y), in the order of x.
        colour: index of the series' colour and marker; None for a reference line, dashed and without markers.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int | None


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        label: beside the bar.
        value: its length.
        spread: (low, high).
        colour: index of the series' colour.
        group: bars of one group stand together under its name.
    """

    label: str
    value: float
    spread: tuple[float, float]
    colour: int
    group: str


def lines(series: Sequence[Line], x_label: str, y_label: str) -> str:
    """Return a chart of ``series`` over logarithmic axes, in ``PAGE``'s colours."""
    with matplotlib.rc_context(_style(PAGE)):
        figure = Figure(figsize=_SIZE)
        figure.subplots_adjust(**_MARGINS)
        axes = figure.add_subplot()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for each in series:
            x, y = zip(*each.points, strict=True)
            look: dict[str, Any] = {"linestyle": "--", "color": PAGE.ink, "linewidth": 1}
            if each.colour is not None:
                look = {"color": PAGE.series[each.colour % len(COLOURS)], "linewidth": 1.4, "markersize": 4}
                look["marker"] = MARKERS[each.colour % len(MARKERS)]
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


def bars(series: Sequence[Bar], x_label: str, title: str) -> str:
    """Return a chart of horizontal bars in ``FILE``'s colours, group by group from the top, each with its value."""
    with matplotlib.rc_context(_style(FILE)):
        places, labels, place, group = [], [], 0.0, None
        for each in series:
            place += 1.0 if each.group == group else 1.9
            if each.group != group:
                group = each.group
                labels.append((place - 0.85, group, True))
            places.append(place)
            labels.append((place, each.label, False))
        figure = Figure(figsize=(_SIZE[0] * 1.3, 0.9 + 0.22 * (place + 1)), layout="constrained")
        axes = figure.add_subplot()
        most = max(each.spread[1] for each in series)
        for y, each in zip(places, series, strict=True):
            axes.barh(y, each.value, height=0.72, color=FILE.series[each.colour % len(COLOURS)])
            axes.plot(each.spread, (y, y), color=FILE.ink, linewidth=1.2, marker="|", markersize=5)
            axes.text(each.spread[1] + most * 0.015, y, f"{each.value:.3g}", va="center", fontsize=8)
        axes.set_yticks([y for y, _, _ in labels], [text for _, text, _ in labels], fontsize=8)
        for tick, (_, _, heading) in zip(axes.get_yticklabels(), labels, strict=True):
            tick.set_fontweight("bold" if heading else "normal")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(place + 0.8, 0.4)
        axes.set_xlim(0, most * 1.14)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x_label)
        axes.set_title(title)
        return _svg(figure)


def in_page(svg: str, name: str, text: str) -> str:
    """Return a ``PAGE`` chart as an element of a page.

    Args:
        name: makes the identifiers within the element unlike other charts'; letters, digits and hyphens.
        text: says what the chart shows, for those who do not see it.
    """
    found = svg[svg.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    found = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", found)
    found = _PLACEHOLDER.sub(lambda match: f"var(--series-{int(match[1])})", found)
    for colour, variable in _NAMED.items():
        found = found.replace(colour, variable)
    # A presentation attribute takes no variable: matplotlib writes styles, but for these.
    found = re.sub(r'\b(fill|stroke)="(var\([^"]*\))"', r'style="\1: \2"', found)
    label = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', found, count=1)


def _style(theme: Theme) -> Any:
    """Return matplotlib's settings for a chart in these colours."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "attn-select",
        "font.size": 9,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.ink,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }


def _tokens(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()
