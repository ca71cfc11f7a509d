"""Gathering heads and merging results through memory that all ranks read and write, without a collective.

Programs of one number meet: each tells the others on other ranks how often it has met, and waits until all have come
as often. What a rank's stream did before is done by then.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from attn_select.runtime.rank_memory import PROGRAMS, RankMemory
from attn_select_triton.kernels import launch
from attn_select_triton.kernels.primitives import LOG2E, natural_lse
from attn_select_triton.kernels.relaunch import Relaunches, dtypes, specialised

WORDS = 512  # Words of 8 bytes that a program copies at a time


@triton.jit
def meet(
    addresses, met_ptr, timeout, MEETING: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Wait for the programs of this number on all ranks; trap after ``timeout`` seconds."""
    place = MEETING * PROGRAMS + tl.program_id(0)
    count = tl.load(met_ptr + place) + 1
    tl.debug_barrier()  # all threads have stored what others read, and have read the count
    tl.store(met_ptr + place, count)
    for other in tl.static_range(RANKS):
        if other != RANK:
            there = addresses[other].to(tl.int64).to(tl.pointer_type(tl.int32)) + place * RANKS + RANK
            tl.atomic_xchg(there, count, sem="release", scope="sys")
    here = addresses[RANK].to(tl.int64).to(tl.pointer_type(tl.int32)) + place * RANKS
    for other in tl.static_range(RANKS):
        if other != RANK:
            # Adding 0 reads with an order. Another rank may already be a meeting ahead, and counts may wrap: so the
            # difference is asked for.
            seen = tl.atomic_add(here + other, 0, sem="acquire", scope="sys")
            began = tl.zeros((), tl.int64)
            while seen - count < 0:
                now = globaltimer()
                began = tl.where(began == 0, now, began)
                if now - began > timeout.to(tl.int64) * 1000000000:
                    tl.inline_asm_elementwise(
                        "{ mov.u32 $0, 0; trap; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                    )
                seen = tl.atomic_add(here + other, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # no thread reads what others sent before all have come


@triton.jit(do_not_specialize=["timeout"])
def gather_rank_heads_kernel(
    rows_ptr,
    addresses,
    met_ptr,
    timeout,
    words,
    start,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Write this rank's heads into all ranks' memory, ``GROUP`` words of one KV head after the other, and meet."""
    first = tl.program_id(0) * WORDS
    while first < words:
        word = first + tl.arange(0, WORDS)
        inside = word < words
        values = tl.load(rows_ptr + word, mask=inside)
        # Heads of all ranks lie KV head by KV head: in each one's share the ranks follow each other.
        target = start + (word // GROUP * RANKS + RANK) * GROUP + word % GROUP
        for other in tl.static_range(RANKS):
            tl.store(addresses[other].to(tl.int64).to(tl.pointer_type(tl.int64)) + target, values, mask=inside)
        first += tl.num_programs(0) * WORDS
    meet(addresses, met_ptr, timeout, 0, RANK, RANKS, PROGRAMS)


@triton.jit(do_not_specialize=["timeout", "rows"], do_not_specialize_on_alignment=["lse_ptr", "sinks_ptr"])
def merge_rank_memory_kernel(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    addresses,
    met_ptr,
    timeout,
    rows,
    start,
    lse_start,
    out_strides,
    lse_strides,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    OWN: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Meet, and merge the partial results that lie in all ranks' memory, of part ``OWN`` of ``SPLIT`` of the heads."""
    # Memory traffic: each partial once, and the result.
    meet(addresses, met_ptr, timeout, 1, RANK, RANKS, PROGRAMS)
    width = tl.arange(0, BLOCK_DV)
    first = tl.program_id(0) * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)
        some = row < rows
        mask = some[:, None] & (width < DV)[None, :]
        head = row % (KV_HEADS * GROUP)
        token = (row // (KV_HEADS * GROUP)).to(tl.int64)
        held = (head // GROUP * SPLIT + OWN) * GROUP + head % GROUP  # among the heads of the partial results
        source = token * (KV_HEADS * SPLIT * GROUP) + held
        # LSEs twice: first the largest, so that the weights below need no rescaling.
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        for other in tl.static_range(RANKS):
            lses = addresses[other].to(tl.int64).to(tl.pointer_type(tl.float32)) + lse_start
            largest = tl.maximum(largest, tl.load(lses + source, mask=some, other=float("-inf")))
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + held, mask=some, other=float("-inf"))
            largest = tl.maximum(largest, sink)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.zeros([ROWS], tl.float32)
        merged = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        for other in tl.static_range(RANKS):
            lses = addresses[other].to(tl.int64).to(tl.pointer_type(tl.float32)) + lse_start
            weight = tl.exp2((tl.load(lses + source, mask=some, other=float("-inf")) - base) * LOG2E)
            total += weight
            parts = addresses[other].to(tl.int64).to(tl.pointer_type(out_ptr.dtype.element_ty)) + start
            values = tl.load(parts + source[:, None] * DV + width[None, :], mask=mask, other=0.0)  # before the weight
            merged += tl.where((weight > 0)[:, None], values.to(tl.float32), 0.0) * weight[:, None]
        if sinks_ptr is not None:
            total += tl.exp2((sink - base) * LOG2E)
        merged *= (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        target = out_ptr + (token * out_strides[0] + head * out_strides[1])[:, None] + width[None, :]
        tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            target = lse_ptr + token * lse_strides[0] + head * lse_strides[1]
            tl.store(target, natural_lse(base * LOG2E, total), mask=some)
        first += tl.num_programs(0) * ROWS


_gather = Relaunches(gather_rank_heads_kernel, num_warps=4)
_merge = Relaunches(merge_rank_memory_kernel, num_warps=4)


def gather_rank_heads(rows: Tensor, memory: RankMemory, kv_heads: int) -> Tensor:
    """As ``attn_select.runtime.ops.gather_rank_heads``; a KV head's share of a row is a multiple of 8 bytes."""
    tokens, heads, width = rows.shape
    size, given = len(memory.buffers), rows.contiguous()
    words, group = given.nbytes // 8, heads // kv_heads * width * rows.element_size() // 8
    grid = (min(-(-words // WORDS), PROGRAMS), 1, 1)
    _gather(
        (memory.rank, size, group, words % 16, *specialised(given)), grid,
        given.view(torch.int64), memory.addresses, memory.met, memory.timeout, words, memory.layout.starts[0] // 8,
        memory.rank, size, group, WORDS, PROGRAMS,
    )  # fmt: skip
    return memory.queries(memory.rank, tokens)


def merge_rank_memory(
    output: Tensor, output_lse: Tensor | None, sinks: Tensor | None, memory: RankMemory, kv_heads: int, sharded: bool
) -> None:
    """As ``attn_select.runtime.ops.merge_rank_memory``; the last dimension of the output is contiguous."""
    tokens, heads, width = output.shape
    size, rows, rank = len(memory.buffers), tokens * heads, memory.rank
    split, own = (size, rank) if sharded else (1, 0)
    strides = output.stride()[:2], (0, 0) if output_lse is None else output_lse.stride()
    per_program = min(8, launch.power_of_two(-(-rows // PROGRAMS)))
    key = (
        rank, size, split, kv_heads, heads, width, strides, per_program, *specialised(output),
        *dtypes(output_lse, sinks),
    )  # fmt: skip
    _merge(
        key, (min(-(-rows // per_program), PROGRAMS), 1, 1), output, output_lse, sinks, memory.addresses, memory.met,
        memory.timeout, rows, memory.layout.starts[1] // output.element_size(), memory.layout.starts[2] // 4, *strides,
        rank, size, own, split, kv_heads, heads // kv_heads, width, launch.power_of_two(width), per_program,
        PROGRAMS,
    )  # fmt: skip
