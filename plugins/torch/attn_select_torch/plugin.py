"""The entry point: registers the backends, imports no torch."""

from __future__ import annotations

from attn_select.backends.hookspecs import hookimpl
from attn_select.backends.spec import BackendSpec
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA
from attn_select_torch.facts.torch_state import TORCH_STATE


@hookimpl
def attn_select_register_backends() -> list[BackendSpec]:
    """Return the specs of torch's backends for attention, and of ``TORCH_STATE``."""
    return [TORCH_SDPA, FLEX_ATTENTION, TORCH_MLA, TORCH_MLA_SPARSE, TORCH_STATE]
