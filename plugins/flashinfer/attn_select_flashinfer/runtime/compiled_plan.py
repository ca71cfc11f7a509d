"""Plans steps by the compiled functions that stand behind the ``plan`` of FlashInfer's paged wrappers.

``plan`` copies three or four lists to the device, looks its module up and checks what is the same in every step, before
it has a compiled function make the schedule (flashinfer/decode.py and prefill.py 0.6.14 to 0.7.2.post1). A wrapper is
planned by ``plan`` twice, and the second time the arguments of the compiled function are kept. Later steps call it with
the same arguments except for the batch's lists, and put what the kernel reads where ``plan`` puts it.

Pages are then rows of the block table, read where they lie, each taken as wide as the table. No page is copied, and
those behind a request's last key are not looked at:

- fa2's schedule counts pages on the host. Its kernel takes from the device where a request's pages begin, and how many
  tokens they hold: ``(pages - 1) * page_size + last_page_len`` modulo 2 ** 32 (``paged_kv_t::get_length`` in
  include/flashinfer/page.cuh). A negative ``last_page_len`` makes the length right.
- fa3's schedule takes both from the host, places and lengths (``PrefillSM90Plan`` in attention/scheduler.cuh), and its
  kernel takes them from the schedule (attention/hopper/sparse_mainloop.cuh).

A CUDA graph reads rows too, of a table that stays where it is and that the step's is copied into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select_flashinfer.runtime.native_wrappers import GraphBuffers, NativePlan, PageLists, PhaseKernel, WrapperPool
from attn_select_flashinfer.runtime.plans import PINNED, Wrapper

LISTS = ("_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")
"""Attributes of a wrapper: the lists that its kernel reads, on the device."""
PLANNED = ("_cached_module", "_jit_module", "_max_kv_len", "_plan_info")
"""Attributes of a wrapper that its ``plan`` reads or writes beside them."""
PREFILL = ("_batch_size", "_causal", "_max_q_len", "_qo_indptr_last")
"""Attributes that the prefill wrapper's ``plan`` writes too, of the batch."""


def _same(found: Any, own: Tensor) -> bool:
    return torch.is_tensor(found) and found.data_ptr() == own.data_ptr()


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A wrapper's compiled function, with the arguments that are the same for all batches."""

    function: Callable[..., Any]  # makes a schedule and starts its copy to the device
    before: tuple[Tensor, ...]  # the workspace for partial results and the schedule's memory on the device
    later: tuple[Any, ...]  # heads, page size, window and what else stands behind the numbers of tokens and requests

    def __call__(self, pinned: Tensor, queries: Tensor, pages: Tensor, seq_lens: Tensor, tokens: int) -> Any:
        """Make a schedule."""
        # pinned: where it is written; the device's copy is read from there later
        # queries: int32 ``(B + 1,)`` on the host, prefix sums of the query lengths
        # pages: int32 ``(B + 1,)`` on the host, where each request's pages begin, by fa2 prefix sums of their number
        # Returns what ``run`` reads as the wrapper's ``_plan_info``.
        return self.function(*self.before, pinned, queries, pages, seq_lens, tokens, seq_lens.shape[0], *self.later)


# Nothing is kept at a wrapper's first plan, which looks the module up.
class Recorder:
    """While it is entered, keeps what a wrapper's ``plan`` calls: its module is asked for ``plan`` through this."""

    def __init__(self, made: Any, more: tuple[str, ...] = ()) -> None:
        # made: FlashInfer's wrapper
        # more: attributes beside ``LISTS`` and ``PLANNED`` that are written in the place of ``plan``
        self._made, self._arguments = made, ()
        known = all(hasattr(made, name) for name in (*LISTS, *PLANNED, *more))
        self._module: Any = made._cached_module if known else None

    def __enter__(self) -> Recorder:
        # ``plan`` calls ``_jit_module`` where there is one, and leaves it in ``_cached_module``: both are put back.
        if self._module is not None:
            self._variant, self._made._jit_module = self._made._jit_module, self
        return self

    def __exit__(self, *raised: object) -> None:
        if self._module is not None:
            self._made._cached_module, self._made._jit_module = self._module, self._variant

    def plan(self, *arguments: Any) -> Any:
        """Call the compiled function."""
        self._arguments = arguments
        return self._module.plan(*arguments)

    def compiled(self, lists: PageLists, tokens: int) -> CompiledPlan | None:
        """Return what the wrapper called with these lists; None where its arguments are not in the places known."""
        if self._module is None:
            return None
        found, requests = self._arguments, lists.num_reqs
        # Places as in ``CompiledPlan.__call__``: 0 to 2 buffers, 3 queries, 4 pages, 5 lengths, 6 tokens, 7 requests,
        # and behind them numbers that no batch changes. A tensor there may be of this batch.
        own = (self._made._float_workspace_buffer, self._made._int_workspace_buffer, getattr(self._made, PINNED))
        places = {**dict(enumerate(own)), 4: lists.paged_kv_indptr, 5: lists.seq_lens}
        known = (
            len(found) > 8
            and all(_same(found[place], tensor) for place, tensor in places.items())
            and found[6:8] == (tokens, requests)
            and not any(map(torch.is_tensor, found[8:]))
        )
        return CompiledPlan(self._module.plan, found[:2], found[8:]) if known else None


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch's pages as rows of a table."""

    starts: Tensor  # int32 ``(B + 1,)`` on the host, where each request's row begins
    device: tuple[Tensor, Tensor, Tensor]  # what the kernel reads of them: ``starts``, the rows, ``last_page_len``


class RowsPlan(NativePlan):
    """A batch whose pages are rows, planned by a wrapper's compiled function."""

    __slots__ = ("_compiled", "_written")

    def __init__(
        self,
        wrapper: Wrapper,
        pool: WrapperPool,
        kernel: PhaseKernel,
        compiled: CompiledPlan,
        host: tuple[Any, ...],
        written: dict[str, Any],
    ) -> None:
        # host: what it gets of the batch
        # written: attributes of the wrapper, as ``plan`` would have left them
        self._compiled, self._written = compiled, written
        super().__init__(wrapper, pool, kernel, host, {})

    def _plan(self) -> None:
        """Call the compiled function."""
        made = self.wrapper.made
        for name, value in self._written.items():
            setattr(made, name, value)
        made._plan_info = self._pool.ring.lend(self._compiled, *self._lists, cleared=self._cleared)


class RowLists:
    """Makes the lists of batches whose pages are rows of a table."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size, self._device = page_size, device
        self._counted: dict[int, tuple[Tensor, Tensor]] = {}
        self._width, self._starts = 0, dict[int, tuple[Tensor, Tensor]]()

    def counted(self, requests: int) -> tuple[Tensor, Tensor]:
        """Return 0 to ``requests``, the bounds of queries of one token, on the host and on the device."""
        if requests not in self._counted:
            bounds = torch.arange(requests + 1, dtype=torch.int32)
            self._counted[requests] = bounds, to_device(bounds, self._device)
        return self._counted[requests]

    def host(self, kernel: PhaseKernel, seq_lens: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``pages`` and ``seq_lens`` as ``CompiledPlan`` takes them, for lengths int32 ``(B,)`` on the host."""
        lens = seq_lens.numpy().copy()  # a copy: a batch may be planned again after the caller has changed its lengths
        if kernel.kernel.backend == "fa3" and starts is not None:
            return starts, torch.from_numpy(lens)
        pages = np.zeros(len(lens) + 1, dtype=np.int32)
        np.add.accumulate((lens + (self._page_size - 1)) // self._page_size, out=pages[1:])
        return torch.from_numpy(pages), torch.from_numpy(lens)

    def of(self, common: CommonAttentionMetadata, first: int, last: int) -> Rows | None:
        """Return the rows of requests ``first .. last - 1``."""
        # None where kernels cannot read them: they do not lie one behind the other, or places exceed 32 bits.
        table, size, requests = common.block_table_tensor, self._page_size, last - first
        assert table is not None
        if first:
            table = table[first:]
        width, step = table.stride()
        # An expanded or a transposed table has no such rows, and kernels count tokens in 32 bits.
        if step != 1 or width < table.shape[1] or requests * width * size >= 1 << 32:
            return None
        try:
            rows = table.as_strided((requests * width,), (1,))
        except RuntimeError:  # columns were cut off in front, so that the last row is not as wide as the table
            return None
        if width != self._width:  # tables that are made anew in each step become wider now and then
            self._width, self._starts = width, {}
        if requests not in self._starts:
            starts = self.counted(requests)[0] * width
            self._starts[requests] = starts, to_device(starts, self._device)
        lengths = common.seq_lens if requests == common.num_reqs else common.seq_lens[first:last]
        host, device = self._starts[requests]
        # The kernel adds (width - 1) * size to the last page's length: this makes the sum the length.
        return Rows(host, (device, rows, lengths - (width - 1) * size))

    def fill(self, common: CommonAttentionMetadata, buffers: GraphBuffers) -> bool:
        """Write what a captured kernel reads into its buffers; False where places exceed 32 bits."""
        table, size, requests = common.block_table_tensor, self._page_size, common.num_reqs
        assert table is not None
        rows = buffers.paged_kv_indices.view(len(buffers.paged_kv_last_page_len), -1)
        width = rows.shape[1]
        if rows.numel() * size >= 1 << 32:
            return False
        if not buffers.by_rows:
            torch.mul(buffers.qo_indptr, width, out=buffers.paged_kv_indptr)
            buffers.by_rows = True
        columns = min(width, table.shape[1])
        rows[:requests, :columns].copy_(table[:, :columns])
        torch.sub(common.seq_lens, (width - 1) * size, out=buffers.paged_kv_last_page_len[:requests])
        return True
