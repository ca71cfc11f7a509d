"""``TRITON_MLA_SPARSE`` at run time: every token is a request of one query, its chosen slots are blocks of one token.

The kernels read as many entries of a row as there are slots, so slots are moved in front of what is -1.
So ``TRITON_MLA``'s decode kernels run over a cache of such blocks. Shapes follow from the number of tokens
and ``sparse_top_k`` alone, so that a batch can be captured in a CUDA graph; but for prefills whose latents are copied
as the Gluon kernel takes them, where its gain is larger than what the copy costs.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.machine.library_imports import import_library
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_triton.facts.planned_kernels import MLASparseKernel
from attn_select_triton.kernels.chosen_slots import rows_of_pages, slots_in_front
from attn_select_triton.kernels.launch import capability_of, sm_count
from attn_select_triton.kernels.mla_cache import gather_cache_mla
from attn_select_triton.kernels.mla_decode import (
    MLALaunch,
    gathered_launch,
    mla_decode,
    mla_launch,
    mla_num_splits,
)
from attn_select_triton.limits import GLUON_CAPABILITY, GLUON_ROPE
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device
from attn_select_triton.runtime.side_by_side import COMPILING

# ns on an H200 for each key and 64 heads or fewer by which the portable kernel takes longer than the Gluon kernel over
# copies, by 120 surveyed workloads: from FP8 (0.62 against 0.22 with 16 heads, 1.33 against 0.60 with 128), and without
# a rope part from 16 bits (0.53 against 0.33 with 64).
GAIN_NS = {True: 0.4, False: 0.2}  # by whether the cache is FP8
# What a token's copy takes (1,728 bytes at 4 TB/s, and a little more), and its launches.
COPY_NS, COPIES_NS = 0.5, 25_000.0


@dataclass(slots=True)
class Gather:
    """Latents of some requests, copied one after the other before their tokens attend."""

    latents: Tensor  # ``(rows, R + 64)`` of the query's dtype, written by each layer; zeros where there is no rope part
    block_table: Tensor  # int32 ``(requests, W)``
    starts: Tensor  # int32 ``(requests,)``, zeros
    # int32 ``(requests + 1,)``, the row of each request's first token; each has whole pages, which others may share
    start_loc: Tensor
    pages: Tensor | None = None  # of ``rows_of_pages``, once a layer ran

    def copy(self, kv_cache: Tensor, scale: Tensor) -> Tensor:
        """Copy one layer's latents; return them as blocks of one token."""
        size, rows = kv_cache.shape[1], len(self.latents)
        if self.pages is None or (kv_cache.is_cuda and torch.cuda.is_current_stream_capturing()):
            # What a capture records has not run: each layer that is captured finds its pages in the graph.
            self.pages = rows_of_pages(self.block_table, self.start_loc, kv_cache.shape[0], size)
        latents = self.latents[:, : kv_cache.shape[2]]
        gather_cache_mla(kv_cache, latents, self.block_table, self.starts, self.start_loc, rows, size, scale)
        return self.latents.unsqueeze(1)


@dataclass(slots=True)
class SparsePart:
    """Tokens of one launch."""

    # first, last: tokens ``first .. last - 1``.
    first: int
    last: int
    num_splits: int  # parts of a token's keys
    gather: Gather | None  # None: they read the cache


@dataclass(slots=True)
class SparseCall:
    """One batch."""

    num_tokens: int  # T
    query_start_loc: Tensor  # int32 ``(T + 1,)``, 0 to T
    parts: list[SparsePart]
    workspace: Tensor  # float32, for the results of parts of keys


def _kernel(context: BackendContext) -> MLASparseKernel:
    """Return the prefills' kernel where they are served: it is the decodes', and may copy latents too."""
    plans = context.plans
    kernel = (plans.get("prefill") or plans["decode"]).kernel
    assert isinstance(kernel, MLASparseKernel)
    return kernel


class TritonMLASparseMetadataBuilder(AttentionMetadataBuilder[SparseCall]):
    """Builds without a kernel launch."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config = context.config
        rank = cast(int, config.kv_lora_rank)
        gather_bytes = _kernel(context).gather_bytes
        self._bounds = torch.arange(context.max_num_batched_tokens + 1, dtype=torch.int32, device=context.device)
        room = (max(plan.workspace_bytes for plan in context.plans.values()) - gather_bytes) // 4
        self._workspace = torch.empty(room, dtype=torch.float32, device=context.device)
        self._per_token = config.num_heads * (rank + 1)
        self._launch = launch_of(context)
        self._sms = sm_count(context.device)
        dtype = PLAIN_DTYPES[config.dtype]
        longest = context.max_num_seqs * self._in_pages(context.max_model_len)
        width = rank + GLUON_ROPE
        rows = min(gather_bytes // (width * dtype.itemsize), longest)
        self._latents = torch.zeros(rows, width, dtype=dtype, device=context.device)
        self._starts = torch.zeros(context.max_num_seqs, dtype=torch.int32, device=context.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCall:
        """As ``AttentionMetadataBuilder.build``."""
        common, parts, done = common_attn_metadata, list[SparsePart](), 0
        bounds = common.query_start_loc_cpu
        for first, last in self._copied(common):
            start, end = int(bounds[first]), int(bounds[last])
            if start == end:  # behind the others stand requests without a query
                continue
            if start > done:
                parts.append(self._part(done, start, None))
            parts.append(self._part(start, end, self._gather(common, first, last)))
            done = end
        tokens = common.num_actual_tokens
        if tokens > done:
            parts.append(self._part(done, tokens, None))
        return SparseCall(tokens, self._bounds[: tokens + 1], parts, self._workspace)

    def _part(self, first: int, last: int, gather: Gather | None) -> SparsePart:
        config, tokens, splits = self.context.config, last - first, 1
        if not config.batch_invariant:
            launch = self._launch if gather is None else gathered_launch(config.num_heads)
            units = tokens * -(-config.num_heads // launch.block_m)
            best = mla_num_splits(units, cast(int, config.sparse_top_k), self._sms)
            splits = max(1, min(best, self._workspace.numel() // (tokens * self._per_token)))
        return SparsePart(first, last, splits, gather)

    def _copied(self, common: CommonAttentionMetadata) -> list[tuple[int, int]]:
        """Return the requests ``first .. last - 1`` of each launch before which latents are copied."""
        config, room = self.context.config, len(self._latents)
        if not room or common.max_query_len <= config.max_decode_query_len:
            return []
        lens, keys = common.query_lens_cpu.numpy(), common.seq_lens_cpu.numpy()
        begin = int(np.argmax(lens > config.max_decode_query_len))  # decodes before it read the cache
        seen = lens * np.minimum(keys - (lens - 1) / 2, cast(int, config.sparse_top_k))  # by a request's tokens
        gain = GAIN_NS[config.cache_dtype in FP8_DTYPES] * -(-config.num_heads // 64) * float(seen[begin:].sum())
        if gain <= COPY_NS * float(keys[begin:].sum()) + COPIES_NS:
            return []
        found: list[tuple[int, int]] = []
        used = room  # so that the first request begins a launch
        for request in range(begin, len(lens)):
            rows = self._in_pages(int(keys[request]))
            if rows > room:  # it reads the cache, and the next one begins a launch
                used = room
            elif found and found[-1][1] == request and used + rows <= room:
                found[-1], used = (found[-1][0], request + 1), used + rows
            else:
                found.append((request, request + 1))
                used = rows
        return found

    def _in_pages(self, keys: Any) -> Any:
        """Return a number of keys, or a tensor of them, in whole pages."""
        size = self.context.block_size or 1
        return -(-keys // size) * size

    def _gather(self, common: CommonAttentionMetadata, first: int, last: int) -> Gather:
        """Return what copies the latents of requests ``first .. last - 1``."""
        assert common.block_table_tensor is not None
        lens = common.seq_lens_cpu[first:last]
        rows = torch.zeros(len(lens) + 1, dtype=torch.int32)
        rows[1:] = self._in_pages(lens).cumsum(0)
        return Gather(
            self._latents[: int(rows[-1])],
            common.block_table_tensor[first:last],
            self._starts[: last - first],
            to_device(rows, self.context.device),
        )


def launch_of(context: BackendContext) -> MLALaunch:
    """Return how the plan's kernel is launched; KernelMismatchError where it is not one for this device."""
    config, planned = context.config, _kernel(context)
    if (planned.gluon or planned.gather_bytes) and capability_of(context.device) != GLUON_CAPABILITY:
        raise KernelMismatchError(
            f"the plan's kernel, written in Gluon for Hopper, does not run on {context.device}",
            hint="select on the machine that runs the layers",
        )
    if planned.gluon:
        return gathered_launch(config.num_heads)
    return mla_launch(
        capability_of(context.device),
        config.num_heads,
        cast(int, config.kv_lora_rank),
        cast(int, config.qk_rope_head_dim),
        1,
        PLAIN_DTYPES[config.dtype],
        storage_dtype(config.cache_dtype),
        gluon=False,
    )


class TritonMLASparseImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        self._fp8 = context.config.cache_dtype in FP8_DTYPES
        self._launch, self._heads = launch_of(context), context.config.num_heads
        self._nope = context.config.qk_rope_head_dim == 0
        if self._launch.gathered or _kernel(context).gather_bytes:
            # With Gluon, now and not in the first step.
            import_library("attn_select_triton.kernels.mla_decode_gathered")
        self._unscaled = torch.ones((), device=context.device)  # copies hold what the cache does
        self._run = on_device(context.device, self._attend)

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseCall,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; an FP8 cache is read with ``terms.scales.k_float``."""
        assert topk_indices is not None
        tokens = attn_metadata.num_tokens
        if not tokens:
            return outputs.output
        part = outputs.first(tokens)
        dense = part.lse if part.lse is None or part.lse.is_contiguous() else part.lse.contiguous()
        scale = self.terms.scales.k_float if self._fp8 else 1.0
        self._run(query[:tokens], kv_cache, attn_metadata, part.output, dense, topk_indices[:tokens], scale)
        if part.lse is not None and dense is not None and dense is not part.lse:
            part.lse.copy_(dense)
        return outputs.output

    def _attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        call: SparseCall,
        output: Tensor,
        output_lse: Tensor | None,
        slots: Tensor,
        kv_scale: float,
    ) -> None:
        for part in call.parts:
            tokens = slice(part.first, part.last)
            rows: Tensor | tuple[Tensor, Tensor] = query[tokens]
            if part.gather is None:
                latents, launch = kv_cache.view(-1, 1, kv_cache.shape[2]), self._launch
                front, counts = slots_in_front(slots[tokens])
            else:
                latents, launch = part.gather.copy(kv_cache, self._unscaled), gathered_launch(self._heads)
                front, counts = slots_in_front(slots[tokens], part.gather.pages, kv_cache.shape[1])
                if self._nope:
                    rows = query[tokens], query.new_zeros(part.last - part.first, self._heads, GLUON_ROPE)
            mla_decode(
                rows,
                latents,
                output[tokens],
                query_start_loc=call.query_start_loc[: part.last - part.first + 1],
                seq_lens=counts,
                block_table=front,
                max_query_len=1,
                scale=self.terms.scale,
                launch=launch,
                num_splits=part.num_splits,
                workspace=call.workspace,
                causal=False,
                kv_scale=kv_scale,
                output_lse=None if output_lse is None else output_lse[tokens],
            )


class TritonMLASparseBackend(AttentionBackend):
    """``TRITON_MLA_SPARSE``."""

    impl_cls = TritonMLASparseImpl
    builder_cls = TritonMLASparseMetadataBuilder
    compiling = COMPILING

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
