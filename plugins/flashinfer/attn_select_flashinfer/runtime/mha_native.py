"""Plans FlashInfer's native wrappers for a step: page lists on the host, page indices on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select_flashinfer.runtime.compiled_plan import LISTS, PREFILL, CompiledPlan, Recorder, RowLists, RowsPlan
from attn_select_flashinfer.runtime.mha_calls import FICascade, FIDecode, FIPrefill
from attn_select_flashinfer.runtime.native_wrappers import NativePlan, PageLists, PhaseKernel, WrapperPool
from attn_select_flashinfer.runtime.plans import Plan, Wrapper


class NativeBuilder:
    """Makes the native parts of a step."""

    def __init__(self, context: BackendContext, scratch_bytes: int) -> None:
        # scratch_bytes: of the buffer for partial results, reserved here
        self._context = context
        self._page = context.block_size or 1
        self.pool = WrapperPool(context, torch.empty(scratch_bytes, dtype=torch.uint8, device=context.device))
        self._rows = RowLists(self._page, context.device)
        self._causal, self._windowed = not context.config.non_causal, context.config.sliding_window is not None

    def decode(self, common: CommonAttentionMetadata, kernel: PhaseKernel, last: int) -> FIDecode:
        """Plan the batch's first ``last`` requests, which have one token each."""
        wrapper, seq_lens = self.pool.eager(kernel, "decode"), _cut(common.seq_lens_cpu, 0, last)
        compiled = wrapper.compiled.get(False) if kernel.backend == "fa2" else None
        rows = None if compiled is None else self._rows.of(common, 0, last)
        if rows is not None:
            bounds, on_device = self._rows.counted(last)
            written = dict(zip(LISTS, (on_device, *rows.device), strict=True))
            return self._decode_by_rows(wrapper, kernel, common, bounds, seq_lens, written)
        lists = self._lists(seq_lens)
        part = self._planned_decode(wrapper, kernel, lists, common)
        self._flatten(common, lists, 0)
        return part

    def _decode_by_rows(
        self,
        wrapper: Wrapper,
        kernel: PhaseKernel,
        common: CommonAttentionMetadata,
        bounds: Tensor,
        seq_lens: Tensor,
        written: dict[str, Any],
    ) -> FIDecode:
        """Plan by the compiled function. The wrapper reads ``written``."""
        last = seq_lens.shape[0]
        host = (bounds, *self._rows.host(kernel, seq_lens, None), last)
        written["_max_kv_len"] = common.max_seq_len
        plan = RowsPlan(wrapper, self.pool, kernel, wrapper.compiled[False], host, written)
        return self._decoding(plan, kernel, common, last, None)

    @staticmethod
    def _decoding(
        plan: Plan, kernel: PhaseKernel, common: CommonAttentionMetadata, end: int, lists: PageLists | None
    ) -> FIDecode:
        lens = _cut(common.seq_lens, 0, end)
        return FIDecode(
            phase="decode", label=kernel.label, start=0, end=end, plan=plan, kernel=kernel, lists=lists, seq_lens=lens
        )

    def _planned_decode(
        self, wrapper: Wrapper, kernel: PhaseKernel, lists: PageLists, common: CommonAttentionMetadata
    ) -> FIDecode:
        """Plan by FlashInfer's ``plan``, and keep what that calls."""
        given, end = (lists.paged_kv_indptr, lists.paged_kv_indices, lists.paged_kv_last_page_len), lists.num_reqs
        with Recorder(wrapper.made) as recorder:
            plan = NativePlan(wrapper, self.pool, kernel, given, {"seq_lens": lists.seq_lens})
        _keep(wrapper, False, recorder.compiled(lists, end))
        return self._decoding(plan, kernel, common, end, lists)

    def prefill(
        self,
        common: CommonAttentionMetadata,
        kernel: PhaseKernel,
        first: int,
        last: int,
        *,
        phase: str = "prefill",
        label: str | None = None,
        skipped: int = 0,
        alone: bool = False,
    ) -> FIPrefill:
        """Plan requests ``first .. last - 1``, without ``skipped`` tokens at the start of each sequence."""
        # alone: each has at most one token, the last of its sequence, so that causality hides no key from it
        causal = alone or (self._causal and common.causal)
        if not causal and self._windowed:
            raise BatchError(
                "the step is not causal and the layers have a sliding window: native kernels cannot hide later keys",
                hint="run such steps causally, or by another backend",
            )
        seq_lens, bounds = _cut(common.seq_lens_cpu, first, last), _cut(common.query_start_loc_cpu, first, last + 1)
        ends = bounds.numpy()
        start, end = int(ends[0]), int(ends[-1])
        qo_indptr = torch.from_numpy(ends - start)  # its own memory, because the plan may copy it later
        wrapper, longest = self.pool.eager(kernel, phase), common.max_query_len
        compiled = None if skipped else wrapper.compiled.get(causal)
        rows = None if compiled is None else self._rows.of(common, first, last)
        if compiled is not None and rows is not None:
            host = (qo_indptr, *self._rows.host(kernel, seq_lens, rows.starts), end - start)
            on_device = _cut(common.query_start_loc, first, last + 1)
            written: dict[str, Any] = dict(
                zip(LISTS, (on_device - start if start else on_device, *rows.device), strict=True)
            )
            written |= dict(zip(PREFILL, (last - first, causal, longest, end - start), strict=True))
            written["_max_kv_len"] = common.max_seq_len
            plan = RowsPlan(wrapper, self.pool, kernel, compiled, host, written)
            return self._part(phase, label, (start, end), plan, kernel, None, qo_indptr, causal)
        lists = self._lists(seq_lens - skipped if skipped else seq_lens)
        with Recorder(wrapper.made, PREFILL) as recorder:
            part = self._queries(phase, wrapper, kernel, (start, end), qo_indptr, lists, causal, longest, label)
        _keep(wrapper, causal, recorder.compiled(lists, end - start))
        # The plan has copied the prefix sums to the device already (FlashInfer 0.6.14 keeps them there by this name).
        indptr = getattr(wrapper.made, "_paged_kv_indptr_buf", None)
        self._flatten(common, lists, first, skipped, indptr)
        return part

    def _lists(self, seq_lens: Tensor) -> PageLists:
        return PageLists.of(seq_lens, self._page, None, self._context.device)

    def _queries(
        self,
        phase: str,
        wrapper: Wrapper,
        kernel: PhaseKernel,
        tokens: tuple[int, int],
        qo_indptr: Tensor,
        lists: PageLists,
        causal: bool,
        longest: int,
        label: str | None = None,
    ) -> FIPrefill:
        """Plan queries of any length, tokens ``tokens[0] .. tokens[1] - 1`` of the step."""
        given = (qo_indptr, lists.paged_kv_indptr, lists.paged_kv_indices, lists.paged_kv_last_page_len)
        more = {"causal": causal, "seq_lens": lists.seq_lens, "max_token_per_sequence": longest}
        plan = NativePlan(wrapper, self.pool, kernel, given, more)
        return self._part(phase, label, tokens, plan, kernel, lists, qo_indptr, causal)

    @staticmethod
    def _part(
        phase: str,
        label: str | None,
        tokens: tuple[int, int],
        plan: NativePlan,
        kernel: PhaseKernel,
        lists: PageLists | None,
        qo_indptr: Tensor,
        causal: bool,
    ) -> FIPrefill:
        return FIPrefill(
            phase=phase,
            label=label or kernel.label,
            start=tokens[0],
            end=tokens[1],
            plan=plan,
            kernel=kernel,
            lists=lists,
            qo_indptr=qo_indptr,
            causal=causal,
        )

    def _flatten(
        self,
        common: CommonAttentionMetadata,
        lists: PageLists,
        first: int,
        skipped: int = 0,
        indptr: Tensor | None = None,
    ) -> None:
        """Gather the page indices on the device, where the table is; the plan has not read them."""
        # indptr: ``lists.paged_kv_indptr`` on the device, if it is there
        rows = common.block_table_tensor
        assert rows is not None
        requests = lists.num_reqs
        if requests < common.num_reqs:
            rows = rows[first : first + requests]
        if skipped:
            rows = rows[:, skipped // self._page :]
        if indptr is None:
            indptr = to_device(lists.paged_kv_indptr, self._context.device)
        ops.flatten_block_table(rows, indptr, lists.paged_kv_indices)

    def captured(self, common: CommonAttentionMetadata, kernel: PhaseKernel) -> FIDecode | FIPrefill:
        """Plan one token per request for a CUDA graph, making a wrapper for this batch size if there is none."""
        requests, buffers = common.num_reqs, self.pool.buffers
        assert buffers is not None
        wrapper = self.pool.captured(kernel, requests)
        if kernel.backend == "fa2" and wrapper.compiled and self._rows.fill(common, buffers):
            written = {name: getattr(wrapper.made, name) for name in LISTS}
            bounds = self._rows.counted(requests)[0]
            return self._decode_by_rows(wrapper, kernel, common, bounds, common.seq_lens_cpu, written)
        buffers.by_rows = False
        lists = PageLists.of(common.seq_lens_cpu, self._page, buffers.paged_kv_indices, self._context.device)
        part: FIDecode | FIPrefill
        if kernel.single_token:
            part = self._planned_decode(wrapper, kernel, lists, common)
        else:
            qo_indptr = torch.arange(requests + 1, dtype=torch.int32)
            part = self._queries("decode", wrapper, kernel, (0, requests), qo_indptr, lists, True, 1)
        indptr = buffers.paged_kv_indptr[: requests + 1]
        assert common.block_table_tensor is not None
        ops.flatten_block_table(common.block_table_tensor, indptr, lists.paged_kv_indices)
        return part

    def cascade(self, common: CommonAttentionMetadata, kernel: PhaseKernel, prefix_len: int) -> FICascade:
        """Plan the first ``prefix_len`` tokens, in the same pages for all requests, and each request's rest."""
        # Both run by the decode kernel, which splits long sequences whatever the number of queries.
        table, tokens = common.block_table_tensor, common.num_actual_tokens
        assert table is not None
        kernel = kernel.any_length
        rest = self.prefill(common, kernel, 0, common.num_reqs, phase="decode", skipped=prefix_len)
        lists = PageLists.of(torch.tensor([prefix_len], dtype=torch.int32), self._page, table[0], self._context.device)
        own = kernel.without_sinks
        qo_indptr = torch.tensor([0, tokens], dtype=torch.int32)
        wrapper = self.pool.eager(own, "prefill")
        prefix = self._queries("prefill", wrapper, own, (0, tokens), qo_indptr, lists, False, tokens)
        label = f"cascade, {kernel.label}"
        return FICascade(phase="decode", label=label, start=0, end=tokens, prefix=prefix, rest=rest)


def _cut(list_: Tensor, first: int, last: int) -> Tensor:
    return list_ if first == 0 and len(list_) == last else list_[first:last]


def _keep(wrapper: Wrapper, causal: bool, compiled: CompiledPlan | None) -> None:
    """Keep what a wrapper's ``plan`` has called, if that is known."""
    if compiled is not None:
        wrapper.compiled[causal] = compiled
