"""The shared operations in torch (``attn_select.runtime.ops`` calls them). None synchronises with a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FP8_DS_MLA, MLA, PAGED_ATTENTION
from attn_select.runtime.kv_cache import key_value_views, paged_attention_views
from attn_select.runtime.rank_memory import RankMemory
from attn_select.runtime.scales import Scales
from attn_select.runtime.torch_dtypes import FP8_DTYPES

DS_MLA_LATENT, DS_MLA_TILE = 512, 128
"""Of a 656-byte token: latent values, and how many of them share one scale (deepseek-ai/FlashMLA README)."""


def quantize_fp8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``numbers / scale`` saturated to an FP8 ``dtype``, rounded to nearest even; ``scale`` float32 ``()``."""
    limit = torch.finfo(dtype).max
    return (numbers.float() / scale).clamp_(-limit, limit).to(dtype)


def concat_and_quantize_mla_q(latent: Tensor, rope: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a query's parts ``(T, H, R)`` and ``(T, H, Pr)`` side by side, quantised: ``(T, H, R + Pr)``, contiguous.

    Args:
        latent, rope: any strides but in the last dimension.
        scale, dtype: as ``quantize_fp8`` has them.
    """
    return quantize_fp8(torch.cat((latent, rope), dim=-1), scale, dtype)


def slots_in_front(topk_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots of each token in front of its padding, int32 ``(T, K)``, and how many they are, int32 ``(T,)``.

    For kernels that read the first slots of a row. Slots keep their order; behind the last stands -1.

    Args:
        topk_indices: int32 ``(T, K)``, as ``MLAAttention.forward`` takes them: negative ones are padding, anywhere.
    """
    chosen = topk_indices >= 0
    counts = chosen.sum(1, dtype=torch.int32)
    # What is left out goes behind the end, one place that is cut off.
    place = torch.where(chosen, chosen.cumsum(1) - 1, topk_indices.shape[1])
    front = topk_indices.new_full((topk_indices.shape[0], topk_indices.shape[1] + 1), -1)
    return front.scatter_(1, place, topk_indices)[:, :-1].contiguous(), counts


def _stored(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(T, heads, size)`` numbers as the cache holds them, FP8 as its bytes."""
    if dtype not in FP8_DTYPES.values():
        return numbers.to(dtype)
    per_head = scale.reshape(-1, 1) if scale.ndim else scale
    return quantize_fp8(numbers, per_head, dtype).view(torch.uint8)


def scatter_rows(view: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Write ``rows (T, …)`` into ``view (num_blocks, block_size, …)`` at their slots, leaving out slot -1."""
    if len(slot_mapping):
        made = _kept if view.device.type == "cpu" else _repeated
        slots, rows = made(view, rows, slot_mapping)
        view.index_put_(_places(view, slots), rows)


def _kept(view: Tensor, rows: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the rows that have a slot by a mask: on a GPU, its host would wait for their number."""
    keep = slot_mapping >= 0
    return (slot_mapping, rows) if bool(keep.all()) else (slot_mapping[keep], rows[keep])


def _repeated(view: Tensor, rows: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Make rows without a slot repeat the write of the first row that has one; if none has, write slot 0 back."""
    keep = slot_mapping >= 0
    # ``first`` is 0 where none has a slot; its target is -1 then, and slot 0 is written with what it already holds.
    first = keep.int().argmax().reshape(1)
    target = slot_mapping.index_select(0, first).clamp_min(0)
    flags = (-1, *[1] * (rows.ndim - 1))
    # Several rows then write one slot, but all of them the same numbers, so their order does not matter.
    instead = torch.where(keep.any().reshape(flags), rows.index_select(0, first), view[_places(view, target)])
    return torch.where(keep, slot_mapping, target), torch.where(keep.reshape(flags), rows, instead)


def _places(view: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return block and offset of each slot."""
    size = view.shape[1]
    return torch.div(slots, size, rounding_mode="floor"), slots % size


def _bytes(view: Tensor) -> Tensor:
    """Return an FP8 view as bytes: torch's index operations do not support FP8."""
    return view.view(torch.uint8) if view.dtype in FP8_DTYPES.values() else view


def stored_views(kv_cache: Tensor, layout: str, config: AttentionConfig) -> list[Tensor]:
    """Return K and V, or the latents, as views ``(num_blocks, block_size, …)`` of what is stored; FP8 as bytes."""
    stored = _bytes(kv_cache)
    if layout in (MLA, FP8_DS_MLA):
        return [stored]
    if layout == PAGED_ATTENTION:
        k, v = paged_attention_views(stored, config)
        return [k.permute(0, 3, 1, 2, 4), v.permute(0, 3, 1, 2)]
    return [*key_value_views(stored, layout, config)]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Write keys ``(T, num_kv_heads, head_size)`` and values ``(T, num_kv_heads, value_head_size)`` into a paged cache.

    Args:
        kv_cache: one layer's cache in ``layout``.
        slot_mapping: int64 ``(T,)``; tokens with slot -1 are skipped.
        scales: an FP8 cache stores ``x / scale``, saturated and rounded to nearest even; others ignore them.
    """
    views = stored_views(kv_cache, layout, config)
    for view, rows, scale in zip(views, (key, value), (scales.k, scales.v), strict=True):
        stored = _stored(rows, scale, kv_cache.dtype)
        scatter_rows(view, stored.reshape(len(rows), *view.shape[2:]), slot_mapping)


def concat_and_cache_mla(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Write latents ``(T, kv_lora_rank)`` and rope parts ``(T, qk_rope_head_dim)`` into a latent cache.

    Args:
        layout: ``MLA``, where an FP8 cache stores ``x / scales.k``, or ``FP8_DS_MLA``, which has scales of its own.
        slot_mapping: int64 ``(T,)``; tokens with slot -1 are skipped.
    """
    if layout == FP8_DS_MLA:
        scatter_rows(kv_cache, _packed(kv_c_normed, k_pe), slot_mapping)
        return
    latent = torch.cat([kv_c_normed, k_pe], dim=-1)
    scatter_rows(_bytes(kv_cache), _stored(latent, scales.k, kv_cache.dtype), slot_mapping)


def _packed(latent: Tensor, rope: Tensor) -> Tensor:
    """Return 656 bytes a token: 512 e4m3, 4 float32 scales (powers of two, at least 1e-4), 64 bfloat16."""
    tiles = latent.float().reshape(-1, DS_MLA_LATENT // DS_MLA_TILE, DS_MLA_TILE)
    scales = tiles.abs().amax(dim=-1) / torch.finfo(torch.float8_e4m3fn).max
    scales = torch.exp2(scales.clamp_min(1e-4).log2().ceil())
    codes = quantize_fp8(tiles, scales.unsqueeze(-1), torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    rope = rope.to(torch.bfloat16).contiguous()
    return torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], dim=-1)


def unpacked_ds_mla(packed: Tensor) -> Tensor:
    """Return float32 ``(N, 576)``, latent and rope part, of uint8 ``(N, 656)`` tokens of layout ``FP8_DS_MLA``."""
    tiles = DS_MLA_LATENT // DS_MLA_TILE
    rope_bytes = packed.shape[1] - DS_MLA_LATENT - 4 * tiles
    codes, scales, rope = packed.split_with_sizes([DS_MLA_LATENT, 4 * tiles, rope_bytes], dim=1)
    latent = codes.view(torch.float8_e4m3fn).float().view(-1, tiles, DS_MLA_TILE)
    latent = latent * scales.contiguous().view(torch.float32).unsqueeze(2)
    return torch.cat([latent.flatten(1), rope.contiguous().view(torch.bfloat16).float()], dim=1)


def gather_cache_mla(
    kv_cache: Tensor,
    output: Tensor,
    block_table: Tensor,
    starts: Tensor,
    start_loc: Tensor,
    num_tokens: int,
    block_size: int,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Copy a range of each request's cached latents into a contiguous workspace, back in the compute dtype.

    Args:
        kv_cache: one layer's cache in layout ``MLA``.
        output: ``(at least num_tokens, head_size)`` in the compute dtype.
        block_table: int32 ``(B, W)``.
        starts: int32 ``(B,)`` on the device, first position to copy of each request.
        start_loc: int32 ``(B + 1,)`` on the device, prefix sums of the lengths to copy.
        num_tokens: their sum, known to the host.
        block_size: tokens per block of the table and the cache.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=kv_cache.device)
    # right=True: a position that equals a bound belongs to the request that begins there, and empty requests are
    # passed.
    request = torch.searchsorted(start_loc[1:], tokens, right=True)
    position = tokens - start_loc[request] + starts[request]
    blocks = block_table[request, torch.div(position, block_size, rounding_mode="floor")].long()
    offsets = (position % block_size).long()
    stored = _bytes(kv_cache)[blocks, offsets]
    if kv_cache.dtype in FP8_DTYPES.values():
        output[:num_tokens] = stored.view(kv_cache.dtype).float() * scales.k
    else:
        output[:num_tokens] = stored


def flatten_block_table(block_table: Tensor, indptr: Tensor, out: Tensor) -> None:
    """Write the first blocks of each row one row behind the other, as FlashInfer wants its page indices.

    Args:
        block_table: int32 ``(B, W)``, B from 1; ``indptr[b + 1] - indptr[b]`` of row b are taken.
        indptr: int32 ``(B + 1,)`` on the device, prefix sums of their numbers.
        out: int32, at least ``indptr[-1]`` long: ``out[indptr[b]:indptr[b + 1]]`` is row b's, the rest stays as it is.
    """
    places = torch.arange(len(out), dtype=torch.int32, device=out.device)
    # Places behind the last row have no row: they are clamped to the last one, and left as they are by the last line.
    row = torch.searchsorted(indptr[1:], places, right=True).clamp_max_(len(block_table) - 1)
    column = (places - indptr[row]).clamp_max_(block_table.shape[1] - 1)
    out.copy_(torch.where(places < indptr[-1], block_table[row, column], out))


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merge attention over two disjoint sets of keys into attention over both.

    ``lse = log(exp(a) + exp(b))`` and ``out = exp(a - lse) * out_a + exp(b - lse) * out_b``, in float32 (online
    softmax, arXiv 1805.02867). A partial whose LSE is -inf is not read; where both are, the result is 0 and -inf.

    Args:
        output: ``(T, H, Dv)``, written; may be one of the partial outputs.
        prefix_output, suffix_output: ``(T, H, Dv)``.
        prefix_lse, suffix_lse: float32 ``(T, H)``, natural logarithm.
        output_lse: float32 ``(T, H)``, written where given; may be one of the partial LSEs.
    """
    # Weights relative to the larger LSE are exact to a rounding, however large both are; the larger one has weight 1.
    most = torch.maximum(prefix_lse, suffix_lse)
    most = most.masked_fill(most.isneginf(), 0.0)
    merged = total = torch.zeros((), dtype=torch.float32, device=output.device)
    for part, part_lse in ((prefix_output, prefix_lse), (suffix_output, suffix_lse)):
        weight = torch.exp(part_lse - most)
        total = total + weight
        weight = weight.unsqueeze(-1)
        merged = merged + torch.where(weight == 0, 0.0, weight * part.float())
    output.copy_(merged / total.clamp_min(1.0).unsqueeze(-1))
    if output_lse is not None:
        output_lse.copy_(most + torch.log(total))


def pack_attn_states(output: Tensor, lse: Tensor, packed_output: Tensor, packed_lse: Tensor) -> None:
    """Copy outputs ``(*R, Dv)`` and their LSEs ``(*R)``, of any strides, to where a message holds them."""
    # ``R`` has four dimensions: ranks, tokens, KV heads and the query heads of each.
    packed_output.copy_(output)
    packed_lse.copy_(lse)


def merge_rank_states(
    parts: Tensor,
    lses: Tensor,
    own: int,
    sinks: Tensor | None,
    output: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merge attention over disjoint sets of keys, one on each of N ranks, or weigh one of the partial results.

    The weight of partial i is ``exp(lse_i) / sum_j exp(lse_j)``, in float32. A partial whose LSE is -inf is not read;
    where all are, the result is 0 and -inf.

    Args:
        parts: ``(N, *R, Dv)`` of any strides but in the last dimension; with ``own`` from 0 on ``(1, *R, Dv)``. ``R``
            has two or four dimensions, tokens first, then heads or groups of them.
        lses: float32 ``(N, *R)`` of any strides, natural logarithm.
        own: -1: all partial results are merged; else the one that is given is rank ``own``'s, and is weighed.
        sinks: logits that count as one more key without a value, float32, of the shape of R without tokens; None
            for none.
        output: ``(*R, Dv)`` of any strides but in the last dimension, written.
        output_lse: float32 ``(*R)``, the LSE over all ranks, written where given.
    """
    most = lses.amax(0)
    if sinks is not None:
        most = torch.maximum(most, sinks)
    most = most.masked_fill(most.isneginf(), 0.0)
    weights = torch.exp(lses - most)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks - most)
    if own >= 0:
        # The total is of all ranks; the outputs that are weighed are this rank's alone.
        weights = weights[own : own + 1]
    weights = (weights / torch.where(total == 0, 1.0, total)).unsqueeze(-1)
    output.copy_(torch.where(weights == 0, 0.0, weights * parts.float()).sum(0))
    if output_lse is not None:
        output_lse.copy_(most + torch.log(total))


def gather_rank_heads(rows: Tensor, memory: RankMemory, kv_heads: int) -> Tensor:
    """Write this rank's heads into the memory of all ranks, and wait for theirs.

    Args:
        rows: ``(T, H, query_width)`` of this rank's heads, as many on all ranks.
        memory: the ranks'.
        kv_heads: the gathered heads lie KV head by KV head, and within one rank by rank.

    Returns:
        ``(T, N * H, query_width)`` in this rank's memory.
    """
    (tokens, heads, width), size = rows.shape, len(memory.buffers)
    shape = (heads // kv_heads, width)
    for rank in range(size):
        # Every rank writes its heads into each rank's memory, at the place of its own number.
        there = memory.queries(rank, tokens).view(tokens, kv_heads, size, *shape)
        there[:, :, memory.rank] = rows.view(tokens, kv_heads, *shape)
    memory.meet()
    return memory.queries(memory.rank, tokens)


def merge_rank_memory(
    output: Tensor, output_lse: Tensor | None, sinks: Tensor | None, memory: RankMemory, kv_heads: int, sharded: bool
) -> None:
    """Wait until all ranks have their partial results in their memory, and merge the results of this rank's heads.

    Args:
        output: ``(T, H, Dv)``, written.
        output_lse: float32 ``(T, H)``, written where given.
        sinks: float32 logits that are counted once, of the partial results' heads; None for none.
        memory: the ranks'.
        kv_heads: the heads of the results lie KV head by KV head, and within one rank by rank.
        sharded: whether this rank's heads are one of N shares; else they are all.
    """
    memory.meet()
    (tokens, heads, width), ranks = output.shape, range(len(memory.buffers))
    split, own = (len(ranks), memory.rank) if sharded else (1, 0)
    by_share, shape = (tokens, kv_heads, split, heads // kv_heads), (tokens, kv_heads, heads // kv_heads)
    merge_rank_states(
        torch.stack([memory.partial(rank, tokens).view(*by_share, width)[:, :, own] for rank in ranks]),
        torch.stack([memory.lse(rank, tokens).view(by_share)[:, :, own] for rank in ranks]),
        -1,
        None if sinks is None else sinks.view(by_share[1:])[:, own],
        output.view(*shape, width),
        None if output_lse is None else output_lse.view(shape),
    )


def causal_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    read_slots: Tensor,
    taps: Tensor,
    write_slots: Tensor,
    window_rows: Tensor,
) -> Tensor:
    """Return the convolution of a step's inputs, one filter per channel and SiLU, and write its requests' new windows.

    It gathers rows: first come the windows of the B requests, ``K - 1`` rows each, then the T inputs.

    Args:
        inputs: ``(T, C)``; the last stride is 1.
        weight: ``(C, K)``, oldest first, as in ``torch.nn.Conv1d``.
        bias: ``(C,)``, or None.
        windows: ``(num_slots, K - 1, C)`` in the dtype of the inputs. A slot that one request writes no other reads.
        read_slots: int64 ``(B,)``; below 0: a window of zeros.
        taps: int64 ``(T, K)``, the rows that each input sees.
        write_slots: int64 ``(W,)``, the slots that get a new window; -1 is the last slot.
        window_rows: int64 ``(W, K - 1)``, the rows of each.

    Returns:
        ``(T, C)`` in the dtype of the inputs, computed in float32: rounded once, whatever the chunks of a request.
    """
    # Filled, not multiplied by 0: a free slot may hold NaN.
    before = windows[read_slots.clamp(min=0)].masked_fill((read_slots < 0)[:, None, None], 0.0)
    rows = torch.cat([before.flatten(0, 1), inputs])
    # Written only now: ``rows`` is a copy of the old windows, and a request may write the slot that it reads.
    windows[write_slots] = rows[window_rows]
    found = torch.zeros(inputs.shape, device=inputs.device) if bias is None else bias.float().expand(inputs.shape)
    for tap in range(weight.shape[1]):  # one after the other: side by side they take as many times the memory
        found = torch.addcmul(found, rows[taps[:, tap]].float(), weight[:, tap].float())
    return functional.silu(found).to(inputs.dtype)
