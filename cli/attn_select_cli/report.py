"""A report: the selections of all layer kinds of a model on one device, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_select.decide import Decider
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.registry import Registry
from attn_select.render import Line, device_lines, layer_lines, warning_lines
from attn_select.selection import Selection

SCHEMA_VERSION = 1


@dataclass(slots=True)
class LayerReport:
    """One layer kind: its name, how many layers are of it, and the decision."""

    kind: str
    count: int
    selection: Selection


@dataclass(slots=True)
class Report:
    """Everything that ``attn-select explain`` says.

    Attributes:
        model: ``{"name", "architecture", "source"}`` or None where the layer was given by flags.
        layers: one entry per layer kind.
        warnings: about the model and the device; those of the selections are added by ``all_warnings``.
        decider: what decided, for the environment's facts.
    """

    model: dict[str, Any] | None
    layers: Sequence[LayerReport]
    warnings: Sequence[str]
    decider: Decider

    @property
    def ok(self) -> bool:
        """Whether every layer has a backend in every phase."""
        return all(layer.selection.ok for layer in self.layers)

    @property
    def device(self) -> Device:
        """The device that was asked about."""
        return self.decider.device

    @property
    def all_warnings(self) -> list[str]:
        """All warnings, each once; those of one layer kind among several name it."""
        seen = dict.fromkeys(self.warnings)
        for layer in self.layers:
            for warning in layer.selection.warnings:
                everywhere = all(warning in other.selection.warnings for other in self.layers)
                seen[warning if everywhere else f"{layer.kind}: {warning}"] = None
        return list(seen)

    def head_lines(self) -> list[Line]:
        """Return the lines that say which model and device the report is about."""
        lines: list[Line] = []
        if self.model is not None:
            architecture = f" ({self.model['architecture']})" if self.model["architecture"] else ""
            lines.append([("Model      ", "dim"), (self.model["name"], "title"), (architecture, "")])
        return lines + device_lines(self.layers[0].selection)

    def lines(self) -> list[Line]:
        """Return the report as styled lines."""
        lines = self.head_lines()
        for layer in self.layers:
            lines += [[], *layer_lines(layer.selection, layer.kind, layer.count)]
        return lines + warning_lines(self.all_warnings)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document; ``docs/json.md`` documents it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "device": self.device.to_dict(),
            "environment": environment_dict(self.decider),
            "warnings": self.all_warnings,
            "layers": [
                {"kind": layer.kind, "count": layer.count, **layer.selection.to_dict()} for layer in self.layers
            ],
        }


def environment_dict(decider: Decider) -> dict[str, Any]:
    """Return what a decision rests on: libraries, plugins and rules files."""
    environment = decider.environment
    return {
        "assumed": environment.assume_installed,
        "cuda": environment.cuda,
        "libraries": library_states(decider.registry, environment),
        "plugins": [plugin.to_dict() for plugin in decider.registry.plugins],
        "rules_files": [layer.to_dict() for layer in decider.rules.layers],
    }


def library_states(registry: Registry, environment: Environment) -> dict[str, dict[str, str | None]]:
    """Return state and version of every library that a registered backend names, by distribution."""
    libraries = {library for spec in registry.specs.values() for group in spec.libraries for library in group}
    return {
        library.distribution: {
            "state": environment.state(library),
            "version": environment.version(library.distribution),
        }
        for library in sorted(libraries, key=lambda library: library.distribution)
    }
