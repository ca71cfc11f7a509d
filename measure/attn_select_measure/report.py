"""``attn-select report``: a page that shows decisions and predicted times, in one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import (
    decision_options,
    engine_option,
    models_and_gpus,
    pair_options,
    workload_options,
)

if TYPE_CHECKING:
    from attn_select_measure.report_page.page import Page
    from attn_select_measure.report_page.predicted import ChartGroup

EPILOG = """\b
Examples:
  attn-select report
  attn-select report --model llama-3-8b --model deepseek-v3 --gpu h100 --gpu h200 --output report.html
  attn-select report --model gpt-oss-120b --gpu h200 --workload chat

The page is one file, which needs no network and no server. A cell of its matrix opens the explanation. Times that the
survey of a GPU predicts for a layer's valid backends are drawn as charts.

Exit code: 0 written, 2 wrong input.
"""


@click.command(
    "report", cls=Command, epilog=EPILOG, short_help="One HTML page: decisions as a matrix, times as charts."
)
@pair_options
@decision_options
@workload_options
@engine_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("attn-select-report.html"),
    show_default=True,
    metavar="FILE",
    help="Where to write.",
)
def command(output: Path, **options: Any) -> int:
    """Write one HTML page that shows decisions, the reasons for them, and predicted times."""
    from attn_select_cli.output import counted, print_line, print_warnings

    _require_libraries()
    _check_output(output)
    page, warnings = _page(options, *models_and_gpus(options))
    text = page.html()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    charts = sum(len(group.charts) for group in page.timed)
    parts = [counted(len(page.cells), "cell"), counted(charts, "chart"), f"{len(text.encode()) / 1e6:.2f} MB"]
    print_line(f"{output}: {', '.join(parts)}")
    for note in page.notes:
        print_line(note)
    print_warnings(warnings)
    return 0


def _require_libraries() -> None:
    """Raise ``RuntimeMissingError`` where a library that a report needs is not installed; it says what to install."""
    from attn_select.errors import RuntimeMissingError

    for name in ("jinja2", "matplotlib"):
        if find_spec(name) is None:
            hint = "pip install 'attn-select-measure[report]'"
            raise RuntimeMissingError(f"a report needs {name}, which is not installed", hint=hint)


def _check_output(output: Path) -> None:
    """Refuse to replace a file that no report wrote, and to write where nothing can be written."""
    from attn_select_cli.output import require_writable
    from attn_select_measure.report_page.page import MARK

    require_writable(output, "--output")
    if output.exists():
        with output.open("rb") as file:
            if MARK.encode() not in file.read(100):
                raise click.BadParameter(f"{output} exists and is no report", param_hint="--output")


def _page(options: dict[str, Any], models: Sequence[str | None], gpus: Sequence[str]) -> tuple[Page, list[str]]:
    """Return the page of decisions for models on GPUs, with the times that surveys predict for their layers, and what
    else is to be told of the decisions."""
    from attn_select.backends.registry import load_plugins
    from attn_select.times.prediction import load_survey, survey_for
    from attn_select_cli.explanation import build_explanations, warnings_of
    from attn_select_cli.matrix import cell_text
    from attn_select_cli.output import counted
    from attn_select_cli.progress import progress
    from attn_select_measure.charts import looks
    from attn_select_measure.report_page.page import Cell, Page
    from attn_select_measure.report_page.predicted import Layer, chart_groups

    explanations = build_explanations(options, models, gpus)
    pairs = [(model or "layer", gpu) for model, gpu in product(models, gpus)]
    cells, layers, lacking = [], [], dict[str, None]()
    for (model, gpu), explanation in zip(pairs, explanations, strict=True):
        survey = None if options["no_times"] else load_survey(explanation.device)
        if options["times"] is not None:
            survey = survey_for(explanation.device, Path(options["times"]), options["times"])
        if survey is None:
            lacking[gpu] = None
        for each in explanation.layers:
            name = f"{each.kind} × {each.count}"
            cells.append(Cell(model, name, gpu, cell_text(each.selection.selected).split(" / "), f"{model} {gpu}"))
            if survey is not None:
                layers.append(Layer(f"{model} {each.kind}", explanation.device, each.selection, survey))
    documents = {f"{model} {gpu}": one.to_dict() for (model, gpu), one in zip(pairs, explanations, strict=True)}
    look = looks(load_plugins().specs)
    with progress(f"drawing times of {counted(len(layers), 'layer')}", len(layers)) as drawn:
        groups = chart_groups(layers, look, drawn.advance)
    shown = [group for group in groups if group.charts]
    return Page(cells, documents, shown, _notes(options, lacking, groups), look), warnings_of(explanations)


def _notes(options: Mapping[str, Any], lacking: Iterable[str], groups: Iterable[ChartGroup]) -> list[str]:
    """Say why there are no charts of some layers or GPUs."""
    if options["no_times"]:
        return ["No charts: --no-times leaves surveys out."]
    notes: list[str] = []
    if gpus := ", ".join(lacking):
        notes.append(f"No charts of {gpus}: there is no survey of them, so rules alone decide.")
    empty: dict[str, list[str]] = {}
    for group in groups:
        if not group.charts:
            empty.setdefault(group.title, []).append(group.gpu)
    notes += [f"No charts of {title} on {', '.join(on)}: no survey has such layers." for title, on in empty.items()]
    return notes
