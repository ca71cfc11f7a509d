"""``attn-select report``: a page that shows decisions, the reasons for them, and predicted times, in one file."""

from __future__ import annotations

from collections.abc import Sequence
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
    from attn_select.decide.selection import Selection
    from attn_select.times.evidence import Evidence

EPILOG = """\b
Examples:
  attn-select report
  attn-select report --model llama-3-8b --model deepseek-v3 --gpu h100 --gpu h200 --output report.html
  attn-select report --model gpt-oss-120b --gpu h200 --workload chat

The page is one file, which needs no network and no server. A cell of its matrix opens the explanation, with the times
that the GPU's survey predicts for the valid backends, batch by batch.

Exit code: 0 written, 2 wrong input.
"""


@click.command("report", cls=Command, epilog=EPILOG, short_help="One HTML page: decisions as a matrix, with reasons.")
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
    from attn_select.errors import RuntimeMissingError
    from attn_select_cli.output import counted, print_line, print_warnings, require_writable

    if find_spec("jinja2") is None:
        hint = "pip install 'attn-select-measure[report]'"
        raise RuntimeMissingError("a report needs jinja2, which is not installed", hint=hint)
    from attn_select_measure.report_page.page import MARK, page_of

    require_writable(output, "--output")
    if output.exists():
        with output.open("rb") as file:
            if MARK.encode() not in file.read(100):
                raise click.BadParameter(f"{output} exists and is no report", param_hint="--output")
    documents, warnings = _documents(options, *models_and_gpus(options))
    text = page_of(documents)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    cells = sum(len(document["layers"]) for document in documents.values())
    print_line(f"{output}: {counted(cells, 'cell')}, {len(text.encode()) / 1e6:.2f} MB")
    print_warnings(warnings)
    return 0


def _documents(
    options: dict[str, Any], models: Sequence[str | None], gpus: Sequence[str]
) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """Return by model and GPU the explanation with its layers' times by batch, and what else is to be told."""
    from attn_select.times.evidence import load_evidence
    from attn_select_cli.explanation import build_explanations, warnings_of

    explanations = build_explanations(options, models, gpus)
    path = None if options["times"] is None else Path(options["times"])
    documents = {}
    for (model, gpu), explanation in zip(product(models, gpus), explanations, strict=True):
        here, evidence = explanation.situation, None
        if not options["no_times"]:
            evidence = load_evidence(here.device, here.environment, here.specs, path, bool(options["host_time"]))
        document = documents[model or "layer", gpu] = explanation.to_dict()
        for each, data in zip(explanation.layers, document["layers"], strict=True):
            data["by_batch"] = None if evidence is None else _by_batch(each.selection, evidence)
    return documents, warnings_of(explanations)


def _by_batch(selection: Selection[Any], evidence: Evidence) -> dict[str, Any] | None:
    """Return what each batch of the workload is predicted to take by valid backend, microseconds; None where nothing is
    predicted."""
    from attn_select.times.roofline import roofline_us
    from attn_select.times.workload import default_mix, phases_of

    config, rows = selection.config, list[dict[str, Any]]()
    for shape in (selection.workload or default_mix(config)).shapes:
        needed, times = phases_of(shape.batch, config), {}
        predicted = evidence.predict(config, shape.batch)
        for each in selection.ranked(needed):
            plan = each.phases[needed[0]].plan
            if plan is not None and each.backend in predicted:
                host_us = plan.host_us_per_shape if needed[0] == "prefill" else 0.0
                times[each.backend] = predicted[each.backend] + host_us
        floor = roofline_us(config, shape.batch, selection.device)
        rows.append({"batch": str(shape.batch), "times_us": times, "roofline_us": floor})
    backends = list(dict.fromkeys(name for row in rows for name in row["times_us"]))
    return {"backends": backends, "rows": rows} if backends else None
