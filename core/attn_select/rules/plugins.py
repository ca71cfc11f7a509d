"""The installed plugins, with the rules that they ship: a plugin whose rules cannot be read is not used."""

from __future__ import annotations

import copyreg
import functools

from attn_select.backends.registry import Registry, find_plugins
from attn_select.backends.spec import BackendSpec
from attn_select.errors import PluginError
from attn_select.rules.fragments import Fragment, read_fragment


@functools.cache
def load_plugins() -> Registry:
    """Load every installed plugin, in sorted order of entry-point name and distribution. Cached."""
    return find_plugins(read_fragment)


def fragments_of(registry: Registry) -> list[Fragment]:
    """Return the rules that plugins ship, in order of plugin name."""
    return [plugin.rules for plugin in registry.plugins if isinstance(plugin.rules, Fragment)]


def registered_spec(name: str) -> BackendSpec:
    """Return the spec that an installed plugin registers under ``name``."""
    registry = load_plugins()
    if name not in registry.specs:
        text = f"backend {name} is not registered in this process"
        raise PluginError(text, hint="; ".join(registry.warnings) or "install the plugin that brings it")
    return registry.specs[name]


# A spec holds functions, which may not be picklable: another process takes its own plugin's spec of the same name.
copyreg.pickle(BackendSpec, lambda spec: (registered_spec, (spec.name,)))
