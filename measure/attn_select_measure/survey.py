"""``attn-select survey``: times every valid backend on layers and batches drawn from the space of real models."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attn_select_cli.complete import BackendName
from attn_select_cli.help import Command

if TYPE_CHECKING:
    from attn_select.machine.environment import Environment
    from attn_select_measure.surveying import Plan, Settings

EPILOG = """\b
Examples:
  attn-select survey --out h200.jsonl
  attn-select survey --out h200.jsonl --workloads 300 --seconds 540
  attn-select survey --out h200.jsonl --backend TRITON_ATTN
  attn-select survey --fit h200.jsonl --out h200.json.gz
  attn-select survey --check
  attn-select survey --check h200.jsonl --with vllm==0.26.0

Each workload is a layer and a batch, drawn by the seed and its number, and becomes one line of the file. A file that is
there is gone on with. --backend with a file that has workloads times that backend anew on them, the oldest times
first, and keeps the others' times. Kernels are compiled first, for some workloads at a time, in processes side by side
(--jobs); FLASHINFER_DISABLE_JIT=1 keeps FlashInfer from compiling modules that are not there. FLEX_ATTENTION, which
compiles for each shape, is timed where it is named alone.

--fit makes of a survey's times what decisions read (`attn-select explain --times h200.json.gz`).

--check compares fingerprints of times with the kernels that are here, and measures nothing: of a survey's file, or
without one of the packaged times. A packaged backend that known_stale.toml names counts as without times.

Exit code: 0 all is done, or no time is stale, 1 workloads are left, or times are stale, 2 wrong input, 130 interrupted.
"""


@click.command("survey", cls=Command, epilog=EPILOG, short_help="Time every valid backend on drawn layers and batches.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE", help="The file.")
@click.option(
    "--fit",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Fit the times of a survey's file, and write to --out what decisions read.",
)
@click.option(
    "--check",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Say which times, packaged ones or a file's, are of other kernels than those that are here.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of the draws.")
@click.option(
    "--workloads", type=click.IntRange(1), default=600, show_default=True, metavar="N", help="How many of the seed."
)
@click.option("--states", "of_states", is_flag=True, help="Draw layers that keep a state, in place of attention.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), metavar="S", help="End by then [default: when all is done]."
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=BackendName(),
    metavar="NAME",
    help="Time this one alone; can be given again.",
)
@click.option("--with", "pins", multiple=True, metavar="NAME==VERSION", help="Count a library as installed.")
@click.option(
    "--jobs",
    type=click.IntRange(0),
    metavar="N",
    help="Processes that compile [default: two less than cores, 14 at most; without a GPU none].",
)
@click.option(
    "--compile-seconds",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="That first calls may take, for some workloads at a time.",
)
def command(
    out: Path | None,
    fit: Path | None,
    check: str | None,
    seed: int,
    workloads: int,
    of_states: bool,
    seconds: float | None,
    backends: tuple[str, ...],
    pins: tuple[str, ...],
    jobs: int | None,
    compile_seconds: float,
) -> int:
    """Time every valid backend on layers and batches drawn from the space of real models, one line for each."""
    from attn_select.backends.registry import load_plugins
    from attn_select.decide.selector import environment_for
    from attn_select.errors import UnknownNameError
    from attn_select.machine.detection import detect_device
    from attn_select.machine.environment import parse_pins
    from attn_select_cli.output import require_writable
    from attn_select_cli.torch_module import torch_module

    if (out is None) == (check is None):
        raise click.UsageError("give either --out FILE or --check [FILE]")
    specs = load_plugins().specs
    for name in backends:
        if name not in specs:
            raise UnknownNameError("backend", name, specs)
    environment = environment_for(detect_device().device, parse_pins(pins))
    if check is not None:
        return _check(Path(check) if check else None, environment)
    assert out is not None
    require_writable(out, "--out")
    if fit is not None:
        from attn_select_cli.progress import progress
        from attn_select_measure.survey_fit import fit_survey, save
        from attn_select_measure.survey_records import read_survey

        records = read_survey(fit)
        with progress(f"fitting {len(records)} workloads") as shown:
            save(fit_survey(records, shown.advance), out)
        return 0
    surveying = torch_module("attn_select_measure.surveying", "timing a layer")
    if jobs is None:
        jobs = surveying.default_jobs(not detect_device().device.is_cpu)
    settings = surveying.Settings(out, seconds, backends, jobs, compile_seconds)
    plan = surveying.drawn_or_again(seed, workloads, backends, of_states)
    return 0 if surveyed(settings, plan, environment) else 1


def surveyed(settings: Settings, plan: Plan, environment: Environment) -> bool:
    """Time what is planned, with a line for each; go on in a new process where the device fails."""
    from attn_select_measure import surveying

    began, seconds = time.monotonic(), settings.seconds
    try:
        complete = surveying.survey(settings, plan, environment, lambda text: click.echo(text, err=True))
    except surveying.DeviceLost as error:
        click.echo(f"the device failed ({error}): going on in a new process", err=True)
        left = [] if seconds is None else ["--seconds", str(max(1.0, seconds - (time.monotonic() - began)))]
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *left])  # of two --seconds the last counts
    if not complete:
        click.echo("time is up: the same command goes on", err=True)
    return complete


def _check(path: Path | None, environment: Environment) -> int:
    """Print which times are stale, of a file or packaged ones; return the exit code."""
    from attn_select.backends.registry import load_plugins
    from attn_select.errors import MeasurementError
    from attn_select.times.evidence import known_stale
    from attn_select_cli.output import print_line
    from attn_select_measure.survey_records import checked, packaged_times, read_survey, recorded_times

    if path is not None and not path.is_file():
        raise MeasurementError(f"{path}: there is no such file", hint="--check alone judges the packaged times")
    times, known = (packaged_times(), known_stale()) if path is None else (recorded_times(read_survey(path)), {})
    found = checked(times, load_plugins(), environment)
    for each in found:
        why = f": {', '.join(each.why)}" if each.why else ""
        if each.stale and each.backend in known:
            why = f", as known: {known[each.backend]['reason']} ({known[each.backend]['date']})"
        if each.stale:
            print_line(f"{each.backend}: {each.stale} of {each.times} times are stale{why}")
        elif each.unknown:
            print_line(f"{each.backend}: {each.unknown} of {each.times} times cannot be judged{why}")
        else:
            print_line(f"{each.backend}: {each.times} times are of the kernels that are here")
    stale = [each.backend for each in found if each.stale and each.backend not in known]
    if stale:
        again = " ".join(f"--backend {name}" for name in stale)
        print_line(f"to measure them again: attn-select survey --out {path or 'FILE'} {again}")
    return 1 if stale else 0
