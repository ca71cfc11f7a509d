"""The oracle on a paged KV cache: reading and writing every layout of ``attn_select.layer.layouts``, and attention.

Only the slots that some query row sees are read, so memory around them may hold anything, NaN included. All of it is
plain indexing with ``slot = block_table[request, pos // block_size] * block_size + pos % block_size`` (PagedAttention,
arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import (
    FLASH_ATTN_NHD,
    FLASHINFER_HND,
    FP8_DS_MLA,
    FP8_DS_MLA_BYTES,
    LAYOUTS,
    MLA,
    PAGED_ATTENTION,
)
from attn_select.reference.oracle import MASK, attention_options, attention_reference, rows_by_request, visible_keys
from attn_select.reference.oracle_quant import (
    FP8_DTYPES,
    decode,
    encode,
    pack_fp8_ds_mla,
    quantize_query,
    unpack_fp8_ds_mla,
)

Scale = Tensor | float | None


def paged_reference(
    query: Tensor,
    kv_cache: Tensor,
    layout: str,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    config: AttentionConfig,
    scale: float,
    *,
    mm_prefix_ranges: Sequence[Sequence[tuple[int, int]]] | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    query_dtype: str | None = None,
    q_scale: Scale = None,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
    block_size: int | None = None,
    spread: Tensor | None = None,
    latents: Tensor | None = None,
    longest_decode: int = 0,
    **per_head: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend per request over a paged cache that already holds this step's tokens.

    Args:
        query: ``(T, H, D)``, or of the tokens ``rows`` alone; with MLA the absorbed query
            ``(T, H, kv_lora_rank + qk_rope_head_dim)``.
        kv_cache: as ``layout`` has it; FP8 as torch's FP8 dtypes or as uint8.
        layout: a name from ``attn_select.layer.layouts``.
        block_table: integers ``(B, W)``. Not read are the entries behind a request's last block, and those of blocks
            that lie outside every row's window.
        query_start_loc: integers ``(B + 1,)``, prefix sums of the query lengths.
        seq_lens: integers ``(B,)``, keys per request, the step's own included.
        config: mask, soft cap and cache dtype come from here.
        scale: factor on ``q . k``.
        mm_prefix_ranges: per request ``(first, last)`` positions, inclusive.
        k_scale: FP8 scale, one number or ``(Hkv,)``; v_scale likewise. With MLA ``k_scale`` is the scale of the latent,
            which holds the values too.
        query_dtype: an FP8 dtype where the path wants the query quantised; ``q_scale`` is its scale, as in
            ``quantize_query``.
        tree_mask: bool ``(T, M)``, which of its request's tokens in this step a token sees; those with more than M
            tokens are causal.
        rows: integers ``(N,)`` in order, which tokens ``query`` is of; None: all.
        block_size: tokens per block of the table; None: as many as in a block of the cache.
        spread: float64 ``(N, H)``, filled as ``attention_reference`` does.
        latents: ``(T, kv_lora_rank + qk_rope_head_dim)`` of this step's tokens. Requests with more than
            ``longest_decode`` of them see these as they are, with a query that is not quantised; None: none do.
        per_head: as in ``attention_options``.

    Returns:
        Output float64 ``(T, H, Dv)``, with MLA the latent ``(T, H, kv_lora_rank)``, and natural-log LSE float64
        ``(T, H)``; rows of no request have 0 and -inf.
    """
    options = attention_options(config, **per_head)
    value_size = config.kv_lora_rank or config.value_head_size
    size = block_size or token_views(kv_cache, layout, config)[0].shape[1]
    output = query.new_zeros((*query.shape[:2], value_size), dtype=torch.float64)
    lse = torch.full_like(output[..., 0], -torch.inf)
    lens, counts = seq_lens.tolist(), query_start_loc.diff().tolist()
    for request, mine, positions in rows_by_request(query, query_start_loc, lens, rows):
        seq_len, count = lens[request], counts[request]
        options["query_positions"] = positions
        options["spread"] = None if spread is None else spread[mine]
        options["mm_prefix_ranges"] = mm_prefix_ranges[request] if mm_prefix_ranges is not None else ()
        options["tree_mask"] = None
        if tree_mask is not None and count <= tree_mask.shape[1]:
            options["tree_mask"] = tree_mask[positions - seq_len + int(query_start_loc[request + 1]), :count]
        visible = visible_keys(positions, seq_len, *(options[name] for name in MASK))
        seen = visible.any(dim=0).nonzero().flatten()
        slots = slot_mapping_reference(block_table[request], seen, size)
        keys = query.new_zeros((seq_len, config.num_kv_heads, query.shape[2]), dtype=torch.float64)
        values = keys.new_zeros((seq_len, config.num_kv_heads, value_size))
        keys[seen], values[seen] = gather_reference(kv_cache, layout, slots, config, k_scale=k_scale, v_scale=v_scale)
        asked = query[mine]
        if latents is not None and count > longest_decode:
            own = latents[int(query_start_loc[request]) : int(query_start_loc[request + 1])]
            keys[seq_len - count :, 0], values[seq_len - count :, 0] = own.double(), own[:, :value_size].double()
        elif query_dtype is not None:
            asked = quantize_query(asked, query_dtype, q_scale)
        output[mine], lse[mine] = attention_reference(asked, keys, values, scale=scale, **options)
    return output, lse


def slot_mapping_reference(
    block_table: Tensor, positions: Tensor, block_size: int, query_start_loc: Tensor | None = None
) -> Tensor:
    """Return the slot of each token, int64 ``(T,)``: ``block * block_size + offset``; -1 where there is none.

    Args:
        block_table: integers ``(B, W)``, or ``(W,)`` for one request.
        positions: integers ``(T,)``, positions within the request; a negative one has no slot.
        block_size: tokens per block; 1 for token-level pools.
        query_start_loc: integers ``(B + 1,)``, which tokens belong to which request. Tokens of none (padding)
            have no slot. Left out with a ``(W,)`` table.
    """
    bounds = [0, len(positions)] if query_start_loc is None else query_start_loc.tolist()
    slots = torch.full_like(positions, -1, dtype=torch.int64)
    for request, row in enumerate(block_table.reshape(-1, block_table.shape[-1])):
        tokens = torch.arange(bounds[request], bounds[request + 1], device=positions.device)
        tokens = tokens[positions[tokens] >= 0]
        position = positions[tokens].long()
        slots[tokens] = row[position // block_size].long() * block_size + position % block_size
    return slots


def gather_reference(
    kv_cache: Tensor,
    layout: str,
    slots: Tensor,
    config: AttentionConfig,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> tuple[Tensor, Tensor]:
    """Read the tokens at ``slots`` (integers ``(N,)``) and decode them.

    Returns:
        Keys float64 ``(N, Hkv, D)`` and values float64 ``(N, Hkv, Dv)``; with MLA ``(N, 1, kv_lora_rank +
        qk_rope_head_dim)`` and its first ``kv_lora_rank`` columns.

    Raises:
        ValueError: a slot lies outside the cache, or the cache's shape is not the layout's.
    """
    views = token_views(kv_cache, layout, config)
    blocks, offsets = _blocks_and_offsets(slots, views[0])
    if layout in (MLA, FP8_DS_MLA):
        if v_scale is not None:
            raise ValueError(f"v_scale is given: layout {layout} keeps values in the latent, which k_scale scales")
        stored = views[0][blocks, offsets]
        packed = layout == FP8_DS_MLA
        keys = unpack_fp8_ds_mla(stored) if packed else decode(stored, config.cache_dtype, k_scale)
        return keys[:, None], keys[:, None, : config.kv_lora_rank]
    stored_keys, stored_values = (view[blocks, offsets].flatten(2) for view in views)
    keys = decode(stored_keys, config.cache_dtype, k_scale)
    return keys, decode(stored_values, config.cache_dtype, v_scale)


def write_reference(
    kv_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Write tokens into the cache, in place. Nothing but their slots changes.

    Args:
        key: ``(N, Hkv, D)``; with MLA the normalised latent ``kv_c`` ``(N, kv_lora_rank)``.
        value: ``(N, Hkv, Dv)``; with MLA ``k_pe`` ``(N, qk_rope_head_dim)``, with or without a head axis of 1.
        slot_mapping: integers ``(N,)``; a token with slot -1 is skipped.
    """
    keep = slot_mapping >= 0
    key, value = key[keep], value[keep]
    views = token_views(kv_cache, layout, config)
    blocks, offsets = _blocks_and_offsets(slot_mapping[keep], views[0])
    if layout == FP8_DS_MLA:
        views[0][blocks, offsets] = pack_fp8_ds_mla(key, value.flatten(1))
    elif layout == MLA:
        latent = torch.cat([key, value.flatten(1)], dim=-1)
        views[0][blocks, offsets] = encode(latent, config.cache_dtype, k_scale)
    else:
        for view, numbers, scale in zip(views, (key, value), (k_scale, v_scale), strict=True):
            stored = encode(numbers, config.cache_dtype, scale)
            view[blocks, offsets] = stored.reshape(len(stored), *view.shape[2:])


def token_views(kv_cache: Tensor, layout: str, config: AttentionConfig) -> tuple[Tensor, ...]:
    """Return strided views of K and V, ``(num_blocks, block_size, ...)``; MLA layouts have one view for both."""
    # The last axes are ``(Hkv, D)`` and ``(Hkv, Dv)``; the K of PAGED_ATTENTION has ``(Hkv, D / x, x)``. FP8 is uint8.
    if layout not in LAYOUTS:
        raise ValueError(f"unknown KV-cache layout {layout!r}; known: {', '.join(LAYOUTS)}")
    first = kv_cache.view(torch.uint8) if config.cache_dtype in FP8_DTYPES else kv_cache
    heads, size, value_size = config.num_kv_heads, config.head_size, config.value_head_size
    views: tuple[Tensor, ...]
    expected: list[tuple[int, ...]]
    if layout in (MLA, FP8_DS_MLA):
        views = (first,)
        expected = [(FP8_DS_MLA_BYTES if layout == FP8_DS_MLA else size,)]
    elif layout == PAGED_ATTENTION:
        x = 16 // first.element_size()
        # (2, num_blocks, heads, block_size * size), with both halves as wide as K.
        k = first[0].view(first.shape[1], heads, size // x, -1, x)
        v = first[1].view(first.shape[1], heads, -1, k.shape[3])[:, :, :value_size]
        views = (k.permute(0, 3, 1, 2, 4), v.permute(0, 3, 1, 2))
        expected = [(heads, size // x, x), (heads, value_size)]
    else:
        k, v = (first[0], first[1]) if layout == FLASH_ATTN_NHD else (first[:, 0], first[:, 1])
        if layout == FLASHINFER_HND:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        views = (k[..., :size], v[..., :value_size])
        expected = [(heads, size), (heads, value_size)]
    if [tuple(view.shape[2:]) for view in views] != expected:
        raise ValueError(
            f"kv_cache of shape {tuple(kv_cache.shape)} is not of layout {layout} with {heads} KV heads of size {size} "
            f"and values of size {value_size}"
        )
    return views


def _blocks_and_offsets(slots: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
    """Split slots into block and offset, and refuse those outside the cache (a negative index would wrap)."""
    num_blocks, block_size = view.shape[:2]
    outside = slots[(slots < 0) | (slots >= num_blocks * block_size)]
    if len(outside):
        raise ValueError(
            f"slot {int(outside[0])} is outside the cache: accepted are 0 to {num_blocks * block_size - 1}"
        )
    return slots.long() // block_size, slots.long() % block_size
