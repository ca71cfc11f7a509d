"""One step of one attention layer as data, and its solution by the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig
from attn_select.testing.oracle import varlen_reference
from attn_select.testing.oracle_mla import sparse_mla_reference
from attn_select.testing.oracle_paged import paged_reference, write_reference

Request = tuple[int, int]
"""``(query_len, seq_len)``: tokens of this step, and tokens in all once they are cached."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of one step, as a backend gets them: B requests, T tokens, tensors on one device.

    A layer without a cache (encoders) has None in ``layout``, ``kv_cache``, ``block_table`` and ``slot_mapping``;
    its ``key`` and ``value`` are all there is. Cross-attention finds its cache complete and writes 0 tokens.
    """

    config: AttentionConfig
    requests: tuple[Request, ...]
    scale: float
    query: Tensor
    """``(T, H, D)`` in the config's dtype; with MLA the absorbed query."""
    key: Tensor
    """``(T, Hkv, D)``, with MLA the latent ``(T, kv_lora_rank)``: this step's, not yet in the cache."""
    value: Tensor
    """``(T, Hkv, Dv)``, with MLA ``k_pe`` ``(T, qk_rope_head_dim)``."""
    query_start_loc: Tensor
    """int32 ``(B + 1,)``."""
    seq_lens: Tensor
    """int32 ``(B,)``."""
    layout: str | None = None
    block_size: int | None = None
    kv_cache: Tensor | None = None
    """As ``layouts.cache_shape`` has it, holding the context of every request; all else is poison."""
    block_table: Tensor | None = None
    """int32 ``(B, W)``, blocks in random order; entries that are not needed point to a poisoned block."""
    slot_mapping: Tensor | None = None
    """int64 ``(T,)``."""
    alibi_slopes: Tensor | None = None
    """float32 ``(H,)``."""
    sinks: Tensor | None = None
    """``(H,)`` in the config's dtype."""
    mm_prefix_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Per request, inclusive positions."""
    topk_indices: Tensor | None = None
    """int32 ``(T, sparse_top_k)``: physical slots, -1 behind the last."""
    k_scale: Tensor | None = None
    """float32 ``()``, or ``(Hkv,)`` with ``per_head_quant_scales``; None unless the cache is FP8 and lacks its own."""
    v_scale: Tensor | None = None
    """As ``k_scale``; None with MLA."""
    q_scale: Tensor | None = None
    """float32 ``()``; for paths that want the query in FP8."""

    def to(self, device: torch.device | str) -> Problem:
        """Return the same problem with its tensors on ``device``."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
        return Problem(**{**fields, **tensors})

    def written_cache(self) -> Tensor:
        """Return a copy of the cache with this step's key and value written.

        Raises:
            ValueError: the layer has no cache.
        """
        if self.layout is None or self.kv_cache is None or self.slot_mapping is None:
            raise ValueError(f"attn_type = {self.config.attn_type!r}: this problem has no cache")
        cache = self.kv_cache.clone()
        scales: dict[str, Any] = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        write_reference(cache, self.key, self.value, self.slot_mapping, self.layout, self.config, **scales)
        return cache

    def reference(self, *, kv_cache: Tensor | None = None, query_dtype: str | None = None) -> tuple[Tensor, Tensor]:
        """Return output float64 ``(T, H, Dv)``, with MLA the latent, and natural-log LSE float64 ``(T, H)``.

        Args:
            kv_cache: the cache after this step's write; left out: ``written_cache()``.
            query_dtype: an FP8 dtype where the path quantises the query with ``q_scale``.
        """
        extras: dict[str, Any] = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        if self.layout is None:
            bounds = self.query_start_loc
            dense = (self.query, self.key, self.value, bounds, bounds)
            return varlen_reference(*dense, self.config, self.scale, **extras)
        cache = self.written_cache() if kv_cache is None else kv_cache
        fp8: dict[str, Any] = {"k_scale": self.k_scale, "query_dtype": query_dtype, "q_scale": self.q_scale}
        if self.topk_indices is not None:
            sparse = (self.query, cache, self.layout, self.topk_indices)
            return sparse_mla_reference(*sparse, self.config, self.scale, sinks=self.sinks, **fp8)
        assert self.block_table is not None
        extras |= {"v_scale": self.v_scale, "mm_prefix_ranges": self.mm_prefix_ranges, **fp8}
        paged = (self.query, cache, self.layout, self.block_table, self.query_start_loc, self.seq_lens)
        return paged_reference(*paged, self.config, self.scale, **extras)
