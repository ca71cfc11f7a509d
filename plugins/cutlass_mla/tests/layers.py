"""Groups and layers of CUTLASS_MLA, chosen by the gate for a B200."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig
from attn_select.device import known_gpus
from attn_select.environment import Environment
from attn_select.runtime import Capacity, CommonAttentionMetadata, MLAAttention, MLAAttentionGroup, Scales
from attn_select.testing import MLAProblem, random_mla_problem
from attn_select.testing.toolkit import outcomes, plans_of, selection_for
from attn_select_cutlass_mla.cutlass_mla import CUTLASS_MLA

DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CAPACITY = Capacity(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)


def layer_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, **DIMS, **fields})


def make_group(
    config: AttentionConfig,
    provider: str = "auto",
    *,
    capacity: Capacity = CAPACITY,
    cuda_graphs: bool = False,
    variables: dict[str, str] | None = None,
    **options: Any,
) -> MLAAttentionGroup:
    """Return a group for decode on a B200 that a CPU stands in for, every library being installed."""
    device = known_gpus()["b200"]
    environment = Environment(assume_installed=True, variables=variables or {})
    made = CUTLASS_MLA.options(provider=provider, **options)
    found = outcomes(CUTLASS_MLA, config, device, environment, made)
    assert plans_of(found), found
    selection = selection_for(CUTLASS_MLA, plans_of(found), config, device, environment, made)
    assert selection is not None
    return MLAAttentionGroup(selection, "cpu", capacity, cuda_graphs=cuda_graphs, phases=["decode"])


def problem_for(group: MLAAttentionGroup, seq_lens: Sequence[int], seed: int = 0, **options: Any) -> MLAProblem:
    """Draw a step of decodes with one token each."""
    requests = [(1, length) for length in seq_lens]
    options = {"block_size": group.block_size, "device": group.device, "nan_tails": False, **options}
    return random_mla_problem(seed, group.config, group.kv_layout or "MLA", requests=requests, **options)


def common_of(problem: MLAProblem, **changes: Any) -> CommonAttentionMetadata:
    """Return a step's batch."""
    step = problem.step
    query_lens, seq_lens = zip(*step.requests, strict=True)
    common = CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc.cpu(),
        seq_lens=step.seq_lens,
        seq_lens_cpu=step.seq_lens.cpu(),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=step.block_table,
        slot_mapping=step.slot_mapping,
    )
    return dataclasses.replace(common, **changes)


def make_layer(group: MLAAttentionGroup, problem: MLAProblem) -> MLAAttention:
    step = problem.step
    given = {"q": step.q_scale, "k": step.k_scale}
    heads = group.config.num_kv_heads if group.config.per_head_quant_scales else 0
    scales = Scales.make(group.device, num_kv_heads=heads, **{n: s for n, s in given.items() if s is not None})
    return MLAAttention(group, problem.kv_b_proj, scale=step.scale, scales=scales)


def run_layer(
    group: MLAAttentionGroup, problem: MLAProblem, common: CommonAttentionMetadata | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run a step of one layer; return output, LSE where the provider returns it, and the cache after it."""
    step = problem.step
    assert step.kv_cache is not None
    cache = step.kv_cache.clone()
    lse = None
    if group.served["decode"].context.plans["decode"].returns_lse:
        lse = torch.full(problem.query.shape[:2], torch.nan)
    metadata = group.build(common or common_of(problem))
    in_kernel_blocks = cache.view(-1, 128, cache.shape[2])
    output = make_layer(group, problem)(problem.query, step.key, step.value, in_kernel_blocks, metadata, output_lse=lse)
    return output, lse, cache
