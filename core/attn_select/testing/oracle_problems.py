"""Random batches on poisoned memory, reproducible from a seed, with everything that the oracle needs to solve them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.config import AttentionConfig
from attn_select.layouts import FP8_DS_MLA, cache_shape
from attn_select.testing.oracle import varlen_reference
from attn_select.testing.oracle_mla import sparse_mla_reference
from attn_select.testing.oracle_paged import paged_reference, slot_mapping_reference, write_reference
from attn_select.testing.oracle_quant import FP8_DTYPES, PLAIN_DTYPES, storage_dtype

Request = tuple[int, int]
"""``(query_len, seq_len)``: tokens of this step, and tokens in all once they are cached."""

LARGE = 1e4
"""Finite poison: finds a leak into a sum, and its products with a query stay finite in float32."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One step of one layer: inputs as a backend gets them. Tensors are on one device.

    B requests, T tokens of this step. Where the layer has no cache (encoders), ``kv_cache``, ``layout``,
    ``block_table`` and ``slot_mapping`` are None and ``key`` and ``value`` are all there is. Cross-attention finds its
    cache complete and has no ``key`` and ``value`` to write (0 tokens).
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
    """float32 ``()``, or ``(Hkv,)`` with ``per_head_quant_scales``; None where the cache is not FP8 or brings its own."""
    v_scale: Tensor | None = None
    """As ``k_scale``; None with MLA."""
    q_scale: Tensor | None = None
    """float32 ``()``; for paths that want the query in FP8."""

    def written_cache(self) -> Tensor:
        """Return a copy of the cache with this step's key and value written."""
        assert self.kv_cache is not None and self.slot_mapping is not None and self.layout is not None
        cache = self.kv_cache.clone()
        write_reference(
            *(cache, self.key, self.value, self.slot_mapping, self.layout, self.config),
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        return cache

    def reference(self, *, kv_cache: Tensor | None = None, query_dtype: str | None = None) -> tuple[Tensor, Tensor]:
        """Return output and LSE, float64 ``(T, H, Dv)`` (with MLA the latent) and ``(T, H)``.

        Args:
            kv_cache: the cache after this step's write; left out: ``written_cache()``.
            query_dtype: an FP8 dtype where the path quantises the query with ``q_scale``.
        """
        if self.layout is None:
            bounds = self.query_start_loc
            return varlen_reference(
                *(self.query, self.key, self.value, bounds, bounds, self.config, self.scale),
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
            )
        assert self.block_table is not None
        cache = self.written_cache() if kv_cache is None else kv_cache
        if self.topk_indices is not None:
            return sparse_mla_reference(
                *(self.query, cache, self.layout, self.topk_indices, self.config, self.scale),
                sinks=self.sinks,
                k_scale=self.k_scale,
                query_dtype=query_dtype,
                q_scale=self.q_scale if query_dtype else None,
            )
        return paged_reference(
            *(self.query, cache, self.layout, self.block_table, self.query_start_loc, self.seq_lens),
            *(self.config, self.scale),
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            mm_prefix_ranges=self.mm_prefix_ranges,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            query_dtype=query_dtype,
            q_scale=self.q_scale if query_dtype else None,
        )


def random_requests(
    seed: int, config: AttentionConfig, *, num_requests: int = 6, max_seq_len: int = 96, block_size: int = 16
) -> tuple[Request, ...]:
    """Draw a batch that mixes prefill, decode, chunked prefill and speculative decode, in random order.

    From four requests on every kind is there. Half of the lengths are multiples of ``block_size``, where mistakes live.
    Encoders get whole sequences, cross-attention query lengths that have nothing to do with the keys.
    """
    rng = random.Random(f"requests {seed}")
    speculative = 1 + (config.num_speculative_tokens or 3)
    requests: list[Request] = []
    for index in range(num_requests):
        seq_len = rng.randint(1, max_seq_len)
        if rng.random() < 0.5:
            seq_len = min(max_seq_len, -(-seq_len // block_size) * block_size)
        kinds = {
            "decode": 1,
            "prefill": seq_len,
            "chunked": rng.randint(1, max(1, seq_len - 1)),
            "speculative": min(speculative, seq_len),
        }
        query_len = list(kinds.values())[index % 4]
        if config.attn_type == "encoder_decoder":
            query_len = rng.randint(1, max_seq_len)
        requests.append((query_len if config.has_cache else seq_len, seq_len))
    rng.shuffle(requests)
    return tuple(requests)


def random_problem(
    seed: int,
    config: AttentionConfig,
    layout: str | None = None,
    *,
    block_size: int = 16,
    requests: Sequence[Request] | None = None,
    device: str = "cpu",
    nan_tails: bool = True,
    spare_blocks: int = 3,
) -> Problem:
    """Draw one step of one layer.

    All numbers are drawn on the CPU, so that a seed gives the same problem on every device. Keys, values and queries are
    standard normal, rounded to the config's dtype.

    Args:
        layout: a name from ``attn_select.layouts``; None for layers without a cache.
        block_size: tokens per block; the config's own goes first.
        requests: ``(query_len, seq_len)`` each; left out: ``random_requests``. Where ``query_len`` exceeds ``seq_len``
            (padding has 1 and 0) the first rows see no key and have no slot.
        nan_tails: what stands behind a sequence's end in its last block: NaN, or +-``LARGE`` where kernels may
            multiply it by 0. Blocks of nobody are NaN in any case.
        spare_blocks: blocks of nobody, at least 1.
    """
    block_size = config.block_size or block_size
    if config.has_cache != (layout is not None):
        raise ValueError(f"layout = {layout!r} with attn_type = {config.attn_type!r}: only layers with a cache have one")
    if requests is None:
        requests = random_requests(seed, config, block_size=block_size)
    generator = torch.Generator().manual_seed(seed)
    dtype = PLAIN_DTYPES[config.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def draw_key_and_value(tokens: int) -> tuple[Tensor, Tensor]:
        if config.kv_lora_rank is not None:
            return normal(tokens, config.kv_lora_rank), normal(tokens, config.head_size - config.kv_lora_rank)
        heads = config.num_kv_heads
        return normal(tokens, heads, config.head_size), normal(tokens, heads, config.value_head_size)

    query_lens = torch.tensor([query_len for query_len, _ in requests])
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    tokens = int(query_start_loc[-1])
    key, value = draw_key_and_value(tokens if config.attn_type != "encoder_decoder" else 0)
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    width = config.head_size if nope is None or rope is None else nope + rope  # MLA: that of the decompressed form
    fields: dict[str, object] = {}
    if config.alibi:  # the paper's slopes for a power of two of heads
        fields["alibi_slopes"] = torch.exp2(-8.0 * torch.arange(1, config.num_heads + 1) / config.num_heads)
    if config.sinks:
        fields["sinks"] = normal(config.num_heads)
    if config.mm_prefix:
        rng = random.Random(f"ranges {seed}")
        fields["mm_prefix_ranges"] = tuple(_random_ranges(rng, seq_len) for _, seq_len in requests)
    if config.cache_dtype in FP8_DTYPES:
        count = (config.num_kv_heads,) if config.per_head_quant_scales else ()
        # Not a power of two, so that a scale left out or applied twice shows.
        fields["k_scale"], v_scale = (0.01 + 0.05 * torch.rand((2, *count), generator=generator)).unbind()
        fields["v_scale"] = None if config.mla else v_scale
        fields["q_scale"] = 0.01 + 0.05 * torch.rand((), generator=generator)
    if layout is not None:
        order = torch.Generator().manual_seed(seed + 1)
        block_table = _random_block_table(requests, block_size, spare_blocks, order)
        positions = torch.cat([torch.arange(seq_len - query_len, seq_len) for query_len, seq_len in requests])
        slot_mapping = slot_mapping_reference(block_table, positions, block_size, query_start_loc)
        cache = _poisoned_cache(layout, config, int(block_table.max()) + 1, block_size)
        scales = {"k_scale": fields.get("k_scale"), "v_scale": fields.get("v_scale")}
        for row, (query_len, seq_len) in zip(block_table, requests, strict=True):
            cached = seq_len if config.attn_type == "encoder_decoder" else max(0, seq_len - query_len)
            slots = slot_mapping_reference(row, torch.arange(cached), block_size)
            write_reference(cache, *draw_key_and_value(cached), slots, layout, config, **scales)  # type: ignore[arg-type]
