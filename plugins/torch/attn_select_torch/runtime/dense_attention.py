"""Attention on dense tensors by matmul and softmax, with features that fused kernels lack (soft cap, sinks, LSE).

Also who sees whom: the mask from positions, and on the host the keys that a range of rows can see at all. The formula
is defined by ``attn_select.reference.oracle``: scale, soft cap, ALiBi, mask, sink; LSE is the natural logarithm, sinks
included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_select.runtime.terms import Terms

MAX_SCORES = 2**24
"""Scores held at once, 64 MiB in float32 and as much again for the weights; longer queries go in chunks of rows."""

FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What ``scaled_dot_product_attention`` runs on a CPU. It is called directly where its log-sum-exp is wanted."""

Range = tuple[int, int]


def visible_keys(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    causal: bool,
    sliding_window: int | None = None,
    mm_prefix_ranges: Sequence[Range] = (),
    drafts: Tensor | None = None,
) -> Tensor | None:
    """Return bool ``(..., T, S)``, True where a row sees a key; None where every row sees every key.

    Positions are integers ``(..., T)`` and ``(..., S)``, the keys' in any order; leading dimensions broadcast. A causal
    row sees no key behind itself. With a window it sees itself and ``window - 1`` tokens before, if not causal also as
    many after (``|i - j| < window``). ``mm_prefix_ranges`` are inclusive ``(first, last)`` positions that see each
    other in both directions, in spite of all that. ``drafts`` is the bool of ``drafts_seen``, where drafts form a tree.
    """
    if not causal and sliding_window is None:
        return None
    i, j = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
    distance = i - j
    if sliding_window is None:
        seen = distance >= 0
    elif causal:
        seen = (distance >= 0) & (distance < sliding_window)
    else:
        seen = distance.abs() < sliding_window
    if drafts is not None:
        seen = seen & drafts
    for first, last in mm_prefix_ranges:
        seen = seen | ((first <= i) & (i <= last) & (first <= j) & (j <= last))
    return seen


def drafts_seen(tree_rows: Tensor, places: Tensor) -> Tensor:
    """Return bool ``(..., T, S)``: which keys the rows of a tree of drafts see, causality aside.

    ``tree_rows`` are bool ``(..., T, M)``, rows of ``CommonAttentionMetadata.tree_mask``; ``places`` are integers
    ``(..., S)``: which of its request's tokens in this step each key is, negative in the context.
    """
    places = places.unsqueeze(-2).expand(*tree_rows.shape[:-1], places.shape[-1])
    return (places < 0) | tree_rows.gather(-1, places.clamp(0, tree_rows.shape[-1] - 1).long())


def visible_intervals(
    first_row: int,
    num_rows: int,
    num_keys: int,
    *,
    causal: bool,
    sliding_window: int | None = None,
    mm_prefix_ranges: Sequence[Range] = (),
) -> list[Range]:
    """Return which keys any of the rows ``first_row .. first_row + num_rows - 1`` sees, on the host.

    Rows are positions, negative where there are more rows than keys; keys stand at 0 to ``num_keys - 1``. Returned are
    sorted, disjoint ``(start, end)``, none empty and the end not included; without image ranges at most one.
    """
    if num_rows <= 0:
        return []
    last_row = first_row + num_rows - 1
    window = sliding_window if sliding_window is not None else max(num_keys, last_row + 1) + num_rows
    found = [(first_row - window + 1, (last_row if causal else last_row + window - 1) + 1)]
    if not causal and sliding_window is None:
        found = [(0, num_keys)]
    found += [(first, last + 1) for first, last in mm_prefix_ranges if first <= last_row and last >= first_row]
    merged: list[Range] = []
    for start, end in sorted((max(0, start), min(num_keys, end)) for start, end in found):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    terms: Terms,
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    distance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by matmul and softmax, scores and sums in float32. Does not synchronise.

    ``query (B, H, T, D)``, ``keys (B, Hkv, S, D)`` and ``values (B, Hkv, S, Dv)`` are strided as they like; query head
    h reads KV head ``h // (H // Hkv)``. Keys and values must be finite, also where no row sees them. Of ``terms`` FP8
    scales and window are not read. What broadcasts to ``(B, H, T, S)``: ``visible``, bool, None for all; ``bias``,
    added behind the soft cap, -inf hides a key as ``visible`` does; ``distance``, ``|i - j|``, with
    ``terms.alibi_slopes``.

    Returns the output ``(B, H, T, Dv)`` in the query's dtype and the LSE, float32 ``(B, H, T)``. A row without keys has
    0, and -inf or its sink.
    """
    batch, heads, rows, _ = query.shape
    num_keys, value_size = values.shape[2:]
    output = query.new_zeros(batch, heads, rows, value_size)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=query.device)
    slopes, cap, sinks = terms.alibi_slopes, terms.logits_soft_cap, terms.sinks
    sink = None if sinks is None else sinks.float().view(1, heads, 1)
    if not num_keys or not rows or not batch:
        return output, lse if sink is None else lse.copy_(sink.expand_as(lse))
    step = max(1, MAX_SCORES // (batch * heads * num_keys))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scores = _products(query[:, :, part], keys).mul_(terms.scale)
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        if slopes is not None:
            assert distance is not None
            scores.addcmul_(slopes.float().view(1, heads, 1, 1), _rows(distance, part).float(), value=-1)
        if bias is not None:
            scores.add_(_rows(bias, part))
        if visible is not None:
            scores.masked_fill_(~_rows(visible, part), -torch.inf)
        row_lse = torch.logsumexp(scores, dim=-1)
        if sink is not None:
            row_lse = torch.logaddexp(row_lse, sink)
        # -inf - -inf is NaN: a row without keys keeps its scores of -inf and gets weights of 0.
        weights = scores.sub_(row_lse.masked_fill(row_lse.isneginf(), 0.0).unsqueeze(-1)).exp_()
        output[:, :, part] = _weighted(weights, values)
        lse[:, :, part] = row_lse
    return output, lse


def _rows(tensor: Tensor, part: slice) -> Tensor:
    """Return rows of something that broadcasts to ``(B, H, T, S)``."""
    return tensor if tensor.ndim < 2 or tensor.shape[-2] == 1 else tensor[..., part, :]


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """Return ``q . k`` float32 ``(B, H, T, S)``: rounding scores to 16 bits would cost most of the accuracy."""
    batch, heads, rows, size = query.shape
    kv_heads, num_keys = keys.shape[1:3]
    # The query heads of one KV head become more rows of one matmul.
    left = query.reshape(batch * kv_heads, heads // kv_heads * rows, size)
    right = keys.reshape(batch * kv_heads, num_keys, size).transpose(1, 2)
    if left.dtype == torch.float32:
        product = torch.bmm(left, right)
    elif left.device.type == "cuda":  # no other device writes float32 sums of 16-bit factors
        product = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        product = torch.bmm(left.float(), right.float())
    return product.view(batch, heads, rows, num_keys)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``weights @ values`` ``(B, H, T, Dv)``."""
    batch, heads, rows, num_keys = weights.shape
    kv_heads, _, value_size = values.shape[1:]
    left = weights.view(batch * kv_heads, heads // kv_heads * rows, num_keys)
    right = values.reshape(batch * kv_heads, num_keys, value_size)
    if right.device.type == "cuda":
        left = left.to(right.dtype)  # as fused kernels round the weights too
    else:
        right = right.float()
    return torch.bmm(left, right).view(batch, heads, rows, value_size)
