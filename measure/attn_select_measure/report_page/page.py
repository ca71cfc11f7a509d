"""The page itself: cells and their explanations, filled into the templates."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attn_select import __version__
from attn_select.decide.config_text import config_text
from attn_select.decide.lines import byte_text, us_text
from attn_select.decide.text import NAN_TAIL_WARNING
from attn_select.layer.layer_config import layer_of

MARK = "attn-select report"  # In the first lines of every report, so that a file can be told to be one
_CUT = "\x00"


@dataclass(slots=True)
class Cell:
    """One model's layers of one kind on one GPU."""

    model: str  # the model, or what names the layer
    kind: str  # the layer kind and how many layers are of it
    gpu: str
    names: list[str]  # the chosen backends, prefill's first; ``none`` for a phase without one
    key: str  # which of ``Page.explanations`` opens


@dataclass(slots=True)
class Page:
    """Everything that a report shows."""

    cells: Sequence[Cell]
    # what each key of a cell opens: a document of ``attn-select explain --json``, of each layer ``by_batch`` beside it
    explanations: Mapping[str, Mapping[str, Any]]

    def html(self) -> str:
        """Return the page as text."""
        templates = _templates()
        page = templates.get_template("page.html.j2")
        backends = sorted({name for cell in self.cells for name in cell.names})
        return page.render(
            mark=MARK,
            version=__version__,
            title="Attention backends",
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            css=Markup(_text("report.css")),
            script=Markup(_text("report.js")),
            gpus=list(dict.fromkeys(cell.gpu for cell in self.cells)),
            backends=backends,
            matrix=self._rows(),
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


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("attn_select_measure.report_page"), autoescape=True, undefined=StrictUndefined
    )
    templates.globals.update(
        cut=_CUT,
        us=us_text,
        in_bytes=byte_text,
        nan_tail_warning=NAN_TAIL_WARNING,
        config_line=lambda layer: config_text(layer_of(layer["config"])),
        ranked=_ranked,
        origin=_origin,
    )
    return templates


def _ranked(layer: Mapping[str, Any], phase: str) -> list[Mapping[str, Any]]:
    return sorted(layer["candidates"], key=lambda candidate: candidate["phases"][phase]["rank"] or 1 << 30)


def _origin(rule: Mapping[str, Any]) -> str:
    return f"{rule['file']}:{rule['line']}"


def _text(name: str) -> str:
    return resources.files("attn_select_measure.report_page").joinpath("templates", name).read_text(encoding="utf-8")
