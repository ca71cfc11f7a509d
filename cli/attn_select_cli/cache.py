"""``attn-select cache``: the format of a model's KV cache, and whether two sides can exchange it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import cache_options, options_in

if TYPE_CHECKING:
    from attn_select.decide.lines import Line
    from attn_select.decide.outcome import Outcome
    from attn_select.layer.cache_format import Format
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
SIDES = ("prefill", "decode")
_OPTIONS = {
    "dtype": "--kv-cache-dtype",
    "scales": "--per-head-quant-scales",
    "num_kv_heads": "--tensor-parallel",
    "num_v_heads": "--tensor-parallel",
    "decode_context_parallel_size": "--dcp",
    "block_size": "--block-size",
    "kernel_block_size": "--block-size",
    "layout": "--backend",
    "state_layout": "--backend",
    "state_dtype": "--state-dtype",
    "conv_dtype": "--dtype",
}
"""Fact of a format -> the option that changes it."""


@click.command(
    "cache", cls=Command, epilog=EPILOG, short_help="The format of a KV cache, and whether two sides can exchange it."
)
@cache_options
@click.option("--to", "to", metavar="OPTIONS", help="Options of the decode side that replace those given here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, gpu: tuple[str, ...], to: str | None, as_json: bool, **options: Any) -> int:
    """Show how a model's KV cache lies in memory. With a second --gpu or --to: whether a prefill side and a decode
    side can exchange blocks, and in what they differ."""
    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_json, print_lines, print_warnings

    if len(gpu) > 2:
        raise click.UsageError(f"--gpu is given {len(gpu)} times: a cache has a prefill side and a decode side", ctx)
    named = {} if to is None else options_in(to, "--to")[1]
    if to is not None and not named:
        raise click.UsageError("--to is empty: name an option that differs, such as --to '--block-size 64'", ctx)
    if "model" in named:
        raise click.UsageError("--to names a model: both sides of a cache run the same one", ctx)
    sides = [build_explanation({**options, "gpu": gpu[0] if gpu else "auto"})]
    if len(gpu) == 2 or named:
        sides.append(build_explanation({**options, "gpu": gpu[-1] if gpu else "auto", **named}))
    differences = _differences(*sides) if len(sides) == 2 else []
    fits = not differences and all(side.ok for side in sides)
    warnings = list(dict.fromkeys(text for side in sides for text in side.all_warnings))
    if as_json:
        data: dict[str, Any] = {"sides": [_side(side) for side in sides]}
        if len(sides) == 2:
            data |= {"fits": fits, "differences": differences}
        print_json({"schema_version": 1, **data, "warnings": warnings})
    elif len(sides) == 1:
        print_lines([*sides[0].head_lines(), [], *_table(sides[0])])
    else:
        print_lines(_comparison_lines(sides, differences))
    print_warnings(warnings)
    return 0 if fits else 1


def _format(selection: Outcome[Any]) -> Format | None:
    return selection.cache_format or selection.state_format


def _differences(prefill: Explanation, decode: Explanation) -> list[dict[str, Any]]:
    """Return in which facts the caches of the same kind of layers differ; ``docs/json.md`` documents the keys."""
    there = {layer.kind: _format(layer.selection) for layer in decode.layers}
    found = []
    for layer in prefill.layers:
        here, other = _format(layer.selection), there.get(layer.kind)
        if here is None or other is None:
            continue
        for fact, (mine, others) in here.differences(other).items():
            difference = {"kind": layer.kind, "fact": fact, "prefill": mine, "decode": others}
            found.append({**difference, "option": _OPTIONS.get(fact), "converted": fact in here.converted})
    return found


def _side(explained: Explanation) -> dict[str, Any]:
    layers = []
    for layer in explained.layers:
        form = _format(layer.selection)
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


def _table(explained: Explanation) -> list[Block]:
    from attn_select.decide.lines import HANG
    from attn_select_cli.matrix import cell_text
    from attn_select_cli.table import Table

    rows = []
    for layer in explained.layers:
        form, owning = _format(layer.selection), layer.layers.owners.caches
        cells = ["no cache"] + ["-"] * 5 if form is None else [form.fingerprint, *_cells(layer.selection)]
        name = f"{layer.kind} × {layer.count}"
        name += "" if owning == layer.count else f", {owning} own one"
        rows.append([name, *cells, cell_text(layer.selection.selected)])
    lines: list[Block] = [Table(["layers", "cache id", "layout", "block", "dtype", "heads", "bytes", "backends"], rows)]
    if not all(layer.selection.ok for layer in explained.layers):
        text = "none: no backend is valid there; `attn-select explain` with the same options says why"
        lines += [[], [("", ""), HANG, (text, "warning")]]
    return lines


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


def _comparison_lines(sides: list[Explanation], differences: list[dict[str, Any]]) -> list[Block]:
    from attn_select.decide.lines import HANG

    lines: list[Block] = []
    for name, side in zip(SIDES, sides, strict=True):
        lines += [[(f"{name} side: {side.device.full_name or side.device.name}", "title")], *_table(side), []]
    kinds: dict[str, list[str]] = {}
    for each in differences:
        kinds.setdefault(f"{each['fact']}  {each['prefill']} -> {each['decode']}", []).append(each["kind"])
    for text, names in kinds.items():
        fact, _, values = text.partition("  ")
        option = _OPTIONS.get(fact)
        lines.append([(f"{', '.join(names)}: {fact}", "title"), (f"  {values}", "")])
        lines.append([("  ", ""), HANG, (f"{option} changes it" if option else "no option changes it", "dim")])
    return [*lines, *([[]] if kinds else []), _verdict(sides, differences)]


def _verdict(sides: list[Explanation], differences: list[dict[str, Any]]) -> Line:
    """Return the line that says whether the sides fit, and what to do where they do not."""
    from attn_select.decide.lines import HANG

    if not differences:
        if not all(side.ok for side in sides):
            return [("No backend: ", "warning"), HANG, ("`attn-select explain` with the same options says why.", "")]
        if not any(layer.selection.config.has_cache for layer in sides[0].layers):
            return [("No cache: ", "selected"), HANG, ("these layers keep none.", "")]
        return [("Both sides fit: ", "selected"), HANG, ("blocks and states can be copied byte by byte.", "")]
    text = "they keep other heads or tokens on a rank, which no conversion changes."
    if all(each["converted"] for each in differences):
        states = {layer.kind for layer in sides[0].layers if layer.selection.config.sort == "state"}
        kinds = {each["kind"] for each in differences}
        turns = ["attn_select.runtime.convert_kv_cache turns one side's blocks into the other's"] * bool(kinds - states)
        if kinds & states:
            turns.append("attn_select.runtime.states.convert_states turns one side's states into the other's")
        text = f"{', and '.join(turns)}."
    return [("The sides do not fit: ", "warning"), HANG, (text, "")]
