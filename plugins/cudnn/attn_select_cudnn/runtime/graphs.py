"""cuDNN's attention graph over a paged cache: what one is built for, how it is built, and how it is run.

A graph has fixed shapes: the number of requests, the longest query, the most keys and the cache. Lengths, tables and
offsets are tensors, so one graph serves every batch of these shapes, captured in a CUDA graph too. Building one takes
tens of milliseconds and more, and is done once per shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY, KEYS, VALUES, OUTPUT, LSE = 1, 2, 3, 4, 5
QUERY_OFFSETS, LSE_OFFSETS, QUERY_LENS, KEY_LENS, KEY_TABLE, VALUE_TABLE = 6, 7, 8, 9, 10, 11
"""Names (``uid``) of the graph's tensors."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is built for."""

    requests: int  # B
    query_len: int  # the longest query; every query's length where ``packed`` is False
    packed: bool  # queries of different lengths lie one behind the other, found by offsets
    keys: int  # the most keys of a request
    columns: int  # of the block table, ``ceil(keys / block_size)``
    table_stride: int  # elements between its rows
    heads: int  # query heads
    cache: tuple[int, ...]  # of keys and of values, ``(num_blocks, num_kv_heads, block_size, head_size)``
    key_strides: tuple[int, ...]  # key_strides, value_strides: of these, in elements
    value_strides: tuple[int, ...]
    dtype: torch.dtype  # of query, cache and output
    scale: float  # factor on ``q . k``
    window: int | None  # keys that a query sees, its own included; None for all before it
    lse: bool  # whether the log-sum-exp is written


class Graph:
    """One graph, built for a shape."""

    def __init__(self, cudnn: Any, handle: Any, shape: Shape) -> None:
        # handle: of the device, from ``cudnn.create_handle``
        self._handle = handle
        types = cudnn.data_type
        dtype = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[shape.dtype]
        graph = cudnn.pygraph(
            io_data_type=dtype,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )
        requests, heads, tokens, size = shape.requests, shape.heads, shape.query_len, shape.cache[-1]

        def tensor(uid: int, dim: tuple[int, ...], stride: tuple[int, ...], data_type: Any) -> Any:
            return graph.tensor(dim=dim, stride=stride, data_type=data_type, uid=uid)

        def ints(uid: int, count: int, data_type: Any) -> Any:
            return tensor(uid, (count, 1, 1, 1), (1, 1, 1, 1), data_type)

        # cuDNN's order (B, H, T, D) on memory that has tokens before heads; packed, offsets say where requests begin.
        rows, row_strides = (requests, heads, tokens, size), (tokens * heads * size, size, heads * size, 1)
        query = tensor(QUERY, rows, row_strides, dtype)
        table, table_strides = (requests, 1, shape.columns, 1), (shape.table_stride, shape.table_stride, 1, 1)
        output, lse = graph.sdpa(
            q=query,
            k=tensor(KEYS, shape.cache, shape.key_strides, dtype),
            v=tensor(VALUES, shape.cache, shape.value_strides, dtype),
            attn_scale=shape.scale,
            use_padding_mask=True,
            seq_len_q=ints(QUERY_LENS, requests, types.INT32),
            seq_len_kv=ints(KEY_LENS, requests, types.INT32),
            paged_attention_k_table=tensor(KEY_TABLE, table, table_strides, types.INT32),
            paged_attention_v_table=tensor(VALUE_TABLE, table, table_strides, types.INT32),
            paged_attention_max_seq_len_kv=shape.keys,
            generate_stats=shape.lse,
            **_mask(cudnn, shape),
        )
        output.set_output(True).set_uid(OUTPUT).set_dim(rows).set_stride(row_strides).set_data_type(dtype)
        if shape.lse:
            lse_strides = (tokens * heads, 1, heads, 1)
            lse.set_output(True).set_uid(LSE).set_dim((requests, heads, tokens, 1)).set_stride(lse_strides)
            lse.set_data_type(types.FLOAT)
        if shape.packed:
            offsets = ints(QUERY_OFFSETS, requests + 1, types.INT64)
            query.set_ragged_offset(offsets)
            output.set_ragged_offset(offsets)
            if shape.lse:
                lse.set_ragged_offset(ints(LSE_OFFSETS, requests + 1, types.INT64))
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._graph = graph
        self.workspace_bytes: int = graph.get_workspace_size()

    def run(self, tensors: dict[int, Tensor], workspace: Tensor) -> None:
        """Launch it on the handle's stream; ``tensors`` by name, ``workspace`` uint8 of ``workspace_bytes``."""
        self._graph.execute(tensors, workspace, handle=self._handle)


def _mask(cudnn: Any, shape: Shape) -> dict[str, Any]:
    """Return the mask of positions: queries are a sequence's last ones, hence the alignment."""
    if shape.query_len == 1 and shape.window is None:
        return {}
    bounds: dict[str, Any] = {
        "diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT,
        "diagonal_band_right_bound": 0,
    }
    if shape.window is not None:
        bounds["diagonal_band_left_bound"] = shape.window
    return bounds
