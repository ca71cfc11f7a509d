"""A decode of one layer, cut as it is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_select_triton.kernels.decode import Decode, Shape
from attn_select_triton.kernels.launch import PLAIN, Launch, Terms, capability_of, decode_launch, sm_count
from attn_select_triton.kernels.pieces import list_pieces


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    num_splits: int = 1,
    split_tokens: int = 0,
    workspace: Tensor | None = None,
    terms: Terms = PLAIN,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    output_scale: Tensor | None = None,
    output_lse: Tensor | None = None,
    tree_mask: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Attend from few query tokens per request over a paged cache, all at once: a ``Decode`` for one layer.

    Args:
        query, key, value, output, query_start_loc, seq_lens, scale, block_table, k_scale, v_scale, output_scale,
            output_lse: as ``prefill_attention`` has them.
        max_query_len, tree_mask: as ``Decode`` has them.
        launch: None: the table's.
        num_splits: shares of a request's keys, at most.
        split_tokens: keys that a share should have, so that a request's result does not depend on the others' (with
            ``num_splits`` of them for the longest); 0: every request in ``num_splits`` shares.
        workspace: float32, ``decode_workspace`` elements for ``num_splits`` results of each request; with splits.

    Raises:
        ValueError: splits without a workspace that is large enough.
    """
    _, heads, head_size = query.shape
    kv_heads, value_size = value.shape[-2:]
    shape = Shape(heads, kv_heads, head_size, value_size, query.dtype, value.dtype, query.device)
    if launch is None:
        load, rows = len(seq_lens) * kv_heads / sm_count(query.device), heads // kv_heads * max_query_len
        launch = decode_launch(
            capability_of(query.device), rows, max(head_size, value_size), query.dtype, value.dtype, load
        )
    parted: dict[str, Any] = {}
    if num_splits > 1:
        slots = len(seq_lens) * num_splits
        reach = terms.window * (1 if terms.causal else 2)
        parted = {
            "pieces": list_pieces(
                query_start_loc,
                seq_lens,
                capacity=slots,
                split_tokens=split_tokens,
                most_splits=num_splits,
                reach=reach,
            ),
            "slots": slots,
            "arrived": torch.zeros(slots * max_query_len * heads, dtype=torch.int32, device=query.device),
        }
    step = Decode(
        shape, query_start_loc=query_start_loc, seq_lens=seq_lens, block_table=block_table,
        max_query_len=max_query_len, workspace=workspace, tree_mask=tree_mask, launch=launch, **parted,
    )  # fmt: skip
    step(
        query, key, value, output, scale=scale, terms=terms, k_scale=k_scale, v_scale=v_scale,
        output_scale=output_scale, output_lse=output_lse,
    )  # fmt: skip
