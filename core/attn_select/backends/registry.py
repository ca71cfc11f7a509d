"""Loads plugins, one by one, so that a broken one never takes the others down.

pluggy's own entry-point loader stops at the first failure, so each entry point is loaded, checked against the hook
specification and called by itself, and what goes wrong is kept as text.
What a plugin prints meanwhile goes to stderr, so that the output of a command stays its own.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib.metadata
import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pluggy

from attn_select.backends import hookspecs
from attn_select.backends.distributions import known_backends
from attn_select.backends.spec import BackendSpec
from attn_select.backends.spec_check import problems_of
from attn_select.errors import PluginError, shorten, show
from attn_select.machine.environment import canonical_distribution, name_and_version

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Plugin:
    """One entry point of group ``attn_select``, loaded or failed."""

    name: str
    distribution: str  # the distribution that brings it (canonical name), ``?`` where metadata lacks one
    version: str
    backends: tuple[str, ...] = ()
    error: str | None = None  # why it could not be used, one line; None when it loaded

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.distribution} {self.version})"

    def to_dict(self) -> dict[str, Any]:
        """Return the plugin as it stands in JSON output."""
        return {**asdict(self), "backends": [*self.backends]}


@dataclass(slots=True)
class Registry:
    """Every registered backend, in registration order, and every plugin with its fate."""

    specs: dict[str, BackendSpec] = field(default_factory=dict)  # usable backends by name
    owners: dict[str, str] = field(default_factory=dict)  # distribution that registered each backend
    # backend names registered more than once (hence unusable) with all their owners
    conflicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # names of known backends with the other distributions that register them. The backend of the distribution that
    # ``known_backends`` lists is used
    ignored: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)  # all entry points in the order they were loaded

    @property
    def failed(self) -> list[Plugin]:
        """The plugins that could not be used."""
        return [plugin for plugin in self.plugins if plugin.error]

    @property
    def variables(self) -> dict[str, list[str]]:
        """The environment variables that plans read, each with the backends that declare it."""
        found: dict[str, list[str]] = {}
        for spec in self.specs.values():
            for name in spec.variables:
                found.setdefault(name, []).append(spec.name)
        return found

    @property
    def warnings(self) -> list[str]:
        """One line per failed plugin and per backend name that is registered more than once."""
        lines = [f"{plugin} is not usable: {plugin.error}" for plugin in self.failed]
        for name, owners in self.conflicts.items():
            lines.append(f"backend {name} is registered by {' and by '.join(owners)}: usable once one owner is left")
        for name, others in self.ignored.items():
            lines.append(
                f"backend {name} of {' and of '.join(others)} is ignored: the name belongs to "
                f"{known_backends()[name]}, which is installed"
            )
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
    manager = pluggy.PluginManager(hookspecs.ENTRY_POINT_GROUP)
    manager.add_hookspecs(hookspecs)
    taken: dict[str, str] = {}
    registered: dict[str, list[tuple[str, BackendSpec]]] = {}
    named = [(entry_point.name, *_distribution(entry_point), entry_point) for entry_point in entry_points]
    for name, distribution, version, entry_point in sorted(named, key=lambda item: (*item[:2], item[3].value)):
        plugin = Plugin(name, distribution, version)
        registry.plugins.append(plugin)
        if name in taken:
            plugin.error = f"the plugin name {name!r} is already taken by {taken[name]}"
            continue
        taken[name] = distribution
        try:
            with contextlib.redirect_stdout(sys.stderr):
                specs = _register(manager, entry_point)
        except KeyboardInterrupt:
            raise
        except PluginError as error:
            plugin.error = error.message
        except BaseException as error:  # whatever a stranger's module raises on import, SystemExit included
            plugin.error = f"{type(error).__name__}: {shorten(error, 300)}"
        else:
            plugin.backends = tuple(spec.name for spec in specs)
            for spec in specs:
                brought = replace(spec, distribution=f"{distribution} {version}")
                registered.setdefault(spec.name, []).append((distribution, brought))
        logger.info("%s: %s", plugin, plugin.error or ", ".join(plugin.backends))
    for name, found in registered.items():
        _settle(registry, name, found)
    return registry


def _settle(registry: Registry, name: str, found: list[tuple[str, BackendSpec]]) -> None:
    """Enter a backend name with all its registrations, each the distribution and its spec."""
    if len(found) > 1:
        listed = [each for each in found if each[0] == known_backends().get(name)]
        if len(listed) != 1:
            registry.conflicts[name] = tuple(owner for owner, _ in found)
            return
        registry.ignored[name] = tuple(owner for owner, _ in found if owner != listed[0][0])
        found = listed
    registry.owners[name], registry.specs[name] = found[0]


def _distribution(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    name, version = name_and_version(entry_point.dist) if entry_point.dist is not None else (None, None)
    return canonical_distribution(name) if name else "?", version or "?"


def _register(manager: pluggy.PluginManager, entry_point: importlib.metadata.EntryPoint) -> list[BackendSpec]:
    """Return the backends that a plugin registers."""
    module = entry_point.load()
    try:
        manager.register(module, name=entry_point.name)
        manager.check_pending()
        results: list[Any] = manager.hook.attn_select_register_backends()
    finally:  # the next plugin is to be alone, too
        manager.unregister(name=entry_point.name)
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


def registered_spec(name: str) -> BackendSpec:
    """Return the spec that an installed plugin registers under ``name``."""
    registry = load_plugins()
    if name not in registry.specs:
        text = f"backend {name} is not registered in this process"
        raise PluginError(text, hint="; ".join(registry.warnings) or "install the plugin that brings it")
    return registry.specs[name]


# A spec holds functions, which may not be picklable: another process takes its own plugin's spec of the same name.
copyreg.pickle(BackendSpec, lambda spec: (registered_spec, (spec.name,)))
