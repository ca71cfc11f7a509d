"""``attn-select report``: a page that shows decisions and measured times, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.layer_options import decision_options, workload_options
from attn_select_cli.pairs import models_and_gpus, pair_options
from attn_select_measure.libraries import require_libraries

if TYPE_CHECKING:
    from attn_select.layer.config import Phase
    from attn_select_cli.explanation import Explanation
    from attn_select_measure.report_page.measured import TimedOn
    from attn_select_measure.report_page.page import Page

EPILOG = """\b
Examples:
  attn-select report
  attn-select report --model llama-3-8b --model deepseek-v3 --gpu h100 --gpu h200 --output report.html
  attn-select report --model gpt-oss-120b --gpu h200 --workload chat
  attn-select report --measurements h100.jsonl
  attn-select report --matrix matrix.json

The page is one file, which needs no network and no server. A cell of its matrix opens the explanation. Times that are
known for a layer on a GPU are drawn as charts. With --measurements and neither models nor GPUs, the report is about the
layers and GPUs in those files. --matrix takes what `attn-select matrix --json` wrote.

Exit code: 0 written, 2 wrong input.
"""


@click.command("report", epilog=EPILOG, short_help="One HTML page: decisions as a matrix, times as charts.")
@pair_options
@decision_options
@workload_options
@click.option("--matrix", type=click.Path(path_type=Path), metavar="FILE", help="Show this matrix; decide nothing.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("attn-select-report.html"),
    show_default=True,
    metavar="FILE",
    help="Where to write.",
)
@click.option("--force", is_flag=True, help="Replace a file that is no report.")
def command(matrix: Path | None, output: Path, force: bool, **options: Any) -> int:
    """Write one HTML page that shows decisions, the reasons for them, and measured times."""
    from attn_select_cli.output import counted, print_line

    require_libraries("a report", "jinja2", "matplotlib")
    _check_output(output, force)
    asked = ("model", "gpu", "all_models", "all_gpus")
    named = any(options[name] for name in asked) or options["num_heads"] is not None
    models, gpus = models_and_gpus(options)
    if matrix is not None:
        if named or options["measurements"]:
            raise click.UsageError("--matrix shows what its file holds: give it no --model, --gpu or --measurements")
        page = _page_of_matrix(matrix)
    elif options["measurements"] and not named:
        page = _page_of_measurements(options)
    else:
        page = _page_of_models(options, models, gpus)
    text = page.html()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    charts = sum(len(group.charts) for group in page.timed) + len(page.regret)
    parts = [counted(len(page.cells), "cell"), counted(charts, "chart"), f"{len(text.encode()) / 1e6:.2f} MB"]
    print_line(f"{output}: {', '.join(parts)}")
    return 0


def _check_output(output: Path, force: bool) -> None:
    """Refuse to replace a file that no report wrote, and to write where nothing can be written."""
    from attn_select_cli.output import require_writable
    from attn_select_measure.report_page.page import MARK

    require_writable(output, "--output")
    if output.exists() and not force:
        with output.open("rb") as file:
            if MARK.encode() not in file.read(100):
                raise click.BadParameter(
                    f"{output} exists and is no report: --force replaces it", param_hint="--output"
                )


def _page_of_models(options: dict[str, Any], models: Sequence[str | None], gpus: Sequence[str]) -> Page:
    """Return the page of decisions for models on GPUs, with the times that are known of their layers."""
    from attn_select_cli.explanation import build_explanations

    # Without a workload no time counts in a decision, and the files are for the charts alone.
    given = options if options["workload"] is not None else {**options, "measurements": ()}
    explanations = build_explanations(given, models, gpus)
    asked = [(model or "layer", gpu) for model, gpu in product(models, gpus)]
    return _page(list(zip(asked, explanations, strict=True)), options, "Decisions by attn-select's rules.", timed=None)


def _page_of_measurements(options: dict[str, Any]) -> Page:
    """Return the page of the layers and GPUs that the files of ``--measurements`` hold."""
    from attn_select.decide.config_text import config_text
    from attn_select.decide.selector import environment_for, select, situation_for
    from attn_select.errors import MeasurementError
    from attn_select.machine.environment import parse_pins
    from attn_select_cli.explanation import Explanation, LayerExplanation
    from attn_select_measure.report_page.measured import read_times, timed_on

    files = options["measurements"]
    timed = timed_on(read_times(files, alone=True), None)
    if not timed:
        raise MeasurementError(
            f"measurements = {', '.join(files)}: no measured time in it",
            hint="`attn-select bench --output FILE` writes such files, and `attn-select measurements check` reads them",
        )
    rules, workload = tuple(options["rules"]) or None, options["workload"]
    found = []
    for one in timed:
        if one.device is None:
            continue
        environment = environment_for(one.device, parse_pins(options["pins"]))
        known = {"workload": workload, "measurements": files} if workload is not None else {}
        selection = select(one.config, one.device, rules, environment=environment, **known)
        situation = situation_for(one.device, rules, environment)
        described = {"name": config_text(one.config), "architecture": None, "source": ", ".join(files)}
        explanation = Explanation(described, [LayerExplanation("layer", 1, selection)], (), situation)
        found.append(((config_text(one.config), one.device.name), explanation))
    return _page(found, options, f"Of the measurements in {', '.join(files)}.", timed=timed)


def _page(
    explained: Sequence[tuple[tuple[str, str], Explanation]],
    options: dict[str, Any],
    origin: str,
    timed: list[TimedOn] | None,
) -> Page:
    """Return the page of explanations by model and GPU; ``timed`` None reads the times of their layers."""
    from attn_select.machine.environment import parse_pins
    from attn_select_measure.report_page.measured import chart_groups, read_times, regret_groups, timed_on, titles_of
    from attn_select_measure.report_page.page import Cell, Page

    cells = [
        Cell(model, f"{layer.kind} × {layer.count}", gpu, _names(layer.selection.selected), f"{model} {gpu}")
        for (model, gpu), explanation in explained
        for layer in explanation.layers
    ]
    documents = {f"{model} {gpu}": explanation.to_dict() for (model, gpu), explanation in explained}
    notes = []
    if timed is None:
        titles = titles_of(
            (model, layer.kind, layer.selection.config, explanation.device)
            for (model, _), explanation in explained
            for layer in explanation.attention
        )
        stored = read_times(options["measurements"], alone=False)
        notes = [str(problem) for problem in stored.problems]
        timed = timed_on(stored, titles)
        if not timed:
            notes.append("No times are known for these layers on these GPUs: `attn-select bench` measures them.")
    names = sorted({backend for one in timed for backend in one.backends})
    colours = {name: index for index, name in enumerate(names)}
    rules = explained[0][1].situation.rules if explained else None
    regret = regret_groups(timed, rules, parse_pins(options["pins"]), options["measurements"]) if rules else []
    return Page(origin, cells, documents, chart_groups(timed, colours), regret, notes)


def _page_of_matrix(path: Path) -> Page:
    """Return the page of a file that ``attn-select matrix --json`` wrote."""
    from attn_select_measure.report_page.matrix_file import read_matrix
    from attn_select_measure.report_page.page import Cell, Page

    found = read_matrix(path)
    cells = [
        Cell(
            cell.model or "layer",
            f"{cell.kind} × {cell.count}",
            cell.gpu,
            _names(cell.selected),
            f"{cell.model} {cell.gpu}",
        )
        for cell in found
    ]
    choices: dict[str, Any] = {}
    for cell in found:
        document: dict[str, Any] = {"model": cell.model, "gpu": cell.gpu, "choices": []}
        choices.setdefault(f"{cell.model} {cell.gpu}", document)["choices"].append(cell)
    return Page(f"Of the matrix in {path}, which holds the choices alone.", cells, choices)


def _names(selected: Mapping[Phase, str | None]) -> list[str]:
    return list(dict.fromkeys(name or "none" for name in selected.values()))
