"""``attn-select matrix``: models by GPUs, the chosen backend in each cell."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import (
    decision_options,
    engine_option,
    models_and_gpus,
    pair_options,
    workload_options,
)

EPILOG = """\b
Examples:
  attn-select matrix
  attn-select matrix --model llama-3-8b --model deepseek-v3 --gpu a100 --gpu h100 --gpu b200
  attn-select matrix --kv-cache-dtype fp8
  attn-select matrix --gpu h100 --gpu b200 --workload long-context
  attn-select matrix --gpu mi300x --gpu rtx-pro-6000 --engine vllm
  attn-select matrix --json

A cell names the backend, or prefill / decode where they differ; `none` where no backend is valid. With --engine it
names what the engine takes by itself, `none` where it has nothing that serves the layer as it should, `-` where that
is not known.

Exit code: 0 every cell has a backend, 1 one has none, 2 wrong input.
"""


@click.command(
    "matrix", cls=Command, epilog=EPILOG, short_help="The chosen backends of several models on several GPUs."
)
@pair_options
@decision_options
@workload_options
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON (documented in docs/json.md).")
def command(as_json: bool, **options: Any) -> int:
    """Show the chosen backend for each layer kind of several models on several GPUs."""
    from attn_select.decide.lines import HANG
    from attn_select_cli.explanation import build_explanations, warnings_of
    from attn_select_cli.output import print_json, print_lines, print_warnings
    from attn_select_cli.table import Table

    names, gpus = models_and_gpus(options)
    explanations = build_explanations(options, names, gpus)
    cells: list[dict[str, Any]] = [
        {
            "model": name,
            "gpu": device,
            "kind": layer.kind,
            "count": layer.count,
            "selected": layer.selection.selected,
        }
        | ({} if answers is None else {"engine": answers.to_dict()})
        for (name, device), explanation in zip(product(names, gpus), explanations, strict=True)
        for layer in explanation.layers
        for answers in [explanation.answers(layer)]
    ]
    texts = [cell["engine"]["by_itself"] if "engine" in cell else cell_text(cell["selected"]) for cell in cells]
    lacking = [cell for cell, text in zip(cells, texts, strict=True) if "none" in text.split(" / ")]
    if as_json:
        print_json({"schema_version": 1, "models": list(names), "gpus": list(gpus), "cells": cells})
    else:
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for cell, text in zip(cells, texts, strict=True):
            rows.setdefault((cell["model"] or "-", f"{cell['kind']} × {cell['count']}"), {})[cell["gpu"]] = text
        table = [[*key, *(by_gpu.get(g, "-") for g in gpus)] for key, by_gpu in rows.items()]
        print_lines([Table(["model", "layers", *gpus], table)])
    if lacking and not as_json:
        missing = lacking[0]
        model = f"--model {missing['model']} " if missing["model"] else ""
        command = f"`attn-select explain {model}--gpu {missing['gpu']}` with the same options says why"
        print_lines([[], [("none: ", "rejected"), HANG, (f"no backend is valid there: {command}", "")]])
    print_warnings(warnings_of(explanations))
    return 1 if lacking else 0


def cell_text(selected: Mapping[Any, str | None]) -> str:
    """Return ``NAME``, or ``PREFILL / DECODE`` where they differ; ``none`` for a phase without a backend."""
    return " / ".join(dict.fromkeys(name or "none" for name in selected.values()))
