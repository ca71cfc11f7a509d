"""``attn-select cache``: the format of a model's KV cache, and whether two sides can exchange it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import diff_options, options_in

if TYPE_CHECKING:
    from attn_select.decide.outcome import Outcome
    from attn_select_cli.explanation import Explanation
    from attn_select_cli.table import Table

EPILOG = """\b
Examples:
  attn-select cache --model llama-3-8b --gpu h100
  attn-select cache --model llama-3-8b --gpu h100 --to '--gpu b200'
  attn-select cache --model llama-3-8b --gpu h100 --to '--kv-cache-dtype fp8 --block-size 64'

The id of a cache (Selection.cache_fingerprint) is the same wherever blocks can be copied byte by byte: the same
layout, block size, dtype, scales and heads per rank. What changes them: --backend, --block-size, --kv-cache-dtype,
--state-dtype, --dtype, --per-head-quant-scales, --tensor-parallel, --dcp.

Exit code: 0 both sides fit, 1 they do not, or a layer has no backend, 2 wrong input.
"""
_OTHER_LAYERS = "they have other kinds of layers"
_OTHER_RANKS = "they keep other heads or tokens on a rank, which no conversion changes"
_CONVERT_BLOCKS = "attn_select.runtime.convert_kv_cache turns one side's blocks into the other's"
_CONVERT_STATES = "attn_select.runtime.states.convert_states turns one side's states into the other's"


@click.command(
    "cache", cls=Command, epilog=EPILOG, short_help="The format of a KV cache, and whether two sides can exchange it."
)
@diff_options
@click.option("--to", metavar="OPTIONS", help="The decode side: options that replace those given here.")
def command(to: str | None, **options: Any) -> int:
    """Show how a model's KV cache lies in memory. With --to: whether a prefill side and a decode side can exchange
    blocks, and in what they differ."""
    from attn_select_cli.explanation import build_explanation, warnings_of
    from attn_select_cli.output import print_line, print_lines, print_warnings

    changed = {} if to is None else options_in(to, "--to")[1]
    if to is not None and (not changed or "model" in changed):
        raise click.UsageError(f"--to {to!r}: expected options that differ, and no model: both sides run the same")
    sides = [build_explanation(options)]
    if to is None:
        print_lines([*sides[0].head_lines(), [], _table(sides[0])])
    else:
        sides.append(build_explanation({**options, **changed}))
        for name, side in zip(("prefill", "decode"), sides, strict=True):
            print_lines([[(f"{name} side: {side.device.full_name}", "title")], _table(side), []])
    ok, differences = all(side.ok for side in sides), _differences(sides[0], sides[-1])
    for text, (kinds, _) in differences.items():
        print_line(f"{', '.join(kinds)}: {text}")
    if differences:
        said = [why for _, why in differences.values()]
        obstacles = [why for why in said if why in (_OTHER_LAYERS, _OTHER_RANKS)]
        click.echo(f"The sides do not fit: {', and '.join(dict.fromkeys(obstacles or said))}.")
    elif to is not None and ok and not any(layer.selection.config.has_cache for layer in sides[0].layers):
        click.echo("No cache: these layers keep none.")
    elif to is not None and ok:
        click.echo("Both sides fit: blocks and states can be copied byte by byte.")
    if not ok:
        click.echo("No backend: `attn-select explain` with the same options says why.")
    print_warnings(warnings_of(sides))
    return 0 if ok and not differences else 1


def _table(explained: Explanation) -> Table:
    from attn_select_cli.matrix import cell_text
    from attn_select_cli.table import Table

    rows = []
    for each in explained.layers:
        owning = each.layers.owners.caches
        name = f"{each.kind} × {each.count}{'' if owning == each.count else f', {owning} own one'}"
        rows.append([name, *_cells(each.selection), cell_text(each.selection.selected)])
    return Table(["layers", "cache id", "layout", "block", "dtype", "heads", "bytes", "backends"], rows)


def _cells(selection: Outcome[Any]) -> list[str]:
    """Return id, layout, block size, dtype, heads and bytes of a cache."""
    if (states := selection.state_format) is not None:
        facts = states.facts()
        heads = f"{facts['num_v_heads']} × {facts['head_size']} × {facts['v_head_size']}"
        per_request = f"{selection.bytes_per_request} per request"
        return [states.fingerprint, states.layout, "-", facts["state_dtype"], heads, per_request]
    if (form := selection.cache_format) is None:
        return ["no cache"] + ["-"] * 5
    facts = form.facts()
    heads, per_token = f"{facts['num_kv_heads']} × {facts['head_size']}", f"{selection.bytes_per_token} per token"
    return [form.fingerprint, form.layout, str(form.block_size), facts["dtype"], heads, per_token]


def _differences(prefill: Explanation, decode: Explanation) -> dict[str, tuple[list[str], str]]:
    """Return each fact in which the caches differ: for which kinds of layers, and what that means."""
    here, there = ({layer.kind: layer.selection for layer in side.layers} for side in (prefill, decode))
    found: dict[str, tuple[list[str], str]] = {}
    for kind in dict.fromkeys((*here, *there)):
        if kind not in here or kind not in there:
            text = f"no such layers on the {'decode' if kind in here else 'prefill'} side"
            found.setdefault(text, ([], _OTHER_LAYERS))[0].append(kind)
            continue
        mine, other = (each.cache_format or each.state_format for each in (here[kind], there[kind]))
        if mine is not None and other is not None:
            convert = _CONVERT_STATES if here[kind].state_format else _CONVERT_BLOCKS
            for fact, values in mine.differences(other).items():
                why = convert if fact in mine.converted else _OTHER_RANKS
                found.setdefault(f"{fact}  {values[0]} -> {values[1]}", ([], why))[0].append(kind)
    return found
