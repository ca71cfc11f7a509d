"""What is checked before a kernel starts: shapes and dtypes always, contents in checked mode.

Shapes and dtypes are known on the host, so looking at them costs no wait.

Checked mode (``ATTN_SELECT_CHECK=1`` when a group is made) reads lengths, block ids and slots back from the device, so
it synchronises and is slow; it turns an illegal memory access into an error that names argument, request and bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from attn_select.errors import show
from attn_select.layer.config import AttentionConfig
from attn_select.machine import variables
from attn_select.runtime.kv_cache import cache_dtype, check_cache_shape
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, Ranges
from attn_select.runtime.overlaps import check_not_expanded
from attn_select.runtime.scales import Scales


def checks_enabled() -> bool:
    """Whether ``ATTN_SELECT_CHECK`` asks for checked mode; BatchError where it holds something other than 0 or 1."""
    value = os.environ.get(variables.CHECK, "")
    if value not in ("", "0", "1"):
        raise BatchError(f"{variables.CHECK} = {value!r}: accepted are 1 (check everything), 0 and nothing")
    return value == "1"


def check_lengths(common: CommonAttentionMetadata) -> None:
    """Compare the shapes and dtypes of a batch's lengths with its number of requests. Cheap: no device is asked."""
    count = common.num_reqs
    for name, tensor, length, size in (
        ("query_start_loc", common.query_start_loc, count + 1, "num_reqs + 1"),
        ("query_start_loc_cpu", common.query_start_loc_cpu, count + 1, "num_reqs + 1"),
        ("seq_lens", common.seq_lens, count, "num_reqs"),
        ("seq_lens_cpu", common.seq_lens_cpu, count, "num_reqs"),
    ):
        if tensor.dtype is not torch.int32 or tensor.shape != (length,):
            text = f"{name} is {_kind(tensor)}: accepted is torch.int32 ({length},), since {size} = {length}"
            raise BatchError(text)


def check_shapes(common: CommonAttentionMetadata, config: AttentionConfig, block_size: int | None) -> None:
    """Compare a batch's shapes and dtypes with its own numbers, its table in blocks of ``block_size`` tokens. Cheap."""
    check_lengths(common)
    count, decodes = common.num_reqs, common.num_decodes
    if decodes is not None and not 0 <= decodes <= count:
        raise BatchError(f"num_decodes = {decodes}: accepted are 0 to num_reqs = {count}")
    table, slots = common.block_table_tensor, common.slot_mapping
    if not config.has_cache or table is None or slots is None:
        return
    if table.dtype is not torch.int32 or table.ndim != 2 or table.shape[0] != count:
        text = f"block_table_tensor is {_kind(table)}: accepted is torch.int32 (num_reqs = {count}, blocks)"
        raise BatchError(text)
    # In cross-attention the slots hold the encoder's tokens.
    least = 0 if config.attn_type == "encoder_decoder" else common.num_actual_tokens
    if slots.dtype is not torch.int64 or slots.ndim != 1 or slots.shape[0] < least:
        text = f"slot_mapping is {_kind(slots)}: accepted is torch.int64, a slot for each of {least} tokens"
        raise BatchError(text)
    if block_size is None or not count or common.max_seq_len <= (room := table.shape[1] * block_size):
        return
    request = int(common.seq_lens_cpu.argmax())  # max_seq_len may be any bound above the longest
    if (longest := int(common.seq_lens_cpu[request])) > room:
        raise BatchError(
            f"seq_lens[{request}] = {longest}: block_table_tensor has {table.shape[1]} blocks of {block_size} tokens "
            f"per request, {room} tokens"
        )


def check_common(
    common: CommonAttentionMetadata,
    config: AttentionConfig,
    device: torch.device,
    max_model_len: int,
) -> None:
    """Check the contents of a batch whose shapes are right. Synchronises."""
    _check_device("slot_mapping", common.slot_mapping, device)
    check_copies(common, device)
    bounds, query_lens, seq_lens = common.query_start_loc_cpu, common.query_lens_cpu, common.seq_lens_cpu
    if int(bounds[0]) != 0 or int(bounds[-1]) > common.num_actual_tokens:
        raise BatchError(
            f"query_start_loc runs from {int(bounds[0])} to {int(bounds[-1])}: accepted is 0 to at most "
            f"num_actual_tokens = {common.num_actual_tokens}"
        )
    if common.max_query_len > common.num_actual_tokens:
        raise BatchError(
            f"max_query_len = {common.max_query_len}: accepted is at most num_actual_tokens = "
            f"{common.num_actual_tokens}"
        )
    for request, (query_len, seq_len) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        if query_len < 0 or query_len > common.max_query_len:
            text = f"query of request {request} has {query_len} tokens: max_query_len is {common.max_query_len}"
            raise BatchError(text)
        if not 0 <= seq_len <= common.max_seq_len:
            raise BatchError(f"seq_lens[{request}] = {seq_len}: accepted is 0 to max_seq_len = {common.max_seq_len}")
        if seq_len > max_model_len:
            raise BatchError(
                f"seq_lens[{request}] = {seq_len}: this group was made for max_model_len = {max_model_len}"
            )
        # A padded request of a CUDA graph has no keys; in cross-attention both lengths are independent.
        if config.attn_type == "decoder" and 0 < seq_len < query_len:
            text = f"request {request} has {query_len} query tokens but seq_lens = {seq_len}, which includes them"
            raise BatchError(text)
        if not config.has_cache and seq_len != query_len:
            text = (
                f"request {request}: seq_lens = {seq_len}, but without a cache keys are as many as queries, {query_len}"
            )
            raise BatchError(text)
    if config.has_cache and common.block_table_tensor is not None:
        check_strides("block_table_tensor", common.block_table_tensor, device)


def check_copies(common: CommonAttentionMetadata, device: torch.device) -> None:
    """Compare a batch's lengths on the device with those on the host. Synchronises."""
    for name in ("query_start_loc", "seq_lens"):
        _check_device(name, getattr(common, name), device)
        _check_device(f"{name}_cpu", getattr(common, f"{name}_cpu"), torch.device("cpu"))
        here, there = getattr(common, name).cpu(), getattr(common, f"{name}_cpu")
        if not torch.equal(here, there):
            request = int((here != there).int().argmax())
            text = f"{name}[{request}] is {int(here[request])} on the device and {int(there[request])} in {name}_cpu"
            raise BatchError(text)


def check_blocks(
    common: CommonAttentionMetadata,
    config: AttentionConfig,
    kv_cache: Tensor,
    layout: str,
    num_blocks: int,
    block_size: int,
) -> None:
    """Check block ids and slots against a cache of ``num_blocks`` of the allocator's blocks. Synchronises."""
    table = common.block_table_tensor
    assert table is not None
    rows = table.cpu()
    for request, seq_len in enumerate(common.seq_lens_cpu.tolist()):
        used = rows[request, : -(-seq_len // block_size)]
        bad = ((used < 0) | (used >= num_blocks)).nonzero().flatten()
        if len(bad):
            column = int(bad[0])
            raise BatchError(
                f"block_table_tensor[{request}, {column}] = {int(used[column])}: the pool has blocks 0 to "
                f"{num_blocks - 1} (request {request}, {seq_len} tokens, kv_cache {tuple(kv_cache.shape)} in {layout})"
            )
    if common.slot_mapping is None:
        return
    slots = common.slot_mapping.cpu()
    outside = ((slots < -1) | (slots >= num_blocks * block_size)).nonzero().flatten()
    if len(outside):
        token = int(outside[0])
        owner = f"of request {request_of(token, common)}" if config.attn_type == "decoder" else "of the encoder"
        raise BatchError(
            f"slot_mapping[{token}] = {int(slots[token])} (a token {owner}): accepted are 0 to "
            f"{num_blocks * block_size - 1}, and -1 for none"
        )
    written = slots[slots >= 0]
    twice = written.sort().values
    same = (twice[1:] == twice[:-1]).nonzero().flatten()
    if len(same):
        raise BatchError(
            f"slot_mapping holds slot {int(twice[same[0]])} twice: two tokens would be written to one place"
        )
    if config.attn_type == "decoder":
        _check_slots(slots, rows, common, block_size)


def _check_slots(slots: Tensor, rows: Tensor, common: CommonAttentionMetadata, block_size: int) -> None:
    """Compare the slots that are written with the block table, by which they will be read."""
    bounds, lens = common.query_start_loc_cpu, common.query_lens_cpu
    tokens = torch.arange(int(bounds[-1]))
    request = torch.repeat_interleave(lens)
    # A request's new tokens are its last ones: its first one stands at seq_len - query_len.
    positions = tokens + (common.seq_lens_cpu - lens - bounds[:-1])[request]
    # Negative positions are of padded requests, which have queries and no keys.
    written = (slots[: len(tokens)] >= 0) & (positions >= 0)
    tokens, request, positions = tokens[written], request[written], positions[written]
    wanted = rows[request, positions // block_size].long() * block_size + positions % block_size
    wrong = (slots[tokens] != wanted).nonzero().flatten()
    if len(wrong):
        token, owner, position, slot = (int(found[wrong[0]]) for found in (tokens, request, positions, wanted))
        raise BatchError(
            f"slot_mapping[{token}] = {int(slots[token])}: token {position} of request {owner} is read from slot "
            f"{slot}, by its block table in blocks of {block_size}",
            hint="make slots and table of one block size: slot = block * block_size + offset",
        )


def request_of(token: int, common: CommonAttentionMetadata) -> int:
    """Return the request of a token: as many requests end at or before it (right=True) as stand before its own."""
    return int(torch.searchsorted(common.query_start_loc_cpu[1:], token, right=True))


def check_finite(name: str, tensor: Tensor, common: CommonAttentionMetadata, of_requests: bool) -> None:
    """Check that no token holds NaN or infinity in ``tensor`` ``(T', ...)``. Synchronises."""
    # ``of_requests``: its rows are the batch's tokens, and what lies behind them is padding; else they are the
    # encoder's.
    bounds = common.query_start_loc_cpu
    wrong = ~tensor[: int(bounds[-1]) if of_requests else len(tensor)].flatten(1).isfinite().all(dim=1)
    if bool(wrong.any()):
        token = int(wrong.int().argmax())
        request = request_of(token, common)
        owner = f"token {token - int(bounds[request])} of request {request}" if of_requests else "the encoder's"
        raise BatchError(f"{name}[{token}] holds NaN or infinity ({owner}): accepted are finite numbers")


def check_scales(scales: Scales) -> None:
    """Check that the scales on the device are positive, finite and equal to those on the host. Synchronises."""
    for name in ("q", "k", "v"):
        values = getattr(scales, name).flatten().cpu()
        for value in values.tolist():
            if not 0 < value < float("inf"):
                raise BatchError(f"{name}_scale = {value}: accepted are finite numbers above 0")
        here, there = float(values.max()), getattr(scales, f"{name}_float")
        if not math.isclose(here, there, rel_tol=1e-6):  # the host's may be a double
            text = f"{name}_scale is {here} on the device and {there} on the host: accepted are equal numbers"
            raise BatchError(text)


def check_cache(
    kv_cache: Tensor | None, layout: str, config: AttentionConfig, device: torch.device, block_size: int
) -> int:
    """Check one layer's cache: presence, shape, strides, dtype, device, tokens per block. Cheap. Return its blocks."""
    if kv_cache is None:
        raise BatchError(f"kv_cache is None: attn_type = {config.attn_type!r} keeps one in layout {layout}")
    num_blocks, block_tokens = check_cache_shape(kv_cache, layout, config)
    if block_tokens != block_size:
        text = (
            f"kv_cache of shape {tuple(kv_cache.shape)} has {block_tokens} tokens per block: accepted are {block_size}"
        )
        raise BatchError(text, hint="allocate it with group.allocate_kv_cache")
    wanted = cache_dtype(layout, config)
    if kv_cache.dtype != wanted or kv_cache.device != device:
        raise BatchError(f"kv_cache is {kv_cache.dtype} on {kv_cache.device}: accepted is {wanted} on {device}")
    check_not_expanded("kv_cache", kv_cache)
    return num_blocks


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, least_tokens: int) -> None:
    """Check a ``(tokens, *shape)`` tensor of a layer call. Cheap: no device is asked."""
    if tensor.shape[1:] != shape or tensor.ndim != len(shape) + 1 or tensor.shape[0] < least_tokens:
        extents = ", ".join(map(str, shape))
        raise BatchError(
            f"{name} of shape {tuple(tensor.shape)}: accepted is (at least {least_tokens} tokens, {extents})"
        )
    if dtype is not None and tensor.dtype != dtype:
        raise BatchError(f"{name} is {tensor.dtype}: accepted is {dtype}")


def check_strides(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check that the last dimension is contiguous and the tensor lives on ``device``."""
    if tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}: accepted is {device}")
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise BatchError(f"{name} has strides {tensor.stride()}: the last dimension must be contiguous")


def check_indices(indices: Tensor, common: CommonAttentionMetadata, num_slots: int, block_size: int) -> None:
    """Compare sparse MLA's indices ``(T', top_k)`` with what each token's request has in the cache. Synchronises."""
    chosen = indices[: common.num_actual_tokens].cpu()
    wrong = ((chosen < -1) | (chosen >= num_slots)).nonzero()
    if len(wrong):
        token, place = wrong[0].tolist()
        raise BatchError(
            f"topk_indices[{token}, {place}] = {int(chosen[token, place])}: accepted are slots 0 to {num_slots - 1}, "
            "and -1 for none"
        )
    assert common.block_table_tensor is not None
    rows, offsets = common.block_table_tensor.cpu(), torch.arange(block_size)
    bounds = common.query_start_loc_cpu.tolist()
    for request, seq_len in enumerate(common.seq_lens_cpu.tolist()):
        blocks = rows[request, : -(-seq_len // block_size)].long()
        own = torch.zeros(num_slots, dtype=torch.bool)
        own[(blocks[:, None] * block_size + offsets).flatten()[:seq_len]] = True
        some = chosen[bounds[request] : bounds[request + 1]].long()
        # -1 is clamped to 0 to be an index at all, and left out by the first half of the condition.
        wrong = ((some >= 0) & ~own[some.clamp_min(0)]).nonzero()
        if len(wrong):
            token, place = wrong[0].tolist()
            raise BatchError(
                f"topk_indices[{bounds[request] + token}, {place}] = {int(some[token, place])} (token {token} of "
                f"request {request}): accepted are the slots of the request's {seq_len} tokens, by its block table in "
                f"blocks of {block_size}, and -1 for none"
            )


def check_ranges(common: CommonAttentionMetadata, config: AttentionConfig) -> None:
    """Compare a batch's image ranges with its requests and its layers. Cheap: they lie on the host."""
    given = common.mm_prefix_ranges
    if not config.mm_prefix:
        text = "mm_prefix_ranges given, but the layers were selected with mm_prefix = False"
        raise BatchError(text, hint="select with mm_prefix = True")
    if not isinstance(given, Sequence) or len(given) != common.num_reqs:
        what = f"of {len(given)} requests" if isinstance(given, Sequence) else f"= {show(given)}"
        raise BatchError(f"mm_prefix_ranges {what}: accepted is a list of ranges for each of {common.num_reqs}")
    for request, ranges in enumerate(given):
        if not _are_ranges(ranges):
            text = f"mm_prefix_ranges[{request}] = {show(ranges)}: accepted are pairs of positions, 0 <= first <= last"
            raise BatchError(text)


def _are_ranges(ranges: Ranges) -> bool:
    try:
        return all(0 <= index(first) <= index(last) for first, last in ranges)
    except (TypeError, ValueError):
        return False


def check_tree_mask(common: CommonAttentionMetadata, config: AttentionConfig) -> None:
    """Compare a batch's tree mask with its layers. Cheap: no device is asked."""
    mask = common.tree_mask
    assert mask is not None
    if not config.draft_tree:
        text = "tree_mask given, but the layers were selected with draft_tree = False"
        raise BatchError(text, hint="select with draft_tree = True")
    if not common.causal:
        raise BatchError("tree_mask given with causal = False: drafts see their ancestors alone (accepted: True)")
    columns = config.max_decode_query_len
    if not isinstance(mask, Tensor):
        raise BatchError(f"tree_mask is a {type(mask).__name__}: accepted is a tensor")
    if mask.dtype != torch.bool or mask.ndim != 2 or len(mask) < common.num_actual_tokens or mask.shape[1] != columns:
        raise BatchError(
            f"tree_mask is {mask.dtype} of shape {tuple(mask.shape)}: accepted is torch.bool (at least "
            f"{common.num_actual_tokens} tokens, 1 + num_speculative_tokens = {columns})"
        )


def check_columns(table: Tensor, most: int, max_model_len: int) -> None:
    """Raise BatchError for a block table with more columns than were reserved for the longest request."""
    if table.shape[1] > most:
        raise BatchError(
            f"block_table_tensor of {table.shape[1]} columns: max_model_len = {max_model_len} reserved {most}",
            hint="make the group with a larger max_model_len in its Capacity, or cut the table",
        )


def check_common_prefix(block_table: Tensor, prefix_len: int, block_size: int) -> None:
    """Check that all requests have the same blocks in the first ``prefix_len`` tokens. Synchronises."""
    rows = block_table[:, : prefix_len // block_size].cpu()
    differs = rows != rows[:1]
    if bool(differs.any()):
        request = int(differs.any(dim=1).int().argmax())
        column = int(differs[request].int().argmax())
        raise BatchError(
            f"common_prefix_len = {prefix_len}: request {request} has block {int(rows[request, column])} in column "
            f"{column} of its block table, and request 0 has block {int(rows[0, column])}: they share "
            f"{column * block_size} tokens",
            hint="compute it with attn_select.runtime.common_prefix_len",
        )


def _check_device(name: str, tensor: Tensor | None, device: torch.device) -> None:
    if tensor is not None and tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}: accepted is {device}")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
