"""``attn-select cache``: the format of a model's KV cache, and whether two sides can exchange it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import cache_options, options_in

if TYPE_CHECKING:
    from attn_select.decide.lines import Line
    from attn_select.decide.outcome import Outcome
    from attn_select_cli.cache_sides import Comparison, Difference
    from attn_select_cli.explanation import Explanation
    from attn_select_cli.table import Block

EPILOG = """\b
Examples:
  attn-select cache --model llama-3-8b --gpu h100
  attn-select cache --model llama-3-8b --gpu h100 --gpu b200
  attn-select cache --model llama-3-8b --gpu h100 --to '--kv-cache-dtype fp8 --block-size 64'
  attn-select cache --model deepseek-v3 --gpu h20 --gpu h200 --json

The id of a cache (Selection.cache_fingerprint) is the same wherever blocks can be copied byte by byte: the same
layout, block size, dtype, scales and heads per rank.

Exit code: 0 both sides fit, 1 they do not, or a layer has no backend, 2 wrong input.
"""


@click.command(
    "cache", cls=Command, epilog=EPILOG, short_help="The format of a KV cache, and whether two sides can exchange it."
)
@cache_options
@click.option("--to", "to", metavar="OPTIONS", help="Options of the decode side that replace those given here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, gpu: tuple[str, ...], to: str | None, as_json: bool, **options: Any) -> int:
    """Show how a model's KV cache lies in memory. With a second --gpu or --to: whether a prefill side and a decode
    side can exchange blocks, and which option removes each difference."""
    from attn_select_cli.cache_sides import compare
    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_json, print_lines, print_warnings

    if len(gpu) > 2:
        raise click.UsageError(f"--gpu is given {len(gpu)} times: a cache has a prefill side and a decode side", ctx)
    named = {} if to is None else options_in(to, "--to")[1]
    if to is not None and not named:
        raise click.UsageError("--to is empty: name an option that differs, such as --to '--block-size 64'", ctx)
    if "model" in named:
        raise click.UsageError("--to names a model: both sides of a cache run the same one", ctx)
    prefill = {**options, "gpu": gpu[0] if gpu else "auto"}
    if len(gpu) < 2 and not named:
        explained = build_explanation(prefill)
        shown: list[Block] = [*explained.head_lines(), [], *_table(explained)]
        data: dict[str, Any] = {"sides": [_side(explained)]}
        fits, sides = explained.ok, [explained]
    else:
        compared = compare(prefill, {**options, "gpu": gpu[-1] if gpu else "auto", **named})
        shown, data = _comparison_lines(compared), _comparison_data(compared)
        fits, sides = data["fits"], [*compared.sides]
    warnings = list(dict.fromkeys(text for side in sides for text in side.all_warnings))
    if as_json:
        print_json({"schema_version": 1, **data, "warnings": warnings})
    else:
        print_lines(shown)
    print_warnings(warnings)
    return 0 if fits else 1


def _side(explained: Explanation) -> dict[str, Any]:
    """Return one side as plain data."""
    from attn_select_cli.cache_sides import format_of

    layers = []
    for layer in explained.layers:
        form = format_of(layer.selection)
        layers.append(
            {
                "kind": layer.kind,
                "count": layer.count,
                "cache_count": layer.cache_count,
                "selected": layer.selection.selected,
                "fingerprint": None if form is None else form.fingerprint,
                "format": None if form is None else form.facts(),
                "bytes_per_token": layer.selection.bytes_per_token,
                "bytes_per_request": layer.selection.bytes_per_request,
            }
        )
    return {"gpu": explained.device.name, "layers": layers}


def _comparison_data(compared: Comparison) -> dict[str, Any]:
    """Return the answer as plain data; ``docs/json.md`` documents it."""
    return {
        "fits": not compared.differences and all(side.ok for side in compared.sides),
        "sides": [_side(side) for side in compared.sides],
        "differences": [{**asdict(each), "converted": each.converted} for each in compared.differences],
        "arguments": compared.arguments,
    }


def _table(explained: Explanation) -> list[Block]:
    from attn_select.decide.lines import HANG
    from attn_select_cli.cache_sides import format_of
    from attn_select_cli.matrix import cell_text
    from attn_select_cli.table import Table

    rows, missing = [], False
    for layer in explained.layers:
        form, chosen = format_of(layer.selection), cell_text(layer.selection.selected)
        missing = missing or not layer.selection.ok
        cells = ["no cache"] + ["-"] * 5
        if form is not None:
            cells = [form.fingerprint, *_cells(layer.selection)]
        owning = layer.layers.owners.caches
        name = f"{layer.kind} × {layer.count}"
        rows.append([name if owning == layer.count else f"{name}, {owning} own one", *cells, chosen])
    header = ["layers", "cache id", "layout", "block", "dtype", "heads", "bytes", "backends"]
    missing_text = "none: no backend is valid there; `attn-select explain` with the same options says why"
    return [Table(header, rows), *([[], [("", ""), HANG, (missing_text, "warning")]] if missing else [])]


def _cells(selection: Outcome[Any]) -> list[str]:
    """Return layout, block size, dtype, heads and bytes of a cache."""
    if (states := selection.state_format) is not None:
        facts = states.facts()
        heads = f"{facts['num_v_heads']} × {facts['head_size']} × {facts['v_head_size']}"
        return [states.layout, "-", facts["state_dtype"], heads, f"{selection.bytes_per_request} per request"]
    form = selection.cache_format
    assert form is not None
    facts = form.facts()
    heads = f"{facts['num_kv_heads']} × {facts['head_size']}"
    return [form.layout, str(form.block_size), facts["dtype"], heads, f"{selection.bytes_per_token} per token"]


def _comparison_lines(compared: Comparison) -> list[Block]:
    from attn_select_cli.cache_sides import SIDES

    lines: list[Block] = []
    for name, side in zip(SIDES, compared.sides, strict=True):
        lines += [[(f"{name} side: {side.device.full_name or side.device.name}", "title")], *_table(side), []]
    kinds: dict[Difference, list[str]] = {}
    for each in compared.differences:
        kinds.setdefault(replace(each, kind=""), []).append(each.kind)
    for each, names in kinds.items():
        lines += _difference_lines(each, names)
    return [*lines, *([[]] if kinds else []), _verdict(compared)]


def _verdict(compared: Comparison) -> Line:
    """Return the line that says whether the sides fit, and what to do where they do not."""
    from attn_select.decide.lines import HANG

    if not compared.differences:
        if not all(side.ok for side in compared.sides):
            return [("No backend: ", "warning"), HANG, ("`attn-select explain` with the same options says why.", "")]
        if not any(layer.selection.config.has_cache for layer in compared.sides[0].layers):
            return [("No cache: ", "selected"), HANG, ("these layers keep none.", "")]
        return [("Both sides fit: ", "selected"), HANG, ("blocks and states can be copied byte by byte.", "")]
    convert = _conversion(compared)
    able = all(each.converted for each in compared.differences)
    if compared.arguments:
        given = " and ".join(f"the {side} side {' '.join(options)}" for side, options in compared.arguments.items())
        return [
            ("The sides fit ", "selected"),
            HANG,
            (f"when you give {given}.{f' Or {convert}.' if able else ''}", ""),
        ]
    text = f"{convert}." if able else "They keep other heads or tokens on a rank, which no conversion changes."
    return [("No options make the sides fit. ", "warning"), HANG, (text, "")]


def _conversion(compared: Comparison) -> str:
    """Return what turns one side's caches into the other's."""
    states = {layer.kind for layer in compared.sides[0].layers if layer.selection.config.sort == "state"}
    of_states = {each.kind in states for each in compared.differences}
    turns = {
        False: "attn_select.runtime.convert_kv_cache turns one side's blocks into the other's",
        True: "attn_select.runtime.states.convert_states turns one side's states into the other's",
    }
    return ", and ".join(text for kind, text in turns.items() if kind in of_states)


def _difference_lines(each: Difference, kinds: Sequence[str]) -> list[Line]:
    from attn_select.decide.lines import HANG

    head: Line = [(f"{', '.join(kinds)}: {each.fact}", "title"), (f"  {each.prefill} -> {each.decode}", "")]
    remedy = "no option of either side removes it"
    if each.argument is not None:
        remedy = f"{each.argument} on the {each.side} side removes it"
    return [head, [("  ", ""), HANG, (remedy, "dim")]]
