"""One step of an MLA layer of ``TORCH_MLA``, run with every check on and compared with the float64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attn_select import select
from attn_select.decide.selection import Selection
from attn_select.runtime import (
    AttentionMetadata,
    CommonAttentionMetadata,
    MLAAttention,
    MLAAttentionGroup,
    Scales,
)
from attn_select.runtime.kv_cache import in_blocks_of
from attn_select.testing import (
    Problem,
    error_bound,
    lse_error,
    relative_error,
    same_bits,
)

SMALL = {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
DEEPSEEK = {"num_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MIXED = ((1, 1), (1, 40), (1, 16), (20, 20), (5, 69), (16, 48), (2, 2), (30, 35))
"""Decodes with and without context, then prefills: whole, with 64 cached tokens, with 32, whole, with 5."""
PADDING = 3


@dataclasses.dataclass
class Ran:
    """A step that was run, and what it ran on."""

    problem: Problem
    group: MLAAttentionGroup
    layer: MLAAttention
    metadata: AttentionMetadata
    kv_cache: Tensor
    output: Tensor
    lse: Tensor | None

    @property
    def tokens(self) -> int:
        return len(self.problem.query)

    def check(self) -> None:
        """Compare output, LSE and cache with the oracle, and see that padding was left alone."""
        problem, cache = self.problem, self.kv_cache
        assert problem.kv_cache is not None
        assert same_bits(cache.view(problem.kv_cache.shape), problem.written_cache())
        output, lse = problem.reference()
        bound = error_bound(problem.config, self.group.selection.plans)
        error = relative_error(self.output[: self.tokens], output)
        assert error.norm <= bound.norm, (error, bound)
        assert error.row <= bound.row, (error, bound)
        assert self.output[self.tokens :].isnan().all()
        if self.lse is not None:
            assert lse_error(self.lse[: self.tokens], lse) <= bound.lse
            assert self.lse[self.tokens :].isnan().all()


def padded(tensor: Tensor) -> Tensor:
    """Add rows of NaN that no kernel may read."""
    return torch.cat([tensor, tensor.new_full((PADDING, *tensor.shape[1:]), torch.nan)])


def layer_of(group: MLAAttentionGroup, problem: Problem, **options: Any) -> MLAAttention:
    scales = None
    if problem.k_scale is not None and problem.q_scale is not None:
        heads = 1 if problem.config.per_head_quant_scales else 0
        scales = Scales.make("cpu", q=problem.q_scale, k=problem.k_scale, num_kv_heads=heads)
    return MLAAttention(group, problem.kv_b_proj, **problem.per_head, scales=scales, **options)


def run(
    problem: Problem,
    common: CommonAttentionMetadata,
    *,
    selection: Selection | None = None,
    wants_lse: bool = True,
    **options: Any,
) -> Ran:
    """Run one step with every check on; ``options`` are the group's."""
    chosen = selection or select(problem.config, device="cpu", backend="TORCH_MLA")
    group = MLAAttentionGroup(chosen, checked=True, **options)
    layer, metadata = layer_of(group, problem), group.build(common)
    assert problem.kv_cache is not None
    assert problem.layout is not None
    assert group.kernel_block_size is not None
    cache = in_blocks_of(group.kernel_block_size, problem.kv_cache.clone(), problem.layout, problem.config)
    config, rows = problem.config, len(problem.query) + PADDING
    output = torch.full((rows, config.num_heads, config.v_head_dim or 0), torch.nan, dtype=problem.query.dtype)
    lse = torch.full((rows, config.num_heads), torch.nan) if wants_lse else None
    chosen = None
    if problem.topk_indices is not None:
        chosen = torch.cat([problem.topk_indices, torch.full_like(problem.topk_indices[:PADDING], 2**30)])
    given = (padded(problem.query), padded(problem.key), padded(problem.value), cache, metadata, output, chosen, lse)
    assert layer(*given) is output
    return Ran(problem, group, layer, metadata, cache, output, lse)
