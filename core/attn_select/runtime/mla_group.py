"""The metadata of MLA layers: decodes on the latent cache, prefills on decompressed keys and values in chunks.

A prefill attends to its own tokens first, causally, then to its cached context chunk by chunk; the partial results are
merged by their log-sum-exp. A chunk holds at most ``workspace_tokens`` tokens of all requests together, which bounds
what is decompressed at a time: per token ``kv_lora_rank + qk_rope_head_dim`` elements of latent, and per head
``2 * qk_nope_head_dim + qk_rope_head_dim + v_head_dim`` of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.config import Phase
from attn_select.errors import ConfigError
from attn_select.runtime.batch import to_device
from attn_select.runtime.group import AttentionGroup, Capacity, Served
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.metadata import (
    BatchError,
    CommonAttentionMetadata,
    Ranges,
    VarlenMetadata,
    prefix_sums,
    split_decodes_and_prefills,
)
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select.selection import Selection

WORKSPACE_TOKENS = 8192
"""Cached tokens that are decompressed at a time unless a group says otherwise: at 128 heads of DeepSeek-V3 in bfloat16
9 MiB of latents and 896 MiB of keys and values."""


@dataclass(slots=True)
class ContextChunk:
    """A part of every prefilling request's cached context.

    Attributes:
        starts: int32 ``(B,)`` on the device, first position of each request's part.
        start_loc: int32 ``(B + 1,)`` on the device, prefix sums of the parts' lengths (0 for exhausted contexts).
        num_tokens: their sum.
        metadata: what the prefill backend's ``build_prefill`` built.
    """

    starts: Tensor
    start_loc: Tensor
    num_tokens: int
    metadata: Any


@dataclass(slots=True)
class MLAPrefillMetadata:
    """The prefills of a batch.

    Attributes:
        new: metadata of the call over the step's own tokens.
        chunks: the cached contexts, in parts that fit the workspace.
        block_table: int32 ``(B, W)`` on the device, in the cache's blocks.
    """

    new: Any
    chunks: tuple[ContextChunk, ...]
    block_table: Tensor


@dataclass(slots=True)
class MLAMetadata:
    """One step's batch as MLA layers want it.

    Attributes:
        common: the batch, tables in the allocator's blocks.
        num_actual_tokens: tokens; what lies behind is padding.
        num_decode_tokens: the first of them, which go through ``forward_mqa``.
        slot_mapping: int64 slots of the step's latents.
        decode: what the decode backend built; None without decodes.
        prefill: the prefills; with sparse MLA what the prefill backend built for ``forward_mqa``; None without.
    """

    common: CommonAttentionMetadata
    num_actual_tokens: int
    num_decode_tokens: int
    slot_mapping: Tensor
    decode: Any
    prefill: Any


class MLAAttentionGroup(AttentionGroup):
    """``AttentionGroup`` for MLA layers.

    Args:
        workspace_tokens: cached tokens decompressed at a time in prefill.

    Attributes:
        workspace: ``(workspace_tokens, head_size)`` in the compute dtype: a chunk's latents. Reserved here, shared by
            all layers.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        workspace_tokens: int = WORKSPACE_TOKENS,
    ) -> None:
        if not selection.config.mla:
            raise ConfigError("this selection's layers are not MLA: AttentionGroup is theirs", fields=["kv_lora_rank"])
        if workspace_tokens < 1:
            text = f"workspace_tokens = {workspace_tokens}: accepted are integers from 1"
            raise ConfigError(text, fields=["workspace_tokens"])
        super().__init__(selection, device, capacity, cuda_graphs=cuda_graphs, phases=phases)
        self.workspace_tokens = workspace_tokens
        self.workspace = torch.empty(
            workspace_tokens if "prefill" in self.served and not self.config.sparse else 0,
            self.config.head_size,
            dtype=PLAIN_DTYPES[self.config.dtype],
            device=self.device,
        )

    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> MLAMetadata:
        """As ``AttentionGroup.build``; MLA layers use no cascade, so ``common_prefix_len`` changes nothing."""
        self._check(common_attn_metadata)
        split = split_decodes_and_prefills(common_attn_metadata, self.reorder_batch_threshold or 1)
        decode = prefill = None
        if split.num_decodes:
            served = self._server("decode")
            common = common_attn_metadata.requests(0, split.num_decodes)
            decode = served.builder.build(0, self._for_kernel(served.context, common), fast_build)
        if split.num_prefills:
            common = common_attn_metadata.requests(split.num_decodes, common_attn_metadata.num_reqs)
            prefill = self._prefill(common, fast_build)
        return self._mla_metadata(common_attn_metadata, split.num_decode_tokens, decode, prefill)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        """As ``AttentionGroup.build_for_cudagraph_capture``; only decodes are captured."""
        self._check(common_attn_metadata)
        served = self._server("decode")
        common = self._for_kernel(served.context, common_attn_metadata)
        decode = served.builder.build_for_cudagraph_capture(common)
        return self._mla_metadata(common_attn_metadata, common.num_actual_tokens, decode, None)

    @staticmethod
    def _mla_metadata(
        common: CommonAttentionMetadata, num_decode_tokens: int, decode: Any, prefill: Any
    ) -> MLAMetadata:
        assert common.slot_mapping is not None
        return MLAMetadata(common, common.num_actual_tokens, num_decode_tokens, common.slot_mapping, decode, prefill)

    @property
    def reorder_batch_threshold(self) -> int:
        """Queries up to this many tokens count as decodes and must come first."""
        served = self.served.get("decode")
        wanted = None if served is None else served.builder.reorder_batch_threshold
        return 1 + self.config.num_speculative_tokens if wanted is None else wanted

    def _prefill(self, common: CommonAttentionMetadata, fast_build: bool) -> Any:
        served = self._server("prefill")
        if self.config.sparse:
            return served.builder.build(0, self._for_kernel(served.context, common), fast_build)
        bounds, bounds_cpu = common.query_start_loc, common.query_start_loc_cpu
        context = common.num_computed_tokens_cpu
        new = VarlenMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds_cpu,
            key_start_loc=bounds,
            key_start_loc_cpu=bounds_cpu,
            max_query_len=common.max_query_len,
            max_key_len=common.max_query_len,
            causal=common.causal and not self.config.non_causal,
            query_offsets_cpu=torch.zeros_like(context),
            counts_sinks=True,
            mm_prefix_ranges=_shifted(common.mm_prefix_ranges, context),
        )
        longest = int(context.max())
        if longest and not served.context.plans["prefill"].returns_lse:
            raise BatchError(
                f"a prefill with {longest} cached tokens: {served.spec.name} returns no LSE to merge its parts by",
                hint="prefill whole prompts, or choose another backend for prefill",
            )
        block_table = common.block_table_tensor
        assert block_table is not None
        assert self.block_size is not None
        ratio = self.block_size // (self.kernel_block_size or self.block_size)
        if longest and ratio > 1:
            block_table = kernel_block_table(block_table, ratio)
        chunks = tuple(self._chunk(served, common, *part) for part in self._parts(context)) if longest else ()
        return MLAPrefillMetadata(served.builder.build_prefill(new), chunks, block_table)

    def _parts(self, context: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut the contexts: per chunk first positions and lengths, int32 ``(B,)`` on the host."""
        each = self.workspace_tokens // int((context > 0).sum())
        if each == 0:
            raise BatchError(
                f"{int((context > 0).sum())} requests in prefill with cached context: workspace_tokens = "
                f"{self.workspace_tokens} leaves none a token"
            )
        if self.block_size is not None and each > self.block_size:
            each -= each % self.block_size
        return [
            (torch.full_like(context, start), (context - start).clamp(0, each))
            for start in range(0, int(context.max()), each)
        ]

    def _chunk(self, served: Served, common: CommonAttentionMetadata, starts: Tensor, lengths: Tensor) -> ContextChunk:
        key_bounds = prefix_sums(lengths)
        on_device = to_device(torch.cat([starts, key_bounds]), self.device)
        context = common.num_computed_tokens_cpu
        varlen = VarlenMetadata(
            query_start_loc=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            key_start_loc=on_device[len(starts) :],
            key_start_loc_cpu=key_bounds,
            max_query_len=common.max_query_len,
            max_key_len=int(lengths.max()),
            causal=False,
            query_offsets_cpu=context - starts,
            counts_sinks=False,
            mm_prefix_ranges=_shifted(common.mm_prefix_ranges, starts),
        )
        metadata = served.builder.build_prefill(varlen)
        return ContextChunk(on_device[: len(starts)], varlen.key_start_loc, int(key_bounds[-1]), metadata)


def _shifted(ranges: Sequence[Ranges] | None, origins: Tensor) -> list[list[tuple[int, int]]] | None:
    """Return each request's ranges relative to its origin."""
    if ranges is None:
        return None
    return [
        [(first - origin, last - origin) for first, last in request]
        for request, origin in zip(ranges, origins.tolist(), strict=True)
    ]
