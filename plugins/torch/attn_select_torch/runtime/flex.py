"""The runtime of ``FLEX_ATTENTION``: torch's FlexAttention, compiled per kind of layer, on the cache as it lies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attn_select.runtime.backend import AttentionBackend, AttentionImpl, BackendContext
from attn_select.runtime.kv_cache import key_value_views
from attn_select.runtime.terms import Outputs, Terms
from attn_select_torch.facts.flex_attention import TILE, FlexKernel, compile_key
from attn_select_torch.runtime.flex_builder import BlockLists, FlexBuilder, FlexMetadata


def _masked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    partial: tuple[Tensor, Tensor],
    full: tuple[Tensor, Tensor],
    bounds: tuple[Tensor, ...],
    pages: tuple[Tensor, Tensor] | None,
    scale: float,
    stages: int,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend; compiled. ``(1, H, R, D)``, ``(1, Hkv, S, D)`` and ``(1, Hkv, S, Dv)`` to ``(1, H, R, Dv)``."""

    def mask(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        position = place
        if pages is not None:
            position = pages[1][pages[0][row] + place // TILE] * TILE + place % TILE
        seen = (bounds[0][row] <= position) & (position <= bounds[1][row])
        if len(bounds) > 2:
            seen = seen | ((bounds[2][row] <= position) & (position <= bounds[3][row]))
        return seen

    lengths = (query.shape[2], keys.shape[2])
    blocks = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=(TILE, TILE), mask_mod=mask, seq_lengths=lengths, compute_q_blocks=False
    )
    options: Any = {"block_mask": blocks, "scale": scale, "enable_gqa": True}
    if not with_lse:
        return flex_attention(query, keys, values, **options), None
    # The decoding kernel splits a request's keys by the size of the batch; the other takes few rows as well.
    options["kernel_options"] = {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": TILE,
        "BLOCK_N": TILE,
        "num_stages": stages,
    }
    out, aux = flex_attention(query, keys, values, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse


@cache
def _compiled(key: object, device: torch.device, scale: float, stages: int) -> Callable[..., Any]:
    """Return the compiled function of the layers of one ``compile_key``; of all else only sizes differ."""
    # Each has a code object of its own: torch counts recompilations by it, and gives up compiling after eight.
    kind = (key, device, scale, stages)
    code = _masked.__code__.replace(co_name=f"flex_{device}_{abs(hash(kind)):x}")
    function = FunctionType(code, globals(), code.co_name, _masked.__defaults__, _masked.__closure__)
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


class FlexImpl(AttentionImpl[FlexMetadata]):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = context.config
        self.on_cpu = context.device.type == "cpu"
        self.paged = context.kv_layout is not None
        self.stages = context.kernel(FlexKernel).stages
        self.function = _compiled(compile_key(config), context.device, terms.scale, self.stages)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: FlexMetadata,
        outputs: Outputs,
    ) -> Tensor:
        metadata = attn_metadata
        pages = None
        partial, full = metadata.partial, metadata.full
        if self.paged:
            assert kv_cache is not None
            assert metadata.tails is not None
            keys, values = self._cached(kv_cache)
            metadata.tails.clear(values)
            found = metadata.pages(kv_cache.shape[1])
            pages = (found.first, found.places)
        else:
            assert key is not None
            assert value is not None
            # Laid out like the queries: a tile holds keys of one request alone, whatever else is in the batch.
            keys, values = key.index_select(0, metadata.tokens), value.index_select(0, metadata.tokens)
        if self.on_cpu:
            partial, full = (each.widened(-(-len(keys) // TILE)) for each in (partial, full))
        queries = query.index_select(0, metadata.tokens).transpose(0, 1)[None]
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        lists = [(one.counts, one.indices) for one in (partial, full)]
        for tensor, axes in ((queries, (2,)), (keys, (2,)), (values, (2,)), *_axes(partial), *_axes(full)):
            torch._dynamo.maybe_mark_dynamic(tensor, axes)
        with torch.no_grad():
            out, lse = self.function(
                queries,
                keys,
                values,
                *lists,
                metadata.bounds,
                pages,
                self.terms.scale,
                self.stages,
                not self.on_cpu,
            )
        tokens = slice(0, metadata.num_tokens)
        outputs.output[tokens].copy_(out[0].transpose(0, 1).index_select(0, metadata.rows))
        if outputs.lse is not None and lse is not None:
            outputs.lse[tokens].copy_(lse[0].t().index_select(0, metadata.rows))
        return outputs.output

    def _cached(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache's keys and values ``(num_blocks * block_size, num_kv_heads, size)`` as views."""
        keys, values = key_value_views(kv_cache, self.context.kv_layout or "", self.context.config)
        return keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])


def _axes(lists: BlockLists) -> list[tuple[Tensor, tuple[int, ...]]]:
    return [(lists.counts, (2,)), (lists.indices, (2, 3))]


class FlexBackend(AttentionBackend):
    """``FLEX_ATTENTION``."""

    impl_cls = FlexImpl
    builder_cls = FlexBuilder
