"""How the fa3 MLA kernel runs the lists of a schedule: pieces of requests per cluster, then merges per CTA.

Rules by source: ``BatchMLAPageAttentionHopperKernel`` (attention/mla_hopper.cuh), ``DevicePersistentMergeStates``
(attention/mla.cuh) and the scratch that ``MLAPlan`` lays out (attention/scheduler.cuh), all 0.6.14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashinfer_emulated import need

TILE_Q, TILE_KV = 64, 64
ORDER = (
    "q_indptr", "kv_indptr", "partial_indptr", "merge_packed_offset_start", "merge_packed_offset_end",
    "merge_partial_packed_offset_start", "merge_partial_packed_offset_end", "merge_partial_stride",
    "q_len", "kv_len", "q_start", "kv_start", "kv_end", "work_indptr",
)  # fmt: skip
"""The lists whose offsets are the numbers of ``MLAPlanInfo`` from the third on."""

Attend = Callable[[int, int, int, int], tuple[Tensor, Tensor]]
"""From a query's row, its first page index and a range of keys to the output ``(H, R)`` and the LSE ``(H,)``."""


@dataclass(frozen=True)
class Lists:
    """The lists of a schedule.

    Attributes:
        memory: the integer workspace, as it is when the kernel runs.
        info: the numbers of ``MLAPlanInfo``.
    """

    memory: Tensor
    info: tuple[int, ...]

    def named(self, name: str, length: int) -> list[int]:
        """Return so many entries of a list of ``ORDER``."""
        offset = self.info[2 + ORDER.index(name)]
        need(offset + 4 * length <= len(self.memory), f"{name} ends behind the workspace")
        return self.memory[offset : offset + 4 * length].view(torch.int32).tolist()

    def run(self, attend: Attend, heads: int, output: Tensor, lse: Tensor) -> int:
        """Write ``output (N * H, R)`` and ``lse (N * H,)``, every row of the first tokens once; return how many."""
        ctas, clusters = self.info[:2]
        work = self.named("work_indptr", clusters + 1)
        need(work[0] == 0 and work == sorted(work), f"work_indptr {work}")
        columns = [self.named(name, work[-1]) for name in (*ORDER[:3], *ORDER[8:13])]
        room = 2 * clusters * ctas * TILE_Q
        partial, partial_lse = torch.full((room, output.shape[1]), torch.nan).double(), torch.full((room,), torch.nan)
        written = torch.zeros(len(output), dtype=torch.int32)
        for row, page, place, queries, keys, row_start, start, end in zip(*columns, strict=True):
            need(row_start == 0 and queries in (0, 1), "other queries than of one token are not emulated here")
            need(heads <= ctas * TILE_Q, f"{heads} rows do not fit a cluster of {ctas} CTAs")
            need(start % TILE_KV == 0 and 0 <= start <= end, f"keys {start} to {end}")
            need(end <= keys or start == end, f"keys {start} to {end} of {keys}")
            need(end in (start, keys) or end % TILE_KV == 0, f"the next piece begins at {end}")
            if not queries:
                continue
            values, its_lse = attend(row, page, start, end)
            if place == -1:
                rows = slice(row * heads, (row + 1) * heads)
                output[rows], lse[rows] = values.to(output.dtype), its_lse.float()
                written[rows] += 1
            else:
                need(0 <= place <= room - heads, f"partial output at row {place} of {room}")
                need(
                    partial_lse[place : place + heads].isnan().all(), f"partial output at row {place} is written twice"
                )
                partial[place : place + heads], partial_lse[place : place + heads] = values, its_lse.float()
        for first, last, begin, behind, stride in zip(
            *(self.named(name, ctas * clusters) for name in ORDER[3:8]), strict=True
        ):
            for offset in range(last - first):
                rows = torch.arange(begin + offset, behind, stride)
                weights = torch.softmax(partial_lse[rows].double(), 0)
                output[first + offset] = (weights[:, None] * partial[rows]).sum(0).to(output.dtype)
                lse[first + offset] = torch.logsumexp(partial_lse[rows], 0)
                written[first + offset] += 1
        tokens = max((row + queries for row, queries in zip(columns[0], columns[3], strict=True)), default=0)
        times = written[: tokens * heads].unique().tolist()
        need(times in ([], [1]) and not written[tokens * heads :].any(), f"rows are written {times} times")
        return tokens
