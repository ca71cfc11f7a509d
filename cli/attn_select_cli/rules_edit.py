"""``attn-select rules init, prefer, avoid, deny, undo``: the user's rules file by command."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from attn_select.layer.config import PHASES
from attn_select_cli import complete
from attn_select_cli.help import Command
from attn_select_cli.layer_options import gpu_option, model_option, options_in

if TYPE_CHECKING:
    from attn_select.machine.device import Device
    from attn_select.rules.layers import RuleSet
    from attn_select.rules.rule import Rule
    from attn_select_cli.table import Block

_MOST_GPUS = 5
"""GPUs whose decisions are compared where none is named."""


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
    rules_file.write(path, _new_file)
    print_line(f"created {path}")
    return 0


def _new_file(text: str) -> str:
    """Return the text of a new rules file."""
    from attn_select.errors import RulesError
    from attn_select_cli import rules_file

    if text:
        raise RulesError("another process has made the file meanwhile: nothing was written")
    return rules_file.HEAD + rules_file.EXAMPLE


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

        def change(text: str) -> str:
            if text != seen:  # another process has written meanwhile
                proposal.rules(text)
            written = dict(rule)
            if rule_name is None:
                others = rules_file.rules_in(text) if text else []
                same = [each["name"] for each in others if {**each, "name": ""} == rule]
                taken = {each["name"] for each in others} | {each.name for each in before.rules}
                written["name"] = same[0] if same else _new_name(effect, rule, gpu, taken)
            proposal.check(written, before)
            return rules_file.with_rule(text, written)

        path = rules_path(file)
        seen = rules_file.read_text(path)
        preview, named = options_in(options, "--for")
        models = model or ((None,) if "num_heads" in named else ())
        proposal = Proposal(path, seen, change, models, gpu, preview)
        before = proposal.rules(seen)  # a file that is broken is said to be before anything is made of it
        rule: dict[str, Any] = {"name": rule_name or ""}
        if phase:
            rule["phase"] = phase
        if conditions := {**_device_conditions(gpu), **_conditions(when, bool(gpu))}:
            rule["when"] = conditions
        rule[effect] = _backends(backends)
        if because:
            rule["because"] = because
        return proposal.put(yes, as_json)

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
    """Put back what a rules file had before the last change by command, and again before the one before it."""
    from attn_select.errors import RulesError
    from attn_select_cli import rules_file

    path = rules_path(file)
    kept = rules_file.previous_files(path)[0]
    if not kept.exists():
        raise RulesError(f"{path}: nothing to take back", hint=f"there is no {kept}")
    seen, back = rules_file.read_text(path), rules_file.read_text(kept)
    proposal = Proposal(path, seen, lambda _: back, model, gpu)
    return proposal.put(yes, as_json, write=lambda: rules_file.undo(path, seen))


def rules_path(file: Path | None) -> Path:
    """Return the file that commands change: ``file``, else the user's."""
    from attn_select.errors import RulesError
    from attn_select.rules.layers import user_rules_path

    path = file or user_rules_path()
    if path is None:
        raise RulesError("this user has no home directory for a rules file", hint="name one: --file FILE")
    return path


@dataclass(slots=True)
class Proposal:
    """A change of a rules file: shown, asked about, written."""

    path: Path
    seen: str  # its text, "" where there is none
    change: Callable[[str], str]  # returns the text that it is to have for the one that it has, "" for no file
    # whose decisions are compared; none: the ones of ``matrix``, on GPUs that the new rules speak of. A model of None
    # is the layer that the options describe
    models: Sequence[str | None] = ()
    gpus: Sequence[str] = ()
    options: Mapping[str, Any] | None = None  # of ``explain``, for the decisions; none: its defaults

    def rules(self, text: str) -> RuleSet:
        """Return the effective rules, were this the file's text."""
        import os

        from attn_select.rules.layers import candidate_layers, load_rules
        from attn_select.rules.plugins import fragments_of, load_plugins

        real = os.path.realpath(self.path)
        a_layer = any(os.path.realpath(layer.path) == real for layer in candidate_layers())
        extra = () if a_layer or not text else (self.path,)
        if not text and a_layer:
            text = "version = 1\n"
        return load_rules(extra, fragments_of(load_plugins()), {real: text.encode()})

    def check(self, rule: dict[str, Any], rules: RuleSet) -> None:
        """Raise ``RulesError`` where a rule breaks the format, or one of the effective rules denies the same."""
        from attn_select.errors import RulesError
        from attn_select.rules.lint import same_denial
        from attn_select.rules.rule import RuleError, parse_rule

        try:
            parsed = parse_rule(rule, file=str(self.path), line=1, layer=1)
        except RuleError as error:
            raise RulesError("; ".join(text for _, text in error.problems)) from None
        same = same_denial(rules, parsed)
        if same is not None:
            text = f"rule {same.name!r} ({same.origin}) denies {', '.join(parsed.backends)} there already"
            raise RulesError(text, hint=f"--name {same.name} replaces it")

    def put(
        self,
        yes: bool,
        as_json: bool,
        more: Mapping[str, Any] = MappingProxyType({}),
        write: Callable[[], None] | None = None,
    ) -> int:
        """Show the change and what it changes, ask unless ``yes``, write; return the exit code."""
        from attn_select_cli import rules_file
        from attn_select_cli.output import print_json, print_line, print_lines, print_warnings

        write = write or partial(rules_file.write, self.path, self.change)
        text = self.change(self.seen)
        if text == self.seen:
            if as_json:
                data = {"file": str(self.path), "changes": [], "warnings": [], "written": False}
                print_json({"schema_version": 1, **more, **data})
            else:
                print_line(f"{self.path} says so already: nothing to write")
            return 0
        before, after = self.rules(self.seen), self.rules(text)
        changes, compared, warned = self._changes(before, after)
        warnings = [*dict.fromkeys((*self._warnings(before, after), *warned))]
        if as_json:
            if yes:
                write()
            data = {"file": str(self.path), "changes": changes, "warnings": warnings, "written": yes}
            print_json({"schema_version": 1, **more, **data})
            print_warnings(warnings)
            return 0 if yes else 1
        print_lines(self._lines(text, changes, compared))
        print_warnings(warnings)
        if not yes and not _asked():
            return 1
        write()
        print_line(f"written to {self.path}; `attn-select rules undo{self._file_flag()}` takes it back")
        return 0

    def _file_flag(self) -> str:
        from attn_select.rules.layers import user_rules_path

        return "" if self.path == user_rules_path() else f" --file {self.path}"

    def _changes(self, before: RuleSet, after: RuleSet) -> tuple[list[dict[str, Any]], str, list[str]]:
        """Return what changes for every model on every GPU, which those are in words, and decisions' new warnings."""
        from attn_select_cli.diff import compare
        from attn_select_cli.explanation import build_explanations
        from attn_select_cli.pairs import MODELS

        options = self.options if self.options is not None else options_in("", "--for")[0]
        models = self.models or MODELS
        gpus = self.gpus or self._gpus(before, after)
        sides = [build_explanations(options, models, gpus, rules) for rules in (before, after)]
        changes = []
        for index, (a, b) in enumerate(zip(*sides, strict=True)):
            where = {"model": models[index // len(gpus)], "gpu": gpus[index % len(gpus)]}
            changes += [where | change for change in compare(a.to_dict(), b.to_dict())]
        named = ", ".join(model or "the given layer" for model in models)
        compared = f"{named} on {', '.join('this machine' if gpu == 'auto' else gpu for gpu in gpus)}"
        said = [{warning for each in side for warning in each.all_warnings} for side in sides]
        return changes, compared, sorted(said[1] - said[0])

    def _gpus(self, before: RuleSet, after: RuleSet) -> list[str]:
        """Return GPUs that rules of only one side may apply to, the GPUs of ``matrix`` first."""
        from attn_select.machine.device import CPU, known_gpus
        from attn_select_cli.pairs import GPUS

        sides = [{_identity(rule): rule for rule in rules.rules} for rules in (before, after)]
        changed = [rule for one, other in (sides, sides[::-1]) for key, rule in one.items() if key not in other]
        known = {**known_gpus(), CPU.name: CPU}
        order = dict.fromkeys((*GPUS, *known))
        names = [name for name in order if any(_may_apply(rule, known[name]) for rule in changed)]
        return names[:_MOST_GPUS] or list(GPUS)

    def _warnings(self, before: RuleSet, after: RuleSet) -> list[str]:
        """Return what ``rules check`` says of the file as it is to be and did not say before."""
        from attn_select.rules.lint import doubts, known_names, unknown_names
        from attn_select.rules.plugins import load_plugins

        registry = load_plugins()
        said = []
        for rules in (before, after):
            problems = [*unknown_names(rules, known_names(registry)), *doubts(rules, registry)]
            said.append([text for file, _, text in problems if file == str(self.path)])
        return [text for text in said[1] if text not in said[0]]

    def _lines(self, text: str, changes: list[dict[str, Any]], compared: str) -> list[Block]:
        import difflib

        from attn_select_cli.diff import value_text
        from attn_select_cli.table import Table

        lines: list[Block] = [[(str(self.path), "title"), ("" if self.seen else " (new)", "")]]
        difference = difflib.unified_diff(self.seen.splitlines(), text.splitlines(), lineterm="", n=1)
        styles = {"+": "valid", "-": "rejected"}
        lines += [[(f"  {line}", styles.get(line[0], "dim"))] for line in list(difference)[2:] if line[:2] != "@@"]
        shown = [change for change in changes if change["what"] in _SHOWN]
        if not shown:
            return [*lines, [], [(f"Nothing changes for {compared}; --model names other models", "")]]
        rows = [
            [
                change["model"] or "-",
                change["gpu"],
                change["kind"],
                f"{change['phase']} {change['what']}" if change["phase"] else change["what"].replace("_", " "),
                value_text(change["from"]),
                value_text(change["to"]),
            ]
            for change in shown
        ]
        header = ["model", "gpu", "layers", "what changes", "from", "to"]
        return [*lines, [], Table(header, rows), [], [(f"Compared: {compared}", "dim")]]


_SHOWN = ("layer kind", "backend", "path", "block_size", "kv_layout")
"""Changes that are shown as text; what follows from them stands in JSON."""


def _identity(rule: Rule) -> tuple[Any, ...]:
    return rule.name, rule.file, rule.effect, rule.backends, rule.phase, tuple(map(str, rule.when))


def _may_apply(rule: Rule, device: Device) -> bool:
    """Whether the conditions of a rule that are about devices hold."""
    values = {
        c: device.name if c.field == "gpu" else getattr(device, c.field) for c in rule.when if c.scope == "device"
    }
    return all(value is not None and condition.matches(value) for condition, value in values.items())


def _asked() -> bool:
    """Ask whether to write; where nobody can answer, say what to do."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        click.echo("not written: there is no terminal to ask on; give --yes")
        return False
    return click.confirm("Write it?")


def _backends(names: Sequence[str]) -> list[str]:
    from attn_select.backends.distributions import registered_name
    from attn_select.errors import UnknownNameError
    from attn_select.rules.lint import known_names
    from attn_select.rules.plugins import load_plugins

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
    capabilities: list[str] = []
    for gpu in gpus:
        device = detect_device().device if gpu.strip().lower() == "auto" else lookup(gpu)
        any_of_kind = not device.is_cpu and device.name == f"sm{device.capability_text.replace('.', '')}"
        (capabilities if any_of_kind else named).append(device.capability_text if any_of_kind else device.name)
    if named and capabilities:
        raise click.UsageError(
            f"--gpu: {', '.join(named)} and compute capability {', '.join(capabilities)} need a rule each",
            click.get_current_context(),
        )
    conditions = {"gpu": named, "compute_capability": capabilities}
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
        if with_gpu and field in ("gpu", "compute_capability"):
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
