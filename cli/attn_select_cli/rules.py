"""``attn-select rules``: show, check, schema, path; ``rules_edit`` has the commands that write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli import rules_edit
from attn_select_cli.command_group import CommandGroup
from attn_select_cli.layer_options import rules_option

if TYPE_CHECKING:
    from attn_select.rules.document import Problem
    from attn_select.rules.layers import RuleSet
    from attn_select.rules.rule import Rule

EPILOG = """\b
Examples:
  attn-select rules path
  attn-select rules show --rules my_rules.toml
  attn-select rules check my_rules.toml
  attn-select rules schema > selector_rules.schema.json
  attn-select rules prefer FLASHINFER --gpu h20 --phase decode
  attn-select rules deny FLASHINFER --when 'library.flashinfer-python<0.7'
"""


@click.group(
    "rules", cls=CommandGroup, epilog=EPILOG, short_help="Show, check, find and change the rules that rank backends."
)
def command() -> None:
    """Show, check, find and change the rules that rank backends."""


@command.command("show", epilog="\b\nExample:\n  attn-select rules show --rules my_rules.toml --json\n")
@rules_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(rules: tuple[str, ...], as_json: bool) -> int:
    """Show the effective rules and backend options with their origin."""
    from attn_select.rules import load_rules
    from attn_select_cli.output import print_json, print_lines

    rule_set = load_rules(rules)
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "rules": [_rule_dict(rule) for rule in rule_set.rules],
                "backends": _options_dict(rule_set),
            }
        )
        return 0
    for rule in rule_set.rules:
        phase = f", {rule.phase} only" if rule.phase else ""
        when = " and ".join(map(str, rule.when)) or "always"
        lines = [
            [(rule.name, "title"), (f"  {rule.origin}", "dim")],
            [(f"  when {when}{phase}", "")],
            [(f"  {rule.effect} {', '.join(rule.backends) or 'false'}", "")],
        ]
        if rule.because:
            lines.append([(f"  because {rule.because}", "dim")])
        print_lines([*lines, []])
    for backend, table in rule_set.options.items():
        values = [
            [(f"  {key} = {value!r}", ""), ("  {}:{}".format(*table.origins[key]), "dim")]
            for key, value in table.values.items()
        ]
        print_lines([[(f"backends.{backend}", "title")], *values, []])
    return 0


def _rule_dict(rule: Rule) -> dict[str, Any]:
    when = {condition.field: list(condition.written) for condition in rule.when}
    return {
        "name": rule.name,
        "effect": rule.effect,
        "backends": list(rule.backends),
        "phase": rule.phase,
        "when": when,
        "because": rule.because,
        "file": rule.file,
        "line": rule.line,
    }


def _options_dict(rule_set: RuleSet) -> dict[str, Any]:
    return {
        backend: {
            key: {"value": value, "file": table.origins[key][0], "line": table.origins[key][1]}
            for key, value in table.values.items()
        }
        for backend, table in rule_set.options.items()
    }


def rules_errors(files: Sequence[str] = ()) -> tuple[RuleSet, list[Problem]]:
    """Return the effective rules as far as they can be read, and every error in them, options and names included."""
    from attn_select.backends.registry import load_plugins
    from attn_select.errors import RulesError
    from attn_select.rules.layers import read_rules
    from attn_select.rules.lint import known_names, unknown_names
    from attn_select.rules.options import read_options

    registry = load_plugins()
    rule_set, problems = read_rules(files)
    problems += unknown_names(rule_set, known_names(registry))
    try:
        read_options(rule_set, registry.specs)
    except RulesError as error:
        problems += error.problems
    found = [*dict.fromkeys(file for file, _, _ in problems)]
    return rule_set, sorted(problems, key=lambda problem: (found.index(problem[0]), problem[1] or 0))


@command.command(
    "check",
    epilog="\b\nExample:\n  attn-select rules check my_rules.toml\n\n"
    "Exit code: 0 no errors (warnings may be), 1 errors.\n",
)
@click.argument("files", nargs=-1, type=click.Path(), metavar="[FILE]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(files: tuple[str, ...], as_json: bool) -> int:
    """Check the effective rules together with the given FILEs.

    Errors: what breaks the format, unknown backends, wrong options. Warnings: rules that never take effect, unknown
    libraries and GPUs.
    """
    from attn_select.backends.registry import load_plugins
    from attn_select.rules.lint import doubts
    from attn_select_cli.output import counted, print_json, print_lines

    rule_set, broken = rules_errors(files)
    found: list[tuple[str, str, int | None, str]] = [("error", *problem) for problem in broken]
    found += [("warning", *problem) for problem in doubts(rule_set, load_plugins())]
    errors = sum(severity == "error" for severity, *_ in found)
    if as_json:
        problems = [{"severity": s, "file": file, "line": line, "message": text} for s, file, line, text in found]
        print_json({"schema_version": 1, "errors": errors, "warnings": len(found) - errors, "problems": problems})
    else:
        styles = {"error": "rejected", "warning": "warning"}
        for severity, file, line, text in found:
            print_lines(
                [[(f"{file}:{line}: " if line else f"{file}: ", ""), (f"{severity}: ", styles[severity]), (text, "")]]
            )
        read = sum(layer.state == "read" for layer in rule_set.layers)
        checked = f"{counted(len(rule_set.rules), 'rule')} in {counted(read, 'file')}"
        click.echo(f"{counted(errors, 'error')}, {counted(len(found) - errors, 'warning')}; {checked}")
    return 1 if errors else 0


@command.command("schema", epilog="\b\nExample:\n  attn-select rules schema > selector_rules.schema.json\n")
def schema() -> int:
    """Print a JSON Schema of rules files, for editors (Taplo, Even Better TOML)."""
    from attn_select.backends.registry import load_plugins
    from attn_select.rules.schema import rules_schema
    from attn_select_cli.output import print_json

    print_json(rules_schema(load_plugins()))
    return 0


@command.command("path", epilog="\b\nExample:\n  attn-select rules path --json\n")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def path(as_json: bool) -> int:
    """List the files that are looked for, first to last, found or not. A later one overrides an earlier one."""
    from attn_select.rules.layers import inspect_layers
    from attn_select_cli.output import print_json, print_lines
    from attn_select_cli.table import Table

    layers = inspect_layers()
    if as_json:
        print_json({"schema_version": 1, "files": [layer.to_dict() for layer in layers]})
    else:
        print_lines([Table(["layer", "state", "path"], [[x.kind, x.state, str(x.path)] for x in layers])])
    return 0


for each in (rules_edit.prefer, rules_edit.avoid, rules_edit.deny):
    command.add_command(each)
