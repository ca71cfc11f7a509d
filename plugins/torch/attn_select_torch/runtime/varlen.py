"""``torch.nn.attention.varlen``: FlashAttention over the packed queries and keys of many requests in one call.

It takes block tables with FlashAttention-3 alone, which torch does not contain; with the FlashAttention-2 that it does
contain they are an error (pytorch/pytorch pull request 175924). So keys and values are gathered here as well, one
request behind the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig, Phase
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select_torch.facts.torch_sdpa import SdpaFunction
from attn_select_torch.runtime.gather import CacheGather

ATTEND = torch.ops.aten._flash_attention_forward
"""What ``varlen_attn`` calls, without the Python operator around it, which takes longer than a small batch."""
CALL_BYTES = 2**28
"""Keys in bytes that one call gathers, unless a single request has more."""


@dataclass(slots=True)
class Call:
    """Some requests of a batch."""

    start: int  # start, end: their tokens
    end: int
    query_start_loc: Tensor  # query_start_loc, key_start_loc: int32 ``(B + 1,)`` on the device
    key_start_loc: Tensor
    max_query_len: int  # max_query_len, max_key_len: tokens
    max_key_len: int
    # row numbers in the cache (``CacheGather.rows``); None without a cache, keys are then the step's own
    rows: Tensor | None
    window: tuple[int, int]  # ``(left, right)`` keys that a row sees beside itself; -1: all


def available(functions: Mapping[Phase, SdpaFunction]) -> bool:
    """Whether a phase's plan names torch's kernel, and the installed torch has it."""
    if not {"varlen_attn", "cuDNN and varlen_attn"} & set(functions.values()):
        return False
    return torch.version.cuda is not None and torch.backends.cuda.is_flash_attention_available() and _has_windows()


@cache
def _has_windows() -> bool:
    """Whether the installed torch's ``varlen_attn`` takes windows: its parameters grew from release to release."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"return_aux", "scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters)


def calls(
    common: CommonAttentionMetadata,
    config: AttentionConfig,
    causal: bool,
    gather: CacheGather | None,
    apart: Collection[int] = (),
) -> list[Call]:
    """Return the calls that compute a batch except for the requests ``apart``. No synchronisation."""
    window = (-1, 0) if causal else (-1, -1)
    if config.sliding_window is not None:
        window = (config.sliding_window - 1, 0 if causal else config.sliding_window - 1)
    query_lens, seq_lens = common.query_lens_cpu.tolist(), common.seq_lens_cpu.tolist()
    if gather is None:
        seq_lens = query_lens
    # Keys before the window of a request's first row are not gathered. FlashAttention places the last row at the last
    # key, so what is cut off in front moves no mask.
    first_keys = [0] * len(seq_lens)
    if gather is not None and config.sliding_window is not None:
        lens = zip(query_lens, seq_lens, strict=True)
        first_keys = [max(0, seq_len - query_len - config.sliding_window + 1) for query_len, seq_len in lens]
    key_lens = [seq_len - first for seq_len, first in zip(seq_lens, first_keys, strict=True)]
    most = 1
    if gather is not None and not config.batch_invariant:
        most = CALL_BYTES // (config.num_kv_heads * gather.width * gather.dtype.itemsize)
    elif gather is None and not config.batch_invariant:
        most = sum(key_lens)
    found, first = [], 0
    while first < len(key_lens):
        if first in apart:
            first += 1
            continue
        last, num_keys = first + 1, key_lens[first]
        while last < len(key_lens) and num_keys + key_lens[last] <= most and last not in apart:
            num_keys += key_lens[last]
            last += 1
        if common.query_start_loc_cpu[first] < common.query_start_loc_cpu[last]:
            found.append(_call(common, gather, window, first, last, first_keys[first:last], key_lens[first:last]))
        first = last
    return found


def _call(
    common: CommonAttentionMetadata,
    gather: CacheGather | None,
    window: tuple[int, int],
    first: int,
    last: int,
    first_keys: list[int],
    key_lens: list[int],
) -> Call:
    part = common.requests(first, last)
    start = int(common.query_start_loc_cpu[first])
    bounds = part.query_start_loc
    if gather is None:
        longest = part.max_query_len
        return Call(start, start + part.num_actual_tokens, bounds, bounds, longest, longest, None, window)
    assert part.block_table_tensor is not None
    sums = [0]
    for count in key_lens:
        sums.append(sums[-1] + count)
    numbers = to_device(torch.tensor([*sums, *first_keys], dtype=torch.int32), bounds.device)
    key_bounds, firsts = numbers[: len(sums)], numbers[len(sums) :]
    # Of each gathered key: its request, its position there, and so its row in the cache.
    tokens = torch.arange(sums[-1], dtype=torch.int32, device=bounds.device)
    request = torch.searchsorted(key_bounds[1:], tokens, right=True)
    positions = tokens - key_bounds[request] + firsts[request]
    blocks = part.block_table_tensor[request, torch.div(positions, gather.block_size, rounding_mode="floor")]
    rows = gather.rows(blocks, positions % gather.block_size)
    end = start + part.num_actual_tokens
    return Call(start, end, bounds, key_bounds, part.max_query_len, max(key_lens), rows, window)


def run(call: Call, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output ``(T, H, Dv)`` and log-sum-exp ``(H, T)``, +inf for rows without keys.

    ``query (T, H, D)`` of the call's tokens, ``keys (S, Hkv, D)``, ``values (S, Hkv, Dv)``.
    """
    lens = call.query_start_loc, call.key_start_loc, call.max_query_len, call.max_key_len
    left, right = call.window
    causal = call.window == (-1, 0)
    options = {"scale": scale, "window_size_left": left, "window_size_right": right}
    found = ATTEND(query, keys, values, *lens, 0.0, causal, False, **options)
    return found[0], found[1]
