"""``attn-select measurements``: list, check, fit, import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.command_group import CommandGroup
from attn_select_cli.layer_options import gpu_option, layer_options

if TYPE_CHECKING:
    from attn_select.machine.device import Device
    from attn_select.times.measurement import Measurement
    from attn_select.times.store import Stored, StoredMeasurement
    from attn_select.times.timed_layer import TimedLayer
    from attn_select_measure.published_tables import Table

EPILOG = """\b
Examples:
  attn-select measurements list
  attn-select measurements check h100.jsonl
  attn-select measurements fit --gpu h100
  attn-select measurements import --model llama-3-8b --gpu b200

Times are measured by `attn-select bench`. Without FILE every file is read: the ones that packaged models were fitted
to, the ones in your cache folder, and the ones that ATTN_SELECT_MEASUREMENTS names.
"""

_files = click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path())
_gpu = gpu_option("Only times on this GPU [default: all].", several=False)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_POINTS = 64


@click.group("measurements", cls=CommandGroup, epilog=EPILOG, short_help="List, check, fit and import measured times.")
def command() -> None:
    """List, check, fit and import measured times."""


@command.command(
    "list",
    short_help="List what was measured.",
    epilog="\b\nExample:\n  attn-select measurements list --gpu h100 --json\n",
)
@_files
@click.option(
    "--measurements", "named", multiple=True, metavar="FILE", help="As FILE (repeatable): its name elsewhere."
)
@_gpu
@_json
def list_command(files: tuple[str, ...], named: tuple[str, ...], gpu: str | None, as_json: bool) -> int:
    """List what was measured: by file, GPU, kernel and source, the number of layers and batches."""
    from attn_select_cli.output import print_json, print_lines
    from attn_select_cli.table import Table

    stored = _read((*files, *named), gpu)
    groups: dict[tuple[str, ...], list[Measurement]] = {}
    for row in stored.measurements:
        one = row.measurement
        key = str(row.file.path), row.file.kind, one.gpu, one.backend, _kernel(one), one.method, one.source
        groups.setdefault(key, []).append(one)
    listed = [
        {
            **dict(zip(("file", "kind", "gpu", "backend", "kernel", "method", "source"), key, strict=True)),
            "layers": len({str(sorted(each.config.items())) for each in group}),
            "batches": len({each.batch for each in group}),
            "measurements": len(group),
            "last": max(each.date for each in group) or None,
        }
        for key, group in groups.items()
    ]
    if as_json:
        problems = [_problem(each) for each in stored.problems]
        print_json({"schema_version": 1, "measurements": listed, "problems": problems})
        return 0
    if not listed:
        click.echo(f"no measurements{f' on {gpu}' if gpu else ''}: `attn-select bench` makes some")
    for path in dict.fromkeys(each["file"] for each in listed):
        here = [each for each in listed if each["file"] == path]
        rows = [
            [
                str(each["gpu"]),
                f"{each['backend']} {each['kernel']}",
                str(each["layers"]),
                str(each["batches"]),
                str(each["measurements"]),
                str(each["source"]),
                str(each["last"] or "-")[:10],
            ]
            for each in here
        ]
        print_lines([[(f"{path} ({here[0]['kind']})", "title")]])
        print_lines([Table(["GPU", "kernel", "layers", "batches", "times", "source", "last"], rows), [("", "")]])
    _warn(stored)
    return 0


@command.command(
    "check",
    short_help="Name the lines that cannot be used.",
    epilog="\b\nExample:\n  attn-select measurements check h100.jsonl\n\nExit code: 0 every line is sound, 1 not.\n",
)
@_files
@_json
def check(files: tuple[str, ...], as_json: bool) -> int:
    """Name the lines that cannot be used, and why. Decisions skip them."""
    from attn_select.errors import ConfigError
    from attn_select.times.batch_shape import parse_batch_shape
    from attn_select.times.store import Problem
    from attn_select.times.timed_layer import layer_from_dict
    from attn_select_cli.output import counted, print_json, print_line

    stored = _read(files, None)
    problems = list(stored.problems)
    for row in stored.measurements:
        try:
            parse_batch_shape(row.measurement.batch)
            layer = layer_from_dict(row.measurement.config).to_dict()
        except ConfigError as error:
            problems.append(Problem(row.file.path, row.line, error.message))
        else:
            if layer != dict(row.measurement.config):
                text = f"config = {dict(row.measurement.config)}: accepted is {layer}, which says the same"
                problems.append(Problem(row.file.path, row.line, text))
    if as_json:
        problem_rows = [_problem(each) for each in problems]
        print_json({"schema_version": 1, "measurements": len(stored.measurements), "problems": problem_rows})
    else:
        for each in problems:
            print_line(str(each))
        numbers = (len(stored.files), "file"), (len(stored.measurements), "measurement"), (len(problems), "problem")
        click.echo(", ".join(counted(*each) for each in numbers))
    return 1 if problems else 0


@command.command(
    "fit",
    short_help="Fit and keep the model of time, and say how well it does.",
    epilog="\b\nExample:\n  attn-select measurements fit --gpu h100 h100.jsonl\n",
)
@_files
@_gpu
@_json
def fit_command(files: tuple[str, ...], gpu: str | None, as_json: bool) -> int:
    """Fit the model of time for each kernel and layer, and say by how much it misses batches that are left out.

    Models are kept in your cache folder, where decisions read them. Times of files that are named together belong
    together, as with --measurements. `attn-select bench` and `tune` fit what they measure.
    """
    from attn_select.times.model import LEAST_POINTS
    from attn_select_cli.output import counted, print_json, print_lines
    from attn_select_cli.table import Table
    from attn_select_measure.fitting.keeping import known_times

    stored = _read(files, gpu)
    own = known_times([row for row in stored.measurements if row.file.kind != "packaged"])
    kept = sum(known.model is not None for known in own)  # asking for a model fits and keeps it
    fitted = [_fitted(key, rows) for key, rows in _by_kernel(stored.measurements).items()]
    if as_json:
        problems = [_problem(each) for each in stored.problems]
        print_json({"schema_version": 1, "least_batches": LEAST_POINTS, "fits": fitted, "problems": problems})
        return 0
    _warn(stored)
    if not fitted:
        click.echo(f"no measurements{f' on {gpu}' if gpu else ''}: `attn-select bench` makes some")
        return 0
    rows = [
        [
            each["gpu"],
            f"{each['backend']} {each['kernel']}",
            each["layer"],
            each["phase"],
            str(each["batches"]),
            *(_percent(each[name]) for name in ("median_error", "p90_error")),
            each["source"],
        ]
        for each in fitted
    ]
    print_lines([Table(["GPU", "kernel", "layer", "phase", "batches", "median", "p90", "source"], rows)])
    click.echo(f"median and p90: error of batches left out of the fit; -: fewer than {LEAST_POINTS} others")
    if own:
        click.echo(f"{counted(kept, 'model')} kept for decisions that read the same files")
    return 0


@command.command(
    "import",
    short_help="Take a model's times from published tables.",
    epilog="""\b
Examples:
  attn-select measurements import --model llama-3-8b --gpu b200
  attn-select measurements import --num-heads 32 --num-kv-heads 8 --head-size 128 --gpu l40s --output l40s.jsonl
  attn-select measurements import --labels

The tables come from aiconfigurator-core: pip install 'attn-select-measure[tables]'. Times of other engines'
own kernels and of whole modules are left out; --labels says which and why. docs/times-model.md describes the tables.
""",
)
@layer_options
@click.option("--all", "all_layers", is_flag=True, help="Every layer that the tables have, instead of one model's.")
@click.option(
    "--points",
    type=click.IntRange(0),
    default=_POINTS,
    show_default=True,
    metavar="N",
    help="Batches of each kernel, layer and phase, those farthest from each other; 0: all.",
)
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Append to this file instead.")
@click.option("--labels", "show_labels", is_flag=True, help="Only print what the labels of the tables mean.")
@_json
def import_command(
    all_layers: bool, points: int, output: Path | None, show_labels: bool, as_json: bool, **options: Any
) -> int:
    """Take the times of a model's layers from published tables, and append them to a file of measurements.

    What the file has already is not appended again.
    """
    from attn_select.errors import MeasurementError
    from attn_select.times import store
    from attn_select_cli.output import print_json, print_lines
    from attn_select_measure import published_tables as tables
    from attn_select_measure.fitting.keeping import fit_file

    if show_labels:
        print_json(_labels_dict()) if as_json else print_lines(_labels_tables())
        return 0
    if all_layers and (options["model"] is not None or options["num_heads"] is not None):
        raise click.UsageError("--all takes every layer of the tables: leave out --model and --num-heads")
    device = _device(options["gpu"])
    wanted = None if all_layers else _layers(options, device)
    folder, version = tables.installed()
    read: list[Table] = []
    for engine, engine_version, path in tables.table_files(folder):
        gpu = tables.gpu_of(path)
        if gpu is not None and gpu.name == device.name:
            read.append(tables.read_table(path, engine, engine_version, version))
    if not read:
        measured = {gpu.name for _, _, path in tables.table_files(folder) if (gpu := tables.gpu_of(path)) is not None}
        raise MeasurementError(
            f"--gpu {device.name}: the tables of {tables.DISTRIBUTION} {version} have no such GPU",
            hint=f"they have {', '.join(sorted(measured))}",
        )
    found = _thinned([m for table in read for m in table.measurements], wanted, points)
    file = output or store.default_file(f"{device.name} tables")
    if file is None:
        raise MeasurementError("there is no cache folder: HOME is not set", hint="name a file with --output")
    there = set(file.read_text("utf-8").splitlines()) if file.is_file() else set()
    new = [each for each in found if each.to_line() not in there]
    store.append_measurements(file, new)
    if found:
        fit_file(file)
    data = {
        "schema_version": 1,
        "gpu": device.name,
        "file": str(file),
        "appended": len(new),
        "already_there": len(found) - len(new),
        "sources": sorted({each.source for each in found}),
        "left_out": _sum(table.left_out for table in read),
    }
    if as_json:
        print_json(data)
    else:
        print_lines(_import_lines(data, bool(wanted)))
    return 0 if found else 1


def _read(files: Sequence[str], gpu: str | None) -> Stored:
    """Return the measurements of ``files``, or of all that decisions read, on a GPU or on all."""
    from attn_select.errors import MeasurementError
    from attn_select.machine.device import find_gpu
    from attn_select.times.store import MeasurementFile, Stored, read_measurements
    from attn_select_measure.measured_lines import every_measurement

    if missing := [name for name in files if not Path(name).is_file()]:
        seen = "it is a folder" if Path(missing[0]).is_dir() else "there is no such file"
        raise MeasurementError(f"FILE = {missing[0]!r}: {seen}")
    named = [MeasurementFile("named", Path(name)) for name in files]
    stored = read_measurements(named) if named else every_measurement()
    if gpu is None:
        return stored
    device = _device(gpu)

    def is_meant(name: str) -> bool:
        known = find_gpu(name)
        return name == device.full_name or (known is not None and known.name == device.name)

    found = [row for row in stored.measurements if is_meant(row.measurement.gpu)]
    return Stored(tuple(found), stored.problems, stored.files)


def _device(gpu: str | None) -> Device:
    from attn_select.machine.detection import detect_device
    from attn_select.machine.device import lookup

    return detect_device().device if gpu is None or gpu.strip().lower() == "auto" else lookup(gpu)


def _warn(stored: Stored) -> None:
    if stored.problems:
        from attn_select_cli.output import counted

        lines = counted(len(stored.problems), "line")
        click.echo(f"warning: {lines} skipped: `attn-select measurements check` names them", err=True)


def _problem(problem: Any) -> dict[str, Any]:
    return {"file": str(problem.path), "line": problem.line, "message": problem.message}


def _kernel(measurement: Measurement) -> str:
    """Return the kernel's name, or the names of both phases."""
    names = measurement.kernel
    same = len(set(names.values())) == 1
    return next(iter(names.values())) if same else ", ".join(f"{phase} {names[phase]}" for phase in sorted(names))


def _by_kernel(rows: Iterable[StoredMeasurement]) -> dict[tuple[Any, ...], list[Measurement]]:
    """Group measurements that one model is fitted from, by layer in the order of their first lines."""
    from attn_select.errors import ConfigError
    from attn_select.times.timed_layer import layer_from_dict

    found: dict[tuple[Any, ...], list[Measurement]] = {}
    for row in rows:
        one = row.measurement
        try:
            layer = layer_from_dict(one.config)
        except ConfigError:
            continue  # `check` names it
        libraries = tuple(sorted(one.libraries.items()))
        for phase, kernel in one.kernel.items():
            if len(one.kernel) == 1:
                key = one.gpu, one.backend, kernel, layer, phase, one.source, one.method, libraries
                found.setdefault(key, []).append(one)
    return found


def _fitted(key: tuple[Any, ...], rows: Sequence[Measurement]) -> dict[str, Any]:
    """Return how well the model of one kernel and layer does where batches are left out."""
    from attn_select.decide.config_text import config_text
    from attn_select.machine.device import Device, find_gpu
    from attn_select.times.batch_shape import parse_batch_shape
    from attn_select_measure.fitting.fit import left_out_errors
    from attn_select_measure.fitting.points import farthest_first

    gpu, backend, kernel, layer, phase, source, method, libraries = key
    device = find_gpu(gpu) or Device(gpu, None)
    points = [(parse_batch_shape(one.batch), one.time_us) for one in rows]
    batches = list(dict.fromkeys(batch for batch, _ in points))
    errors = sorted(left_out_errors(points, layer, device, farthest_first(batches, _POINTS)).values())
    return {
        "gpu": gpu,
        "backend": backend,
        "kernel": kernel,
        "config": layer.to_dict(),
        "layer": config_text(layer.config),
        "phase": phase,
        "batches": len(batches),
        "median_error": errors[len(errors) // 2] if errors else None,
        "p90_error": errors[int(0.9 * (len(errors) - 1))] if errors else None,
        "method": method,
        "source": source,
        "libraries": dict(libraries),
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _layers(options: dict[str, Any], device: Device) -> set[TimedLayer]:
    from attn_select.layer.models import load
    from attn_select.times.timed_layer import timed_layer
    from attn_select_cli.explanation import known_layers
    from attn_select_cli.layer_options import overrides_from

    overrides = overrides_from(options)
    if options["model"] is None and "num_heads" not in overrides:
        raise click.UsageError("which layers? Give --model, or --num-heads with --head-size, or --all")
    source = load(options["model"]) if options["model"] is not None else None
    kinds = known_layers(source, options, device, overrides)
    return {timed_layer(config) for config in kinds.configs}


def _thinned(found: Sequence[Measurement], wanted: set[TimedLayer] | None, points: int) -> list[Measurement]:
    """Return the wanted layers' measurements: of each kernel and phase the ``points`` farthest from each other."""
    from attn_select.times.batch_shape import parse_batch_shape
    from attn_select_measure.fitting.points import farthest_first

    layers = None if wanted is None else [layer.to_dict() for layer in wanted]
    groups: dict[str, list[Measurement]] = {}
    for one in found:
        if layers is None or one.config in layers:
            groups.setdefault(f"{one.source} {one.backend} {one.kernel} {one.config}", []).append(one)
    kept: list[Measurement] = []
    for group in groups.values():
        by_batch = {parse_batch_shape(one.batch): one for one in group}
        kept += [by_batch[batch] for batch in farthest_first(list(by_batch), points or len(by_batch))]
    return kept


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for reason, count in each.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _import_lines(data: dict[str, Any], of_model: bool) -> list[Any]:
    if not data["sources"]:
        layers = "these layers" if of_model else "any layer"
        lines = [[(f"the tables have no usable times of {layers} on {data['gpu']}", "warning")]]
    else:
        already = f", {data['already_there']} were there already" if data["already_there"] else ""
        lines = [[(f"{data['appended']} times appended to {data['file']}{already}", "title")]]
        lines += [[(f"  from {source}", "")] for source in data["sources"]]
    if data["left_out"]:
        lines.append([("rows left out of the GPU's tables, all layers counted:", "")])
        lines += [[(f"  {count:6} {reason}", "dim")] for reason, count in data["left_out"].items()]
    return lines


def _labels_dict() -> dict[str, Any]:
    from attn_select_measure import published_tables as tables

    labels = [
        {
            "framework": label.framework,
            "label": label.label,
            "compute_capability": f"{label.capability}x" if label.capability else None,
            "backend": label.backend or None,
            "kernel": label.kernel or None,
            "source": label.source or None,
            "excluded": label.excluded or None,
        }
        for label in tables.labels()
    ]
    return {"schema_version": 1, "labels": labels, "excluded_folders": tables.excluded_folders()}


def _labels_tables() -> list[Any]:
    from attn_select_cli.table import Table

    data = _labels_dict()
    rows = [
        [
            label["framework"],
            label["label"],
            label["compute_capability"] or "any",
            f"{label['backend']} {label['kernel']}" if label["backend"] else "left out",
            label["source"] or label["excluded"],
        ]
        for label in data["labels"]
    ]
    folders = [[name, reason] for name, reason in data["excluded_folders"].items()]
    return [
        Table(["framework", "label", "capability", "kernel", "source, or why it is left out"], rows),
        [("", "")],
        Table(["folder that is not read", "why"], folders),
    ]
