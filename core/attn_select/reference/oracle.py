"""Attention in plain float64, written to be read: what every backend is held to.

For a query row at position i, keys at positions j, and per query head h (KV head ``h // group``)::

    s_j  = scale * q . k_j                               scores (arXiv 1706.03762)
    s_j  = cap * tanh(s_j / cap)                         logits soft cap (Gemma 2, arXiv 2408.00118)
    s_j -= slope_h * |i - j|                             ALiBi (arXiv 2108.12409)
    lse  = log(exp(sink_h) + sum_j exp(s_j))             over the keys that the row sees; no sink: exp(sink_h) = 0
    out  = sum_j exp(s_j - lse) * v_j

The order, cap before bias before mask, is FlashAttention-2's and vLLM's Triton kernel's. Conventions:

- *Positions.* Keys stand at 0 to S-1; row i of T stands at ``S - T + i``, so that the last row sees the last key.
- *Sliding window.* A causal row sees itself and ``window - 1`` tokens before it; without causality also ``window - 1``
  tokens after it, which is vLLM's reading (``abs(i - j) < window``). Beware of transformers: its bidirectional masks
  take ``abs(i - j) <= sliding_window``, its flash path subtracts one, and ModernBERT adds one in between.
- *Chunks* (``attention_chunk_size``, Llama 4): a row sees no key of an earlier chunk, ``j // size == i // size``.
- *Trees of drafts* (``tree_mask``): of its own step's keys a row sees its ancestors and itself. Causality, windows and
  ALiBi go by the place in the sequence, as in vLLM's TREE_ATTN (``qq_bias``), not by the depth in the tree.
- *Multimodal prefix.* A range ``(first, last)``, both inclusive: its tokens see each other in both directions. The
  ranges widen the mask, ``(causal and window) or range``, as in vLLM; Gemma 4 alone clamps them to the window.
- *ALiBi* takes the distance, which for keys at or before the row equals ``slope * (j - i)``. Kernels add
  row constants of their own (FlashAttention-2 under causality ``slope * j``, vLLM's Triton kernel
  ``slope * (j - context_len)``): the output is the same, the LSE is not. For keys after the row FlashAttention-2 and
  models with bidirectional ALiBi take the distance; vLLM's Triton kernel rewards them instead.
- *LSE* is the natural logarithm of the denominator that the output was divided by. So it includes a sink, and merging
  partials is exact when the sink was given to one of them. (FlashAttention does the same; FlashMLA's LSE leaves
  the sink out: ``logaddexp(lse, sink)``.) A row that sees no key has output 0, and LSE -inf or its sink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.features import PER_HEAD

_MAX_SCORES = 2**24
"""Scores held at once: 128 MiB. Longer queries are taken in chunks of rows."""


def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_ranges: Sequence[tuple[int, int]] = (),
    query_positions: Tensor | None = None,
    tree_mask: Tensor | None = None,
    spread: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from one request's query rows to its keys. The module's docstring has the formula.

    Args:
        query: ``(T, H, D)``, any floating dtype, as all tensors here.
        keys: ``(S, Hkv, D)``; ``Hkv`` divides ``H``. Keys that no row sees may hold anything, NaN included.
        values: ``(S, Hkv, Dv)``.
        scale: factor on ``q . k``; there is no default, since MLA's is not ``D ** -0.5``.
        causal: a row sees no key after itself.
        sliding_window: tokens that a row sees on each side that the mask allows, itself included.
        attention_chunk_size: tokens of a chunk, which a row sees no key outside of.
        logits_soft_cap: ``cap`` in logits.
        alibi_slopes: ``(H,)``.
        sinks: ``(H,)`` logits that count in the denominator only; neither scaled nor capped.
        mm_prefix_ranges: ``(first, last)`` positions, inclusive.
        query_positions: ``(T,)`` integer positions of the rows; None: the last T of the S keys. To attend to a part of
            a request's keys, give positions relative to the first key of the part.
        tree_mask: bool ``(T, T)``, which of the last T keys, its own step's, a row sees; None: the rest decides.
        spread: float64 ``(T, H)``, filled where given: the norm of each row if its terms were orthogonal, the root of
            ``sum_j w_j^2 ||v_j||^2``. Terms that are rounded one by one have an error in proportion to it, also where
            they cancel.

    Returns:
        Output float64 ``(T, H, Dv)`` and LSE float64 ``(T, H)``, natural logarithm.
    """
    rows, heads, head_size = query.shape
    seq_len, kv_heads, value_size = values.shape
    if keys.shape != (seq_len, kv_heads, head_size) or heads % kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}: accepted are "
            "(T, H, D), (S, Hkv, D) and (S, Hkv, Dv) with Hkv dividing H"
        )
    if query_positions is None:
        query_positions = last_positions(rows, seq_len, query.device)
    sink = torch.full((heads,), -torch.inf) if sinks is None else sinks
    sink = sink.to(query.device, torch.float64)

    output = query.new_empty((rows, heads, value_size), dtype=torch.float64)
    lse = query.new_empty((rows, heads), dtype=torch.float64)
    step = max(1, _MAX_SCORES // (heads * max(1, seq_len)))
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        positions = query_positions[chunk]
        tree = None if tree_mask is None else tree_mask[chunk]
        mask = (causal, sliding_window, attention_chunk_size, mm_prefix_ranges, tree)
        visible = visible_keys(positions, seq_len, *mask)
        # Zero times NaN is NaN: a value that no row sees must not reach the sum, not even with weight zero.
        seen = visible.any(dim=0)[:, None, None]
        k = torch.where(seen, keys.double(), 0.0)
        v = torch.where(seen, values.double(), 0.0)
        q = query[chunk].double().reshape(-1, kv_heads, heads // kv_heads, head_size)

        scores = scale * torch.einsum("tkgd,skd->kgts", q, k).flatten(0, 1)  # (H, T, S)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if alibi_slopes is not None:
            distance = (positions[:, None] - torch.arange(seq_len, device=query.device)).abs()
            scores = scores - alibi_slopes.to(scores)[:, None, None] * distance
        scores = scores.masked_fill(~visible, -torch.inf)

        with_sink = torch.cat([scores, sink[:, None, None].expand(-1, len(positions), 1)], dim=-1)
        row_lse = torch.logsumexp(with_sink, dim=-1)  # (H, T)
        # -inf - -inf is NaN: a row without keys and sink keeps its scores of -inf, and so gets weights of 0.
        weights = torch.exp(scores - row_lse.masked_fill(row_lse.isneginf(), 0.0)[..., None])
        weights = weights.reshape(kv_heads, heads // kv_heads, len(positions), seq_len)
        output[chunk] = torch.einsum("kgts,skd->tkgd", weights, v).flatten(1, 2)
        lse[chunk] = row_lse.T
        if spread is not None:
            squares = torch.einsum("kgts,sk->tkg", weights.square(), v.square().sum(dim=-1))
            spread[chunk] = squares.flatten(1).sqrt()
    return output, lse


def last_positions(rows: int, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 ``(rows,)``: where the last ``rows`` tokens of ``seq_len`` stand (negative where there are more)."""
    return torch.arange(seq_len - rows, seq_len, device=device)


MASK = ("causal", "sliding_window", "attention_chunk_size", "mm_prefix_ranges", "tree_mask")
"""The arguments of ``attention_reference`` that say which keys a row sees, in the order of ``visible_keys``."""


def visible_keys(
    query_positions: Tensor,
    seq_len: int,
    causal: bool,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    mm_prefix_ranges: Sequence[tuple[int, int]],
    tree_mask: Tensor | None,
) -> Tensor:
    """Return bool ``(T, seq_len)``: whether the row at ``query_positions[t]`` sees the key at position s."""
    i = query_positions[:, None]
    j = torch.arange(seq_len, device=query_positions.device)[None, :]
    visible = (j <= i) if causal else torch.ones_like(j <= i)
    if sliding_window is not None:
        visible = visible & ((i - j).abs() < sliding_window)
    if attention_chunk_size is not None:
        visible = visible & (i // attention_chunk_size == j // attention_chunk_size)
    if tree_mask is not None:
        own = min(tree_mask.shape[1], seq_len)  # there may be more rows than keys: the first ones stand before key 0
        visible[:, seq_len - own :] &= tree_mask[:, tree_mask.shape[1] - own :]
    for first, last in mm_prefix_ranges:
        visible = visible | ((first <= i) & (i <= last) & (first <= j) & (j <= last))
    return visible


def attention_options(config: AttentionConfig, **per_head: Tensor | None) -> dict[str, Any]:
    """Return the mask and score options of a config, as the arguments of ``attention_reference``.

    Attention is causal where the type is ``decoder`` and ``non_causal`` is not set.

    Args:
        per_head: ``alibi_slopes`` and ``sinks`` ``(H,)``, what ``attn_select.layer.features.PER_HEAD`` names.

    Raises:
        ValueError: one is missing where the config asks for it, or given where not.
    """
    for name, field in PER_HEAD.items():
        wanted = getattr(config, field)
        if wanted != (per_head.get(name) is not None):
            raise ValueError(f"{name} {'missing' if wanted else 'given'}, but the layer has {field} = {wanted}")
    return {
        "causal": config.attn_type == "decoder" and not config.non_causal,
        "sliding_window": config.sliding_window,
        "attention_chunk_size": config.attention_chunk_size,
        "logits_soft_cap": config.logits_soft_cap,
        **per_head,
    }


def varlen_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    config: AttentionConfig,
    scale: float,
    *,
    rows: Tensor | None = None,
    spread: Tensor | None = None,
    **per_head: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend within each request over keys and values that are packed one request after another (encoders, no cache).

    Args:
        query: ``(T, H, D)``, or of the tokens ``rows`` alone.
        keys: ``(S, Hkv, D)``; values ``(S, Hkv, Dv)``.
        query_start_loc: ``(B + 1,)`` prefix sums of the query lengths; key_start_loc likewise.
        rows: integers ``(N,)`` in order, which tokens ``query`` is of; None: all.
        spread: float64 ``(N, H)``, filled as ``attention_reference`` does.
        per_head: as in ``attention_options``.

    Returns:
        Output float64 ``(T, H, Dv)`` and LSE float64 ``(T, H)``; rows of no request have 0 and -inf.
    """
    options = attention_options(config, **per_head)
    output = query.new_zeros((*query.shape[:2], values.shape[2]), dtype=torch.float64)
    lse = torch.full_like(output[..., 0], -torch.inf)
    key_bounds = key_start_loc.tolist()
    lens = key_start_loc.diff().tolist()
    for request, mine, options["query_positions"] in rows_by_request(query, query_start_loc, lens, rows):
        options["spread"] = None if spread is None else spread[mine]
        part = slice(key_bounds[request], key_bounds[request + 1])
        output[mine], lse[mine] = attention_reference(query[mine], keys[part], values[part], scale=scale, **options)
    return output, lse


def rows_by_request(
    query: Tensor, query_start_loc: Tensor, seq_lens: Sequence[int], rows: Tensor | None
) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield requests with the rows of ``query`` that are theirs, and their positions; ``rows`` as in the references.

    A request's tokens of this step are the last of its ``seq_lens``.
    """
    tokens = torch.arange(len(query), device=query.device) if rows is None else rows
    edges = torch.searchsorted(tokens, query_start_loc.to(tokens)).tolist()
    for request, mine in enumerate(map(slice, edges, edges[1:])):
        if mine.start < mine.stop:
            yield request, mine, tokens[mine] - query_start_loc[request + 1] + seq_lens[request]


def merge_reference(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint parts of the keys into attention over all of them.

    ``lse = log(sum_p exp(lse_p))`` and ``out = sum_p exp(lse_p - lse) * out_p`` (online softmax, Milakov and
    Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, section 3.1; used across blocks of keys by
    Flash-Decoding and across prefix and suffix by cascade attention). A sink must be in exactly one part.

    Args:
        outputs: per part ``(T, H, Dv)``. Where the part's LSE is -inf its output is not read.
        lses: per part ``(T, H)``, natural logarithm.

    Returns:
        Output float64 ``(T, H, Dv)``, LSE float64 ``(T, H)``; 0 and -inf where all parts are -inf.
    """
    stacked = torch.stack([lse.double() for lse in lses])
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.masked_fill(lse.isneginf(), 0.0))[..., None]
    parts = torch.stack([output.double() for output in outputs])
    return torch.where(weights == 0, 0.0, weights * parts).sum(dim=0), lse
