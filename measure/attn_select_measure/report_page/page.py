"""The page itself: decisions and their explanations, filled into the templates."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attn_select import __version__
from attn_select.decide.config_text import config_text
from attn_select.decide.lines import byte_text, us_text
from attn_select.decide.text import NAN_TAIL_WARNING
from attn_select.layer.layer_config import layer_of
from attn_select_cli.matrix import cell_text

MARK = "attn-select report"  # In the first lines of every report, so that a file can be told to be one
_CUT = "\x00"


Documents = Mapping[tuple[str, str], Mapping[str, Any]]
"""By model and GPU what ``attn-select explain --json`` prints, each layer with ``by_batch`` beside it."""


def page_of(documents: Documents) -> str:
    """Return the page as text."""
    templates = _templates()
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for (model, gpu), document in documents.items():
        for layer in document["layers"]:
            kind = f"{layer['kind']} × {layer['count']}"
            rows.setdefault((model, kind), {})[gpu] = cell_text(layer["selected"]).split(" / ")
    return templates.get_template("page.html.j2").render(
        mark=MARK,
        version=__version__,
        title="Attention backends",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        gpus=list(dict.fromkeys(gpu for _, gpu in documents)),
        backends=sorted({name for by_gpu in rows.values() for names in by_gpu.values() for name in names}),
        rows=rows,
        pieces=Markup(_pieces(documents, templates)),
    )


def _pieces(documents: Documents, templates: Environment) -> str:
    """Return all explanations, gzipped, in base 64; each piece that several have in common once."""
    explanation = templates.get_template("explanation.html.j2")
    parts: dict[str, int] = {}
    cells = {}
    for names, document in documents.items():
        text = explanation.render(document)
        cells[" on ".join(names)] = [parts.setdefault(piece, len(parts)) for piece in text.split(_CUT) if piece]
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
    )
    return templates


def _ranked(layer: Mapping[str, Any], phase: str) -> list[Mapping[str, Any]]:
    return sorted(layer["candidates"], key=lambda candidate: candidate["phases"][phase]["rank"] or 1 << 30)
