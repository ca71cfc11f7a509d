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
from attn_select_flashinfer.runtime.mha_calls import Cascade, NativePart
from attn_select_flashinfer.runtime.native_wrappers import NativePlan, PageLists, PhaseKernel, WrapperPool
from attn_select_flashinfer.runtime.plans import Wrapper


class NativeBuilder:
    """Makes the native parts of a step."""

    def __init__(self, context: BackendContext, scratch_bytes: int) -> None:
        # scratch_bytes: of the buffer for partial results, reserved here
        self._device, self._page = context.device, context.block_size or 1
        self.pool = WrapperPool(context, torch.empty(scratch_bytes, dtype=torch.uint8, device=context.device))
        self._rows = RowLists(self._page, context.device)
        self._causal, self._windowed = not context.config.non_causal, context.config.sliding_window is not None

    def decode(self, common: CommonAttentionMetadata, kernel: PhaseKernel, last: int) -> NativePart:
        """Plan the batch's first ``last`` requests, which have one token each."""
        wrapper, seq_lens = self.pool.eager(kernel, "decode"), _cut(common.seq_lens_cpu, 0, last)
        compiled = wrapper.compiled.get(False) if kernel.kernel.backend == "fa2" else None
        rows = None if compiled is None else self._rows.of(common, 0, last)
        if rows is not None:
            bounds, on_device = self._rows.counted(last)
            written = dict(zip(LISTS, (on_device, *rows.device), strict=True))
            plan = self._plan_rows(wrapper, kernel, common, bounds, seq_lens, written)
        else:
            lists = PageLists.of(seq_lens, self._page, None, self._device)
            plan = self._plan_decode(wrapper, kernel, lists)
            self._flatten(common, lists, 0)
        return _decoding(common, kernel, plan, last)

    def _plan_rows(
        self,
        wrapper: Wrapper,
        kernel: PhaseKernel,
        common: CommonAttentionMetadata,
        bounds: Tensor,
        seq_lens: Tensor,
        written: dict[str, Any],
    ) -> NativePlan:
        """Plan decodes by the compiled function. The wrapper reads ``written``."""
        host = (bounds, *self._rows.host(kernel, seq_lens, None), seq_lens.shape[0])
        written["_max_kv_len"] = common.max_seq_len
        return RowsPlan(wrapper, self.pool, kernel, wrapper.compiled[False], host, written)

    def _plan_decode(self, wrapper: Wrapper, kernel: PhaseKernel, lists: PageLists) -> NativePlan:
        """Plan by FlashInfer's ``plan``, and keep what that calls."""
        given = (lists.paged_kv_indptr, lists.paged_kv_indices, lists.paged_kv_last_page_len)
        with Recorder(wrapper.made) as recorder:
            plan = NativePlan(wrapper, self.pool, kernel, given, {"seq_lens": lists.seq_lens})
        _keep(wrapper, False, recorder.compiled(lists, lists.num_reqs))
        return plan

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
    ) -> NativePart:
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
        plan: NativePlan
        if compiled is not None and rows is not None:
            host = (qo_indptr, *self._rows.host(kernel, seq_lens, rows.starts), end - start)
            on_device = _cut(common.query_start_loc, first, last + 1)
            lists_read = (on_device - start if start else on_device, *rows.device)
            written: dict[str, Any] = dict(zip(LISTS, lists_read, strict=True))
            written |= dict(zip(PREFILL, (last - first, causal, longest, end - start), strict=True))
            written["_max_kv_len"] = common.max_seq_len
            plan = RowsPlan(wrapper, self.pool, kernel, compiled, host, written)
        else:
            lists = PageLists.of(seq_lens - skipped if skipped else seq_lens, self._page, None, self._device)
            with Recorder(wrapper.made, PREFILL) as recorder:
                plan = self._plan_queries(wrapper, kernel, qo_indptr, lists, causal, longest)
            _keep(wrapper, causal, recorder.compiled(lists, end - start))
            # The plan has copied the prefix sums to the device already (FlashInfer 0.6.14 keeps them by this name).
            self._flatten(common, lists, first, skipped, getattr(wrapper.made, "_paged_kv_indptr_buf", None))
        return NativePart(phase=phase, label=label or kernel.label, start=start, end=end, plan=plan, kernel=kernel)

    def _plan_queries(
        self, wrapper: Wrapper, kernel: PhaseKernel, qo_indptr: Tensor, lists: PageLists, causal: bool, longest: int
    ) -> NativePlan:
        """Plan queries of any length by FlashInfer's ``plan``."""
        given = (qo_indptr, lists.paged_kv_indptr, lists.paged_kv_indices, lists.paged_kv_last_page_len)
        more = {"causal": causal, "seq_lens": lists.seq_lens, "max_token_per_sequence": longest}
        return NativePlan(wrapper, self.pool, kernel, given, more)

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
            indptr = to_device(lists.paged_kv_indptr, self._device)
        ops.flatten_block_table(rows, indptr, lists.paged_kv_indices)

    def captured(self, common: CommonAttentionMetadata, kernel: PhaseKernel) -> NativePart:
        """Plan one token per request for a CUDA graph, making a wrapper for this batch size if there is none."""
        requests, buffers = common.num_reqs, self.pool.buffers
        assert buffers is not None
        wrapper = self.pool.captured(kernel, requests)
        if kernel.kernel.backend == "fa2" and wrapper.compiled and self._rows.fill(common, buffers):
            written = {name: getattr(wrapper.made, name) for name in LISTS}
            bounds = self._rows.counted(requests)[0]
            plan = self._plan_rows(wrapper, kernel, common, bounds, common.seq_lens_cpu, written)
            return _decoding(common, kernel, plan, requests)
        buffers.by_rows = False
        lists = PageLists.of(common.seq_lens_cpu, self._page, buffers.paged_kv_indices, self._device)
        if kernel.single_token:
            plan = self._plan_decode(wrapper, kernel, lists)
        else:
            counted = torch.arange(requests + 1, dtype=torch.int32)
            plan = self._plan_queries(wrapper, kernel, counted, lists, True, 1)
        self._flatten(common, lists, 0, 0, buffers.paged_kv_indptr[: requests + 1])
        return _decoding(common, kernel, plan, requests)

    def cascade(self, common: CommonAttentionMetadata, kernel: PhaseKernel, prefix_len: int) -> Cascade:
        """Plan the first ``prefix_len`` tokens, in the same pages for all requests, and each request's rest."""
        # Both run by the decode kernel, which splits long sequences whatever the number of queries.
        table, tokens = common.block_table_tensor, common.num_actual_tokens
        assert table is not None
        kernel = kernel.any_length
        rest = self.prefill(common, kernel, 0, common.num_reqs, phase="decode", skipped=prefix_len)
        lists = PageLists.of(torch.tensor([prefix_len], dtype=torch.int32), self._page, table[0], self._device)
        own = kernel.without_sinks
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        plan = self._plan_queries(self.pool.eager(own, "prefill"), own, bounds, lists, False, tokens)
        place: dict[str, Any] = {"phase": "decode", "label": f"cascade, {kernel.label}", "start": 0, "end": tokens}
        return Cascade(**place, prefix=NativePart(**place, plan=plan, kernel=own), rest=rest)


def _decoding(common: CommonAttentionMetadata, kernel: PhaseKernel, plan: NativePlan, last: int) -> NativePart:
    """Return the part of the first ``last`` requests, of one token each."""
    lens = _cut(common.seq_lens, 0, last) if kernel.kernel.backend == "cute-dsl" else None
    return NativePart(phase="decode", label=kernel.label, start=0, end=last, plan=plan, kernel=kernel, seq_lens=lens)


def _cut(list_: Tensor, first: int, last: int) -> Tensor:
    return list_ if first == 0 and len(list_) == last else list_[first:last]


def _keep(wrapper: Wrapper, causal: bool, compiled: CompiledPlan | None) -> None:
    """Keep what a wrapper's ``plan`` has called, if that is known."""
    if compiled is not None:
        wrapper.compiled[causal] = compiled
