"""``attn-select warm``: compile and load the kernels of a model's layers here, ahead of serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import run_options

if TYPE_CHECKING:
    from attn_select.runtime.warm_up import WarmUp
    from attn_select_cli.explanation import LayerExplanation

EPILOG = """\b
Examples:
  attn-select warm --model llama-3-8b
  attn-select warm --model deepseek-v3 -tp 8 --kv-cache-dtype fp8 --max-model-len 32768
  attn-select warm --model gpt-oss-120b --layer sliding_attention --json
  attn-select warm --model llama-3-8b --backend TRITON_ATTN --block-size 64    (what vLLM launches)

Steps of the kinds that serving has run once through a layer of each kind: few and many requests, short and long ones,
prefills, decodes, on a GPU also decodes as they are captured. Compiled kernels stay where their libraries keep them
(TRITON_CACHE_DIR, FLASHINFER_WORKSPACE_BASE, TORCHINDUCTOR_CACHE_DIR): run it while an image is built, on a GPU of the
kind that the image will run on, and keep these folders in it.

Exit code: 0 done, 1 a layer has no backend, 2 wrong input, 3 a bug.
"""


@click.command(
    "warm", cls=Command, epilog=EPILOG, short_help="Compile the kernels of a model's layers here, ahead of serving."
)
@run_options
@click.option("--layer", "layer", metavar="KIND", help="Warm only this kind of the model's layers [default: each].")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True, help="Requests of a step.")
@click.option(
    "--max-num-batched-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of a step."
)
@click.option("--max-model-len", type=click.IntRange(1), default=32768, show_default=True, help="Tokens of a request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(layer: str | None, as_json: bool, **options: Any) -> int:
    """Run every kind of step once through the kernels that are chosen here, so that serving compiles nothing."""
    from dataclasses import asdict

    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.matrix import cell_text
    from attn_select_cli.output import print_json, print_lines, print_warnings
    from attn_select_cli.run import chosen_layers
    from attn_select_cli.table import Table
    from attn_select_cli.torch_module import torch_module

    bounds = tuple(options.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"))
    explanation = build_explanation({**options, "gpu": "auto"})
    chosen = chosen_layers(explanation.layers, layer)
    for one in chosen:
        one.selection.require()
    warming = torch_module("attn_select_cli.warming", "warming up a layer")
    done: list[tuple[LayerExplanation, WarmUp]] = [(one, warming.warm(one.selection, bounds)) for one in chosen]
    if as_json:
        layers = [
            {"kind": one.kind, "count": one.count, "selected": one.selection.selected, **asdict(found)}
            for one, found in done
        ]
        print_json({"schema_version": 1, "device": explanation.device.to_dict(), "layers": layers})
        print_warnings(explanation.all_warnings)
        return 0
    rows = [
        [
            f"{one.kind} × {one.count}",
            cell_text(one.selection.selected),
            str(found.kernels),
            str(found.steps),
            f"{found.seconds:.1f}",
        ]
        for one, found in done
    ]
    header = ["layers", "backends", "kernels compiled", "steps", "seconds"]
    print_lines([*explanation.head_lines(), [], Table(header, rows)])
    print_warnings(explanation.all_warnings)
    return 0
