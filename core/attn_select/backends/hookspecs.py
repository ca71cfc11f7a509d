"""The hook that a plugin implements (pluggy, entry-point group ``attn_select``)."""

from __future__ import annotations

import pluggy

from attn_select.backends.spec import BackendSpec

ENTRY_POINT_GROUP = "attn_select"

hookspec = pluggy.HookspecMarker("attn_select")
hookimpl = pluggy.HookimplMarker("attn_select")


@hookspec
def attn_select_register_backends() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Return the specs of all backends that this plugin brings. Called once; must import nothing heavy."""
