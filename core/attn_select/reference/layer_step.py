"""``LayerStep``: one step of layers that engines call, on random numbers in random blocks, to be timed and checked.

Its caches come from outside, so that the steps of several backends share one memory (``CacheMemory``): candidates that
are compared then need it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import is_quantized
from attn_select.layer.layouts import FP8_DS_MLA, FP8_DS_MLA_BYTES
from attn_select.reference.comparison import relative_error
from attn_select.reference.oracle import attention_options, attention_reference
from attn_select.reference.oracle_mla import (
    absorb_query,
    mla_absorbed_reference,
    project_output,
    sparse_mla_reference,
)
from attn_select.reference.oracle_paged import gather_reference, slot_mapping_reference
from attn_select.reference.oracle_quant import quantize_query
from attn_select.reference.problems import FP8_SCALE, Request, random_per_head
from attn_select.runtime import (
    Attention,
    BlockTable,
    Capacity,
    ContextParallel,
    MLAAttention,
    Scales,
    attention_group,
    prepare_batch,
)
from attn_select.runtime.kv_cache import cache_dtype, kv_cache_shape
from attn_select.runtime.timer import Call
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES

_CHUNK = 1 << 26
"""Elements that are drawn at a time."""
_MOST_KEYS_CHECKED = 1 << 18
"""Keys of all requests that are compared with the oracle: in float64 they take 4 GiB with 8 heads of size 128."""


class CacheMemory:
    """Memory for ``count`` caches of equal size, filled with random numbers that any layout of one dtype may hold."""

    # Numbers are standard normal, in FP8 divided by ``FP8_SCALE``.

    def __init__(self, config: AttentionConfig, num_bytes: int, count: int, device: torch.device) -> None:
        self._stride = -(-num_bytes // 4096) * 4096
        self._memory = torch.empty(count, self._stride, dtype=torch.uint8, device=device)
        self._packed = config.sparse and is_quantized(config.cache_dtype)
        self._dtype = torch.float8_e4m3fn if self._packed else cache_dtype("", config)
        self._spread = 1 / FP8_SCALE if is_quantized(config.cache_dtype) else 1.0
        self._fill(self._memory[0])
        for other in self._memory[1:]:
            other.copy_(self._memory[0])

    def _fill(self, memory: Tensor) -> None:
        draw, numbers = torch.Generator(memory.device).manual_seed(0), memory.view(self._dtype)
        for start in range(0, len(numbers), _CHUNK):
            part = numbers[start : start + _CHUNK]
            part.copy_(torch.randn(part.shape, generator=draw, device=memory.device).mul_(self._spread))
        if self._packed:
            self._pack(memory, draw)

    def mend(self) -> None:
        """Make the last cache what it was, where other layouts' new tokens may have made it no numbers in a layout."""
        if self._packed:
            self._fill(self._memory[-1])

    def _pack(self, memory: Tensor, draw: torch.Generator) -> None:
        """Write what a token has in ``FP8_DS_MLA`` beside its 512 numbers: four scales, and a rope part in bfloat16."""
        # Of that only bytes are taken that are finite numbers in FP8 too, since other layouts read them so.
        count = self._stride // FP8_DS_MLA_BYTES
        tokens = memory[: count * FP8_DS_MLA_BYTES].view(-1, FP8_DS_MLA_BYTES)
        tokens[:, 512:528] = torch.full((count, 4), FP8_SCALE, device=draw.device).view(torch.uint8)
        powers = torch.randint(-1, 2, (count, 64), generator=draw, device=draw.device).float().exp2()
        signs = torch.randint(0, 2, (count, 64), generator=draw, device=draw.device) * 2 - 1
        tokens[:, 528:] = (powers * signs).bfloat16().view(torch.uint8)

    def caches(self, step: LayerStep) -> list[Tensor]:
        """Return the caches as a step's layers want them."""
        assert step.cache_shape is not None
        dtype = cache_dtype(step.group.kv_layout or "", step.group.config)
        return [row[: step.cache_bytes].view(dtype).view(step.cache_shape) for row in self._memory]


class LayerStep:
    """One batch for layers of one kind, on random numbers; requests are ``(query_len, seq_len)``, decodes first."""

    # The layers are no cross-attention. With sparse MLA every token attends to an even choice of what it sees, as long
    # as ``sparse_top_k`` allows. Of the ranks that share a cache every one makes the step. ``cache_shape`` and
    # ``cache_bytes`` are of one cache in the group's layout; None and 0 without one.

    def __init__(
        self,
        selection: Selection,
        requests: Sequence[Request],
        phases: Sequence[Phase] | None = None,
        device: torch.device | str | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        config = self.config = selection.config
        self.requests = sorted(requests)
        query_lens, seq_lens = [query for query, _ in self.requests], [seq_len for _, seq_len in self.requests]
        capacity = Capacity(len(requests), sum(query_lens), max(seq_lens))
        options: dict[str, Any] = {"phases": phases, "context_parallel": context_parallel}
        self.group: Any = attention_group(selection, device, capacity, **options)
        self._ranks = 1 if context_parallel is None else context_parallel.size
        self.cache_shape: tuple[int, ...] | None = None
        self.cache_bytes = 0
        self.table = None
        if config.has_cache:
            self.table = self._block_table(seq_lens)
        self.common = prepare_batch(query_lens, seq_lens, self.table, device=self.group.device)
        self._draw = torch.Generator(self.group.device).manual_seed(1)
        self._made: list[Any] = []
        self._inputs = self._random_inputs(sum(query_lens))
        width = config.v_head_dim or config.value_head_size
        self.output = self._inputs[0].new_empty(sum(query_lens), config.num_heads, width)
        self._chosen = [self._choose_slots()] if config.sparse else []

    def _block_table(self, seq_lens: Sequence[int]) -> BlockTable:
        """Give every request blocks in random order, and work out the cache that holds them."""
        group, size = self.group, self.group.block_size
        needed = [-(-seq_len // size) for seq_len in seq_lens]
        table = BlockTable(len(seq_lens), max(needed), size, group.device)
        blocks = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).int()
        for row, own in enumerate(blocks.split_with_sizes(needed)):
            table.set_row(row, own.tolist())
        kernel_blocks = sum(needed) * (size // self._ranks // group.kernel_block_size)
        self.cache_shape = kv_cache_shape(group.kv_layout, self.config, kernel_blocks, group.kernel_block_size)
        self.cache_bytes = math.prod(self.cache_shape) * cache_dtype(group.kv_layout, self.config).itemsize
        return table

    def _normal(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self._draw, device=self.group.device)
        return numbers.to(PLAIN_DTYPES[self.config.dtype])

    def _random_inputs(self, tokens: int) -> list[Tensor]:
        """Return query, key and value, with MLA query, latent and rope part."""
        config, heads, kv_heads = self.config, self.config.num_heads, self.config.num_kv_heads
        if config.mla:
            rank, nope, rope = (config.kv_lora_rank or 0, config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0)
            return [self._normal(tokens, heads, nope + rope), self._normal(tokens, rank), self._normal(tokens, rope)]
        shapes = [(heads, config.head_size), (kv_heads, config.head_size), (kv_heads, config.value_head_size)]
        return [self._normal(tokens, *shape) for shape in shapes]

    def make_layers(self, caches: Sequence[Tensor | None]) -> None:
        """Make one layer for each cache; MLA layers have weights of their own."""
        config, device = self.config, self.group.device
        fp8 = FP8_SCALE if is_quantized(config.cache_dtype) else 1.0
        per_head = config.num_kv_heads if config.per_head_quant_scales else 0
        drawn = random_per_head(config, self._normal)
        self._per_head = {name: tensor.to(device) for name, tensor in drawn.items()}
        self._scales = Scales.make(device, q=fp8, k=fp8, v=fp8, num_kv_heads=per_head)
        options: dict[str, Any] = {**self._per_head, "scales": self._scales}
        self._caches = [*caches]
        weight = self._weight() if config.mla else None
        self._made = [
            Attention(self.group, **options)
            if weight is None
            else MLAAttention(self.group, weight if index == 0 else weight.clone(), **options)
            for index in range(len(caches))
        ]

    def _choose_slots(self) -> Tensor:
        """Return the slots that each token attends to, int32 ``(T, sparse_top_k)``, -1 behind the last."""
        assert self.table is not None
        top_k, device, size = self.config.sparse_top_k or 0, self.group.device, self.table.block_size
        places = torch.arange(top_k, device=device)
        shuffled = torch.randperm(top_k, generator=self._draw, device=device)
        chosen = []
        for row, (query_len, seq_len) in enumerate(self.requests):
            seen = torch.arange(seq_len - query_len + 1, seq_len + 1, device=device)[:, None]
            within = torch.rand(query_len, top_k, generator=self._draw, device=device)
            # One of each of ``top_k`` equal parts of a long context, in any order; all of a short one.
            spread = ((places + within) * (seen / top_k)).long().minimum(seen - 1)[:, shuffled]
            positions = torch.where(seen > top_k, spread, places)
            slots = self.table.device_table[row].long()[(positions // size).clamp_max(-(-seq_len // size) - 1)]
            slots = slots * size + positions % size
            chosen.append(torch.where((positions < seen), slots, -1).int())
        return torch.cat(chosen)

    def _weight(self) -> Tensor:
        config, rank = self.config, self.config.kv_lora_rank or 0
        width = (config.qk_nope_head_dim or 0) + (config.v_head_dim or 0)
        # Decompressed keys and values are then about standard normal, too.
        weight: Tensor = self._normal(config.num_heads * width, rank) * rank**-0.5
        return weight

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that each layer reads."""
        config = self.config
        width = (config.qk_nope_head_dim or 0) + (config.v_head_dim or 0) if config.mla else 0
        return config.num_heads * width * (config.kv_lora_rank or 0) * PLAIN_DTYPES[config.dtype].itemsize

    def build(self) -> Any:
        """Return the step's metadata, made anew."""
        return self.group.build(self.common)

    def calls(self) -> list[Call]:
        """Build the step's metadata anew, and return for each layer the call that runs it."""
        metadata = self.build()
        return [
            partial(layer, *self._inputs, cache, metadata, self.output, *self._chosen)
            for layer, cache in zip(self._made, self._caches, strict=True)
        ]

    def error(self) -> float:
        """Return the relative error, in the Euclidean norm, of the last layer's result in ``output``."""
        # Compared with the float64 oracle are the first and the last token of the first, the middle and the last
        # request, of fewer requests where these have many keys.
        bounds = self.common.query_start_loc_cpu.tolist()
        seen: list[Tensor] = []
        wanted: list[Tensor] = []
        for request in self._compared():
            query_len = self.requests[request][0]
            rows = torch.tensor(sorted({0, query_len - 1}), device=self.group.device)
            seen.append(self.output[rows + bounds[request]])
            wanted.append(self._reference(request, rows, bounds[request]))
        return relative_error(torch.cat(seen), torch.cat(wanted)).norm

    def _compared(self) -> list[int]:
        """Return the requests that ``error`` compares."""
        count, total = len(self.requests), 0
        chosen: list[int] = []
        for request in dict.fromkeys((count - 1, 0, count // 2)):
            total += self.requests[request][1]
            if total > _MOST_KEYS_CHECKED and chosen:
                break
            chosen.append(request)
        return chosen

    @property
    def oracle_bytes(self) -> int:
        """Bytes that ``error`` takes at most at a time: the longest request's keys and values in float64, twice."""
        config, longest = self.config, max(self.requests[request][1] for request in self._compared())
        per_key = config.head_size if config.mla else config.num_kv_heads * (config.head_size + config.value_head_size)
        return 2 * 8 * longest * per_key

    def _reference(self, request: int, rows: Tensor, first: int) -> Tensor:
        """Return the outputs float64 ``(N, H, Dv)`` of some of a request's tokens, counted from its first."""
        config, (query_len, seq_len) = self.config, self.requests[request]
        new = slice(first, first + query_len)
        inputs = [tensor[new] for tensor in self._inputs]
        phase: Phase = "decode" if config.has_cache and query_len <= config.max_decode_query_len else "prefill"
        backend = self.group.backends.get(phase)
        fp8_query = backend is not None and is_quantized(dtype := backend.context.plans[phase].query_dtype)
        options: dict[str, Any] = {
            **attention_options(config, **self._per_head),
            "scale": config.softmax_scale,
            "query_positions": rows + seq_len - query_len,
        }
        query = inputs[0][rows]
        scales, quantized = self._scales, is_quantized(config.cache_dtype)
        if not config.has_cache:
            return attention_reference(query, inputs[1], inputs[2], **options)[0]
        cache = self._caches[-1]
        assert self.table is not None
        assert cache is not None
        if config.sparse:
            return self._sparse_reference(query, cache, self._chosen[0][rows + first], dtype if fp8_query else None)
        positions = torch.arange(seq_len, device=self.group.device)
        slots = slot_mapping_reference(self.table.device_table[request], positions, self.table.block_size)
        own = {"k_scale": scales.k, "v_scale": None if config.mla else scales.v} if quantized else {}
        keys, values = gather_reference(cache, self.group.kv_layout, slots, config, **own)
        if not config.mla:
            if fp8_query:
                query = quantize_query(query, dtype, scales.q)
            return attention_reference(query, keys, values, **options)[0]
        rank, nope = config.kv_lora_rank or 0, config.qk_nope_head_dim or 0
        latents = keys[:, 0]
        if phase == "prefill":  # attends to the step's own latents as they are
            latents[seq_len - query_len :] = torch.cat(inputs[1:], dim=-1).double()
        by_head = self._by_head()
        absorbed = absorb_query(query[..., :nope], query[..., nope:], by_head[..., :nope])
        if fp8_query and phase == "decode":
            absorbed = quantize_query(absorbed.to(query.dtype), dtype, scales.q)
        latent, _ = mla_absorbed_reference(absorbed, latents[:, :rank], latents[:, rank:], **options)
        return project_output(latent, by_head[..., nope:])

    def _by_head(self) -> Tensor:
        """Return the last layer's decompressing weight, ``(R, H, P + V)``."""
        weight: Tensor = self._made[-1].kv_b_proj
        return weight.view(self.config.num_heads, -1, self.config.kv_lora_rank or 0).permute(2, 0, 1)

    def _sparse_reference(self, query: Tensor, cache: Tensor, chosen: Tensor, query_dtype: str | None) -> Tensor:
        config, scales, nope = self.config, self._scales, self.config.qk_nope_head_dim or 0
        by_head = self._by_head()
        absorbed = absorb_query(query[..., :nope], query[..., nope:], by_head[..., :nope])
        fp8: dict[str, Any] = {}
        if is_quantized(config.cache_dtype) and self.group.kv_layout != FP8_DS_MLA:
            fp8["k_scale"] = scales.k
        if query_dtype:
            absorbed, fp8 = absorbed.to(query.dtype), {**fp8, "query_dtype": query_dtype, "q_scale": scales.q}
        given = (absorbed, cache, self.group.kv_layout, chosen, config, config.softmax_scale)
        latent, _ = sparse_mla_reference(*given, **(fp8 | self._per_head))
        return project_output(latent, by_head[..., nope:])
