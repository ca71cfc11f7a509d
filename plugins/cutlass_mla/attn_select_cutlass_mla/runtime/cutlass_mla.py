"""``CUTLASS_MLA`` at run time: one query token per request, on the latent cache.

The kernel computes 128 heads, so fewer are padded; what the rows of the other heads hold is never read. It leaves the
rows of a request without keys alone, so these are set to 0 afterwards. It takes no FP8 scales: the scales of query and
latent are part of the softmax scale, and the latent's multiplies the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_cutlass_mla.facts.builds import CutlassMLAKernel
from attn_select_cutlass_mla.facts.cutlass_mla import HEADS
from attn_select_cutlass_mla.runtime.adapters import PAGE, RANK, CutlassMLAMetadata, adapter_for

B200_SMS = 148
"""Multiprocessors that are assumed on a CPU, where kernels are emulated: as many as a B200 has."""


class CutlassMLAMetadataBuilder(AttentionMetadataBuilder[CutlassMLAMetadata]):
    """Reserves the workspace for the largest batch; building launches a kernel or two only where graphs need it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._adapter, device = adapter_for(context.kernel(CutlassMLAKernel)), context.device
        on_gpu = device.type == "cuda"
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else B200_SMS
        self._width = -(-context.max_model_len // PAGE)
        size = max(context.plans["decode"].workspace_bytes, self._needed(self._width))
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self._empty: Tensor | None = None
        if context.cuda_graphs:
            self._empty = torch.zeros(context.max_num_seqs, dtype=torch.bool, device=context.device)
        self._tables: dict[int, Tensor] = {}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CutlassMLAMetadata:
        """As ``AttentionMetadataBuilder.build``."""
        common = common_attn_metadata
        table, seq_lens, seq_lens_cpu = common.block_table_tensor, common.seq_lens, common.seq_lens_cpu
        assert table is not None
        requests = common.num_reqs
        if common.num_actual_tokens != requests:
            chosen_cpu = common.query_lens_cpu.nonzero().flatten()
            chosen, seq_lens_cpu = to_device(chosen_cpu, seq_lens.device), seq_lens_cpu[chosen_cpu]
            table, seq_lens, requests = table.index_select(0, chosen), seq_lens.index_select(0, chosen), len(chosen_cpu)
        if table.shape[1] > self._width:
            self._widen(table.shape[1])
        empty = None
        if self._empty is not None:
            empty = torch.eq(seq_lens, 0, out=self._empty[:requests])
        elif requests and int(seq_lens_cpu.min()) == 0:
            empty = seq_lens == 0
        return CutlassMLAMetadata(
            num_reqs=requests,
            page_table=table if table.is_contiguous() else self._packed(table),
            seq_lens=seq_lens,
            workspace=self._workspace,
            empty=empty,
        )

    def _needed(self, width: int) -> int:
        """Return the bytes of scratch that batches take whose tables have ``width`` pages."""
        # How many parts a request is split into may grow as batches shrink, so every batch size is asked about.
        sizes = range(1, self.context.max_num_seqs + 1)
        return max(self._adapter.workspace_bytes(PAGE * width, requests, self._sms) for requests in sizes)

    def _widen(self, width: int) -> None:
        """Make room for tables that are wider than ``max_model_len`` needs, unless graphs hold the address."""
        needed, reserved = self._needed(width), self._workspace.numel()
        if needed > reserved and self.context.cuda_graphs:
            raise BatchError(
                f"block_table_tensor of {width} blocks needs a workspace of {needed} bytes: {reserved} are reserved, "
                "and CUDA graphs hold their address",
                hint=f"set backends.CUTLASS_MLA.workspace_bytes = {needed}, or pass narrower tables",
            )
        if needed > reserved:
            self._workspace = self._workspace.new_empty(needed)
        self._width = width

    def _packed(self, table: Tensor) -> Tensor:
        """Return a table with its rows one behind the other; where steps are captured always at the same place."""
        requests, width = table.shape
        if not self.context.cuda_graphs:
            return table.contiguous()
        if width not in self._tables:
            self._tables[width] = table.new_zeros(self.context.max_num_seqs, width)
        return self._tables[width][:requests].copy_(table)


class CutlassMLAImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        self._adapter = adapter_for(context.kernel(CutlassMLAKernel))
        self._fp8 = context.config.cache_dtype == "fp8_e4m3"
        self._written = torch.bfloat16 if self._fp8 else PLAIN_DTYPES[context.config.dtype]
        self._factor = self._adapter.query_factor(terms.scale)
        self._no_lse = torch.empty(0, device=context.device)

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: CutlassMLAMetadata,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; ``kv_cache (pages, 128, 576)`` is bfloat16, float16 or e4m3."""
        metadata, heads, scale, scales = attn_metadata, query.shape[1], self.terms.scale, self.terms.scales
        output, output_lse = outputs.output, outputs.lse
        if not metadata.num_reqs:
            return output
        if not kv_cache.is_contiguous():
            raise BatchError(f"kv_cache has strides {kv_cache.stride()}: accepted is a contiguous cache")
        if self._fp8:
            query = ops.quantize_fp8(query, scales.q, kv_cache.dtype)
            scale *= scales.q_float * scales.k_float
        query = self._padded(query, heads)
        direct = heads == HEADS and output.dtype is self._written and output.is_contiguous()
        out = output if direct else query.new_empty((metadata.num_reqs, HEADS, RANK), dtype=self._written)
        lse = self._no_lse
        if output_lse is not None:
            lse = output_lse.new_empty(metadata.num_reqs, HEADS)
        found = self._adapter.decode(query, kv_cache, metadata, scale, out, lse)
        if found is not output:
            output.copy_(found[:, :heads])
        if self._fp8 and scales.k_float != 1.0:
            output.mul_(scales.k_float)
        if output_lse is not None:
            output_lse.copy_(lse[:, :heads])
        if metadata.empty is not None:
            output.masked_fill_(metadata.empty[:, None, None], 0.0)
            if output_lse is not None:
                output_lse.masked_fill_(metadata.empty[:, None], -torch.inf)
        return output

    def _padded(self, query: Tensor, heads: int) -> Tensor:
        """Return the query of 128 heads, contiguous, in units of the kernel's own softmax scale."""
        if heads == HEADS:
            return query.contiguous() if self._factor == 1.0 else query * self._factor
        padded = query.new_empty(query.shape[0], HEADS, query.shape[2])
        if self._factor == 1.0:
            padded[:, :heads] = query
        else:
            torch.mul(query, self._factor, out=padded[:, :heads])
        return padded


class CutlassMLABackend(AttentionBackend):
    """``CUTLASS_MLA``."""

    impl_cls = CutlassMLAImpl
    builder_cls = CutlassMLAMetadataBuilder
