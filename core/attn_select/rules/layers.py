"""Finds, reads and merges rules files, from the packaged ones to the files of ``--rules``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attn_select.errors import RulesError
from attn_select.machine import variables
from attn_select.rules.document import (
    MOST_PROBLEMS,
    Named,
    OptionsTable,
    Problem,
    problem_text,
    read_document,
    read_file,
)
from attn_select.rules.rule import PACKAGED, Rule

logger = logging.getLogger(__name__)

FILE_NAME = "selector_rules.toml"
WORKING_DIRECTORY = "working directory"

Instead = Mapping[str, bytes]
"""Contents to read in place of files, by the real path of each: rules as they would be after an edit."""


@dataclass(slots=True)
class Layer:
    """One place where rules are looked for."""

    kind: str  # ``packaged``, ``user``, ``working directory``, ``ATTN_SELECT_RULES`` or ``--rules``
    path: Path
    state: str = ""  # ``read``, ``not found``, or why it was skipped or cannot be read; empty until looked at

    def to_dict(self) -> dict[str, str]:
        """Return the layer as it stands in JSON output."""
        return {"kind": self.kind, "path": str(self.path), "state": self.state}


@dataclass(slots=True)
class RuleSet:
    """The effective rules."""

    rules: list[Rule] = field(default_factory=list)  # enabled rules, first layer to last, top-down within one
    options: dict[str, OptionsTable] = field(default_factory=dict)  # option tables by backend name
    layers: list[Layer] = field(default_factory=list)  # every file that was looked for
    # one problem for each rule that disables a rule which no earlier layer has
    idle: list[Problem] = field(default_factory=list)
    # one problem where the working directory's file, which nobody asked for, is another user's
    foreign: list[Problem] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)  # the backends that broken rules name (``Document.named``)


def packaged_rules_path() -> Path:
    """Return the path of the default rules that come with the package."""
    return Path(__file__).parent.parent / FILE_NAME


def candidate_layers(extra: Sequence[str | os.PathLike[str]] = (), working_directory: bool = True) -> list[Layer]:
    """Return every place where rules are looked for, first to last, with ``state`` still empty."""
    layers = [Layer("packaged", packaged_rules_path())]
    if user := user_rules_path():
        layers.append(Layer("user", user))
    if working_directory:
        layers.append(Layer(WORKING_DIRECTORY, Path(FILE_NAME)))
    layers += (
        Layer(variables.RULES, Path(path)) for path in os.environ.get(variables.RULES, "").split(os.pathsep) if path
    )
    layers += (Layer("--rules", Path(path)) for path in extra)
    return layers


def user_rules_path() -> Path | None:
    """Return the path of the user's own rules, there or not; None where there is no home directory."""
    import platformdirs

    try:
        return platformdirs.user_config_path("attn-select", appauthor=False) / FILE_NAME
    except (OSError, RuntimeError):  # no home directory
        return None


def inspect_layers(extra: Sequence[str | os.PathLike[str]] = ()) -> list[Layer]:
    """Return every layer with its state (``read``, ``not found``, skipped, the error) without judging the contents."""
    layers = candidate_layers(extra)
    _read_all(layers, [])
    return layers


def load_rules(
    extra: Sequence[str | os.PathLike[str]] = (),
    instead: Instead | None = None,
    working_directory: bool = True,
) -> RuleSet:
    """Read and merge every layer."""
    rule_set, problems = read_rules(extra, instead, working_directory)
    if problems:
        lines = [*map(problem_text, problems)]
        shown = lines[0] if len(lines) == 1 else f"{len(lines)} errors in rules files\n  " + "\n  ".join(lines[:20])
        hint = "`attn-select rules check` lists all problems; `attn-select rules path` lists the files"
        raise RulesError(shown, problems=problems, hint=hint)
    return rule_set


def read_rules(
    extra: Sequence[str | os.PathLike[str]] = (),
    instead: Instead | None = None,
    working_directory: bool = True,
) -> tuple[RuleSet, list[Problem]]:
    """Read and merge every layer as far as it can be understood; return also what cannot (the first hundred)."""
    layers = candidate_layers(extra, working_directory)
    problems: list[Problem] = []
    documents = []
    for index, content in enumerate(_read_all(layers, problems, instead)):
        if content is not None:
            layer = PACKAGED + index
            documents.append(read_document(content, str(layers[index].path), layer, problems))
    rule_set = RuleSet(layers=layers, foreign=_foreign(layers))
    for each in rule_set.layers:
        logger.info("rules, %s: %s: %s", each.kind, each.path, each.state)
    by_name: dict[str, Rule] = {}
    for document in documents:
        rule_set.named += document.named
        for rule in document.rules:
            earlier = by_name.pop(rule.name, None)
            if rule.enabled:
                by_name[rule.name] = rule
            elif earlier is None:
                text = f"rule {rule.name!r} disables nothing: no earlier file has a rule of this name"
                rule_set.idle.append((rule.file, rule.line, text))
        for backend, options in document.options.items():
            table = rule_set.options.setdefault(backend, options)
            table.values.update(options.values)
            table.origins.update(options.origins)
            table.origin = options.origin
    rule_set.rules = [*by_name.values()]
    return rule_set, problems[:MOST_PROBLEMS]


def _read_all(layers: list[Layer], problems: list[Problem], instead: Instead | None = None) -> list[bytes | None]:
    """Set the state of every layer; return the contents of those whose state is ``read``."""
    contents: list[bytes | None] = []
    for layer in layers:
        try:
            content = _read(layer, instead)
        except (OSError, ValueError) as error:
            content, layer.state = None, str(getattr(error, "strerror", None) or error)
            origin = f" (given by {layer.kind})" if layer.kind == variables.RULES else ""
            problems.append((str(layer.path), None, f"cannot be read: {layer.state}{origin}"))
        contents.append(content)
    for index, layer in enumerate(layers[1:], 1):
        if contents[index] is None:
            continue
        # The same file again as a stronger layer says everything that this one says.
        others = [other for other in layers[index + 1 :] if other.state == "read"]
        here = os.path.realpath(layer.path)
        stronger = next((other.kind for other in others if os.path.realpath(other.path) == here), None)
        if layer.kind == WORKING_DIRECTORY and contents[index] == contents[0]:
            layer.state = "skipped: identical to the packaged rules"
        elif stronger is not None:
            layer.state = f"skipped: read as {stronger}"
        else:
            continue
        contents[index] = None
    return contents


def _foreign(layers: list[Layer]) -> list[Problem]:
    """Return what is to be said of the working directory's file: whoever wrote it chooses backends here."""
    path = next((each.path for each in layers if each.kind == WORKING_DIRECTORY and each.state == "read"), None)
    if path is None or not hasattr(os, "geteuid"):  # a file has no such owner on Windows
        return []
    try:
        owner = os.stat(path).st_uid
    except OSError:  # its content was given
        return []
    here = os.geteuid()
    text = f"its rules are followed, but it belongs to another user: uid {owner}, where this process has uid {here}"
    return [] if owner == here else [(str(path), None, text)]


def _read(layer: Layer, instead: Instead | None) -> bytes | None:
    """Return a file's content, None where an optional one does not exist."""
    try:
        content = instead.get(os.path.realpath(layer.path)) if instead else None
        content = read_file(layer.path) if content is None else content
    except (FileNotFoundError, NotADirectoryError):
        if layer.kind not in ("user", WORKING_DIRECTORY):
            raise ValueError("no such file") from None
        layer.state = "not found"
        return None
    layer.state = "read"
    return content
