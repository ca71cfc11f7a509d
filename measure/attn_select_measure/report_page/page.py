"""The page itself: cells and their explanations, filled into the templates."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attn_select import __version__
from attn_select.backends.distributions import known_backends
from attn_select.decide.config_text import config_text
from attn_select.decide.text import NAN_TAIL_WARNING, us_text
from attn_select.layer.layer_config import layer_of
from attn_select_measure.charts import COLOURS
from attn_select_measure.report_page.predicted import Chart, ChartGroup

MARK = "attn-select report"
"""In the first lines of every report, so that a file can be told to be one."""
_CUT = "\x00"
MARKS = "●▲■◆▼✚★✖"
"""Of families of backends, so that colour is not all that tells them apart; as many as there are colours."""


@dataclass(frozen=True, slots=True)
class Family:
    """Backends that one distribution brings.

    Attributes:
        name: the distribution's, without ``attn-select-``.
        index: of its colour.
        mark: before the names of its backends.
    """

    name: str
    index: int
    mark: str


def families(backends: Sequence[str]) -> dict[str, Family]:
    """Return the family of each backend, coloured in the order of the packaged rules; others are one family."""
    brought = known_backends()
    names = [*dict.fromkeys(brought.values()), "other"]
    of = {name: Family(name.removeprefix("attn-select-"), i, MARKS[i % len(MARKS)]) for i, name in enumerate(names)}
    return {backend: of[brought.get(backend, "other")] for backend in backends if backend != "none"}


@dataclass(slots=True)
class Cell:
    """One model's layers of one kind on one GPU.

    Attributes:
        model: the model, or what names the layer.
        kind: the layer kind and how many layers are of it.
        gpu: the column.
        names: the chosen backends, prefill's first; ``none`` for a phase without one.
        key: which of ``Page.explanations`` opens.
    """

    model: str
    kind: str
    gpu: str
    names: list[str]
    key: str


@dataclass(slots=True)
class Page:
    """Everything that a report shows.

    Attributes:
        cells: of the matrix.
        explanations: what each key of a cell opens: a document of ``attn-select explain --json``.
        timed: charts of predicted times.
        notes: sentences below.
    """

    cells: Sequence[Cell]
    explanations: Mapping[str, Mapping[str, Any]]
    timed: Sequence[ChartGroup]
    notes: Sequence[str]

    def html(self) -> str:
        """Return the page as text."""
        templates = _templates()
        page = templates.get_template("page.html.j2")
        backends = sorted({name for cell in self.cells for name in cell.names})
        family_of = families(backends)
        return page.render(
            mark=MARK,
            version=__version__,
            title="Attention backends",
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            colours=COLOURS,
            css=Markup(_text("report.css")),
            script=Markup(_text("report.js")),
            gpus=list(dict.fromkeys(cell.gpu for cell in self.cells)),
            backends=backends,
            family_of=family_of,
            legend=sorted(set(family_of.values()), key=lambda family: family.index),
            matrix=self._rows(),
            timed=[{**asdict(group), "charts": [_chart(chart) for chart in group.charts]} for group in self.timed],
            notes=self.notes,
            pieces=Markup(self._pieces(templates)),
        )

    def _rows(self) -> list[dict[str, Any]]:
        gpus = dict.fromkeys(cell.gpu for cell in self.cells)
        rows: dict[tuple[str, str], dict[str, Cell]] = {}
        for cell in self.cells:
            rows.setdefault((cell.model, cell.kind), {})[cell.gpu] = cell
        empty = {"names": None}
        return [
            {"model": model, "kind": kind, "cells": [by_gpu.get(gpu, {**empty, "gpu": gpu}) for gpu in gpus]}
            for (model, kind), by_gpu in rows.items()
        ]

    def _pieces(self, templates: Environment) -> str:
        """Return all explanations, gzipped, in base 64; each piece that several have in common once."""
        explanation = templates.get_template("explanation.html.j2")
        parts: dict[str, int] = {}
        cells = {}
        for key, document in self.explanations.items():
            text = explanation.render(document)
            cells[key] = [parts.setdefault(piece, len(parts)) for piece in text.split(_CUT) if piece]
        packed = json.dumps({"cells": cells, "parts": list(parts)}, ensure_ascii=False, separators=(",", ":"))
        return base64.b64encode(gzip.compress(packed.encode(), 6, mtime=0)).decode()


def _chart(chart: Chart) -> dict[str, Any]:
    """Return a chart that is taken as an element, not as text."""
    return {**asdict(chart), "svg": Markup(chart.svg)}


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("attn_select_measure.report_page"), autoescape=True, undefined=StrictUndefined
    )
    templates.globals.update(
        cut=_CUT,
        us=us_text,
        nan_tail_warning=NAN_TAIL_WARNING,
        asked=lambda layer: config_text(layer_of(layer["config"])),
        ranked=_ranked,
        origin=_origin,
    )
    return templates


def _ranked(layer: Mapping[str, Any], phase: str) -> list[Mapping[str, Any]]:
    return sorted(layer["candidates"], key=lambda candidate: candidate["phases"][phase]["rank"] or 1 << 30)


def _origin(rule: Mapping[str, Any]) -> str:
    return f"{rule['plugin'] or rule['file']}:{rule['line']}"


def _text(name: str) -> str:
    return resources.files("attn_select_measure.report_page").joinpath("templates", name).read_text(encoding="utf-8")
