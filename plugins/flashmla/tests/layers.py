"""Groups and layers of the FlashMLA backends, chosen by the gate for an H100 or for the machine's own GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select import gate
from attn_select.config import AttentionConfig, Phase
from attn_select.decide import shared_cache
from attn_select.device import known_gpus
from attn_select.environment import Environment
from attn_select.outcome import Candidate, Verdict
from attn_select.runtime import Capacity, CommonAttentionMetadata, MLAAttention, MLAAttentionGroup, Scales
from attn_select.selection import Selection
from attn_select.spec import BackendPlan, BackendSpec
from attn_select.testing import MLAProblem, random_mla_problem
from attn_select_flashmla.flashmla import FLASHMLA
from attn_select_flashmla.flashmla_sparse import FLASHMLA_SPARSE

DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CAPACITY = Capacity(max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=512)


def layer_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, **DIMS, **fields})


def plans_for(
    config: AttentionConfig, provider: str = "auto", phases: Sequence[Phase] | None = None, **pins: str
) -> tuple[BackendSpec, dict[Phase, BackendPlan]]:
    """Return the spec and its plans on an H100, every library being installed."""
    spec = FLASHMLA_SPARSE if config.sparse else FLASHMLA
    environment = Environment(assume_installed=True, pins={"vllm": "0.26.0", **pins})
    plans = {}
    for phase in phases or spec.capabilities:
        device = known_gpus()["h100"]
        found = gate.check(spec, config, device, environment, spec.options(provider=provider), phase)
        assert isinstance(found, BackendPlan), found
        plans[phase] = found
    return spec, plans


def make_group(
    config: AttentionConfig,
    provider: str = "auto",
    *,
    device: str = "cpu",
    phases: Sequence[Phase] | None = None,
    capacity: Capacity = CAPACITY,
    cuda_graphs: bool = False,
) -> MLAAttentionGroup:
    """Return a group of one backend for these phases, by default all that it serves."""
    spec, plans = plans_for(config, provider, phases)
    cache = shared_cache([*plans.values()], config.block_size, None)
    assert cache is not None
    verdicts: dict[Phase, Verdict] = {phase: Verdict(1, "selected", [], plan) for phase, plan in plans.items()}
    selection = Selection(
        config=config,
        device=known_gpus()["h100"],
        environment=Environment(assume_installed=True),
        backends=dict.fromkeys(plans, spec),
        block_size=cache[1],
        kv_layout=cache[0],
        candidates=(Candidate(spec.name, verdicts),),
        rules=(),
        explicit={},
        warnings=(),
        options={spec.name: spec.options(provider=provider)},
    )
    return MLAAttentionGroup(selection, device, capacity, cuda_graphs=cuda_graphs, phases=[*plans])


def problem_for(
    group: MLAAttentionGroup, requests: Sequence[tuple[int, int]], seed: int = 0, **options: Any
) -> MLAProblem:
    """Draw a step; decodes come first."""
    options = {"block_size": group.block_size, "device": group.device, **options}
    problem = random_mla_problem(seed, group.config, group.kv_layout or "MLA", requests=requests, **options)
    step = problem.step
    if step.kv_cache is not None and step.layout == "FP8_DS_MLA":  # as bytes, whatever the config calls them
        problem = dataclasses.replace(problem, step=dataclasses.replace(step, kv_cache=step.kv_cache.view(torch.uint8)))
    return problem


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
    return MLAAttention(group, problem.kv_b_proj, scale=step.scale, sinks=step.sinks, scales=scales)


def run_layer(
    group: MLAAttentionGroup, problem: MLAProblem, common: CommonAttentionMetadata | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a step of one layer; return output, LSE and the cache after it."""
    step = problem.step
    assert step.kv_cache is not None
    cache = step.kv_cache.clone()
    lse = torch.full(problem.query.shape[:2], torch.nan, device=group.device)
    metadata = group.build(common or common_of(problem))
    in_kernel_blocks = cache.view(-1, group.kernel_block_size or 64, cache.shape[2])
    output = make_layer(group, problem)(
        problem.query, step.key, step.value, in_kernel_blocks, metadata, topk_indices=step.topk_indices, output_lse=lse
    )
    return output, lse, cache
