"""``attn-select bench``: the time of every valid backend of a model's layers on this device, side by side."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import bench_options

if TYPE_CHECKING:
    from attn_select.times.workload import Workload
    from attn_select_cli.table import Block
    from attn_select_measure.benching import Bench

EPILOG = """\b
Examples:
  attn-select bench --model llama-3-8b
  attn-select bench --model deepseek-v3 --tensor-parallel 8 --workload 64q1s4k
  attn-select bench --model gpt-oss-120b --workload long-context --backend TRITON_ATTN --backend FLASH_ATTN
  attn-select bench --model qwen3-next-80b-a3b --layer gated_delta_net --workload 64q1s1k,4q2k
  attn-select bench --num-heads 32 --num-kv-heads 8 --head-size 128 --workload '64q1s4k*0.8,1q2k*0.2' --json
  torchrun --nproc-per-node 2 --no-python attn-select bench --model llama-3-8b --dcp 2 --workload 1q1s128k

A batch is written as requests, q and new tokens, s and all tokens: 64q1s4k is 64 requests that decode one token each
over 4096. A time is for one layer, its write of the cache included: the median of rounds in which the backends take
turns, on a cold L2 cache, until all medians are sure to 1 %, in 12 rounds at most. `behind` compares with the fastest.
`roofline` is the share of the speed that the device's measured copy and matmul rates allow. `error` is relative to
float64. Nothing is kept: `attn-select tune` writes times that decisions rest on. With --dcp N torchrun starts N
processes, one for each GPU, that share each request's cache: the slowest GPU's time counts.

Exit code: 0 every batch has a time, 1 one has none or an error is above its bound, 2 wrong input, 130 interrupted.
"""


@click.command("bench", cls=Command, epilog=EPILOG, short_help="Time every valid backend of a model's layers here.")
@bench_options
@click.option("--layer", metavar="KIND", help="Time only this kind of the model's layers [default: each].")
@click.option(
    "--workload",
    "-w",
    default="chat",
    show_default=True,
    metavar="SHAPES|PROFILE|FILE",
    help="Batches: 64q1s4k*0.8,1q2k*0.2, or chat, long-context, offline, speculative, agent, or a TOML file.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds of timing in all; preparing and compiling come on top.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (documented in docs/json.md).")
def command(layer: str | None, workload: str, seconds: float, as_json: bool, **options: Any) -> int:
    """Time every valid backend of a model's layers on this device over a workload, side by side."""
    from attn_select.times.workload import parse_workload
    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_json, print_lines, print_warnings
    from attn_select_cli.progress import progress
    from attn_select_cli.run import chosen_layers
    from attn_select_cli.torch_module import torch_module

    wanted, backends = parse_workload(workload), tuple(options["backend"])
    explanation = build_explanation({**options, "backend": (), "gpu": "auto"})
    benching = torch_module("attn_select_measure.benching", "timing a layer")
    rules = tuple(options["rules"]) or None
    with benching.joined_ranks() as ranks, progress("measuring", shown=ranks is None or ranks.rank == 0) as shown:
        bench: Bench = benching.Bench(explanation.situation.environment, rules, partial(shown.advance, 1), ranks)
        first = ranks is None or ranks.rank == 0
        layers, todo = [], []
        for one in chosen_layers(explanation.layers, layer):
            config, batches = one.selection.config, list[dict[str, Any]]()
            not_run = benching.untimed(config, ranks)
            told = {"kind": one.kind, "count": one.count, "config": config.model_dump(), "not_run": not_run}
            layers.append({**told, "batches": batches})
            for shape in wanted.shapes if not_run is None else ():
                benching.check_runnable(config, shape.batch)
                todo.append((config, shape.batch, bench.candidates(config, shape.batch, backends), batches))
        shown.total = 1.0 + sum(3 * len(candidates) + 1 for _, _, candidates, _ in todo)
        complete, ok = False, bool(todo)
        with suppress(KeyboardInterrupt):
            for config, batch, candidates, batches in todo:
                found = bench.measure(config, batch, candidates, seconds / len(todo))
                batches.append(found.to_dict())
                ok = ok and found.ok
            complete = True
    shapes = [{"batch": str(shape.batch), "weight": shape.weight} for shape in wanted.shapes]
    document = {
        "schema_version": 1,
        "model": explanation.model,
        "device": explanation.device.to_dict(),
        "rates": {"copy_bytes_per_s": bench.rates.copy, "matmul_flops": bench.rates.matmul},
        "workload": {"name": wanted.name, "shapes": shapes},
        "layers": layers,
        "complete": complete,
        "ok": ok,
        "warnings": explanation.all_warnings,
    }
    if first:
        if as_json:
            print_json(document)
        else:
            print_lines([*explanation.head_lines(), *_lines(document, wanted)])
        print_warnings(explanation.all_warnings)
    return 130 if not complete else 0 if ok else 1


def _lines(document: dict[str, Any], workload: Workload) -> list[Block]:
    """Return the tables of what was measured."""
    from attn_select.decide.lines import HANG

    rates = document["rates"]
    text = f"copy {rates['copy_bytes_per_s'] / 1e9:.4g} GB/s, matmul {rates['matmul_flops'] / 1e12:.3g} TFLOP/s"
    lines: list[Block] = [[("Measured   ", "dim"), HANG, (text, "")]]
    lines.append([("Workload   ", "dim"), HANG, (str(workload), "")])
    for layer in document["layers"]:
        lines += [[], *_layer_lines(layer, workload)]
    if not document["complete"]:
        lines.append([("interrupted: the batches that were timed until then are shown", "warning")])
    return lines


def _layer_lines(layer: dict[str, Any], workload: Workload) -> list[Block]:
    from attn_select.decide.config_text import config_text
    from attn_select.decide.lines import HANG
    from attn_select.layer.layer_config import layer_of
    from attn_select_cli.table import Table

    config, weights = layer_of(layer["config"]), {str(shape.batch): shape.weight for shape in workload.shapes}
    lines: list[Block] = [[(f"{layer['kind']} × {layer['count']}  ", "title"), HANG, (config_text(config), "")]]
    if layer["not_run"] is not None:
        return [*lines, [("  not timed: ", "warning"), (layer["not_run"], "")]]
    times: dict[str, dict[str, float]] = {}
    for found in layer["batches"]:
        told = f"{weights[found['batch']]:.0%} of the steps"
        if found["roofline_us"] is not None:
            told += f", roofline {_us(found['roofline_us'])} us"
        lines += [[], [(f"  {found['batch']}  ", "title"), (told, "dim")]]
        timed = [one for one in found["backends"] if one["failure"] is None]
        times[found["batch"]] = {one["backend"]: one["time_us"] for one in timed}
        if timed:
            header = ["  backend", "kernel", "us", "quartiles", "behind", "roofline", "error", "rounds"]
            lines.append(Table(header, [_row(one, timed[0]["time_us"]) for one in timed]))
        if not found["backends"]:
            lines.append([("  no backend is valid here", "rejected"), ("; `attn-select explain` says why", "")])
        for one in found["backends"]:
            for key, text, style in (
                ("failure", "", "rejected"),
                ("unchecked", " was not compared", "dim"),
                ("why_eager", " is eager", "dim"),
            ):
                if one[key]:
                    lines.append([(f"  {one['backend']}{text}: ", ""), HANG, (one[key], style)])
    if len(layer["batches"]) > 1:
        lines.append([])
        for phase in config.phases:
            mine = [(shape.weight, times.get(str(shape.batch), {})) for shape in workload.of_phase(phase, config)]
            whole = set.intersection(*[{*known} for _, known in mine]) if mine else set()
            totals = {name: sum(weight * known[name] for weight, known in mine) for name in whole}
            if totals:
                text = ", ".join(f"{name} {_us(totals[name])} us" for name in sorted(totals, key=totals.__getitem__))
                lines.append([(f"  weighted, {phase:<7}  ", "title"), HANG, (text, "")])
    return lines


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def _row(timed: dict[str, Any], least_us: float) -> list[str]:
    share, time_us = timed["roofline_share"], timed["time_us"]
    return [
        f"  {timed['backend']}",
        " + ".join(dict.fromkeys(timed["kernel"].values())),
        _us(time_us),
        " to ".join(map(_us, timed["spread_us"])),
        "" if time_us == least_us else f"{time_us / least_us - 1:.1%}",
        "" if share is None else f"{share:.0%}",
        "not compared" if timed["error"] is None else f"{timed['error']:.1e}",
        f"{timed['rounds']}{', eager' if timed['method'] == 'eager' else ''}",
    ]
