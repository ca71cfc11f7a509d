"""The hooks that a plugin implements (pluggy, entry-point group ``attn_select``): one, and an optional one."""

from __future__ import annotations

import os

import pluggy

from attn_select.backends.spec import BackendSpec

ENTRY_POINT_GROUP = "attn_select"

hookspec = pluggy.HookspecMarker("attn_select")
hookimpl = pluggy.HookimplMarker("attn_select")


@hookspec
def attn_select_register_backends() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Return the specs of all backends that this plugin brings. Called once; must import nothing heavy."""


@hookspec
def attn_select_register_rules() -> str | os.PathLike[str]:  # type: ignore[empty-body]
    """Return the absolute path of a rules file in the plugin's package. Optional.

    Its rules are a layer below the packaged ones and may name only backends that the same plugin registers: ``prefer``
    puts them in front of the packaged order, ``avoid`` behind it, and every user's rule beats both. docs/rules.md
    describes the format. A file that breaks these rules is an error of the plugin, whose backends are then unusable.
    """
