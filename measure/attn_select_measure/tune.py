"""``attn-select tune``: measures what a model's layers need on this device, and writes rules out of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.layer_options import bench_options
from attn_select_cli.rules_edit import write_options
from attn_select_measure.bench import Seconds

if TYPE_CHECKING:
    from attn_select.layer.config import Phase

EPILOG = """\b
Examples:
  attn-select tune --model llama-3-8b
  attn-select tune --model deepseek-v3 --tensor-parallel 8 --seconds 1200
  attn-select tune --model gpt-oss-120b --workload chat --yes
  attn-select tune --num-heads 32 --num-kv-heads 8 --head-size 128 --batch 1-64 --seq-len 1k-32k --file h100.toml

Batches are chosen where the order of the backends is least sure. Times are kept as `attn-select bench` keeps its own;
a tune that is stopped, or run again, goes on from there. Packaged times of this GPU and these versions count too, if
three of their batches take as long here. The rules name this GPU and the libraries' versions, so that
they lapse with them. Some batches judge the rules and take no part in making them: their regret, the time of the chosen
backend over the best time, is printed.

After an interrupt, rules are made of the layers and phases that were measured often enough.

Exit code: 0 written, or nothing to write, 1 not written, 2 wrong input, 130 interrupted.
"""


class _Range(click.ParamType[tuple[int, int]]):
    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+)(k?)(?:-(\d+)(k?))?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r}: expected LOW-HIGH such as 1-64 or 1k-32k, or one number", param, ctx)
        low = int(match[1]) * (1024 if match[2] else 1)
        high = low if match[3] is None else int(match[3]) * (1024 if match[4] else 1)
        if not 1 <= low <= high < 2**31:
            self.fail(f"{value!r}: expected two numbers from 1, the smaller first", param, ctx)
        return low, high


@click.command("tune", epilog=EPILOG, short_help="Measure a model's layers here and write rules out of it.")
@bench_options
@click.option("--layer", metavar="KIND", help="Tune only this kind of the model's layers [default: each].")
@click.option("--phase", type=click.Choice(("prefill", "decode")), help="Tune this phase alone.")
@click.option(
    "--workload",
    "-w",
    metavar="SHAPES|PROFILE|FILE",
    help="Tune for these batches and what lies between them [default: a wide range of batches].",
)
@click.option("--batch", type=_Range(), metavar="LOW-HIGH", help="Requests of a batch.")
@click.option("--seq-len", type=_Range(), metavar="LOW-HIGH", help="Tokens of a request, the new ones included.")
@click.option("--query-len", type=_Range(), metavar="LOW-HIGH", help="New tokens of a request in prefill.")
@click.option(
    "--seconds",
    type=Seconds(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Seconds in all, compilation included. Times that are kept already cost none.",
)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Rounds per batch.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Keep the times in this file instead.",
)
@write_options
def command(
    layer: str | None,
    phase: Phase | None,
    workload: str | None,
    batch: tuple[int, int] | None,
    seq_len: tuple[int, int] | None,
    query_len: tuple[int, int] | None,
    seconds: float,
    rounds: int,
    output: Path | None,
    file: Path | None,
    yes: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Measure what a model's layers need on this device, and write rules out of it."""
    from attn_select.errors import UnknownNameError
    from attn_select.times.workload import parse_workload
    from attn_select_cli import rules_file
    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_json, print_lines, require_writable
    from attn_select_cli.rules_edit import Proposal, rules_path
    from attn_select_cli.run import chosen_layers
    from attn_select_measure.bench import benching_module, check_output, progress, times_file

    check_output(output)
    wanted = None if workload is None else parse_workload(workload)
    asked = tuple(options["backend"])
    explanation = build_explanation({**options, "backend": (), "gpu": "auto"})
    for name in asked:
        if name not in explanation.situation.names:
            raise UnknownNameError("backend", name, explanation.situation.names)
    path = rules_path(file)
    require_writable(path, "--file")  # this, and that the file is broken, is said before anything is measured
    seen = rules_file.read_text(path)
    Proposal(path, seen, str).rules(seen)
    spans = {"batch": batch, "seq_len": seq_len, "query_len": query_len}
    benching = benching_module()

    from attn_select_measure import tuner

    with progress() as (say, _):
        bench = benching.Bench(explanation.situation.environment, tuple(options["rules"]) or None, rounds, say)
        found = tuner.Tuner(bench, output or times_file(bench), asked)
        for each in chosen_layers(explanation.layers, layer):
            config = each.selection.config
            if layer is None and (reason := benching.untimed(config)) is not None:
                found.skipped[each.kind] = reason
                continue
            phases = [one for one in config.phases if phase in (None, one)]
            if not phases:
                found.skipped[each.kind] = f"its layers have no {phase}"
            for one in phases:
                found.add(each.kind, config, one, spans, wanted)
        found.run(seconds, say)
    outcome = [*tuner.outcomes(found, rules_file.rules_in(seen) if seen else [])]
    if not as_json:
        print_lines(tuner.outcome_lines(outcome, found))
    if found.interrupted:
        text = f"interrupted: the times are kept in {found.file}, and the next tune goes on from there"
        short = [f"{one.layer.kind} {one.layer.tuning.phase}" for one in outcome if one.unfinished]
        click.echo(f"{text}; no rules yet of {', '.join(short)}" if short else text, err=True)
    more = {"layers": tuner.outcome_dicts(outcome), "measurements": str(found.file), "interrupted": found.interrupted}
    if any(one.tables for one in outcome):
        kept = {table["name"] for one in outcome for table in one.tables}
        gone = {rule["name"] for one in outcome if one.tables for rule in one.replaced} - kept

        def change(text: str) -> str:
            text = rules_file.without_rules(text, gone)
            for table in (table for one in outcome for table in one.tables):
                text = rules_file.with_rule(text, table)
            return text

        shown = {**options, "backend": (), "workload": workload}
        code = Proposal(path, seen, change, [options["model"]], ["auto"], shown).put(yes, as_json, more)
    else:
        if as_json:
            data = {**more, "file": str(path), "changes": [], "warnings": [], "written": False}
            print_json({"schema_version": 1, **data})
        code = 1
    return 130 if found.interrupted else code
