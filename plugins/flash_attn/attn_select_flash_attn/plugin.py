"""The entry point: registers the backends, imports no kernel library."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA
from attn_select_flash_attn.facts.flash_attn_mla_sparse import FLASH_ATTN_MLA_SPARSE


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the specs of ``FLASH_ATTN``, ``FLASH_ATTN_MLA`` and ``FLASH_ATTN_MLA_SPARSE``."""
    return [FLASH_ATTN, FLASH_ATTN_MLA, FLASH_ATTN_MLA_SPARSE]
