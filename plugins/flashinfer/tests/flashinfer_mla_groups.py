"""Groups and steps of the two MLA backends, for any GPU by emulation or for this machine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashinfer_groups import RELEASE, with_plans

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.reference import running
from attn_select.reference.running import Result, check_result, common_of, layer_of, run_problem
from attn_select.runtime import Capacity, MLAAttention, MLAAttentionGroup
from attn_select.testing import Problem, mla_layer, selection_of
from attn_select_flashinfer.facts.mla import FLASHINFER_MLA
from attn_select_flashinfer.facts.mla_cute_dsl import FLASHINFER_MLA_CUTE_DSL
from attn_select_flashinfer.facts.mla_sparse import FLASHINFER_MLA_SPARSE

__all__ = ["CAPACITY", "common_of", "group_for", "layer_of", "mla_config", "problem_for", "run"]

CAPACITY = Capacity(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512)


def mla_config(**fields: Any) -> AttentionConfig:
    return mla_layer(**{"num_heads": 4, **fields})


def group_for(
    gpu: str,
    config: AttentionConfig,
    *,
    device: str = "cpu",
    phases: Sequence[Phase] | None = None,
    capacity: Capacity = CAPACITY,
    cuda_graphs: bool = False,
    workspace_tokens: int = 64,
    change: Callable[[BackendPlan], BackendPlan] | None = None,
    stated: Any = None,
    cute_dsl: bool = False,
    **options: Any,
) -> MLAAttentionGroup:
    """Return a group of the one backend that serves these layers on a GPU.

    Args:
        change: makes another plan of each.
        stated: the environment, as ``selection_of`` takes it; left out: the release that the facts are for.
        cute_dsl: the other backend that decodes them on compute capability 10.x.
    """
    dense = FLASHINFER_MLA_CUTE_DSL if cute_dsl else FLASHINFER_MLA
    spec = FLASHINFER_MLA_SPARSE if config.sparse else dense
    selection = selection_of(spec, config, gpu, phases=phases, options=options, **(stated or RELEASE))
    given: dict[str, Any] = {"cuda_graphs": cuda_graphs, "phases": phases, "workspace_tokens": workspace_tokens}
    return MLAAttentionGroup(with_plans(selection, change), device, capacity, **given)


def problem_for(group: MLAAttentionGroup, requests: Sequence[tuple[int, int]], seed: int = 0, **options: Any) -> Any:
    """Draw a step; NaN lies behind its sequences' ends unless a plan declares that it is not safe from that."""
    return running.problem_for(group, requests, seed, **{"nan_tails": group.nan_tail_safe, **options})


def run(
    group: MLAAttentionGroup,
    problem: Problem,
    layer: MLAAttention | None = None,
    metadata: Any = None,
    *,
    wants_lse: bool | None = None,
) -> Result:
    """Run a step on poisoned memory and compare it with the oracle."""
    result = run_problem(group, problem, layer=layer, metadata=metadata, wants_lse=wants_lse)
    check_result(group, problem, result)
    return result
