"""``attn-select rules prefer, avoid, deny``: one more rule in a rules file; what it changes is shown first."""

from __future__ import annotations

import codecs
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_select.layer.config import PHASES
from attn_select_cli import complete
from attn_select_cli.help import Command
from attn_select_cli.layer_options import GPUS, MODELS, gpu_option, model_option, options_in

if TYPE_CHECKING:
    from attn_select.rules.layers import RuleSet
    from attn_select_cli.table import Block

HEAD = """\
# Rules of your own for attn-select. They stand above the packaged ones.
# `attn-select rules show` prints the effective rules, `attn-select rules check` looks for mistakes.

version = 1
"""
_EPILOG = """\b
Examples:
  attn-select rules {effect} {first} --gpu h20 --phase decode
  attn-select rules {effect} {first} --when 'kv_cache_dtype=fp8*' --when 'num_heads<=16'
  attn-select rules {effect} {first} --when 'library.flashinfer-python<0.7' --because 'broken before 0.7' --yes
  attn-select rules {effect} {first} --gpu h100 --when sinks --model gpt-oss-120b --for '--kv-cache-dtype fp8'

Exit code: 0 written, or the file says so already, 1 not written, 2 wrong input.
"""
_SHOWN = ("layer kind", "backend", "path", "block_size", "kv_layout")
"""Changes that are shown; the others follow from them."""


def _encodable(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse text that no file in UTF-8 can hold: bytes of the command line that were none."""
    try:
        "".join(value or ()).encode()
    except UnicodeEncodeError:
        raise click.BadParameter("is not UTF-8", context, parameter) from None
    return value


def _edit_command(effect: str, text: str, first: str) -> click.Command:
    """Return the command that writes a rule of one effect."""

    @click.command(effect, cls=Command, help=text, epilog=_EPILOG.format(effect=effect, first=first))
    @click.argument("backends", nargs=-1, required=True, metavar="BACKEND...", type=complete.BackendName())
    @gpu_option("The rule is for this device alone (repeatable).", several=True)
    @click.option("--phase", type=click.Choice(PHASES, case_sensitive=False), help="The rule is for this phase alone.")
    @click.option(
        "--when",
        multiple=True,
        metavar="CONDITION",
        callback=_encodable,
        help="FIELD=VALUE, FIELD<=NUMBER or a FIELD that must be true (repeatable; one field twice: either value).",
    )
    @click.option("--because", metavar="TEXT", callback=_encodable, help="The reason, which `explain` shows.")
    @click.option(
        "--name",
        "rule_name",
        metavar="NAME",
        callback=_encodable,
        help="The rule's name, which the file must not have yet.",
    )
    @model_option("Show what changes for this model (repeatable) [default: all of `matrix`].", several=True)
    @click.option("--for", "options", default="", metavar="OPTIONS", help="More options of explain.")
    @click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The rules file [default: the user's, which `attn-select rules path` shows].",
    )
    @click.option("--yes", "-y", is_flag=True, help="Write without asking.")
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
    ) -> int:
        from attn_select.errors import RulesError
        from attn_select_cli.output import print_line, print_lines, print_warnings

        path = _path(file)
        before = _read(path)
        old = _rules_with(path, before)  # a file that is broken is named before anything is made of it
        preview, named = options_in(options, "--for")
        models = model or ((None,) if "num_heads" in named else MODELS)
        rule = {"phase": phase, "when": _conditions(gpu, when), effect: list(dict.fromkeys(backends))}
        rule["because"] = because
        if rule_name is None and _has(before, _rule_text("", rule)):
            print_line(f"{path} says so already: nothing to write")
            return 0
        name = rule_name
        if name is None:
            name = _new_name([effect, *backends, *gpu, phase or ""], {each.name for each in old.rules})
        text = f"{before.rstrip() or HEAD.rstrip()}\n\n{_rule_text(name, rule)}"
        try:
            new = _rules_with(path, text)
        except RulesError as error:  # the file itself was read above, and the lines of the new one are nowhere
            what = "; ".join(problem for *_, problem in error.problems)
            raise RulesError(f"{path} cannot have a rule of this --name and --when: {what}") from None
        added = text.removeprefix(before.rstrip()).strip().splitlines()
        title = [(str(path), "title"), ("" if before else " (new)", "")]
        lines: list[Block] = [title, *([(f"  +{line}", "valid")] for line in added)]
        print_lines([*lines, *_change_lines(old, new, models, gpu or GPUS, preview)])
        known, now = _problems(path, old), {each.name: each.origin for each in new.rules}
        replaced = [each for each in old.rules if now.get(each.name) != each.origin]
        print_warnings(
            [f"rule {each.name!r} ({each.origin}) is replaced by this one of its name" for each in replaced]
            + [problem for problem in _problems(path, new) if problem not in known]
        )
        if not yes and not _confirmed():
            return 1
        _write(path, text, before)
        print_line(f"written to {path}")
        return 0

    return edit


prefer = _edit_command(
    "prefer", "Put backends in front of all others. Of several such rules, the last one leads.", "FLASHINFER"
)
avoid = _edit_command("avoid", "Put backends behind all others.", "TRITON_ATTN")
deny = _edit_command("deny", "Never choose backends, whatever prefers them.", "FLASHINFER")


def _path(file: Path | None) -> Path:
    """Return the file that is written: ``file``, else the user's."""
    from attn_select.errors import RulesError
    from attn_select.rules.layers import user_rules_path

    path = file or user_rules_path()
    if path is None:
        raise RulesError("this user has no home directory for a rules file", hint="name one: --file FILE")
    return path


def _read(path: Path) -> str:
    """Return a rules file's text; "" where there is no file."""
    from attn_select.errors import RulesError
    from attn_select.rules.document import read_file

    try:
        return read_file(path).removeprefix(codecs.BOM_UTF8).decode()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError as error:
        raise RulesError(f"{path}: is not UTF-8 (byte 0x{error.object[error.start]:02x}): save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise RulesError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _write(path: Path, text: str, before: str) -> None:
    from attn_select.errors import RulesError
    from attn_select.machine.files import replace_file

    def check() -> None:  # an editor, or another of these commands, while this one compared and asked
        if _read(path) != before:
            raise RulesError(f"{path}: has changed meanwhile, and is left as it is", hint="run the command again")

    target = Path(os.path.realpath(path))  # a link to a file elsewhere stays one
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text.encode(), check)
    except OSError as error:
        raise RulesError(f"{path}: cannot be written: {error.strerror or error}") from None


def _rules_with(path: Path, text: str) -> RuleSet:
    """Return the effective rules, were this the file's text; "" is no file."""
    from attn_select.rules.layers import candidate_layers, load_rules

    real = os.path.realpath(path)
    a_layer = any(os.path.realpath(layer.path) == real for layer in candidate_layers())
    extra = () if a_layer or not text else (path,)
    return load_rules(extra, {real: (text or HEAD).encode()})


def _rule_text(name: str, rule: Mapping[str, Any]) -> str:
    """Return a rule as TOML."""
    import tomlkit

    lines = ["[[rules]]"]
    for key, value in {"name": name, **rule}.items():
        if not value and key != "name":
            continue
        text = tomlkit.item(value).as_string()
        if key == "when":
            fields = {tomlkit.key(field.split(".", 1)).as_string(): values for field, values in value.items()}
            text = f"{{ {', '.join(f'{field} = {tomlkit.item(each).as_string()}' for field, each in fields.items())} }}"
        lines.append(f"{key} = {text}")
    return "\n".join([*lines, ""])


def _has(text: str, rule: str) -> bool:
    """Whether a file has a rule, whatever its name there."""
    (wanted,) = tomllib.loads(rule)["rules"]
    return any({**each, "name": ""} == wanted for each in tomllib.loads(text).get("rules", []))


def _new_name(words: Sequence[str], taken: set[str]) -> str:
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")[:90]
    return next(each for each in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if each not in taken)


def _conditions(gpus: Sequence[str], written: Sequence[str]) -> dict[str, Any]:
    """Return the ``when`` table that ``--gpu`` and ``--when`` ask for; the rules' reader judges the values."""
    from attn_select.errors import UnknownNameError
    from attn_select.machine.detection import detect_device
    from attn_select.machine.device import lookup
    from attn_select.rules.conditions import FIELDS, is_boolean

    valid = [*(field for field in FIELDS if field != "library"), "library.NAME"]
    found: dict[str, list[Any]] = {}
    for gpu in gpus:
        device = detect_device().device if gpu.strip().lower() == "auto" else lookup(gpu)
        any_of_kind = device.name in (device.arch, f"sm{device.capability_text.replace('.', '')}")
        kind = "arch" if device.arch else "compute_capability"
        field, value = (kind, device.capability_text) if any_of_kind else ("gpu", device.name)
        found.setdefault(field, []).append(value)
    if len(found) > 1:
        raise click.UsageError(f"--gpu: {' and '.join(found)} need a rule each", click.get_current_context())
    for text in written:
        match = re.fullmatch(r"\s*([\w.-]+)\s*(?:=\s*|(?=[<>!~]))(.*?)\s*|\s*(\w+)\s*", text)
        if match is None:
            accepted = "expected FIELD=VALUE, FIELD<=NUMBER or FIELD, such as 'head_size=128', 'num_heads<=16', sinks"
            raise click.UsageError(f"--when {text!r}: {accepted}", click.get_current_context())
        field = match[3] or match[1]
        if field not in valid and not re.match(r"library\..", field):
            raise UnknownNameError("field of --when", field, valid)
        if match[3] and not is_boolean(field):
            accepted = f"expected a value, {field}=VALUE: a field alone must be one that is true or false"
            raise click.UsageError(f"--when {text!r}: {accepted}", click.get_current_context())
        given = True if match[3] else _value(field, match[2])
        found.setdefault(field, []).extend(given if isinstance(given, list) else [given])
    return {field: values[0] if len(values) == 1 else values for field, values in found.items()}


def _value(field: str, text: str) -> Any:
    """Return a value written as in TOML; quotes may be left out where a field takes text."""
    from attn_select.rules.conditions import is_boolean, is_number

    if is_boolean(field) or is_number(field) or text.startswith(("[", '"', "'")):
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # a comparison, an integer of too many digits, a list nested too deeply
            return text
        values = value if isinstance(value, list) else [value]
        if all(isinstance(each, str) or (isinstance(each, int | float) and abs(each) < 2**63) for each in values):
            return value
    return text  # also for a date, a table, an infinity: what the rules' reader says of it


def _problems(path: Path, rules: RuleSet) -> list[str]:
    """Return what ``rules check`` says of one file."""
    from attn_select.backends.registry import load_plugins
    from attn_select.rules.lint import doubts

    return [text for file, _, text in doubts(rules, load_plugins()) if file == str(path)]


def _change_lines(
    old: RuleSet, new: RuleSet, models: Sequence[str | None], gpus: Sequence[str], options: Mapping[str, Any]
) -> list[Block]:
    """Return what changes for every model on every GPU."""
    from attn_select_cli.diff import compare, value_text
    from attn_select_cli.explanation import build_explanations
    from attn_select_cli.table import Table

    sides = [build_explanations(options, models, gpus, rules) for rules in (old, new)]
    rows = []
    for (model, gpu), before, after in zip(product(models, gpus), *sides, strict=True):
        for change in compare(before.to_dict(), after.to_dict()):
            if change["what"] in _SHOWN:
                what = f"{change['phase'] or ''} {change['what'].replace('_', ' ')}".lstrip()
                sizes = value_text(change["from"]), value_text(change["to"])
                rows.append([model or "-", gpu, change["kind"], what, *sizes])
    named = ", ".join(model or "the given layer" for model in models)
    compared = f"{named} on {', '.join('this machine' if gpu == 'auto' else gpu for gpu in gpus)}"
    if not rows:
        return [[], [(f"Nothing changes for {compared}; --model names other models", "")]]
    header = ["model", "gpu", "layers", "what changes", "from", "to"]
    return [[], Table(header, rows), [], [(f"Compared: {compared}", "dim")]]


def _confirmed() -> bool:
    """Ask whether to write; where nobody can answer, say what to do."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        click.echo("not written: there is no terminal to ask on; give --yes")
        return False
    return click.confirm("Write it?")
