"""SGLang's description of a step's batch as attn-select's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.utils import is_cpu
from torch import Tensor

from attn_select.runtime import BatchError, CommonAttentionMetadata
from attn_select.runtime.batch import to_device
from attn_select.runtime.cuda_graph import StaticBatch
from attn_select.runtime.metadata import prefix_sums

VERIFY = "TARGET_VERIFY"
"""SGLang's steps that check drafts: each request has the same number of tokens, which form a tree."""
MODES = ("DECODE", "EXTEND", "MIXED", "SPLIT_PREFILL", VERIFY)
"""SGLang's kinds of steps: tokens attend to all before the step, and within the step causally or by a tree."""


def requests_with_slots(forward_batch: Any) -> int:
    """Return how many of a replayed batch's requests are real: the others, behind them, fill a captured size."""
    # SGLang gives those a row and a length, and no slot (build_replay_fb_view in decode_cuda_graph_runner.py 0.5.23).
    tokens_each = forward_batch.spec_info.draft_token_num if forward_batch.forward_mode.name == VERIFY else 1
    return len(forward_batch.out_cache_loc) // tokens_each


def common_of(
    forward_batch: Any,
    requests: int,
    req_to_token: Tensor,
    page_size: int,
    translate: Callable[[Tensor], Tensor] | None = None,
    static: StaticBatch | None = None,
) -> CommonAttentionMetadata:
    """Return attn-select's view of the first ``requests`` of a ``ForwardBatch`` of decodes, extends or drafts."""
    # Does not wait for the device. ``req_to_token`` is int32 ``(requests, tokens)``, SGLang's token slots of each
    # request in order; slots of one page lie one behind the other, the first at a multiple of the page size.
    # ``translate`` turns them into slots of the pool that the layers' keys and values are in, page by page; None: they
    # are that pool's. Lengths and tables are written to the buffers of ``static``, which ``StaticBatch.load`` then need
    # not copy; None: they are new tensors.
    mode, drafts, mask = forward_batch.forward_mode, 0, None
    if mode.name not in MODES:
        raise BatchError(f"forward_mode = {mode.name}: accepted are {', '.join(MODES)}")
    if forward_batch.seq_lens_cpu is None:
        raise BatchError("seq_lens_cpu is None: the kernels' plans are made from lengths on the host")
    if mode.name == VERIFY:
        drafts, mask = forward_batch.spec_info.draft_token_num, forward_batch.spec_info.custom_mask
    before = forward_batch.seq_lens[:requests]  # counts the step's own tokens, except for TARGET_VERIFY
    seq_lens_cpu = forward_batch.seq_lens_cpu[:requests].to(torch.int32) + drafts
    longest = int(seq_lens_cpu.max())
    if drafts or mode.is_decode():
        query_len = drafts or 1
        tokens = requests * query_len
        bounds_cpu = torch.arange(0, tokens + 1, query_len, dtype=torch.int32)
    else:
        lens = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        query_len, tokens = max(lens), sum(lens)
        bounds_cpu = prefix_sums(torch.tensor(lens, dtype=torch.int32))
    # Every page_size-th slot is the first of a page, so divided by the page size it is the page's number.
    rows = req_to_token[forward_batch.req_pool_indices[:requests], : -(-longest // page_size) * page_size : page_size]
    slots = forward_batch.out_cache_loc[:tokens]
    if translate is not None:
        rows, slots = translate(rows), translate(slots)
    if static is None:
        bounds = to_device(bounds_cpu, req_to_token.device)
        seq_lens, table = torch.empty_like(before, dtype=torch.int32), torch.empty_like(rows, dtype=torch.int32)
    else:
        bounds, seq_lens = static.query_start_loc[: requests + 1], static.seq_lens[:requests]
        table = static.block_table[:requests, : rows.shape[1]]
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds_cpu,
        seq_lens=torch.add(before, drafts, out=seq_lens),
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=query_len,
        max_seq_len=longest,
        block_table_tensor=torch.div(rows, page_size, rounding_mode="floor", out=table),
        slot_mapping=slots.to(torch.int64),
        block_size=page_size,
        tree_mask=None if mask is None else tree_of(mask, drafts, before),  # without one drafts are a chain
    )


def tree_of(mask: Tensor, drafts: int, before: Tensor) -> Tensor:
    """Return which of a request's drafts each of them sees, bool ``(B * drafts, drafts)``."""
    # SGLang's mask lies one request behind the other: ``(drafts, drafts)`` of each in its engine for CPUs, elsewhere
    # with a column in front for each token before the step (speculative/ngram_worker.py 0.5.23).
    if is_cpu():
        return mask.view(-1, drafts)
    # The last columns of each draft's row.
    ends = (before.long() + drafts).repeat_interleave(drafts).cumsum(0)
    return mask[ends[:, None] + torch.arange(-drafts, 0, device=mask.device)]


def reordered(common: CommonAttentionMetadata, order: Sequence[int]) -> tuple[CommonAttentionMetadata, Tensor]:
    """Return the batch with its requests in another order, and each token's place in the given one, int64 ``(T,)``."""
    device = common.seq_lens.device
    lens = common.query_lens_cpu[list(order)]
    starts = common.query_start_loc_cpu[:-1][list(order)].long()
    bounds_cpu = prefix_sums(lens)
    within = torch.arange(common.num_actual_tokens) - torch.repeat_interleave(bounds_cpu[:-1].long(), lens)
    tokens = to_device(torch.repeat_interleave(starts, lens) + within, device)
    requests = to_device(torch.tensor(order, dtype=torch.int64), device)
    assert common.block_table_tensor is not None
    assert common.slot_mapping is not None
    changed = replace(
        common,
        query_start_loc=to_device(bounds_cpu, device),
        query_start_loc_cpu=bounds_cpu,
        seq_lens=common.seq_lens[requests],
        seq_lens_cpu=common.seq_lens_cpu[list(order)],
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[tokens],
    )
    return changed, tokens
