"""Loads plugins, one by one, so that a broken one never takes the others down.

pluggy's own entry-point loader stops at the first failure, so each entry point gets a plugin manager
of its own: it is loaded, checked against the hook specification and called, and what goes wrong is kept as text.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from attn_select import hookspecs
from attn_select.config import PHASES
from attn_select.environment import canonical_distribution
from attn_select.errors import PluginError, shorten
from attn_select.spec import BackendOptions, BackendSpec, Capabilities, Library


@dataclass(slots=True)
class Plugin:
    """One entry point of group ``attn_select``, loaded or failed.

    Attributes:
        name: the entry point's name.
        distribution: the distribution that brings it (canonical name), ``?`` where metadata lacks one.
        version: that distribution's version.
        backends: names of the backends it registered.
        error: why it could not be used, one line; None when it loaded.
    """

    name: str
    distribution: str
    version: str
    backends: tuple[str, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class Registry:
    """Every registered backend, in registration order, and every plugin with its fate.

    Attributes:
        specs: usable backends by name.
        owners: distribution that registered each backend.
        conflicts: backend names registered more than once (hence unusable) with all their owners.
        plugins: all entry points in the order they were loaded.
    """

    specs: dict[str, BackendSpec] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    conflicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """One line per failed plugin and per conflicting backend name."""
        failed = [f"plugin {p.name} ({p.distribution} {p.version}) is not usable: {p.error}" for p in self.plugins if p.error]
        doubled = [
            f"backend {name} is registered by {' and by '.join(owners)}: uninstall one of them; until then it is not usable"
            for name, owners in self.conflicts.items()
        ]
        return failed + doubled


@functools.cache
def load_plugins() -> Registry:
    """Load every installed plugin, in sorted order of entry-point name and distribution. Cached."""
    return build_registry(importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP))


def build_registry(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """Load the given entry points. Never raises: what fails is in ``Registry.plugins`` with its error."""
    registry = Registry()
    taken: dict[str, str] = {}
    for entry_point in sorted(entry_points, key=lambda e: (e.name, _distribution(e)[0], e.value)):
        distribution, version = _distribution(entry_point)
        plugin = Plugin(entry_point.name, distribution, version)
        registry.plugins.append(plugin)
        if entry_point.name in taken:
            plugin.error = f"the plugin name {entry_point.name!r} is already taken by {taken[entry_point.name]}"
            continue
        taken[entry_point.name] = distribution
        try:
            specs = _register(entry_point)
        except PluginError as error:
            plugin.error = error.message
        except (Exception, SystemExit) as error:  # whatever a stranger's module raises on import
            plugin.error = f"{type(error).__name__}: {shorten(error, 300)}"
        else:
            plugin.backends = tuple(spec.name for spec in specs)
            for spec in specs:
                _add(registry, spec, distribution)
    return registry


def _add(registry: Registry, spec: BackendSpec, owner: str) -> None:
    if spec.name in registry.conflicts:
        registry.conflicts[spec.name] += (owner,)
    elif spec.name in registry.specs:
        registry.conflicts[spec.name] = (registry.owners.pop(spec.name), owner)
        del registry.specs[spec.name]
    else:
        registry.specs[spec.name] = spec
        registry.owners[spec.name] = owner


def _distribution(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    dist = entry_point.dist
    if dist is None:
        return "?", "?"
    try:
        return canonical_distribution(dist.name), dist.version
    except (KeyError, TypeError, AttributeError):  # a distribution with broken metadata
        return "?", "?"


def _register(entry_point: importlib.metadata.EntryPoint) -> list[BackendSpec]:
    manager = pluggy.PluginManager("attn_select")
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), name=entry_point.name)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(shorten(error, 300)) from None
    results: list[Any] = manager.hook.attn_select_register_backends()
    if not results:
        raise PluginError(f"{entry_point.value} has no @hookimpl attn_select_register_backends that returns backends")
    specs: list[BackendSpec] = []
    for result in results:
        if not isinstance(result, (list, tuple)):
            raise PluginError(f"attn_select_register_backends returned {shorten(repr(result))} instead of a list of BackendSpec")
        for spec in result:
            _check_spec(spec)
            if spec.name in (s.name for s in specs):
                raise PluginError(f"backend {spec.name} is registered twice by the same plugin")
            specs.append(spec)
    return specs


def _check_spec(spec: object) -> None:
    if not isinstance(spec, BackendSpec):
        raise PluginError(f"registered {shorten(repr(spec))}, which is not a BackendSpec")
    problems = []
    if not isinstance(spec.name, str) or not re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", spec.name):
        problems.append(f"name {shorten(repr(spec.name))} (accepted: A-Z, 0-9 and _, starting with a letter)")
    if not isinstance(spec.capabilities, Mapping) or not spec.capabilities:
        problems.append("capabilities (accepted: a mapping of phase to Capabilities)")
    else:
        for phase, capabilities in spec.capabilities.items():
            if phase not in PHASES:
                problems.append(f"phase {shorten(repr(phase))} (accepted: {', '.join(PHASES)})")
            elif not isinstance(capabilities, Capabilities):
                problems.append(f"capabilities[{phase!r}] {shorten(repr(capabilities))} (accepted: Capabilities)")
    for attribute in ("plan", "load", "compile_key"):
        if not callable(getattr(spec, attribute)):
            problems.append(f"{attribute} {shorten(repr(getattr(spec, attribute)))} (accepted: a callable)")
    if not (isinstance(spec.options, type) and issubclass(spec.options, BackendOptions)):
        problems.append(f"options {shorten(repr(spec.options))} (accepted: a subclass of BackendOptions)")
    if not all(isinstance(library, Library) for group in _groups(spec.libraries) for library in group):
        problems.append("libraries (accepted: a list of lists of Library)")
    if problems:
        raise PluginError(f"backend {shorten(repr(spec.name))}: invalid {'; '.join(problems)}")


def _groups(libraries: object) -> list[Any]:
    if not isinstance(libraries, (list, tuple)):
        return [[libraries]]
    return [group if isinstance(group, (list, tuple)) and group else [None] for group in libraries]
