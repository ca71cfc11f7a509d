"""``attn-select rules init, prefer, avoid, deny, undo``: the user's rules file by command."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_select.layer.config import PHASES
from attn_select_cli import complete
from attn_select_cli.help import Command
from attn_select_cli.layer_options import gpu_option, model_option, options_in
from attn_select_cli.pairs import GPUS, MODELS

if TYPE_CHECKING:
    from attn_select.rules.layers import RuleSet
    from attn_select_cli.table import Block


def _file_option(function: Callable[..., Any]) -> Callable[..., Any]:
    text = "The rules file [default: the user's, which `attn-select rules path` shows]."
    return click.option("--file", "file", type=click.Path(dir_okay=False, path_type=Path), help=text)(function)


def write_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that changes a rules file."""
    options = (
        _file_option,
        click.option("--yes", "-y", is_flag=True, help="Write without asking."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON; writes with --yes alone."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.command(
    "init",
    cls=Command,
    short_help="Create the user's rules file.",
    epilog="\b\nExamples:\n  attn-select rules init\n  attn-select rules init --file my_rules.toml\n",
)
@_file_option
def init(file: Path | None) -> int:
    """Create a rules file with a head that says what it is and an example in comments."""
    from attn_select.errors import RulesError
    from attn_select_cli import rules_file
    from attn_select_cli.output import print_line

    path = rules_path(file)
    if rules_file.read_text(path):
        raise RulesError(f"{path} exists", hint="`attn-select rules prefer` and `deny` add to it")
    rules_file.write(path, rules_file.HEAD + rules_file.EXAMPLE)
    print_line(f"created {path}")
    return 0


_EDIT_EPILOG = """\b
Examples:
  attn-select rules {effect} {first} --gpu h20 --phase decode
  attn-select rules {effect} {first} --when 'kv_cache_dtype=fp8*' --when 'num_heads<=16'
  attn-select rules {effect} {first} --when 'library.flashinfer-python<0.7' --because 'broken before 0.7' --yes
  attn-select rules {effect} {first} --gpu h100 --when sinks --model gpt-oss-120b --for '--kv-cache-dtype fp8'

Exit code: 0 written, or the file says so already, 1 not written, 2 wrong input.
"""


def _edit_command(effect: str, text: str, first: str) -> click.Command:
    """Return the command that writes a rule of one effect."""

    @click.command(
        effect,
        cls=Command,
        help=text,
        short_help=text.partition(".")[0] + ".",
        epilog=_EDIT_EPILOG.format(effect=effect, first=first),
    )
    @click.argument("backends", nargs=-1, required=True, metavar="BACKEND...", shell_complete=complete.backends)
    @gpu_option("The rule is for this device alone (repeatable).", several=True)
    @click.option("--phase", type=click.Choice(PHASES, case_sensitive=False), help="The rule is for this phase alone.")
    @click.option(
        "--when",
        multiple=True,
        metavar="CONDITION",
        help="FIELD=VALUE, FIELD<=NUMBER or a FIELD that must be true (repeatable; one field twice: either value).",
    )
    @click.option("--because", metavar="TEXT", help="The reason, which `explain` shows.")
    @click.option("--name", "rule_name", metavar="NAME", help="The rule's name; a rule of this name is replaced.")
    @model_option("Show what changes for this model (repeatable) [default: all of `matrix`].", several=True)
    @click.option("--for", "options", default="", metavar="OPTIONS", help="More options of explain.")
    @write_options
    def edit(
        backends: tuple[str, ...],
        gpu: tuple[str, ...],
        phase: str | None,
        when: tuple[str, ...],
        because: str | None,
        rule_name: str | None,
        model: tuple[str, ...],
        options: str,
        file: Path | None,
        yes: bool,
        as_json: bool,
    ) -> int:
        from attn_select_cli import rules_file

        path = rules_path(file)
        before = rules_file.read_text(path)
        preview, named = options_in(options, "--for")
        models = model or ((None,) if "num_heads" in named else MODELS)
        rules = rules_with(path, before)  # a file that is broken is named before anything is made of it
        rule: dict[str, Any] = {"name": rule_name or ""}
        if phase:
            rule["phase"] = phase
        if conditions := {**_device_conditions(gpu), **_conditions(when, bool(gpu))}:
            rule["when"] = conditions
        rule[effect] = _backends(backends)
        if because:
            rule["because"] = because
        if rule_name is None:
            present = rules_file.rules_in(before) if before else []
            same = [each["name"] for each in present if {**each, "name": ""} == rule]
            rule["name"] = same[0] if same else _new_name(effect, rule, gpu, {each.name for each in rules.rules})
        _check(rule, path)
        return _put(path, before, rules_file.with_rule(before, rule), models, gpu or GPUS, preview, yes, as_json)

    return edit


prefer = _edit_command(
    "prefer", "Put backends in front of all others. Of several such rules, the last one leads.", "FLASHINFER"
)
avoid = _edit_command("avoid", "Put backends behind all others.", "TRITON_ATTN")
deny = _edit_command("deny", "Never choose backends, whatever prefers them.", "FLASHINFER")


@click.command(
    "undo",
    cls=Command,
    short_help="Take the last change of a rules file back.",
    epilog="\b\nExamples:\n  attn-select rules undo\n  attn-select rules undo --yes\n\n"
    "Exit code: 0 taken back, 1 not written, 2 wrong input.\n",
)
@model_option("Show what changes for this model (repeatable) [default: all of `matrix`].", several=True)
@gpu_option("Show what changes on this device (repeatable) [default: all of `matrix`].", several=True)
@write_options
def undo(model: tuple[str, ...], gpu: tuple[str, ...], file: Path | None, yes: bool, as_json: bool) -> int:
    """Put back what a rules file had before the last change by command; a second undo takes the first one back."""
    from attn_select.errors import RulesError
    from attn_select_cli import rules_file

    path = rules_path(file)
    kept = rules_file.previous_file(path)
    if not kept.exists():
        raise RulesError(f"{path}: nothing to take back", hint=f"there is no {kept}")
    before, text = rules_file.read_text(path), rules_file.read_text(kept)
    return _put(path, before, text, model or MODELS, gpu or GPUS, options_in("", "--for")[0], yes, as_json)


def rules_path(file: Path | None) -> Path:
    """Return the file that commands change: ``file``, else the user's."""
    from attn_select.errors import RulesError
    from attn_select.rules.layers import user_rules_path

    path = file or user_rules_path()
    if path is None:
        raise RulesError("this user has no home directory for a rules file", hint="name one: --file FILE")
    return path


def rules_with(path: Path, text: str) -> RuleSet:
    """Return the effective rules, were this the file's text; "" is no file."""
    import os

    from attn_select.rules.layers import candidate_layers, load_rules

    real = os.path.realpath(path)
    a_layer = any(os.path.realpath(layer.path) == real for layer in candidate_layers())
    extra = () if a_layer or not text else (path,)
    content = text or "version = 1\n"
    return load_rules(extra, {real: content.encode()})


def _check(rule: dict[str, Any], path: Path) -> None:
    from attn_select.errors import RulesError
    from attn_select.rules.rule import RuleError, parse_rule

    try:
        parse_rule(rule, file=str(path), line=1, layer=1)
    except RuleError as error:
        raise RulesError("; ".join(text for _, text in error.problems)) from None


def _put(
    path: Path,
    before: str,
    text: str,
    models: Sequence[str | None],
    gpus: Sequence[str],
    options: Mapping[str, Any],
    yes: bool,
    as_json: bool,
) -> int:
    """Show the change of a file and what it changes, ask unless ``yes``, write; return the exit code."""
    from attn_select.rules.layers import user_rules_path
    from attn_select_cli import rules_file
    from attn_select_cli.output import print_json, print_line, print_lines, print_warnings

    changes, warnings = [], []
    if text != before:
        old, new = rules_with(path, before), rules_with(path, text)
        changes = _changes(old, new, models, gpus, options)
        known = _problems(path, old)
        warnings = [problem for problem in _problems(path, new) if problem not in known]
    written = yes and text != before
    if as_json:
        if written:
            rules_file.write(path, text)
        data = {"file": str(path), "changes": changes, "warnings": warnings, "written": written}
        print_json({"schema_version": 1, **data})
        print_warnings(warnings)
        return 0 if written or text == before else 1
    if text == before:
        print_line(f"{path} says so already: nothing to write")
        return 0
    named = ", ".join(model or "the given layer" for model in models)
    compared = f"{named} on {', '.join('this machine' if gpu == 'auto' else gpu for gpu in gpus)}"
    print_lines(_lines(path, before, text, changes, compared))
    print_warnings(warnings)
    if not yes and not _confirmed():
        return 1
    rules_file.write(path, text)
    flag = "" if path == user_rules_path() else f" --file {path}"
    print_line(f"written to {path}; `attn-select rules undo{flag}` takes it back")
    return 0


def _changes(
    old: RuleSet, new: RuleSet, models: Sequence[str | None], gpus: Sequence[str], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return what changes for every model on every GPU."""
    from attn_select_cli.diff import compare
    from attn_select_cli.explanation import build_explanations

    sides = [build_explanations(options, models, gpus, rules) for rules in (old, new)]
    found = []
    for (model, gpu), a, b in zip(product(models, gpus), *sides, strict=True):
        found += [{"model": model, "gpu": gpu, **change} for change in compare(a.to_dict(), b.to_dict())]
    return found


def _problems(path: Path, rules: RuleSet) -> list[str]:
    """Return what ``rules check`` says of one file."""
    from attn_select.backends.registry import load_plugins
    from attn_select.rules.lint import doubts, known_names, unknown_names

    registry = load_plugins()
    problems = [*unknown_names(rules, known_names(registry)), *doubts(rules, registry)]
    return [text for file, _, text in problems if file == str(path)]


def _lines(path: Path, before: str, text: str, changes: list[dict[str, Any]], compared: str) -> list[Block]:
    import difflib

    from attn_select_cli.diff import value_text
    from attn_select_cli.table import Table

    lines: list[Block] = [[(str(path), "title"), ("" if before else " (new)", "")]]
    difference = difflib.unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=1)
    styles = {"+": "valid", "-": "rejected"}
    lines += [[(f"  {line}", styles.get(line[0], "dim"))] for line in list(difference)[2:] if line[:2] != "@@"]
    rows = [
        [
            change["model"] or "-",
            change["gpu"],
            change["kind"],
            f"{change['phase']} {change['what']}" if change["phase"] else change["what"].replace("_", " "),
            value_text(change["from"]),
            value_text(change["to"]),
        ]
        for change in changes
        if change["what"] in _SHOWN
    ]
    if not rows:
        return [*lines, [], [(f"Nothing changes for {compared}; --model names other models", "")]]
    header = ["model", "gpu", "layers", "what changes", "from", "to"]
    return [*lines, [], Table(header, rows), [], [(f"Compared: {compared}", "dim")]]


_SHOWN = ("layer kind", "backend", "path", "block_size", "kv_layout")
"""Changes that are shown as text; what follows from them stands in JSON."""


def _confirmed() -> bool:
    """Ask whether to write; where nobody can answer, say what to do."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        click.echo("not written: there is no terminal to ask on; give --yes")
        return False
    return click.confirm("Write it?")


def _backends(names: Sequence[str]) -> list[str]:
    from attn_select.backends.distributions import registered_name
    from attn_select.backends.registry import load_plugins
    from attn_select.errors import UnknownNameError
    from attn_select.rules.lint import known_names

    known = known_names(load_plugins())
    spelled = list(dict.fromkeys(registered_name(name) for name in names))
    for name, written in zip(spelled, names, strict=False):
        if name not in known:
            raise UnknownNameError("backend", written, known)
    return spelled


def _device_conditions(gpus: Sequence[str]) -> dict[str, Any]:
    """Return the conditions that name these devices."""
    from attn_select.machine.detection import detect_device
    from attn_select.machine.device import lookup

    named: list[str] = []
    kinds: dict[str, list[str]] = {"compute_capability": [], "arch": []}
    for gpu in gpus:
        device = detect_device().device if gpu.strip().lower() == "auto" else lookup(gpu)
        any_of_kind = device.name in (device.arch, f"sm{device.capability_text.replace('.', '')}")
        kind = kinds["arch" if device.arch else "compute_capability"] if any_of_kind else named
        kind.append(device.capability_text if any_of_kind else device.name)
    conditions = {"gpu": named, **kinds}
    written = {field: ", ".join(values) for field, values in conditions.items() if values}
    if len(written) > 1:
        each = " and ".join(f"{field.replace('_', ' ')} {text}" for field, text in written.items())
        raise click.UsageError(f"--gpu: {each} need a rule each", click.get_current_context())
    return {field: _one_or_all(values) for field, values in conditions.items() if values}


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _conditions(written: Sequence[str], with_gpu: bool) -> dict[str, Any]:
    """Return the ``when`` table that ``--when`` asks for. The rule's own check judges fields and values."""
    from attn_select.rules.conditions import FIELDS, is_boolean

    found: dict[str, list[Any]] = {}
    for text in written:
        match = re.fullmatch(r"\s*([\w.-]+)\s*(?:=\s*|(?=[<>!~]))(.*?)\s*|\s*(\w+)\s*", text)
        if match is None:
            accepted = "expected FIELD=VALUE, FIELD<=NUMBER or FIELD, such as 'head_size=128', 'num_heads<=16', sinks"
            raise click.UsageError(f"--when {text!r}: {accepted}", click.get_current_context())
        field = match[3] or match[1]
        if with_gpu and field in ("gpu", "compute_capability", "arch"):
            raise click.UsageError(f"--when {text!r}: --gpu names the devices already", click.get_current_context())
        if match[3] and field in FIELDS and not is_boolean(field):
            accepted = f"expected a value, {field}=VALUE: a field alone must be one that is true or false"
            raise click.UsageError(f"--when {text!r}: {accepted}", click.get_current_context())
        values = found.setdefault(field, [])
        value = True if match[3] else _value(field, match[2])
        values += value if isinstance(value, list) else [value]
    when: dict[str, Any] = {}
    for field, values in found.items():
        table, _, library = field.partition(".")
        if library:
            when.setdefault(table, {})[library] = _one_or_all(values)
        else:
            when[field] = _one_or_all(values)
    return when


def _value(field: str, text: str) -> Any:
    """Return a value written as in TOML; quotes may be left out where a field takes text."""
    from attn_select.rules.conditions import is_boolean, is_number

    if is_boolean(field) or is_number(field) or text.startswith(("[", '"', "'")):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            pass  # a comparison, or what the rule's own check says of it
    return text


def _new_name(effect: str, rule: dict[str, Any], gpus: Sequence[str], taken: set[str]) -> str:
    words = [effect, *rule[effect], *gpus, rule.get("phase", "")]
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")[:90]
    return next(each for each in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if each not in taken)
