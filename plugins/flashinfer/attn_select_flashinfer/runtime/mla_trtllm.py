"""Decode of MLA layers by ``trtllm_batch_decode_with_kv_cache_mla``: trtllm-gen and CuTe DSL on 10.x, XQA on 12.x.

The kernels take block tables and lengths from the device; nothing is planned. Queries of one length are passed as
``(B, q_len, H, R + Pr)`` and are causal. Where lengths differ, and without causality, each query becomes a row of its
own, whose length is the number of keys that it sees. (trtllm-gen since 0.6.18 and monolithic CuTe DSL since 0.7.2 take
queries of several lengths with their bounds, but return no LSE then, which most groups want.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.backends.spec import Fact
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import ops
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashinfer.facts.libraries import MIB, MLA_CORE, padded_heads
from attn_select_flashinfer.facts.mla import FlashInferMLAOptions
from attn_select_flashinfer.facts.mla_kernels import MAX_HEADS, MLAKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.scores import LN2, blank_rows, float_sinks

MOST_REQUESTS = Fact(8192, f"{MLA_CORE} _TRTLLM_GEN_MLA_MAX_BATCH: the counters end there")
STATISTICS = Fact((8, 256), "csrc/trtllm_fmha_kernel_launcher.cu v0.6.14: bytes per query and head, queries at a time")
RESERVED = (8 + 1 + 24) * MIB
"""Bytes of a workspace for counters, for the gap behind the statistics, and for partial results (a CTA of 64 rows per
SM)."""
E4M3 = torch.float8_e4m3fn
Scale = float | Tensor


def heads_of(kernel: MLAKernel, config: AttentionConfig) -> int:
    """Return the heads that a kernel works on: the plan's, or more where ranks gather the queries of their heads."""
    if config.num_heads <= kernel.heads:
        return kernel.heads
    if config.num_heads > MAX_HEADS:
        text = f"num_heads = {config.num_heads}, gathered from all ranks: FlashInfer's {kernel.name} takes {MAX_HEADS}"
        raise ConfigError(text, fields=["num_heads"], hint='ContextParallel(…, queries="replicated") gathers none')
    return config.num_heads if kernel.name == "cute-dsl" else padded_heads(config.num_heads)


@dataclass(slots=True)
class Work:
    """What the kernel reads and writes for one call of a layer."""

    query: Tensor  # ``(T, H', R + Pr)``, H' padded heads
    out: Tensor  # bfloat16 ``(T, H', R)``, contiguous; the layer's own output where that is one
    # float32 ``(T, H')``, in the kernel's base (cute-dsl: e, others: 2), likewise; None where it is not wanted
    lse: Tensor | None
    bmm1_scale: Scale  # bmm1_scale, bmm2_scale: factors of scores and output
    bmm2_scale: Scale


class Heads:
    """One layer's queries and outputs as FlashInfer's Blackwell MLA kernels take them: padded heads, bfloat16 out."""

    def __init__(
        self,
        config: AttentionConfig,
        kernel: MLAKernel,
        terms: Terms,
        *,
        cache_scales: bool = False,
        device_scales: bool = False,
    ) -> None:
        # cache_scales: the kernel's second scale is the cache's, and a factor of the scores too
        # (csrc/xqa/mla_sm120.cu v0.6.14: ``qScale * kvCacheScale``, and ``kvCacheScale`` on the output)
        # device_scales: FP8 scales are read from the device at each call
        self._heads, self.padded = config.num_heads, heads_of(kernel, config)  # padded: H', what the kernel works on
        self._rank, self._fp8 = cast(int, config.kv_lora_rank), kernel.fp8_query
        self._terms, self._device_scales = terms, device_scales
        scales = terms.scales
        of_scores = scales.q_float if cache_scales else scales.q_float * scales.k_float
        self._factors = (of_scores * terms.scale, scales.k_float) if self._fp8 else (terms.scale, 1.0)
        self._lse_factor = 1.0 if kernel.name == "cute-dsl" else LN2
        self._own_sinks = float_sinks(terms).sinks
        self.sinks: Tensor | None = None  # float32 ``(H',)``, padded
        if self._own_sinks is not None:
            self.sinks = self._own_sinks.new_zeros(self.padded)
            self.sinks[: self._heads] = self._own_sinks
        self.arguments: dict[str, Any] = {  # of every call
            "qk_nope_head_dim": config.qk_nope_head_dim,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "sinks": self.sinks,
            "backend": kernel.name,
        }

    def begin(self, query: Tensor, outputs: Outputs) -> Work:
        """Return what the kernel gets for ``query (T, H, R + Pr)`` and ``outputs (T, H, R)``."""
        tokens, output, output_lse = query.shape[0], outputs.output, outputs.lse
        if self._fp8:
            query = ops.quantize_fp8(query, self._terms.scales.q, E4M3)
        if self.padded != self._heads:
            # The padding heads may hold anything: rows of the kernels' products do not mix.
            own, query = query, query.new_empty(tokens, self.padded, query.shape[2])
            query[:, : self._heads] = own
        whole = self.padded == self._heads
        out, lse = output, output_lse
        if not (whole and output.dtype == torch.bfloat16 and output.is_contiguous()):
            out = torch.empty(tokens, self.padded, self._rank, dtype=torch.bfloat16, device=output.device)
        if output_lse is not None and not (whole and output_lse.is_contiguous()):
            lse = output_lse.new_empty(tokens, self.padded)
        return Work(query.contiguous(), out, lse, *self._scales())

    def finish(self, work: Work, outputs: Outputs, blank: Tensor | None) -> None:
        """Bring results to the layer's tensors; ``blank``: bool ``(T,)``, queries without keys."""
        if work.out is not outputs.output:
            outputs.output.copy_(work.out[:, : self._heads])
        if outputs.lse is not None:
            assert work.lse is not None
            torch.mul(work.lse[:, : self._heads], self._lse_factor, out=outputs.lse)
        if blank is not None:
            blank_rows(outputs, blank, self._own_sinks)

    def _scales(self) -> tuple[Scale, Scale]:
        if not (self._fp8 and self._device_scales):
            return self._factors
        scales = self._terms.scales
        k = scales.k.reshape(1)
        return scales.q.reshape(1) * k * self._terms.scale, k


@dataclass(slots=True)
class TrtllmCall:
    """Decodes of one batch, the same for all layers."""

    num_tokens: int  # queries
    query_len: int  # of each request
    block_table: Tensor  # int32 ``(B, W)``, contiguous
    seq_lens: Tensor  # int32 ``(B,)``, at least 1
    max_seq_len: int  # a bound of them
    blank: Tensor | None  # bool ``(T,)``, queries whose request has no keys; None where there is none
    builder: TrtllmDecode  # keeps the workspace
    number: int | None  # the builder's ``number`` after this build; None where the lists are the call's own

    def check(self) -> None:
        """Compare the call with what is in the tensors that CUDA graphs read."""
        if self.number != self.builder.number:
            raise BatchError(
                "a later build has overwritten the lengths of this batch, which CUDA graphs keep in one place",
                hint="with CUDA graphs, run each batch before the next one is built, or build it again",
            )


class TrtllmDecode:
    """Builds the decodes of one kind of layers, and keeps their zeroed workspace."""

    def __init__(self, context: BackendContext, kernel: MLAKernel) -> None:
        self._context, config = context, context.config
        self._causal = not config.non_causal
        size, on = context.plans["decode"].workspace_bytes, context.device
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=on)  # uint8
        self._masks_drafts = (kernel.name, kernel.implementation) != ("cute-dsl", "modular")
        self._most = min(context.max_num_batched_tokens, context.max_num_seqs * config.max_decode_query_len)
        self._lens: Tensor | None = None
        self._table: Tensor | None = None
        # how often the tensors that CUDA graphs read were written; None without CUDA graphs
        self.number: int | None = None
        if context.cuda_graphs:
            self.number = 0
            self._lens = torch.ones(max(self._most, context.max_num_seqs), dtype=torch.int32, device=on)

    def build(self, common: CommonAttentionMetadata) -> TrtllmCall:
        """Return the decodes of a batch. Does not synchronise."""
        longest, table, lens = common.max_query_len, common.block_table_tensor, common.seq_lens
        assert table is not None
        causal = self._causal and common.causal and self._masks_drafts
        uniform = common.num_reqs * longest == common.num_actual_tokens  # not where requests have no query
        if not uniform or (longest > 1 and not causal):
            return self._by_token(common)
        if self._lens is not None:
            # Always by way of the tensor that graphs read, also where all have keys: a replay has other lengths.
            lens = torch.clamp_min(lens, 1, out=self._lens[: common.num_reqs])
            self.number = (self.number or 0) + 1
        blank = None
        if int(common.seq_lens_cpu.min()) == 0:
            # A request without keys reads one key, of block 0, and its rows are blanked afterwards.
            empty = common.seq_lens == 0
            lens, table = lens.clamp_min(1) if self._lens is None else lens, table.masked_fill(empty.unsqueeze(1), 0)
            blank = empty.repeat_interleave(longest, output_size=common.num_actual_tokens)
        return self._call(common, longest, table, lens, blank)

    def _call(
        self, common: CommonAttentionMetadata, query_len: int, table: Tensor, lens: Tensor, blank: Tensor | None
    ) -> TrtllmCall:
        most, table = max(common.max_seq_len, 1), table.contiguous()
        return TrtllmCall(common.num_actual_tokens, query_len, table, lens, most, blank, self, self.number)

    def _by_token(self, common: CommonAttentionMetadata) -> TrtllmCall:
        """Return the call in which every query is a request of one."""
        table, tokens, device = common.block_table_tensor, common.num_actual_tokens, self._context.device
        assert table is not None
        request = torch.repeat_interleave(common.query_lens_cpu, output_size=tokens)
        lens = common.seq_lens_cpu[request]
        if self._causal and common.causal:  # a request's last query sees all keys, each one before it one fewer
            lens = lens - (common.query_start_loc_cpu[1:][request] - 1 - torch.arange(tokens, dtype=torch.int32))
        numbers = to_device(torch.cat([request.int(), lens.int().clamp_min(1)]), device)
        rows, blank = table.index_select(0, numbers[:tokens]), None
        if bool((lens <= 0).any()):
            blank = to_device(lens <= 0, device)
            rows.masked_fill_(blank.unsqueeze(1), 0)
        kept = numbers[tokens:]
        if self._lens is not None:
            if self._table is None:
                self._table = rows.new_zeros(self._most, rows.shape[1])
            kept, rows = self._lens[:tokens].copy_(kept), self._table[:tokens, : rows.shape[1]].copy_(rows)
            self.number = (self.number or 0) + 1
        return self._call(common, 1, rows, kept, blank)


class TrtllmLayer:
    """Runs the decodes of one layer."""

    def __init__(self, context: BackendContext, kernel: MLAKernel, terms: Terms) -> None:
        config = context.config
        self._entry, self._xqa = library.flashinfer().trtllm_batch_decode_with_kv_cache_mla, kernel.name == "xqa"
        options = context.options
        own = options if isinstance(options, FlashInferMLAOptions) else FlashInferMLAOptions()
        device_scales = own.device_scales and not self._xqa
        self._heads = Heads(config, kernel, terms, cache_scales=self._xqa, device_scales=device_scales)
        self._rank, self._fixed = cast(int, config.kv_lora_rank), self._heads.arguments
        if own.skip_softmax_threshold is not None:
            self._fixed["skip_softmax_threshold_scale_factor"] = own.skip_softmax_threshold
        if kernel.name == "cute-dsl":
            self._fixed["cute_dsl_impl"] = kernel.implementation

    def run(self, query: Tensor, kv_cache: Tensor, call: TrtllmCall, outputs: Outputs) -> None:
        """Attend; ``query (T, H, R + Pr)`` and ``outputs (T, H, R)`` have exactly the call's tokens."""
        call.check()
        work, each = self._heads.begin(query, outputs), call.query_len
        fixed: dict[str, Any] = {
            **self._fixed,
            "kv_cache": kv_cache,
            "workspace_buffer": call.builder.workspace,
            "max_seq_len": call.max_seq_len,
            "bmm1_scale": work.bmm1_scale,
            "bmm2_scale": work.bmm2_scale,
        }
        requests, (heads, width) = len(call.seq_lens), work.query.shape[1:]
        out = work.out if self._xqa else work.out.view(requests, each, heads, self._rank)
        parts = (work.query.view(requests, each, heads, width), call.block_table, call.seq_lens, out)
        step = requests_at_once(call.builder.workspace, heads, each, work.lse is not None)
        for first in range(0, requests, step):
            some = slice(first, min(first + step, requests))
            if work.lse is not None:
                fixed |= {"lse": work.lse[some.start * each : some.stop * each], "return_lse": True}
            own = parts if step >= requests else tuple(part[some] for part in parts)
            self._entry(query=own[0], block_tables=own[1], seq_lens=own[2], out=own[3], **fixed)
        self._heads.finish(work, outputs, call.blank)


def requests_at_once(workspace: Tensor, heads: int, query_len: int, wants_lse: bool) -> int:
    """Return how many requests one call takes: what counters there are, and with LSE what statistics fit."""
    if not wants_lse:
        return MOST_REQUESTS.value
    size, at_once = STATISTICS.value
    each = size * heads * -(-query_len // at_once) * at_once
    return max(1, min(MOST_REQUESTS.value, (workspace.numel() - RESERVED) // each))
