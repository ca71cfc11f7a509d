"""What of a layer that keeps a state, and of a batch, a kernel's time depends on; beside ``features``."""

from __future__ import annotations

from math import log2

from attn_select.layer import dtypes
from attn_select.layer.state import StateConfig
from attn_select.times.batch_shape import BatchShape
from attn_select.times.features import LAUNCH_US, Rates, StepFeatures, fill_of
from attn_select.times.roofline import is_decode, request_work


def state_features(config: StateConfig, batch: BatchShape, rates: Rates) -> StepFeatures:
    """Return the features of one layer's step over a batch."""
    bytes_us = flops_us = floor_us = prefill_us = 0.0
    new = chunks = 0
    for group in batch.groups:
        work = request_work(config, group.query_len, group.seq_len)
        moved = group.count * work.bytes / rates.bytes_per_us
        multiplied = group.count * work.attention_flops / rates.flops_per_us
        bytes_us, flops_us, floor_us = bytes_us + moved, flops_us + multiplied, floor_us + max(moved, multiplied)
        if not is_decode(config, group.query_len):
            prefill_us += max(moved, multiplied)
            new += group.count * group.query_len
            chunks += group.count * -(-group.query_len // config.chunk_size)
    rule = config.rule
    values = {
        "floor": log2(floor_us + 1),
        "intensity": log2(flops_us / bytes_us),
        "requests": log2(batch.num_requests),
        "new_tokens": log2(batch.num_tokens),
        "longest_query": log2(batch.max_query_len),
        "chunks": log2(1 + chunks),
        "fill": fill_of(batch.num_requests * config.num_v_heads, rates),
        "prefill_share": prefill_us / floor_us,
        "has_prefills": float(new > 0),
        "has_decodes": float(new < batch.num_tokens),
        "has_states": sum([group.count for group in batch.groups if group.seq_len > group.query_len])
        / batch.num_requests,
        "heads": log2(config.num_heads),
        "v_heads": log2(config.num_v_heads),
        "head_size": log2(config.head_size),
        "v_head_size": log2(config.v_head_size),
        "drafts": log2(config.max_decode_query_len),
        "state_bits": log2(dtypes.BITS[config.state_dtype]),
        "convolution": float(config.conv_kernel_size > 0),
        "delta_rule": float(rule.delta_rule),
        "channel_decay": float(rule.decay == "channel"),
        "writes": float(rule.writes),
    }
    return StepFeatures(LAUNCH_US + floor_us, values)
