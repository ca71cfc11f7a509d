"""The entry point: registers both backends, imports no kernel library."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_flashmla.facts.flashmla import FLASHMLA
from attn_select_flashmla.facts.flashmla_sparse import FLASHMLA_SPARSE


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the specs of ``FLASHMLA`` and ``FLASHMLA_SPARSE``."""
    return [FLASHMLA, FLASHMLA_SPARSE]
