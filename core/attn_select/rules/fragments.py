"""The rules that plugins ship: the weakest layers, each about its own plugin's backends only."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from attn_select.errors import PluginError, show
from attn_select.rules.document import Document, Problem, read_document, read_file
from attn_select.rules.rule import PACKAGED

_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """The rules file of one plugin, read and found to be sound."""

    plugin: str  # the distribution that ships it
    path: Path
    document: Document


def read_fragment(path: object, plugin: str, backends: Collection[str]) -> Fragment:
    """Read the file that ``attn_select_register_rules`` of ``plugin`` named."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.isabs(path):
        accepted = 'an absolute path such as Path(__file__).with_name("rules.toml")'
        raise PluginError(f"attn_select_register_rules returned {show(path)} (accepted: {accepted})")
    file = os.fspath(path)
    problems: list[Problem] = []
    try:
        content = read_file(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PluginError(f"its rules file {file} cannot be read: {reason}") from None
    document = read_document(content, file, PACKAGED - 1, problems)
    problems += _foreign(document, backends)
    if problems:
        shown = [f"{file}:{line}: {text}" if line else f"{file}: {text}" for file, line, text in problems[:_MOST_SHOWN]]
        more = len(problems) - len(shown)
        raise PluginError("; ".join([*shown, *([f"and {more} more"] if more else [])]))
    return Fragment(plugin, Path(file), document)


def _foreign(document: Document, backends: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for everything that reaches beyond the plugin's own backends."""
    own = f"(accepted: {', '.join(backends) or 'none'}, which the plugin registers)"
    for rule in document.rules:
        if not rule.enabled:
            yield rule.file, rule.line, f"rule {rule.name!r}: enabled = false, but a plugin's rules switch no rule off"
        for name in rule.backends:
            if name not in backends:
                yield rule.file, rule.line, f"rule {rule.name!r} names backend {show(name)} {own}"
    for name, options in document.options.items():
        if name not in backends:
            yield options.file, options.line, f"[backends.{name}] sets options of another plugin's backend {own}"
