"""The slots that tokens of sparse MLA attend to, put in order for kernels that read a row's first ones."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import power_of_two
from attn_select_triton.kernels.relaunch import Relaunches, specialised


@triton.jit(do_not_specialize=["stride"])
def slots_in_front_kernel(slots_ptr, front_ptr, counts_ptr, stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Move the slots of one token to the front and count them. Memory traffic: the slots once each way."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + token * stride + column, mask=column < TOP_K, other=-1)
    chosen = slots >= 0
    seen = tl.cumsum(chosen.to(tl.int32), 0)
    count = tl.max(seen, 0)
    place = tl.where(chosen, seen - 1, count + column - seen)
    tl.store(front_ptr + token * TOP_K + place, tl.where(chosen, slots, -1), mask=column < TOP_K)
    tl.store(counts_ptr + token, count)


_in_front = Relaunches(slots_in_front_kernel, num_warps=4)


def slots_in_front(topk_indices: Tensor) -> tuple[Tensor, Tensor]:
    """As ``attn_select.runtime.torch_ops.slots_in_front``; the last dimension is contiguous."""
    tokens, top_k = topk_indices.shape
    front = torch.empty(tokens, top_k, dtype=torch.int32, device=topk_indices.device)
    counts = front.new_empty(tokens)
    if tokens:
        key = (top_k, *specialised(topk_indices, front, counts))
        _in_front(
            key, (tokens, 1, 1), topk_indices, front, counts, topk_indices.stride(0), top_k, power_of_two(top_k)
        )  # fmt: skip
    return front, counts
