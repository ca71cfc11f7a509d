"""Plans FlashInfer's native wrappers for a step: page lists on the host, page indices on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select_flashinfer.runtime.mha_calls import Cascade, NativePart
from attn_select_flashinfer.runtime.native_wrappers import NativePlan, PageLists, PhaseKernel, WrapperPool
from attn_select_flashinfer.runtime.plans import Wrapper


class NativeBuilder:
    """Makes the native parts of a step."""

    def __init__(self, context: BackendContext, scratch_bytes: int) -> None:
        # scratch_bytes: of the buffer for partial results, reserved here
        self._device, self._page = context.device, context.block_size or 1
        self.pool = WrapperPool(context, torch.empty(scratch_bytes, dtype=torch.uint8, device=context.device))
        self._causal, self._windowed = not context.config.non_causal, context.config.sliding_window is not None

    def decode(self, common: CommonAttentionMetadata, kernel: PhaseKernel, last: int) -> NativePart:
        """Plan the batch's first ``last`` requests, which have one token each."""
        lists = PageLists.of(_cut(common.seq_lens_cpu, 0, last), self._page, None, self._device)
        plan = self._planned(self.pool.eager(kernel, "decode"), kernel, lists)
        self._flatten(common, lists, 0, last)
        return _decoding(common, kernel, plan, last)

    def prefill(
        self,
        common: CommonAttentionMetadata,
        kernel: PhaseKernel,
        first: int,
        last: int,
        *,
        role: str = "prefill",
        skipped: int = 0,
        alone: bool = False,
    ) -> NativePart:
        """Plan requests ``first .. last - 1``, without ``skipped`` tokens at the start of each sequence."""
        # role: which schedule the plan may overwrite
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
        queries = torch.from_numpy(ends - start)  # its own memory, because the plan may copy it later
        lists = PageLists.of(seq_lens - skipped if skipped else seq_lens, self._page, None, self._device)
        wrapper, longest = self.pool.eager(kernel, role), common.max_query_len
        plan = self._planned(wrapper, kernel, lists, queries, causal=causal, longest=longest)
        self._flatten(common, lists, first, last, skipped)
        return NativePart(start=start, end=end, plan=plan, kernel=kernel)

    def _planned(
        self,
        wrapper: Wrapper,
        kernel: PhaseKernel,
        lists: PageLists,
        queries: Tensor | None = None,
        *,
        causal: bool = False,
        longest: int = 1,
    ) -> NativePlan:
        """Plan by FlashInfer's ``plan``; the decode wrapper takes no ``queries``, prefix sums of their lengths."""
        pages = (lists.paged_kv_indptr, lists.paged_kv_indices, lists.paged_kv_last_page_len)
        more: dict[str, Any] = {"seq_lens": lists.seq_lens}
        if queries is None:
            return NativePlan(wrapper, self.pool, kernel, pages, more)
        more |= {"causal": causal, "max_token_per_sequence": longest}
        return NativePlan(wrapper, self.pool, kernel, (queries, *pages), more)

    def _flatten(
        self,
        common: CommonAttentionMetadata,
        lists: PageLists,
        first: int,
        last: int,
        skipped: int = 0,
        indptr: Tensor | None = None,
    ) -> None:
        """Gather the page indices of requests ``first .. last - 1`` on the device; the plan has not read them."""
        # indptr: ``lists.paged_kv_indptr`` on the device, if it is there
        table = common.block_table_tensor
        assert table is not None
        rows = table[first:last, skipped // self._page :]
        if indptr is None:
            indptr = to_device(lists.paged_kv_indptr, self._device)
        ops.flatten_block_table(rows, indptr, lists.paged_kv_indices)

    def captured(self, common: CommonAttentionMetadata, kernel: PhaseKernel) -> NativePart:
        """Plan one token per request for a CUDA graph, making a wrapper for this batch size if there is none."""
        requests, buffers = common.num_reqs, self.pool.buffers
        wrapper = self.pool.captured(kernel, requests)
        lists = PageLists.of(common.seq_lens_cpu, self._page, buffers["paged_kv_indices"], self._device)
        queries = None if kernel.single_token else torch.arange(requests + 1, dtype=torch.int32)
        plan = self._planned(wrapper, kernel, lists, queries, causal=True)
        self._flatten(common, lists, 0, requests, indptr=buffers["paged_kv_indptr"][: requests + 1])
        return _decoding(common, kernel, plan, requests)

    def cascade(self, common: CommonAttentionMetadata, kernel: PhaseKernel, prefix_len: int) -> Cascade:
        """Plan the first ``prefix_len`` tokens, in the same pages for all requests, and each request's rest."""
        # Both run by the decode kernel, which splits long sequences whatever the number of queries.
        table, tokens = common.block_table_tensor, common.num_actual_tokens
        assert table is not None
        kernel = kernel.any_length
        rest = self.prefill(common, kernel, 0, common.num_reqs, role="decode", skipped=prefix_len)
        lists = PageLists.of(torch.tensor([prefix_len], dtype=torch.int32), self._page, table[0], self._device)
        own = kernel.without_sinks
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        plan = self._planned(self.pool.eager(own, "prefill"), own, lists, bounds, longest=tokens)
        return Cascade(start=0, end=tokens, prefix=NativePart(start=0, end=tokens, plan=plan, kernel=own), rest=rest)


def _decoding(common: CommonAttentionMetadata, kernel: PhaseKernel, plan: NativePlan, last: int) -> NativePart:
    """Return the part of the first ``last`` requests, of one token each."""
    lens = _cut(common.seq_lens, 0, last) if kernel.kernel.backend == "cute-dsl" else None
    return NativePart(start=0, end=last, plan=plan, kernel=kernel, seq_lens=lens)


def _cut(list_: Tensor, first: int, last: int) -> Tensor:
    return list_ if first == 0 and len(list_) == last else list_[first:last]
