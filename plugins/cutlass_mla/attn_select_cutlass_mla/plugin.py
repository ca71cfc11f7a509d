"""The entry point: registers the backend, imports no kernel library."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_cutlass_mla.facts.cutlass_mla import CUTLASS_MLA


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the spec of ``CUTLASS_MLA``."""
    return [CUTLASS_MLA]
