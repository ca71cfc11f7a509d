"""``attn-select diff``: what changes between two sides, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import diff_options, options_in

if TYPE_CHECKING:
    from attn_select.decide.lines import Line

EPILOG = """\b
Examples:
  attn-select diff --model llama-3-8b --gpu h100 --to '--gpu b200'
  attn-select diff --model deepseek-v3 --gpu h100 --to '--kv-cache-dtype fp8'
  attn-select diff --model deepseek-v3 --gpu h100 --to '--rules my_rules.toml'
  attn-select diff --model deepseek-v3 --gpu h100 --to '--workload chat'
  attn-select explain --model deepseek-v3 --gpu h100 --json > golden.json
  attn-select diff --model deepseek-v3 --gpu h100 --golden golden.json

Exit code: 0 nothing changes, 1 something does, 2 wrong input.
"""


@click.command("diff", cls=Command, epilog=EPILOG, short_help="What changes between two decisions, and why.")
@diff_options
@click.option("--to", "to", metavar="OPTIONS", help="The other side: options of explain that replace those given here.")
@click.option(
    "--golden", type=click.Path(dir_okay=False), help="The first side: a file that `explain --json` wrote earlier."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, to: str | None, golden: str | None, as_json: bool, **options: Any) -> int:
    """Compare two decisions: another GPU, other rules, another config, or a golden file."""
    from attn_select_cli.explanation import build_explanation, warnings_of
    from attn_select_cli.golden import read_golden
    from attn_select_cli.output import print_json, print_lines, print_warnings

    if (to is None) == (golden is None):
        raise click.UsageError("give exactly one of --to OPTIONS and --golden FILE", ctx)
    if to is not None and not to.strip():
        raise click.UsageError("--to is empty: name an option that differs, such as --to '--gpu b200'", ctx)
    explained = [build_explanation(options)]
    if to is not None:
        explained.append(build_explanation({**options, **options_in(to, "--to")[1]}))
    sides = [explanation.to_dict() for explanation in explained]
    before, after = sides if golden is None else (read_golden(golden), *sides)
    changes = compare(before, after)
    if as_json:
        print_json({"schema_version": 1, "changes": changes})
    elif not changes:
        click.echo("no change")
    else:
        print_lines([line for change in changes for line in _change_lines(change)])
    print_warnings(warnings_of(explained))
    return 1 if changes else 0


_PLAN_FIELDS = (
    "path",
    "provider",
    "query_dtype",
    "returns_lse",
    "cuda_graph",
    "workspace_bytes",
    "block_table_width_multiple",
)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per layer kind and phase whose backend, path or cache changes, with the reasons."""
    changes: list[dict[str, Any]] = []
    old = {layer["kind"]: layer for layer in before["layers"]}
    new = {layer["kind"]: layer for layer in after["layers"]}
    for kind in dict.fromkeys((*old, *new)):
        if kind not in old or kind not in new:
            sides = {
                "from": "no such layers" if kind not in old else "present",
                "to": "no such layers" if kind not in new else "present",
            }
            changes.append({"kind": kind, "phase": None, "what": "layer kind", **sides, "why": []})
            continue
        a, b = old[kind], new[kind]
        for phase in dict.fromkeys((*a["selected"], *b["selected"])):
            names = a["selected"].get(phase), b["selected"].get(phase)
            if names[0] != names[1]:
                changes.append(
                    {
                        "kind": kind,
                        "phase": phase,
                        "what": "backend",
                        "from": names[0],
                        "to": names[1],
                        "why": _why(a, b, phase),
                    }
                )
            elif names[0] is not None:
                changes += _plan_changes(kind, phase, a["plan"]["phases"][phase], b["plan"]["phases"][phase])
        cache = [side["plan"] | {"count": side["count"]} for side in (a, b)]
        for what in (
            "count",
            "block_size",
            "kv_layout",
            "cache_shape",
            "cache_dtype",
            "bytes_per_token",
            "bytes_per_request",
        ):
            here, there = (side.get(what) for side in cache)  # older files lack some
            if here != there:
                changes.append({"kind": kind, "phase": None, "what": what, "from": here, "to": there, "why": []})
    return changes


def _plan_changes(kind: str, phase: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what changes in how one and the same backend runs a phase."""
    changes: list[dict[str, Any]] = []
    for what in _PLAN_FIELDS:
        if a.get(what) != b.get(what):
            why = [b["because"]] if what == "path" else []
            changes.append(
                {"kind": kind, "phase": phase, "what": what, "from": a.get(what), "to": b.get(what), "why": why}
            )
    return changes


def _why(a: Mapping[str, Any], b: Mapping[str, Any], phase: str) -> list[str]:
    """Say why the old choice is not made any more, and what speaks for the new one."""
    from attn_select.decide.lines import us_text

    why: list[str] = []
    old, new = a["selected"].get(phase), b["selected"].get(phase)
    now = {candidate["backend"]: candidate["phases"].get(phase) for candidate in b["candidates"]}
    then = {candidate["backend"]: candidate["phases"].get(phase) for candidate in a["candidates"]}
    if old is not None and now.get(old):
        why += [f"{old}: {reason['message']}" for reason in now[old]["reasons"]]
    if new is not None and then.get(new):
        why += [f"{new} was not possible before: {reason['message']}" for reason in then[new]["reasons"]]
    if new is not None and old is not None and now.get(old) and not now[old]["reasons"]:
        why.append(f"{new} is ranked {now[new]['rank']}, {old} {now[old]['rank'] or 'not at all'}")
        if now[old].get("behind") is not None and now[new].get("behind") is not None:
            times = [now[name]["timing"]["time_us"] for name in (new, old)]
            why.append(f"{new} is predicted to take {us_text(times[0])}, {old} {us_text(times[1])}")
    before = {(rule["name"], rule["file"]) for rule in a["rules"]}
    why += [
        f"rule {rule['name']} ({rule['file']}:{rule['line']})"
        for rule in b["rules"]
        if (rule["name"], rule["file"]) not in before and rule["phase"] in (None, phase)
    ]
    return why


def _change_lines(change: Mapping[str, Any]) -> list[Line]:
    from attn_select.decide.lines import HANG

    where = f"{change['kind']}{', ' + change['phase'] if change['phase'] else ''}: {change['what']}"
    before, after = (value_text(change[side]) for side in ("from", "to"))
    lines: list[Line] = [[(where, "title"), (f"  {before} -> {after}", "")]]
    return lines + [[("  ", ""), HANG, (reason, "dim")] for reason in change["why"]]


def value_text(value: Any) -> str:
    """Return one side of a change in words."""
    if isinstance(value, list):
        return f"({', '.join(map(str, value))})"
    return "none" if value is None else str(value)
