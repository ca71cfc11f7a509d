"""The entry point: registers the backends, imports neither torch nor Triton."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA
from attn_select_triton.facts.triton_mla_sparse import TRITON_MLA_SPARSE
from attn_select_triton.facts.triton_state import TRITON_STATE


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the specs of the kernels for attention, and of ``TRITON_STATE``."""
    return [TRITON_ATTN, TRITON_MLA, TRITON_MLA_SPARSE, PAGED_ATTENTION, TRITON_STATE]
