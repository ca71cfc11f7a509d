"""Prefill of ``FLASHINFER_MLA`` at run time: full K and V, one request behind the other, QK wider than V.

fa2 and fa3 stand behind ``BatchPrefillWithRaggedKVCacheWrapper``, which plans on the host. A step's own tokens and each
chunk of context are calls of their own, whose plans are all in use until the last layer has run: each has a wrapper and
a schedule.

trtllm-gen and CUTLASS are functions. What they do with a request without keys is not defined
(flashinfer-ai/flashinfer #3779), so they are called for each run of requests that have some. (CUTLASS's wrapper reads
its prefix sums back from the device; its function does not.)

FlashInfer's LSE is in base 2. In a row without keys it is -5e4 in 0.6.14 and -inf in 0.7.2 (``math::inf`` in
include/flashinfer/math.cuh).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import VarlenMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_flashinfer.facts.libraries import INT_WORKSPACE, MIB
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.plans import PinnedRing, ScaledPlan, Schedule, SharedScale, Wrapper
from attn_select_flashinfer.runtime.scores import LN2, blank_rows, copy_back, packed, power_for


@dataclass(slots=True)
class RaggedCall:
    """One ``forward_mha`` call; by itself one of queries without any key."""

    num_tokens: int

    def run(self, terms: Terms, tensors: tuple[Tensor, ...], outputs: Outputs) -> None:
        """Attend: ``(query, key, value)`` of the call's tokens and keys."""
        outputs.output.zero_()
        if outputs.lse is not None:
            outputs.lse.fill_(-torch.inf)


@dataclass(slots=True)
class PlannedPrefill(RaggedCall):
    """One call of fa2 or fa3."""

    plan: ScaledPlan
    blank: Tensor | None  # bool ``(T,)`` on the device, queries of requests without keys; None: there is none

    def run(self, terms: Terms, tensors: tuple[Tensor, ...], outputs: Outputs) -> None:
        """As ``RaggedCall.run``."""
        power = power_for(terms.scale)
        wrapper, (query, *rest), made = self.plan.ready_for(terms.scale * power), tensors, packed(outputs)
        if power != 1.0:
            query = query / power
        wrapper.run(query, *rest, out=made.output, lse=made.lse, return_lse=made.lse is not None)
        if made.lse is not None:
            made.lse.mul_(LN2)
        copy_back(made, outputs)
        if self.blank is not None:
            blank_rows(outputs, self.blank)


class PlannedRagged:
    """Plans the calls of a kind of layers and runs them by fa2 or fa3."""

    def __init__(self, context: BackendContext, kernel: str, scale: SharedScale) -> None:
        library.flashinfer().check("BatchPrefillWithRaggedKVCacheWrapper")
        self._context, self._kernel, self._scale = context, kernel, scale
        self._ring, on = PinnedRing(context.device), context.device
        size = context.plans["prefill"].workspace_bytes - INT_WORKSPACE
        self._workspace = torch.empty(size, dtype=torch.uint8, device=on)
        self._wrappers: list[Wrapper] = []
        self._used = 0
        config = context.config
        dtype = PLAIN_DTYPES[config.dtype]
        self._fixed: dict[str, Any] = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_heads,
            "head_dim_qk": cast(int, config.qk_nope_head_dim) + cast(int, config.qk_rope_head_dim),
            "head_dim_vo": config.v_head_dim,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def build(self, varlen: VarlenMetadata) -> RaggedCall:
        """Return one call, planned."""
        if varlen.counts_sinks:  # a step's own tokens come first, and with them the next step
            self._used = 0
        tokens = int(varlen.query_start_loc_cpu[-1])
        if not tokens or not int(varlen.key_start_loc_cpu[-1]):
            return RaggedCall(tokens)
        arguments = {
            "qo_indptr": varlen.query_start_loc_cpu.clone(),  # a copy: the call may be planned again
            "kv_indptr": varlen.key_start_loc_cpu.clone(),
            "causal": varlen.causal,
            **self._fixed,
        }
        plan = ScaledPlan(tokens, self._next(), self._ring, arguments, self._scale)
        return PlannedPrefill(tokens, plan, blank_of(varlen))

    def _next(self) -> Wrapper:
        if self._used == len(self._wrappers):
            made = library.flashinfer().BatchPrefillWithRaggedKVCacheWrapper(
                self._workspace, kv_layout="NHD", backend=self._kernel
            )
            if self._wrappers:  # there is one per chunk of context: they take what a plan needs
                size = self._schedule_bytes()
                made.reset_workspace_buffer(self._workspace, self._workspace.new_empty(size))
            self._wrappers.append(Wrapper(made, Schedule()))
        self._used += 1
        return self._wrappers[self._used - 1]

    def _schedule_bytes(self) -> int:
        """Return room for ten int32 lists of a tile of 64 queries each, per head (PrefillSM90Plan, scheduler.cuh)."""
        context = self._context
        tiles = context.max_num_batched_tokens // 64 + context.max_num_seqs
        return min(INT_WORKSPACE, MIB // 4 + 40 * tiles * context.config.num_heads)


@dataclass(slots=True)
class Run:
    """Neighbouring requests with queries and keys."""

    rows: slice  # rows, keys: theirs in the call
    keys: slice
    step: dict[str, Any]  # the function's arguments that the batch fixes


@dataclass(slots=True)
class DirectPrefill(RaggedCall):
    """One call of trtllm-gen or CUTLASS, made of runs."""

    entry: Callable[..., Any]  # the function
    cutlass: bool  # which of both it is
    runs: tuple[Run, ...]
    causal: bool
    counts_sinks: bool

    def run(self, terms: Terms, tensors: tuple[Tensor, ...], outputs: Outputs) -> None:
        """As ``RaggedCall.run``; sinks are float32."""
        if sum(run.rows.stop - run.rows.start for run in self.runs) < self.num_tokens:
            RaggedCall.run(self, terms, tensors, outputs)
        sinks = terms.sinks if self.counts_sinks else None
        for run in self.runs:
            written = outputs.rows(run.rows)
            made = packed(written)
            query, key, value = tensors[0][run.rows], tensors[1][run.keys], tensors[2][run.keys]
            wanted = {"out": made.output, "lse": made.lse, "return_lse": made.lse is not None}
            if self.cutlass:
                self.entry(query, key, value, causal=self.causal, sm_scale=terms.scale, **run.step, **wanted)
            else:
                # The query's strides are not read.
                own = {"query": query.contiguous(), "key": key, "value": value, "bmm1_scale": terms.scale}
                self.entry(**own, is_causal=self.causal, attention_sinks=sinks, **run.step, **wanted)
            if made.lse is not None:
                made.lse.mul_(LN2)
            copy_back(made, written)


class DirectRagged:
    """Makes the calls of trtllm-gen's or CUTLASS's function."""

    def __init__(self, context: BackendContext, kernel: str) -> None:
        self._context, entries = context, library.flashinfer()
        self._cutlass = kernel == "cutlass"
        self._entry = entries.fmha_varlen if self._cutlass else entries.trtllm_ragged_attention_deepseek
        # Since 0.6.18 trtllm-gen's function reads lengths back from the device unless it is given them.
        self._takes_lens = "q_seq_lens_cpu" in inspect.signature(self._entry).parameters
        size = 0 if self._cutlass else context.plans["prefill"].workspace_bytes
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=context.device)

    def build(self, varlen: VarlenMetadata) -> RaggedCall:
        """Return one call. Does not synchronise."""
        bounds, key_bounds = varlen.query_start_loc_cpu, varlen.key_start_loc_cpu
        active, tokens = ((bounds.diff() > 0) & (key_bounds.diff() > 0)).tolist(), int(bounds[-1])
        if not any(active):
            return RaggedCall(tokens)
        runs, first = [], 0
        for has_both, some in groupby(active):
            last = first + len([*some])
            if has_both:
                runs.append(self._run_of(bounds, key_bounds, first, last))
            first = last
        return DirectPrefill(tokens, self._entry, self._cutlass, tuple(runs), varlen.causal, varlen.counts_sinks)

    def _run_of(self, bounds: Tensor, key_bounds: Tensor, first: int, last: int) -> Run:
        own, theirs = bounds[first : last + 1], key_bounds[first : last + 1]
        lens, key_lens = own.diff(), theirs.diff()
        lists = (own - own[0], theirs - theirs[0], key_lens)  # prefix sums of queries and of keys, numbers of keys
        on_device = to_device(torch.cat(lists), self._context.device).split_with_sizes([len(each) for each in lists])
        step: dict[str, Any] = {
            "workspace_buffer": self._workspace,
            "seq_lens": on_device[2],
            "max_q_len": int(lens.max()),
            "max_kv_len": int(key_lens.max()),
            "bmm2_scale": 1.0,
            "o_sf_scale": 1.0,
            "batch_size": len(key_lens),
            "window_left": -1,
            "cum_seq_lens_q": on_device[0],
            "cum_seq_lens_kv": on_device[1],
            "enable_pdl": None,
        }
        if self._cutlass:
            names = ("qo_segment_offsets", "kv_segment_offsets")
            step = {**dict(zip(names, on_device, strict=False)), "max_qo_len": int(lens.max())}
        elif self._takes_lens:
            step |= {"q_seq_lens_cpu": lens, "kv_seq_lens_cpu": key_lens}
        rows, keys = (slice(int(each[0]), int(each[-1])) for each in (own, theirs))
        return Run(rows, keys, step)


def blank_of(varlen: VarlenMetadata) -> Tensor | None:
    """Return bool ``(T,)`` on the device, the queries of requests without keys; None where there is none."""
    lens, key_lens = varlen.query_start_loc_cpu.diff(), varlen.key_start_loc_cpu.diff()
    empty = (key_lens == 0) & (lens > 0)
    if not bool(empty.any()):
        return None
    return to_device(torch.repeat_interleave(empty, lens), varlen.query_start_loc.device)
