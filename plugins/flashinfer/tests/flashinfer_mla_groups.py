"""Groups, steps and layers of the two MLA backends, for any GPU by emulation or for this machine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig, Phase
from attn_select.device import Device, lookup
from attn_select.environment import Environment
from attn_select.runtime import Capacity, CommonAttentionMetadata, MLAAttention, MLAAttentionGroup, Scales
from attn_select.spec import BackendPlan
from attn_select.testing import MLAProblem, random_mla_problem
from attn_select.testing.comparison import error_bound, relative_error
from attn_select.testing.toolkit import outcomes, plans_of, selection_for
from attn_select_flashinfer.facts.mla import FLASHINFER_MLA
from attn_select_flashinfer.facts.mla_sparse import FLASHINFER_MLA_SPARSE

DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CAPACITY = Capacity(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512)
ASSUMED = Environment(assume_installed=True, pins={"flashinfer-python": "0.6.14"})


def mla_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, **DIMS, **fields})


def group_for(
    gpu: str | Device,
    config: AttentionConfig,
    *,
    device: str = "cpu",
    environment: Environment = ASSUMED,
    phases: Sequence[Phase] | None = None,
    capacity: Capacity = CAPACITY,
    cuda_graphs: bool = False,
    workspace_tokens: int = 64,
    change: Any = None,
    **options: Any,
) -> MLAAttentionGroup:
    """Return a group of the one backend that serves these layers on a GPU; ``change`` makes another plan of each."""
    spec = FLASHINFER_MLA_SPARSE if config.sparse else FLASHINFER_MLA
    on, made = lookup(gpu) if isinstance(gpu, str) else gpu, spec.options(**options)
    found = outcomes(spec, config, on, environment, made)
    if phases is not None:
        found = {phase: found[phase] for phase in phases}
    assert all(isinstance(outcome, BackendPlan) for outcome in found.values()), found
    plans = {phase: plan if change is None else change(plan) for phase, plan in plans_of(found).items()}
    selection = selection_for(spec, plans, config, on, environment, made)
    assert selection is not None
    given: dict[str, Any] = {"cuda_graphs": cuda_graphs, "phases": phases, "workspace_tokens": workspace_tokens}
    return MLAAttentionGroup(selection, device, capacity, **given)


def problem_for(
    group: MLAAttentionGroup, requests: Sequence[tuple[int, int]], seed: int = 0, **options: Any
) -> MLAProblem:
    """Draw a step; decodes come first."""
    options = {"block_size": group.block_size, "device": group.device, **options}
    return random_mla_problem(seed, group.config, group.kv_layout or "MLA", requests=requests, **options)


def common_of(problem: MLAProblem, **changes: Any) -> CommonAttentionMetadata:
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


def layer_for(group: MLAAttentionGroup, problem: MLAProblem, **changes: Any) -> MLAAttention:
    step = problem.step
    given = {name: scale for name, scale in (("q", step.q_scale), ("k", step.k_scale)) if scale is not None}
    options: dict[str, Any] = {"scale": step.scale, "sinks": step.sinks, "scales": Scales.make(group.device, **given)}
    return MLAAttention(group, problem.kv_b_proj, **{**options, **changes})


@dataclasses.dataclass
class Ran:
    """A step of one layer: output, LSE where there is one, and how far both are from the oracle."""

    output: Tensor
    lse: Tensor | None
    error: float
    lse_error: float
    bound: float
    metadata: Any = None


def run(
    group: MLAAttentionGroup,
    problem: MLAProblem,
    layer: MLAAttention | None = None,
    metadata: Any = None,
    *,
    wants_lse: bool = True,
) -> Ran:
    """Run a step on a copy of its cache, poisoned outputs and three rows of padding, and compare with the oracle."""
    step, plans = problem.step, {phase: served.context.plans[phase] for phase, served in group.served.items()}
    assert step.kv_cache is not None
    cache = step.kv_cache.clone().view(-1, group.kernel_block_size or 1, step.kv_cache.shape[2])
    cache = cache.view(torch.uint8) if group.kv_layout == "FP8_DS_MLA" else cache
    tokens, heads = len(problem.query), group.config.num_heads

    def padded(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.cat([tensor, tensor[:1].expand(3, *tensor.shape[1:])])

    query = padded(problem.query)
    output = query.new_full((len(query), heads, group.config.v_head_dim or 0), torch.nan)
    lse = query.new_full((len(query), heads), torch.nan, dtype=torch.float32)
    wants_lse = wants_lse and all(plan.returns_lse for plan in plans.values())
    metadata = metadata or group.build(common_of(problem))
    (layer or layer_for(group, problem)).forward(
        query, padded(step.key), padded(step.value), cache, metadata, output, padded(step.topk_indices),
        lse if wants_lse else None,
    )  # fmt: skip
    assert output[tokens:].isnan().all()
    assert lse[tokens:].isnan().all()
    query_dtype = next((plan.query_dtype for plan in plans.values() if plan.query_dtype == "fp8_e4m3"), None)
    decodes = sum(query_len <= 1 + group.config.num_speculative_tokens for query_len, _ in step.requests)
    wanted, wanted_lse = problem.reference(decodes, kv_cache=cache.view(step.kv_cache.shape), query_dtype=query_dtype)
    output, lse = output[:tokens], lse[:tokens] if wants_lse else None
    bound = error_bound(group.config, plans)
    error = relative_error(output.cpu(), wanted.cpu()).norm
    keyless = wanted_lse.isneginf().all(1)
    assert (output[keyless] == 0).all()
    off = 0.0
    if lse is not None:
        assert torch.equal(lse.isneginf(), wanted_lse.to(lse.device).isneginf())
        seen = ~wanted_lse.isneginf()
        scale = wanted_lse[seen].abs().clamp_min(1.0)
        off = (
            float(((lse.double().cpu()[seen.cpu()] - wanted_lse[seen].cpu()).abs() / scale.cpu()).max())
            if seen.any()
            else 0.0
        )
        assert off <= bound.lse, f"LSE is off by {off}, accepted is {bound.lse}"
    assert error <= bound.norm, f"output is off by {error}, accepted is {bound.norm}"
    return Ran(output, lse, error, off, bound.norm, metadata)
