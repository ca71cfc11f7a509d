"""``attn-select tune``: a short survey of a model's own layers, added to the GPU's where choices become better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import bench_options
from attn_select_measure.survey import surveyed

EPILOG = """\b
Examples:
  attn-select tune --model llama-3-8b
  attn-select tune --model deepseek-v3 --tensor-parallel 8 --seconds 900
  attn-select tune --model gpt-oss-120b --workload agent
  attn-select tune --num-heads 32 --num-kv-heads 8 --head-size 128 --workload 64q1s4k,4q2k --out mine.json.gz

Batches are drawn for each kind of the model's layers, all phases in turn; with --workload its own first, then others
within its ranges. Every valid backend is timed on each. A third of the batches is held out: they say what the choice
costs, the chosen backend's time over the least one, as it stands and with the times of the others added. Where it is
not worse, all times are added to the survey that the choice rests on: in the user's cache folder, where every decision
on this GPU finds it, or in the file of --out, which --times names.

Times stand in a file beside it (.records.jsonl): a tune that was stopped, or runs again, goes on from there.

Exit code: 0 written, 1 not written, 2 wrong input, 130 interrupted.
"""


@click.command("tune", cls=Command, epilog=EPILOG, short_help="Time a model's own layers and let choices rest on that.")
@bench_options
@click.option("--layer", metavar="KIND", help="Tune only this kind of the model's layers [default: each].")
@click.option(
    "--workload",
    "-w",
    metavar="SHAPES|PROFILE|FILE",
    help="Tune for these batches and what lies between them [default: a wide range of batches].",
)
@click.option(
    "--workloads",
    type=click.IntRange(3),
    default=48,
    show_default=True,
    metavar="N",
    help="Batches of each kind of layers.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="S",
    help="End by then, compilation included. Times that are kept already cost none.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write this survey instead."
)
def command(
    layer: str | None, workload: str | None, workloads: int, seconds: float, out: Path | None, **options: Any
) -> int:
    """Time a model's own layers on this device, and add them to the device's survey where choices become better."""
    from attn_select.decide.selector import clear_cache
    from attn_select.errors import MeasurementError
    from attn_select.times.prediction import SUFFIX, family_of, user_path
    from attn_select.times.workload import parse_workload
    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_line, print_warnings, require_writable
    from attn_select_cli.run import chosen_layers
    from attn_select_cli.torch_module import torch_module

    wanted = None if workload is None else parse_workload(workload)
    explanation = build_explanation({**options, "backend": (), "gpu": "auto"})
    print_warnings(explanation.all_warnings)
    backends, device = tuple(options["backend"]), explanation.device
    if device.is_cpu:
        raise MeasurementError("there is nothing to tune on a CPU: rules alone decide there")
    path = out or user_path(device)
    if path is None:
        raise MeasurementError("there is no home directory to keep a survey in", hint="use --out FILE")
    require_writable(path, "--out")
    file = path.with_name(path.name.removesuffix(SUFFIX) + ".records.jsonl")
    gpu = device.full_name or device.name
    if path.exists() and not file.exists():
        raise MeasurementError(f"{path} exists, and no tune wrote it", hint="--out FILE names another one")
    benching = torch_module("attn_select_measure.benching", "timing a layer")
    from attn_select_measure import surveying, tuning
    from attn_select_measure.survey_fit import extended, save
    from attn_select_measure.survey_records import read_survey

    layers = {}
    for each in chosen_layers(explanation.layers, layer):
        config = each.selection.config
        reason = benching.untimed(config)
        if reason is None and family_of(config) is None:
            reason = "surveys have no times of such layers"
        if reason is None:
            tuned = tuning.tuned_layer(each.kind, config, wanted)
            layers[tuned.seed] = tuned
        else:
            click.echo(f"{each.kind} is not tuned: {reason}", err=True)
    if not layers:
        return 1
    base = tuning.base_survey(device, gpu, tuning.parted(layers, read_survey(file))[0], file)
    environment, rules = explanation.situation.environment, tuple(options["rules"]) or None
    jobs = surveying.default_jobs(True)
    settings = surveying.Settings(file, seconds, backends, jobs, rules=rules)
    surveyed(settings, lambda _, known: tuning.plan(layers, workloads, known), environment)
    _, added, held_out = tuning.parted(layers, read_survey(file))
    merged = extended(base, added)
    regrets = tuning.judged(held_out, (base, merged), device, rules, environment)
    print_line(f"{gpu}: {len(added) + len(held_out)} workloads, {len(held_out)} of them held out")
    if not regrets:
        print_line("not written: no held-out workload has times of the backends that are chosen")
        return 1
    for seed, mine in regrets.items():
        print_line(f"{layers[seed].name}: regret {tuning.regret_text(mine)}")
    before, after = tuning.means([each for mine in regrets.values() for each in mine])
    if after > before:
        print_line("not written: choices would be worse")
        return 1
    save(extended(merged, held_out), path)
    clear_cache()
    print_line(f"written: {path}" + ("" if out else ", which decisions on this GPU rest on from now on"))
    return 0
