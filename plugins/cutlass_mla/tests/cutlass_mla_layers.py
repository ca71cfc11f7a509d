"""Groups, steps and runs of CUTLASS_MLA's layers, planned for a B200 and run on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import Result, check_result, common_of, problem_for, run_problem
from attn_select.runtime import AttentionGroup, Capacity, attention_group
from attn_select.testing import Problem, mla_layer, selection_of
from attn_select_cutlass_mla.facts.cutlass_mla import CUTLASS_MLA

CAPACITY = Capacity(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)


def layer_config(**fields: Any) -> AttentionConfig:
    return mla_layer(**{"num_heads": 4, **fields})


def group_of(
    config: AttentionConfig,
    provider: str = "auto",
    *,
    capacity: Capacity = CAPACITY,
    cuda_graphs: bool = False,
    variables: dict[str, str] | None = None,
    **options: Any,
) -> AttentionGroup:
    """Return a group for decode, all libraries being installed."""
    selection = selection_of(
        CUTLASS_MLA, config, "b200", variables=variables, options={"provider": provider, **options}
    )
    return attention_group(selection, "cpu", capacity, cuda_graphs=cuda_graphs, phases=["decode"])


def decodes(group: AttentionGroup, seq_lens: Sequence[int], seed: int = 0) -> Problem:
    """Draw a step of decodes with one token each."""
    drawn: Problem = problem_for(group, [(1, length) for length in seq_lens], seed, nan_tails=False)
    return drawn


def check(group: AttentionGroup, seq_lens: Sequence[int], problem: Problem | None = None, /, **changes: Any) -> Result:
    """Run a step of decodes, whose batch may be changed, compare it with the oracle, and return what it left."""
    problem = problem or decodes(group, seq_lens)
    result = run_problem(group, problem, metadata=group.build(common_of(problem, **changes)))
    check_result(group, problem, result)
    return result
