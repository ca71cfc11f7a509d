"""Which graphs a step runs, and that they are built once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from attn_select_cudnn.facts.cudnn_attn import CUDNN_ATTN

pytest.importorskip("torch")

import cudnn_emulated
import torch

from attn_select.reference.running import check_result, common_of, problem_for, run_problem
from attn_select.runtime import Attention, BatchError, Capacity, attention_group
from attn_select.testing import gqa_layer, selection_of
from attn_select_cudnn.runtime import graphs

Emulate = Callable[..., Any]
Requests = Sequence[tuple[int, int]]


def group_of(*, cuda_graphs: bool = False, **fields: Any) -> Any:
    layer = gqa_layer(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, **fields})
    selection = selection_of(CUDNN_ATTN, layer, "h100")
    return attention_group(selection, "cpu", Capacity(16, 512, 512), cuda_graphs=cuda_graphs)


def run(group: Any, requests: Requests) -> None:
    problem = problem_for(group, requests, seed=1)
    check_result(group, problem, run_problem(group, problem))


def parts_of(group: Any, requests: Requests) -> list[tuple[int, int, bool, int]]:
    common = common_of(problem_for(group, requests, seed=1))
    parts = group.build(common).parts[0].metadata
    return [tuple(part.sizes[name] for name in ("requests", "query_len", "packed", "keys")) for part in parts]


def test_decodes_and_prefills_have_a_graph_each(emulate: Emulate) -> None:
    emulate()
    group = group_of()
    assert [part[:3] for part in parts_of(group, [(1, 40), (1, 300)])] == [(2, 1, False)]
    assert parts_of(group, [(20, 40), (20, 20), (20, 300)]) == [(4, 32, True, 512)]
    mixed = [(1, 40), (1, 3), (5, 5), (40, 90)]
    assert [part[:3] for part in parts_of(group, mixed)] == [(2, 1, False), (2, 64, True)]
    run(group, mixed)


def test_drafts_are_not_packed_where_all_have_as_many(emulate: Emulate) -> None:
    emulate()
    group = group_of(num_speculative_tokens=3)
    assert parts_of(group, [(4, 40), (4, 9)]) == [(2, 4, False, 256)]
    assert parts_of(group, [(4, 40), (2, 9), (1, 5)]) == [(4, 16, True, 256)]
    run(group, [(4, 40), (4, 9)])
    run(group, [(4, 40), (2, 9), (1, 5)])


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_that_are_not_captured_beside_captured_ones(emulate: Emulate, drafts: int) -> None:
    """Masks and tables of decodes stay at one address there; a prefill in the same step has its own."""
    emulate()
    group = group_of(cuda_graphs=True, num_speculative_tokens=drafts)
    query = 1 + drafts
    run(group, [(query, 0), (query, 40), (query, 9), (30, 0), (30, 40), (20, 20)])
    kept = []
    for seq_len in (40, 50):
        common = common_of(problem_for(group, [(query, seq_len), (query, 0)], seed=1))
        part = group.build(common).parts[0].metadata[0]
        kept.append([part.keyless.data_ptr(), part.tensors[graphs.QUERY_LENS].data_ptr()])
        assert part.keyless.tolist() == [False] * query + [True] * query
        if drafts:
            kept[-1].append(part.tensors[graphs.KEY_TABLE].data_ptr())
    assert kept[0] == kept[1]


def test_a_graph_is_built_once_for_all_steps_of_a_shape(emulate: Emulate) -> None:
    emulate()
    group = group_of()
    run(group, [(1, 40), (1, 7)])
    before = cudnn_emulated.PyGraph.built
    run(group, [(1, 37), (1, 4)])
    assert cudnn_emulated.PyGraph.built == before
    run(group, [(1, 37), (1, 4), (1, 9)])
    assert cudnn_emulated.PyGraph.built > before


def test_a_step_that_is_not_causal_is_refused(emulate: Emulate) -> None:
    emulate()
    group = group_of()
    common = common_of(problem_for(group, [(4, 40)], seed=1))
    with pytest.raises(BatchError, match="the step is not causal"):
        group.build(replace(common, causal=False))


def test_a_graph_is_not_built_in_a_capture(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate()
    group = group_of()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BatchError, match=r"cuDNN's graph for 2 requests of 1 tokens is not built yet.*captured"):
        run(group, [(1, 40), (1, 7)])


def test_a_copied_layer_runs_the_same_graphs(emulate: Emulate) -> None:
    emulate()
    impl = Attention(group_of()).impls["decode"]
    assert copy.deepcopy(impl)._graphs is impl._graphs


def test_graphs_run_on_the_current_stream(emulate: Emulate) -> None:
    module = emulate()
    run(group_of(), [(1, 40)])
    assert set(module.streams) == {("handle", 7)}
