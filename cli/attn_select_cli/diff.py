"""``attn-select diff``: what changes between two sides, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    from attn_select_cli.output import print_json, print_lines, print_warnings

    if (to is None) == (golden is None):
        raise click.UsageError("give exactly one of --to OPTIONS and --golden FILE", ctx)
    if to is not None and not to.strip():
        raise click.UsageError("--to is empty: name an option that differs, such as --to '--gpu b200'", ctx)
    explained = [build_explanation(options)]
    if golden is not None:
        changes = changes_since(golden, explained[0].to_dict())
    else:
        explained.append(build_explanation({**options, **options_in(to or "", "--to")[1]}))
        changes = compare(*(explanation.to_dict() for explanation in explained))
    if as_json:
        print_json({"schema_version": 1, "changes": changes})
    elif not changes:
        click.echo("no change")
    else:
        print_lines([line for change in changes for line in _change_lines(change)])
    print_warnings(warnings_of(explained))
    return 1 if changes else 0


_PLAN_FIELDS = (
    "path", "provider", "query_dtype", "returns_lse", "cuda_graph", "workspace_bytes", "block_table_width_multiple",
)  # fmt: skip
_CACHE_FIELDS = (
    "count", "block_size", "kv_layout", "cache_shape", "cache_dtype", "bytes_per_token", "bytes_per_request",
)  # fmt: skip
MAX_BYTES = 1 << 24
"""Of a golden file; one of a model with many kinds of layers has 200 KB."""


def changes_since(golden: str, after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what changes from the decisions in a golden file."""
    from attn_select.errors import ConfigError, shorten, show
    from attn_select.machine.files import read_bounded

    problem = "expected schema_version 1 and a layer"
    try:
        before = json.loads(read_bounded(golden, MAX_BYTES))
        if not isinstance(before, dict):
            problem = f"expected an object, found {show(before)}"
        elif before["schema_version"] == 1 and before["layers"]:
            return compare(before, after)
    except OSError as error:
        problem = error.strerror or shorten(error)
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # no JSON, too large, no regular file, a null byte in the path
        problem = shorten(error)
    except KeyError as error:
        problem = f"{show(error.args[0])} is missing"
    except (TypeError, AttributeError, IndexError):
        problem = "not what `explain --json` writes: a value has another type"
    raise ConfigError(
        f"golden = {show(golden, 1000)}: {problem}",
        fields=["golden"],
        hint="a golden file is what `attn-select explain --json` writes for one model on one GPU",
    )


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per layer kind and phase whose backend, path or cache changes, with the reasons."""
    changes: list[dict[str, Any]] = []

    def add(kind: str, phase: str | None, what: str, old: Any, new: Any, why: Sequence[str] = ()) -> None:
        if old != new:
            changes.append({"kind": kind, "phase": phase, "what": what, "from": old, "to": new, "why": [*why]})

    old, new = ({layer["kind"]: layer for layer in side["layers"]} for side in (before, after))
    for kind in dict.fromkeys((*old, *new)):
        if kind not in old or kind not in new:
            add(kind, None, "layer kind", *("present" if kind in side else "no such layers" for side in (old, new)))
            continue
        a, b = old[kind], new[kind]
        for phase in dict.fromkeys((*a["selected"], *b["selected"])):
            names = a["selected"].get(phase), b["selected"].get(phase)
            if names[0] != names[1]:
                add(kind, phase, "backend", *names, _why(a, b, phase))
            elif names[0] is not None:
                here, there = (side["plan"]["phases"][phase] for side in (a, b))
                for what in _PLAN_FIELDS:
                    why = [there["because"]] if what == "path" else []
                    add(kind, phase, what, here.get(what), there.get(what), why)
        here, there = (side["plan"] | {"count": side["count"]} for side in (a, b))
        for what in _CACHE_FIELDS:
            add(kind, None, what, here.get(what), there.get(what))  # older files lack some
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
