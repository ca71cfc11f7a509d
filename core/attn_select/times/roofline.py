"""Bytes and FLOPs of one layer's step, and the least time that a device needs for them.

A step reads the queries and the keys and values that they see, multiplies, and writes the outputs. It also writes its
new keys and values into the cache, and an MLA layer multiplies by ``W_UK`` and ``W_UV`` (arXiv 2405.04434): decodes
absorb both into the query and the output, prefills decompress keys and values. A layer that keeps a state reads and
writes it: its times depend on how many requests a step has and on their new tokens, not on how long the requests are.
Bytes count each tensor once, as if no cache were warm and nothing were read twice. FLOPs count a multiplication and an
addition as two, and only visible keys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from attn_select.layer import dtypes
from attn_select.layer.config import MLA_DIMS, AttentionConfig
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.layouts import FP8_DS_MLA, MLA, bytes_per_slot, bytes_per_token
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device

if TYPE_CHECKING:
    from attn_select.times.batch_shape import BatchShape


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one layer's step reads, writes and multiplies."""

    kv_bytes: float = 0  # keys and values (MLA: latents) that attention reads, or states, convolution windows included
    query_bytes: float = 0  # queries read and outputs written, of states keys, values and gates too
    # new keys and values, read and written into the cache, or states written; 0 for layers without a cache
    cache_write_bytes: float = 0
    projection_bytes: float = 0  # what MLA's products with ``W_UK`` and ``W_UV`` read and write beyond that; else 0
    attention_flops: float = 0  # scores and weighted sums over visible keys, or the recurrence
    projection_flops: float = 0  # MLA's products with ``W_UK`` and ``W_UV``; else 0

    @property
    def bytes(self) -> float:
        """All bytes of the step."""
        return self.kv_bytes + self.query_bytes + self.cache_write_bytes + self.projection_bytes

    @property
    def flops(self) -> float:
        """All FLOPs of the step."""
        return self.attention_flops + self.projection_flops


def visible_keys(config: AttentionConfig, query_len: int, seq_len: int) -> float:
    """Return the number of pairs of a query and a key that it sees, in one request and one head.

    Causal layers see what is before a query, itself included, at most ``sliding_window`` or ``sparse_top_k`` of it, or
    what lies in the same chunk of ``attention_chunk_size``. Encoders, cross-attention and ``non_causal`` layers see all
    keys.
    """
    limit = min(config.sliding_window or seq_len, config.sparse_top_k or seq_len, seq_len)
    if config.non_causal or config.attn_type != "decoder":
        return float(query_len * limit)
    if (chunk := config.attention_chunk_size) is not None:
        return _keys_of_chunk(seq_len, chunk) - _keys_of_chunk(seq_len - query_len, chunk)
    return _keys_before(seq_len, limit) - _keys_before(seq_len - query_len, limit)


def _keys_before(queries: int, limit: int) -> float:
    """Return ``min(1, limit) + min(2, limit) + … + min(queries, limit)``."""
    rising = min(queries, limit)
    return rising * (rising + 1) / 2 + (queries - rising) * limit


def _keys_of_chunk(queries: int, chunk: int) -> float:
    """Return the pairs of the first ``queries`` tokens with what each sees of its chunk."""
    whole, rest = divmod(queries, chunk)
    return whole * _keys_before(chunk, chunk) + _keys_before(rest, chunk)


def keys_read(config: AttentionConfig, query_len: int, seq_len: int) -> int:
    """Return the number of tokens of one request whose keys and values its queries see."""
    if config.sparse_top_k is not None:
        return min(seq_len, query_len * config.sparse_top_k)  # queries may have chosen different tokens
    if config.sliding_window is not None:
        return min(seq_len, config.sliding_window + query_len - 1)
    if (chunk := config.attention_chunk_size) is not None:
        return seq_len - max(0, seq_len - query_len) // chunk * chunk
    return seq_len


def is_decode(config: LayerConfig, query_len: int) -> bool:
    """Whether a request of ``query_len`` new tokens is a decode; speculative decoding has several."""
    return config.has_cache and query_len <= config.max_decode_query_len


def request_work(config: LayerConfig, query_len: int, seq_len: int) -> StepWork:
    """Return the work of one request, without MLA's weights, which a step reads once for all its requests."""
    if isinstance(config, StateConfig):
        return _state_work(config, query_len, seq_len)
    keys, pairs = keys_read(config, query_len, seq_len), visible_keys(config, query_len, seq_len)
    width = dtypes.BITS[config.dtype] / 8
    # A context-parallel rank reads its share of the keys, but with the heads of all ranks: the products stay as many.
    ranks = config.decode_context_parallel_size
    heads = config.num_heads
    if not config.mla:
        both = config.head_size + config.value_head_size
        cached = config.num_kv_heads * both * dtypes.BITS[config.cache_dtype] / 8
        if config.cache_dtype == "nvfp4":
            cached += config.num_kv_heads * both / 16  # one FP8 scale per 16 elements
        return StepWork(
            kv_bytes=keys * (cached / ranks),
            query_bytes=query_len * (heads * both * width),
            cache_write_bytes=query_len * (config.num_kv_heads * both * width + cached) if config.has_cache else 0,
            attention_flops=pairs * (2 * heads * both),
        )
    rank, nope, rope, value = _mla_dims(config)
    token = bytes_per_token(FP8_DS_MLA if config.cache_dtype == "fp8_ds_mla" else MLA, config)
    write = query_len * ((rank + rope) * width + token)
    if is_decode(config, query_len) or config.sparse:  # both products are absorbed into the query and the output
        return StepWork(
            kv_bytes=keys * (token / ranks),
            query_bytes=query_len * (heads * (2 * rank + rope) * width),
            cache_write_bytes=write,
            projection_bytes=query_len * (heads * (nope + value + 2 * rank) * width),
            attention_flops=pairs * (2 * heads * (2 * rank + rope)),
            projection_flops=query_len * (2 * heads * rank * (nope + value)),
        )
    return StepWork(
        kv_bytes=keys * (heads * (nope + rope + value) * width),
        query_bytes=query_len * (heads * (nope + rope + value) * width),
        cache_write_bytes=write,
        projection_bytes=keys * ((rank + heads * (nope + value)) * width),
        attention_flops=pairs * (2 * heads * (nope + rope + value)),
        projection_flops=keys * (2 * heads * rank * (nope + value)),
    )


def _state_work(config: StateConfig, query_len: int, seq_len: int) -> StepWork:
    """Return what one request moves and multiplies: with earlier tokens it reads one state, any request writes one, and
    a decode with drafts writes one per token. FLOPs count the recurrence token by token (``attn_select.layer.state``);
    chunks multiply more, on tensor cores.
    """
    state, has_state = bytes_per_slot(config), seq_len > query_len
    kept = query_len if has_state and query_len <= config.max_decode_query_len else 1
    heads, size = config.num_v_heads, config.head_size
    numbers = config.width + heads * config.v_head_size
    gates = heads * (size if config.rule.decay == "channel" else 1) + heads * config.rule.writes
    products = 3 if config.rule.delta_rule else 2
    return StepWork(
        kv_bytes=state * has_state,
        query_bytes=query_len * (numbers * dtypes.BITS[config.dtype] / 8 + 4 * gates),
        cache_write_bytes=state * kept,
        attention_flops=query_len * heads * size * config.v_head_size * (2 * products + 1),
    )


def _mla_dims(config: AttentionConfig) -> tuple[int, int, int, int]:
    return cast(tuple[int, int, int, int], tuple([getattr(config, name) for name in MLA_DIMS]))


def step_work(config: LayerConfig, batch: BatchShape, *, attention_alone: bool = False) -> StepWork:
    """Return the work of one layer's step over ``batch``, without cache writes and MLA's products where asked for."""
    parts = [(group.count, request_work(config, group.query_len, group.seq_len)) for group in batch.groups]
    total = {each.name: sum(count * getattr(work, each.name) for count, work in parts) for each in fields(StepWork)}
    if isinstance(config, StateConfig):
        return StepWork(**total)
    if attention_alone:
        total["cache_write_bytes"] = total["projection_bytes"] = total["projection_flops"] = 0
    elif config.mla:  # decodes and prefills multiply by the weights apart; sparse prefills run as decodes do
        rank, nope, _, value = _mla_dims(config)
        times_read = len({config.sparse or is_decode(config, group.query_len) for group in batch.groups})
        weights = config.num_heads * rank * (nope + value) * dtypes.BITS[config.dtype] / 8
        total["projection_bytes"] += times_read * weights
    return StepWork(**total)


@lru_cache(maxsize=1024)  # all candidates without times ask the same
def roofline_us(
    config: LayerConfig, batch: BatchShape, device: Device, *, attention_alone: bool = False
) -> float | None:
    """Return the least time in us of one layer's step on ``device``; None where its bandwidth is unknown.

    It is the longer of bytes over peak bandwidth and FLOPs over the dense matmul rate; bytes alone where the rate is
    unknown, and of float32, whose rate the data file has not. A quantised cache counts at the FP8 rate where the GPU
    has one: kernels that quantise queries too multiply in FP8. MLA's products run in the compute dtype.
    """
    if device.bandwidth_gbps is None:
        return None
    work = step_work(config, batch, attention_alone=attention_alone)
    seconds = work.bytes / (device.bandwidth_gbps * 1e9)
    if config.dtype != "float32" and device.bf16_tflops:
        quantized = isinstance(config, AttentionConfig) and dtypes.is_quantized(config.kv_cache_dtype)
        tflops = (quantized and device.fp8_tflops) or device.bf16_tflops
        multiplied = work.attention_flops / tflops + work.projection_flops / device.bf16_tflops
        seconds = max(seconds, multiplied / 1e12)
    return seconds * 1e6
