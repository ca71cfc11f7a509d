"""vLLM's description of a step's batch as attn-select's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from attn_select.runtime import BatchError, CommonAttentionMetadata


def common_of(common: Any, block_size: int | None, longest_decode: int | None = None) -> CommonAttentionMetadata:
    """Return attn-select's view of vLLM's ``CommonAttentionMetadata``; tensors are shared."""
    # ``longest_decode``: tokens up to which the kernels' builders count a query as a decode; None: they count none.
    # Raises BatchError where the step has a causality per request, or vLLM does not say the lengths on the host.
    if not isinstance(common.causal, bool):
        raise BatchError("causal is a tensor: accepted is one answer for the whole batch")
    bounds = _bounds_on_the_host(common)
    return CommonAttentionMetadata(
        query_start_loc=common.query_start_loc,
        query_start_loc_cpu=bounds,
        seq_lens=common.seq_lens,
        seq_lens_cpu=_lengths_on_the_host(common),
        num_reqs=common.num_reqs,
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=None if block_size is None else common.block_table_tensor,
        slot_mapping=None if block_size is None else common.slot_mapping[: common.num_actual_tokens],
        causal=common.causal,
        block_size=block_size,
        num_decodes=_decodes(bounds, common.max_query_len, longest_decode),
        mm_prefix_ranges=_image_ranges(common),
    )


def of_drafts(common: Any, vllm_config: Any) -> Any:
    """Return vLLM's description of a step that drafts, with bounds of the lengths on the host that hold."""
    # Drafts with slots of their own lengthen every request, and vLLM lengthens no bound (``extend_all_queries_by_N``
    # in vllm/v1/spec_decode/utils.py of 0.32 and 0.33).
    bounds, slots = common.seq_lens_cpu_upper_bound, vllm_config.speculative_config.max_num_new_slots_for_drafting
    return common if bounds is None or not slots else replace(common, seq_lens_cpu_upper_bound=bounds + slots)


def _image_ranges(common: Any) -> list[list[tuple[int, int]]] | None:
    """Return per request the first and the last position of each image; None without any. Releases from 0.32 say it."""
    by_request: dict[int, list[tuple[int, int]]] = getattr(common, "mm_req_doc_ranges", None) or {}
    if not any(by_request.values()):
        return None
    return [by_request.get(request, []) for request in range(common.num_reqs)]


def _decodes(bounds: Tensor, longest: int, longest_decode: int | None) -> int | None:
    """Return how many of the first requests are decodes; None where their lengths say it."""
    # vLLM puts new prompts last, however short they are (``reorder_batch_to_split_decodes_and_prefills`` in
    # vllm/v1/attention/backends/utils.py): a prompt of one token behind a longer one is a prefill.
    if longest_decode is None or longest <= longest_decode:
        return None
    on_host = bounds.numpy()
    longer = on_host[1:] - on_host[:-1] > longest_decode
    first = int(longer.argmax())
    return first if longer[first] else None


def _bounds_on_the_host(common: Any) -> Tensor:
    """Return the prefix sums of the query lengths."""
    # vLLM pads the batch of a CUDA graph with requests of no tokens. Attn-select's builders take padding as requests
    # of the same query length and no keys, and find the sizes that a graph was captured with.
    bounds: Tensor = common.query_start_loc_cpu
    each, tokens = common.max_query_len, common.num_actual_tokens
    if each * common.num_reqs != tokens or int(bounds[-1]) == tokens:
        return bounds
    return torch.arange(0, tokens + 1, each, dtype=torch.int32)


def _lengths_on_the_host(common: Any) -> Tensor:
    """Return the requests' lengths without asking the device. The upper bound is exact but in speculative decoding."""
    bound: Tensor | None = common.seq_lens if current_platform.is_cpu() else common.seq_lens_cpu_upper_bound
    if bound is None:
        raise BatchError("seq_lens_cpu_upper_bound is None: the kernels' plans are made from lengths on the host")
    return bound
