"""``attn-select bench``: the time of every valid backend of a model's layers on this device, side by side."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import bench_options

if TYPE_CHECKING:
    from attn_select.times.workload import WeightedShape, Workload
    from attn_select_cli.explanation import Explanation, LayerExplanation
    from attn_select_cli.table import Block
    from attn_select_measure.bench_machine import Rates
    from attn_select_measure.benching import Bench
    from attn_select_measure.timed import Timed, TimedBatch

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

        def say(text: str) -> None:
            shown.advance(1, text)

        bench: Bench = benching.Bench(explanation.situation.environment, rules, say, ranks)
        first = ranks is None or ranks.rank == 0
        layers = [
            LayerBench(one, benching.untimed(one.selection.config, ranks))
            for one in chosen_layers(explanation.layers, layer)
        ]
        todo = []
        for each in layers:
            config = each.layer.selection.config
            for shape in wanted.shapes if each.not_run is None else ():
                benching.check_runnable(config, shape.batch)
                todo.append((each, shape, bench.candidates(config, shape.batch, backends)))
        shown.total = 1.0 + sum(3 * len(candidates) + 1 for _, _, candidates in todo)
        complete = False
        with suppress(KeyboardInterrupt):
            for each, shape, candidates in todo:
                config = each.layer.selection.config
                each.batches.append((shape, bench.measure(config, shape.batch, candidates, seconds / len(todo))))
            complete = True
    outcome = Outcome(explanation, bench.rates, wanted, layers, complete)
    if first:
        print_json(outcome.to_dict()) if as_json else print_lines(outcome.lines())
        print_warnings(explanation.all_warnings)
    return 130 if not complete else 0 if outcome.ok else 1


@dataclass(slots=True)
class LayerBench:
    """One layer kind with its batches, or why it is not run."""

    layer: LayerExplanation
    not_run: str | None
    batches: list[tuple[WeightedShape, TimedBatch]] = field(default_factory=list)

    def totals(self, phase: str) -> list[tuple[str, float]]:
        """Return the workload's time by backend over the shapes of a phase, microseconds, the fastest first."""
        from attn_select.times.workload import phases_of

        config = self.layer.selection.config
        mine = [pair for pair in self.batches if phases_of(pair[0].batch, config)[0] == phase]
        sums: dict[str, list[float]] = {}
        for shape, found in mine:
            for timed in found.timed:
                if timed.failure is None:
                    sums.setdefault(timed.backend, []).append(shape.weight * timed.time_us)
        whole = [(name, sum(times)) for name, times in sums.items() if len(times) == len(mine)]
        return sorted(whole, key=lambda pair: pair[1])


@dataclass(slots=True)
class Outcome:
    """All that was measured, as text and as JSON."""

    explanation: Explanation
    rates: Rates
    workload: Workload
    layers: list[LayerBench]
    complete: bool

    @property
    def ok(self) -> bool:
        """Whether every batch has a time, and no error is above its bound."""
        batches = [found for each in self.layers for _, found in each.batches]
        times = [[timed for timed in found.timed if timed.failure is None] for found in batches]
        return bool(batches) and all(times) and all(timed.exact for found in times for timed in found)

    def lines(self) -> list[Block]:
        """Return the tables."""
        from attn_select.decide.lines import HANG

        rates = f"copy {self.rates.copy / 1e9:.4g} GB/s, matmul {self.rates.matmul / 1e12:.3g} TFLOP/s"
        lines: list[Block] = [*self.explanation.head_lines()]
        lines += [[("Measured   ", "dim"), HANG, (rates, "")], [("Workload   ", "dim"), HANG, (str(self.workload), "")]]
        for each in self.layers:
            lines += [[], *self._layer_lines(each)]
        if not self.complete:
            lines.append([("interrupted: the batches that were timed until then are shown", "warning")])
        return lines

    def _layer_lines(self, each: LayerBench) -> list[Block]:
        from attn_select.decide.config_text import config_text
        from attn_select.decide.lines import HANG
        from attn_select_cli.table import Table

        layer = each.layer
        title = f"{layer.kind} × {layer.count}  "
        lines: list[Block] = [[(title, "title"), HANG, (config_text(layer.selection.config), "")]]
        if each.not_run is not None:
            return [*lines, [("  not timed: ", "warning"), (each.not_run, "")]]
        for shape, found in each.batches:
            told = f"{shape.weight:.0%} of the steps"
            if found.roofline_us is not None:
                told += f", roofline {_us(found.roofline_us)} us"
            lines += [[], [(f"  {found.batch}  ", "title"), (told, "dim")]]
            timed = [one for one in found.timed if one.failure is None]
            if timed:
                header = ["  backend", "kernel", "us", "quartiles", "behind", "roofline", "error", "rounds"]
                lines.append(Table(header, [_row(one, found, timed[0]) for one in timed]))
            failed = [one for one in found.timed if one.failure is not None]
            lines += [[(f"  {one.backend}: ", ""), HANG, (one.failure or "", "rejected")] for one in failed]
            if not found.timed:
                lines.append([("  no backend is valid here", "rejected"), ("; `attn-select explain` says why", "")])
            lines += [
                [(f"  {one.backend} was not compared: ", "dim"), HANG, (one.unchecked, "dim")]
                for one in timed
                if one.unchecked
            ]
            eager = [one for one in timed if one.why_eager]
            lines += [[(f"  {one.backend} is eager: ", "dim"), HANG, (one.why_eager or "", "dim")] for one in eager]
        if len(each.batches) > 1:
            lines.append([])
            for phase in layer.selection.config.phases:
                if totals := each.totals(phase):
                    text = ", ".join(f"{name} {_us(total)} us" for name, total in totals)
                    lines.append([(f"  weighted, {phase:<7}  ", "title"), HANG, (text, "")])
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document; ``docs/json.md`` documents it."""
        return {
            "schema_version": 1,
            "model": self.explanation.model,
            "device": self.explanation.device.to_dict(),
            "rates": {"copy_bytes_per_s": self.rates.copy, "matmul_flops": self.rates.matmul},
            "workload": {
                "name": self.workload.name,
                "shapes": [{"batch": str(shape.batch), "weight": shape.weight} for shape in self.workload.shapes],
            },
            "layers": [
                {
                    "kind": each.layer.kind,
                    "count": each.layer.count,
                    "config": each.layer.selection.config.model_dump(),
                    "not_run": each.not_run,
                    "batches": [_batch_dict(found) for _, found in each.batches],
                }
                for each in self.layers
            ],
            "complete": self.complete,
            "ok": self.ok,
            "warnings": self.explanation.all_warnings,
        }


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us < 1000 else f"{time_us:.0f}"


def _row(timed: Timed, found: TimedBatch, best: Timed) -> list[str]:
    kernels = dict.fromkeys(timed.kernel.values())
    share = timed.share_of(found.roofline_us)
    error = "not compared" if timed.error is None else f"{timed.error:.1e}{'' if timed.exact else ' ABOVE'}"
    low, high = timed.spread_us
    return [
        f"  {timed.backend}",
        " + ".join(kernels),
        _us(timed.time_us),
        f"{_us(low)} to {_us(high)}",
        "" if timed is best else f"{timed.time_us / best.time_us - 1:.1%}",
        "" if share is None else f"{share:.0%}",
        error,
        f"{len(timed.samples_us)}{', eager' if timed.method == 'eager' else ''}",
    ]


def _batch_dict(found: TimedBatch) -> dict[str, Any]:
    return {
        "batch": str(found.batch),
        "roofline_us": found.roofline_us,
        "backends": [{**timed.to_dict(), "roofline_share": timed.share_of(found.roofline_us)} for timed in found.timed],
    }
