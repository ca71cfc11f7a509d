"""The arguments that are the same for all layers of a step: bounds, splits, and FA3's schedule, captured or not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select_flash_attn.runtime.adapters import Adapter, Arguments, KvCacheAdapter, Shape, Step

MAX_SPLITS = 32
"""Most parts of a request's keys in captured steps (vLLM 0.33 config/attention.py,
flash_attn_max_num_splits_for_cuda_graph)."""
SPLIT_BYTES = 256 << 20
"""Most bytes of the partial sums of a captured step. Where they allow one split only, the step's tokens fill a GPU."""
UNEVEN = 2.5
"""A mixed batch is uneven where one query tile reads so many times a multiprocessor's share of the batch. On an H200 a
chunk of 137 tokens beside 3 decodes of 51604 (5.5 times) took 238 us unsplit and 165 us split, 3 chunks of 634 beside 4
decodes of 97123 (3.9 times) 1159 and 424 us; 2 chunks of 1352 beside 3 decodes of 9660 (1.7 times) 137 and 156 us."""
LEAST_KEYS = 8192
"""Fewer keys take less than 0.1 ms on one multiprocessor, and merging their parts costs too."""
MOST_SPLIT_REQUESTS = 992
"""FA3 splits keys in batches of up to so many requests (hopper/flash_prepare_scheduler.cu,
PREPARE_VARLEN_MAX_BATCHES_1CTA)."""


def tile_rows(head_size: int) -> int:
    """Return how many queries times heads of one KV head FA3 takes at a time (hopper/tile_size.h, 16-bit types)."""
    return 192 if head_size <= 96 else 128


def window_of(config: AttentionConfig, causal: bool) -> tuple[int, int]:
    """Return how many keys a query sees to its left and right, -1 for all."""
    if config.sliding_window is None:
        return -1, -1
    left = config.sliding_window - 1
    return left, 0 if causal else left


def is_uneven(common: CommonAttentionMetadata, shape: Shape, window: tuple[int, int], sms: int) -> bool:
    """Whether one request of a step would keep a multiprocessor busy long after all others are done."""
    # FA3 cuts keys into parts by itself only where the longest request's queries, as if it were alone, leave
    # multiprocessors over (hopper/heuristics.h, ``num_splits_heuristic``): beside a prefill it reads a decode's keys on
    # one of them.
    # window: keys seen to the left and right, -1 for all
    queries = common.query_lens_cpu
    keys = common.seq_lens_cpu - (queries - 1) / 2  # that the mean query sees
    if window[0] >= 0:
        keys = keys.clamp(max=window[0] + 1)
    # Each tile of queries reads its request's keys, once for each KV head.
    tiles = (queries * (shape.num_heads // shape.num_kv_heads) / tile_rows(shape.head_size)).ceil()
    share = float((tiles * keys).sum()) * shape.num_kv_heads / sms
    return float(keys.max()) > max(LEAST_KEYS, UNEVEN * share)


class Scheduler:
    """Turns a step's lengths into a call's arguments; one per builder."""

    def __init__(self, context: BackendContext, adapter: Adapter, shape: Shape, *, splits_keys: bool = True) -> None:
        self.adapter, self.shape, self._context = adapter, shape, context
        self._splits_keys = splits_keys
        self._graphs, self._invariant = context.cuda_graphs, context.config.batch_invariant
        self._fa3 = adapter.build.version == 3
        self._split_bytes = shape.num_heads * (shape.value_size + 1) * 4
        self._most_keys = context.max_model_len if self._invariant or (self._graphs and adapter.paged) else 0
        # A schedule's size follows from the tiles and these from the bounds, so it is the same at capture and replay.
        self._scheduled = self._fa3 and adapter.paged and not self._invariant
        self._buffer: Tensor | None = None
        self._key_start_loc: Tensor | None = None
        if self._graphs and adapter.paged:
            rounded = -(-context.max_num_seqs // 4) * 4
            # One word to count tiles, and per request at most four (hopper/flash_api.cpp, num_prepare_batch_vectors).
            self._buffer = _zeros(1 + rounded * 4, context.device) if self._fa3 else None
            self._key_start_loc = _zeros(context.max_num_seqs + 1, context.device)

    def arguments(self, step: Step, *, fast_build: bool = False) -> Arguments:
        """Return the arguments of a step's calls. Does not synchronise with the device."""
        # step: its lengths are exact; bounds and splits are set here
        # fast_build: make no schedule; the kernel then makes one per layer
        step = self._bounded(step)
        if self._scheduled and (self._graphs or not fast_build):
            step.schedule = self.adapter.schedule(step, self.shape)
            if step.schedule is not None and self._buffer is not None:
                step.schedule = self._stored(step.schedule, self._buffer)
        if self._key_start_loc is not None and step.key_start_loc is None:
            step.key_start_loc = self._key_start_loc[: step.num_reqs + 1]
        return self.adapter.step_arguments(step)

    def _bounded(self, step: Step) -> Step:
        """Set the bounds that must not depend on the batch: FA3 chooses its tiles by them."""
        step.num_splits = self._num_splits(step)
        step.max_key_len = max(step.max_key_len, self._most_keys)
        if not (self._invariant and self._fa3):
            return step
        step.max_query_len = max(step.max_query_len, self._context.max_num_batched_tokens)
        # With graphs the table has that width already, and must keep its address.
        if isinstance(self.adapter, KvCacheAdapter) and step.block_table is not None and not self._graphs:
            pages = -(-self._context.max_model_len // (self.shape.page_size or 1))
            return replace(step, block_table=kernel_block_table(step.block_table, 1, pages))
        return step

    def _num_splits(self, step: Step) -> int:
        if self._invariant or not self._splits_keys or (self._fa3 and step.num_reqs > MOST_SPLIT_REQUESTS):
            return 1
        if not self._fa3 or not (self._graphs or step.num_splits):
            return 0
        # With graphs this follows from the padded size alone, so it is the same at capture and replay.
        return max(1, min(MAX_SPLITS, SPLIT_BYTES // (self._split_bytes * max(1, step.num_tokens))))

    @staticmethod
    def _stored(schedule: Tensor, buffer: Tensor) -> Tensor:
        """Copy a schedule to the address that captured kernels read."""
        size = len(schedule)
        buffer[:size].copy_(schedule)
        buffer[size:].zero_()
        return buffer[:size]


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
