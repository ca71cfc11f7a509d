"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in float64: absorbed, and sparse.

The cache keeps per token one latent ``c`` of width R (``kv_lora_rank``) and one roped key part ``r`` of width Pr
(``qk_rope_head_dim``), shared by all heads. Per head::

    k = [c W_UK, r]      v = c W_UV      s = scale * (q_nope . c W_UK + q_pe . r)

Moving W_UK to the query's side and W_UV to the output's gives the absorbed form, one KV head of width R + Pr whose
values are the latents themselves::

    s = scale * ([W_UK^T q_nope, q_pe] . [c, r])      out = (sum_j p_j c_j) W_UV

Both have the scale of the decompressed form, ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`` or what the model's rope
scaling makes of it. Weights are vLLM's ``W_UK (R, H, P)`` and ``W_UV (R, H, V)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.reference.oracle import attention_options, attention_reference
from attn_select.reference.oracle_paged import Scale, gather_reference
from attn_select.reference.oracle_quant import quantize_query


def absorb_query(q_nope: Tensor, q_pe: Tensor, w_uk: Tensor) -> Tensor:
    """Return the absorbed query float64 ``(T, H, R + Pr)`` from ``(T, H, P)``, ``(T, H, Pr)`` and ``(R, H, P)``."""
    latent = torch.einsum("thp,rhp->thr", q_nope.double(), w_uk.double())
    return torch.cat([latent, q_pe.double()], dim=-1)


def project_output(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Return the output float64 ``(T, H, V)`` from attention over latents ``(T, H, R)`` and ``W_UV (R, H, V)``."""
    return torch.einsum("thr,rhv->thv", latent.double(), w_uv.double())


def sparse_mla_reference(
    query: Tensor,
    kv_cache: Tensor,
    layout: str,
    indices: Tensor,
    config: AttentionConfig,
    scale: float,
    *,
    k_scale: Scale = None,
    query_dtype: str | None = None,
    q_scale: Scale = None,
    spread: Tensor | None = None,
    **per_head: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend from each token to its own choice of cached tokens (DeepSeek Sparse Attention), in the absorbed form."""
    # The indexer leaves out future tokens: there is no mask here. ``query`` is absorbed, ``(T, H, R + Pr)``, and the
    # cache in layout ``MLA`` or ``FP8_DS_MLA``. ``indices`` are integers ``(T, top_k)``, physical slots; negative ones
    # are padding, at any place, and a slot that is listed twice counts twice. Returned are the latent output float64
    # ``(T, H, R)`` and the LSE float64 ``(T, H)``.
    if query_dtype is not None:
        query = quantize_query(query, query_dtype, q_scale)
    options = attention_options(config, **per_head)
    options |= {"causal": False, "sliding_window": None}
    output = query.new_zeros((*query.shape[:2], config.kv_lora_rank or 0), dtype=torch.float64)
    lse = torch.full_like(output[..., 0], -torch.inf)
    for token, chosen in enumerate(indices):
        keys, values = gather_reference(kv_cache, layout, chosen[chosen >= 0], config, k_scale=k_scale)
        row = slice(token, token + 1)
        options["spread"] = None if spread is None else spread[row]
        output[row], lse[row] = attention_reference(query[row], keys, values, scale=scale, **options)
    return output, lse
