"""The entry point: registers the backend, imports no torch."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_fla.facts.fla import FLA


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the spec of ``FLA``."""
    return [FLA]
