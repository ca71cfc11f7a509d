"""Groups and runs of FLASHMLA's and FLASHMLA_SPARSE's layers, planned for an H100 and run on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.environment import Environment
from attn_select.reference.running import Result, check_result, common_of, problem_for, run_problem
from attn_select.runtime import AttentionGroup, Capacity, attention_group
from attn_select.testing import Problem, Request, environment_of, mla_layer, selection_of
from attn_select_flashmla.facts.flashmla import FLASHMLA
from attn_select_flashmla.facts.flashmla_sparse import FLASHMLA_SPARSE

CAPACITY = Capacity(max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=512)


def layer_config(**fields: Any) -> AttentionConfig:
    return mla_layer(**{"num_heads": 4, **fields})


def sparse_config(**fields: Any) -> AttentionConfig:
    return layer_config(**{"sparse_top_k": 64, **fields})


def installed(**versions: str) -> Environment:
    """Return an environment in which torch and only these distributions (``sgl_kernel="0.3.21"``) are installed."""
    there = {name.replace("_", "-"): version for name, version in versions.items()}
    return environment_of(installed={"torch": "2.11.0", **there})


def group_of(
    config: AttentionConfig,
    provider: str = "auto",
    *,
    spec: BackendSpec | None = None,
    phases: Sequence[Phase] | None = None,
    capacity: Capacity = CAPACITY,
    cuda_graphs: bool = False,
) -> AttentionGroup:
    """Return a group of one backend for these phases, by default all that it serves; all libraries are installed."""
    spec = spec or (FLASHMLA_SPARSE if config.sparse else FLASHMLA)
    selection = selection_of(spec, config, "h100", phases=phases, options={"provider": provider})
    return attention_group(selection, "cpu", capacity, cuda_graphs=cuda_graphs, phases=[*selection.backends])


def check(
    group: AttentionGroup, requests: Sequence[Request], problem: Problem | None = None, /, **changes: Any
) -> Result:
    """Run a step, whose batch may be changed, compare it with the oracle, and return what it left."""
    problem = problem or problem_for(group, requests)
    result = run_problem(group, problem, metadata=group.build(common_of(problem, **changes)))
    check_result(group, problem, result)
    return result


def with_indices(problem: Problem, indices: Any) -> Problem:
    """Return the problem with other ``topk_indices``."""
    return dataclasses.replace(problem, topk_indices=indices)
