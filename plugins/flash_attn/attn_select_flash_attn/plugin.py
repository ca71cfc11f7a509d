"""The entry point: registers both backends, imports no kernel library."""

from __future__ import annotations

from attn_select.hookspecs import hookimpl
from attn_select.spec import BackendSpec
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the specs of ``FLASH_ATTN`` and ``FLASH_ATTN_MLA``."""
    return [FLASH_ATTN, FLASH_ATTN_MLA]
