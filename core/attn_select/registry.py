"""Loads plugins, one by one, so that a broken one never takes the others down.

pluggy's own entry-point loader stops at the first failure, so each entry point gets a plugin manager
of its own: it is loaded, checked against the hook specification and called, and what goes wrong is kept as text.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pluggy

from attn_select import hookspecs
from attn_select.environment import canonical_distribution, name_and_version
from attn_select.errors import PluginError, shorten, show
from attn_select.spec import BackendSpec
from attn_select.spec_check import problems_of


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

    def to_dict(self) -> dict[str, Any]:
        """Return the plugin as it stands in JSON output."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "backends": list(self.backends),
            "error": self.error,
        }


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
        lines = [
            f"plugin {plugin.name} ({plugin.distribution} {plugin.version}) is not usable: {plugin.error}"
            for plugin in self.plugins
            if plugin.error
        ]
        for name, owners in self.conflicts.items():
            lines.append(f"backend {name} is registered by {' and by '.join(owners)}: usable once one owner is left")
        return lines


@functools.cache
def load_plugins() -> Registry:
    """Load every installed plugin, in sorted order of entry-point name and distribution. Cached."""
    try:
        return build_registry(importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP))
    except Exception:  # one malformed entry_points.txt, of whatever distribution, spoils the common query
        return _search_each_distribution()


def _search_each_distribution() -> Registry:
    found: list[importlib.metadata.EntryPoint] = []
    failed: list[Plugin] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name, version = name_and_version(distribution)
        if name is None or canonical_distribution(name) in seen:
            continue
        seen.add(canonical_distribution(name))
        try:
            found += distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)
        except Exception as error:
            text = f"its entry_points.txt cannot be read: {type(error).__name__}: {shorten(error, 300)}"
            failed.append(Plugin("?", canonical_distribution(name), version or "?", error=text))
    registry = build_registry(found)
    registry.plugins += failed
    return registry


def build_registry(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Registry:
    """Load the given entry points. Raises nothing but KeyboardInterrupt: what fails is in ``Registry.plugins``."""
    registry = Registry()
    taken: dict[str, str] = {}
    named = [(entry_point.name, *_distribution(entry_point), entry_point) for entry_point in entry_points]
    for name, distribution, version, entry_point in sorted(named, key=lambda item: (*item[:2], item[3].value)):
        plugin = Plugin(name, distribution, version)
        registry.plugins.append(plugin)
        if name in taken:
            plugin.error = f"the plugin name {name!r} is already taken by {taken[name]}"
            continue
        taken[name] = distribution
        try:
            specs = _register(entry_point)
        except KeyboardInterrupt:
            raise
        except PluginError as error:
            plugin.error = error.message
        except BaseException as error:  # whatever a stranger's module raises on import, SystemExit included
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
    name, version = name_and_version(entry_point.dist) if entry_point.dist is not None else (None, None)
    return canonical_distribution(name) if name else "?", version or "?"


def _register(entry_point: importlib.metadata.EntryPoint) -> list[BackendSpec]:
    manager = pluggy.PluginManager(hookspecs.ENTRY_POINT_GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), name=entry_point.name)
    manager.check_pending()
    results: list[Any] = manager.hook.attn_select_register_backends()
    if not results:
        raise PluginError(f"{entry_point.value} has no @hookimpl attn_select_register_backends that returns backends")
    specs: dict[str, BackendSpec] = {}
    for result in results:
        if not isinstance(result, (list, tuple)):
            raise PluginError(f"attn_select_register_backends returned {show(result)} instead of a list of BackendSpec")
        for spec in result:
            if problems := problems_of(spec):
                raise PluginError("; ".join(problems))
            if spec.name in specs:
                raise PluginError(f"backend {spec.name} is registered twice by the same plugin")
            specs[spec.name] = spec
    return list(specs.values())
