"""The entry point: registers the backends, imports neither torch nor FlashInfer."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_flashinfer.facts.mha import FLASHINFER
from attn_select_flashinfer.facts.mla import FLASHINFER_MLA
from attn_select_flashinfer.facts.mla_cute_dsl import FLASHINFER_MLA_CUTE_DSL
from attn_select_flashinfer.facts.mla_sparse import FLASHINFER_MLA_SPARSE
from attn_select_flashinfer.facts.states import FLASHINFER_GDN, FLASHINFER_KDA, FLASHINFER_MAMBA


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the specs of ``FLASHINFER``, and of the backends for MLA layers and for layers that keep a state."""
    mla = [FLASHINFER_MLA, FLASHINFER_MLA_CUTE_DSL, FLASHINFER_MLA_SPARSE]
    return [FLASHINFER, *mla, FLASHINFER_GDN, FLASHINFER_KDA, FLASHINFER_MAMBA]
