"""``attn-select warm``: compile and load the kernels of a model's layers here, ahead of serving."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import run_options

if TYPE_CHECKING:
    from attn_select.decide.selection import Selection
    from attn_select.runtime.warm_up import WarmUp
    from attn_select_cli.explanation import LayerExplanation

_FEW = 4
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

    bounds = tuple(options.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"))
    explanation = build_explanation({**options, "gpu": "auto"})
    chosen = chosen_layers(explanation.layers, layer)
    for one in chosen:
        one.selection.require()
    runtime = _warmed()
    done: list[tuple[LayerExplanation, WarmUp]] = [(one, runtime(one.selection, bounds)) for one in chosen]
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


def _warmed() -> Any:
    """Import the runtime, which needs torch and numpy; return the function that warms one kind of layers."""
    from attn_select.errors import RuntimeMissingError
    from attn_select.layer.state import StateConfig
    from attn_select.machine.amx import avoid_trapping_amx

    avoid_trapping_amx()
    try:
        import torch

        from attn_select.reference.state_step import StateStep
        from attn_select.runtime import Capacity
        from attn_select.runtime.compile_ahead import stand_in
        from attn_select.runtime.warm_up import SHORT, USUAL, WarmUp
    except ImportError as error:
        if error.name not in ("numpy", "torch"):
            raise
        raise RuntimeMissingError(
            f"warming up a layer needs {error.name}, which is not installed", hint="pip install torch numpy"
        ) from None

    def warm(selection: Selection[Any], bounds: tuple[int, int, int]) -> WarmUp:
        if isinstance(selection.config, StateConfig):
            return warm_states(selection, bounds)
        layer = stand_in(selection, capacity=Capacity(*bounds), cuda_graphs=not selection.device.is_cpu)
        found: WarmUp = layer.group.warm_up()
        return found

    def warm_states(selection: Selection[StateConfig], bounds: tuple[int, int, int]) -> WarmUp:
        """Run decodes and prefills of one request and of a few: no kernel is compiled for a number of them."""
        began, (requests, tokens, length) = time.perf_counter(), bounds
        lens = [(each, each + 1) for each in {1, selection.config.max_decode_query_len}]  # these have a state
        lens += [(each, each) for each in {min(each, tokens, length) for each in (SHORT, USUAL)}]
        done = 0
        for query_len, seq_len in lens:
            for count in {1, max(1, min(_FEW, requests, tokens // query_len))}:
                step = StateStep(selection, [(query_len, seq_len)] * count)
                step.make_layers(step.memory(1).caches(step))
                for call in step.calls():
                    call()
                done += 1
        if step.group.device.type == "cuda":
            torch.cuda.synchronize()
        return WarmUp(0, done, time.perf_counter() - began)

    return warm
