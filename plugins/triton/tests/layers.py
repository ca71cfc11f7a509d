"""What the runtime's tests share: groups and layers of TRITON_ATTN, and steps that are compared with the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attn_select.config import AttentionConfig
from attn_select.detection import detect_device
from attn_select.device import lookup
from attn_select.environment import Environment
from attn_select.runtime import Attention, AttentionGroup, Capacity, CommonAttentionMetadata, Scales, attention_group
from attn_select.spec import BackendPlan
from attn_select.testing import Problem, lse_error, random_problem, relative_error
from attn_select.testing.toolkit import outcomes, plans_of, selection_for
from attn_select_triton.facts.triton_attn import TRITON_ATTN

BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def layer_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float16", **fields})


def made(device: torch.device, config: AttentionConfig, layout: str | None = None, **options: Any) -> AttentionGroup:
    """Return a group on ``device``; planned for an H100 where that is the CPU. ``group_*`` options go to the group."""
    given = {name.removeprefix("group_"): options.pop(name) for name in list(options) if name.startswith("group_")}
    given.setdefault("capacity", Capacity(16, 1024, 2048))
    here = detect_device().device if device.type == "cuda" else lookup("h100")
    environment, chosen = Environment(assume_installed=True), TRITON_ATTN.options(**options)
    found = outcomes(TRITON_ATTN, config, here, environment, chosen)
    assert all(isinstance(outcome, BackendPlan) for outcome in found.values()), found
    plans = plans_of(found)
    choice = 0 if layout is None else next(iter(plans.values())).kv_layouts.index(layout)
    selection = selection_for(TRITON_ATTN, plans, config, here, environment, chosen, layout_choice=choice)
    assert selection is not None
    return attention_group(selection, device, **given)


def problem_of(group: AttentionGroup, requests: Any, seed: int = 1, **options: Any) -> Problem:
    """Return a step of the group's layers; padding of tables and slots holds NaN."""
    block_size = group.block_size or 16
    return random_problem(
        seed, group.config, group.kv_layout, requests=requests, device=group.device, block_size=block_size, **options
    )


def shared_prefix(problem: Problem, blocks: int) -> Problem:
    """Return the problem with the first blocks of its first request at the start of every one."""
    assert problem.block_table is not None
    table = problem.block_table.clone()
    table[:, :blocks] = table[:1, :blocks]
    return dataclasses.replace(problem, block_table=table)


def common_of(problem: Problem) -> CommonAttentionMetadata:
    bounds, lens = problem.query_start_loc.cpu(), problem.seq_lens.cpu()
    return CommonAttentionMetadata(
        query_start_loc=problem.query_start_loc,
        query_start_loc_cpu=bounds,
        seq_lens=problem.seq_lens,
        seq_lens_cpu=lens,
        num_reqs=len(lens),
        num_actual_tokens=int(bounds[-1]),
        max_query_len=int(bounds.diff().max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=problem.block_table,
        slot_mapping=problem.slot_mapping,
        mm_prefix_ranges=problem.mm_prefix_ranges,
    )


def layer_of(group: AttentionGroup, problem: Problem) -> Attention:
    given = {"q": problem.q_scale, "k": problem.k_scale, "v": problem.v_scale}
    scales = Scales.make(group.device, **{name: scale for name, scale in given.items() if scale is not None})
    return Attention(group, scale=problem.scale, alibi_slopes=problem.alibi_slopes, sinks=problem.sinks, scales=scales)


def run(
    group: AttentionGroup, problem: Problem, metadata: Any = None, padding: int = 2, **build: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step on poisoned outputs with padding behind them, and return output and LSE without it."""
    tokens, config = len(problem.query), group.config

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((padding, *tensor.shape[1:]), torch.nan)])

    output = problem.query.new_full((tokens + padding, config.num_heads, config.value_head_size), torch.nan)
    lse = torch.full((config.num_heads, tokens + padding), torch.nan, device=group.device).T
    if metadata is None:
        metadata = group.build(common_of(problem), **build)
    new = (None, None) if config.attn_type == "encoder_decoder" else (padded(problem.key), padded(problem.value))
    kv_cache = None if problem.kv_cache is None else problem.kv_cache.clone()
    layer_of(group, problem).forward(padded(problem.query), *new, kv_cache, metadata, output, lse)
    assert output[tokens:].isnan().all()
    assert lse[tokens:].isnan().all()
    return output[:tokens], lse[:tokens].contiguous()


def check(group: AttentionGroup, problem: Problem, **build: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step and compare it with the oracle."""
    output, lse = run(group, problem, **build)
    compare(group, problem, output, lse)
    return output, lse


def compare(group: AttentionGroup, problem: Problem, output: torch.Tensor, lse: torch.Tensor) -> None:
    wanted, wanted_lse = problem.reference()
    bound = BOUNDS[group.config.dtype]
    assert relative_error(output, wanted).row < bound
    assert lse_error(lse, wanted_lse) < bound
