"""``CUTLASS_MLA`` at run time on emulated kernels: every provider, padding, scales, empty rows, splits, workspace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from attn_select.runtime import Outputs

pytest.importorskip("torch")

import cutlass_mla_emulated as emulated
import torch
from cutlass_mla_layers import CAPACITY, check, decodes, group_of, layer_config

from attn_select.reference.running import common_of, layer_of, run_problem
from attn_select.runtime import AttentionGroup, BatchError, Capacity
from attn_select_cutlass_mla.facts.builds import BUILDS

Emulate = Callable[[str], list[dict[str, Any]]]
NAMES = [build.distribution for build in BUILDS]
DECODES = [1, 127, 128, 129, 300]
MIB = 1 << 20


def test_any_softmax_scale(emulate: Emulate) -> None:
    """FlashInfer's function takes none: queries bring what differs from its own."""
    emulate("flashinfer-python")
    group = group_of(layer_config(), "flashinfer-python")
    for scale in (192**-0.5, 0.1352):
        problem = decodes(group, DECODES)
        check(group, DECODES, dataclasses.replace(problem, scale=scale))


def test_fp8_scales_are_folded_in(emulate: Emulate) -> None:
    calls, k_scale = emulate("vllm"), 0.37
    config = layer_config(kv_cache_dtype="fp8_e4m3")
    group = group_of(config)
    problem = decodes(group, DECODES)
    drawn = problem.k_scale
    assert drawn is not None
    assert problem.q_scale is not None
    # Another scale of the same codes, and logits as they were.
    scale = problem.scale * float(drawn) / k_scale
    check(group, DECODES, dataclasses.replace(problem, k_scale=torch.tensor(k_scale), scale=scale))
    assert calls[0]["scale"] == pytest.approx(scale * float(problem.q_scale) * k_scale)


def test_output_is_written_in_place_where_nothing_is_padded(emulate: Emulate) -> None:
    for provider in ("vllm", "flashinfer-python"):
        calls = emulate(provider)
        for num_heads in (128, 64):
            group = group_of(layer_config(num_heads=num_heads), provider)
            problem = decodes(group, [5, 200])
            layer, output = layer_of(group, problem), torch.empty(2, num_heads, 512, dtype=torch.bfloat16)
            metadata = group.build(common_of(problem)).parts[0].metadata
            query = problem.absorbed.to(torch.bfloat16)
            cache = problem.written_cache().view(-1, 128, 576)
            layer.impls["decode"].forward_mqa(query, cache, metadata, Outputs(output))
            assert (calls[-1]["out"].data_ptr() == output.data_ptr()) == (num_heads == 128)


def test_the_lse_is_asked_for_where_it_is_wanted(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = group_of(layer_config())
    problem = decodes(group, [5, 200])
    for wants_lse in (False, True):
        run_problem(group, problem, wants_lse=wants_lse)
    assert [call["lse"] for call in calls] == [False, True]


# --- Rows without keys, requests without queries ------------------------------------------------


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("provider", NAMES)
def test_rows_without_keys(emulate: Emulate, provider: str, cuda_graphs: bool) -> None:
    emulate(provider)
    group = group_of(layer_config(), provider, cuda_graphs=cuda_graphs)
    result = check(group, [9, 0, 130, 0])
    for row in (1, 3):
        assert bool((result.output[row] == 0).all())
        assert result.lse is None or bool(result.lse[row].isneginf().all())


def test_requests_without_a_query(emulate: Emulate) -> None:
    emulate("vllm")
    group = group_of(layer_config())
    problem = decodes(group, [9, 130, 200])
    assert problem.block_table is not None
    # Between the three there are two requests whose turn it is not.
    table, lens = problem.block_table[[0, 0, 1, 2, 1]], problem.seq_lens[[0, 0, 1, 2, 1]]
    bounds = torch.tensor([0, 1, 1, 2, 3, 3], dtype=torch.int32)
    changes = {"num_reqs": 5, "query_start_loc": bounds, "query_start_loc_cpu": bounds, "block_table_tensor": table}
    check(group, [], problem, seq_lens=lens, seq_lens_cpu=lens, **changes)


def test_a_batch_without_tokens(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = group_of(layer_config())
    problem = decodes(group, [9])
    none = torch.zeros(2, dtype=torch.int32)
    changes = {"query_start_loc": none, "query_start_loc_cpu": none, "num_actual_tokens": 0, "max_query_len": 0}
    metadata = group.backends["decode"].builder.build(0, common_of(problem, **changes))
    layer = layer_of(group, problem)
    query, output = (torch.empty(0, 4, width, dtype=torch.bfloat16) for width in (576, 512))
    assert problem.kv_cache is not None
    layer.impls["decode"].forward_mqa(query, problem.kv_cache, metadata, Outputs(output))
    assert calls == []


# --- What is read packed ------------------------------------------------------------------------


def test_tables_of_a_wider_buffer(emulate: Emulate) -> None:
    """The kernel takes the table's width for its row stride."""
    emulate("vllm")
    group = group_of(layer_config())
    problem = decodes(group, DECODES)
    table = problem.block_table
    assert table is not None
    wide = torch.full((len(table), table.shape[1] + 5), 7, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    check(group, DECODES, problem, block_table_tensor=wide[:, : table.shape[1]])


def test_a_strided_cache_is_refused(emulate: Emulate) -> None:
    emulate("vllm")
    group = group_of(layer_config())
    problem = decodes(group, DECODES)
    assert problem.kv_cache is not None
    wide = torch.zeros(len(problem.kv_cache), 128, 600, dtype=torch.bfloat16)[..., :576]
    layer, metadata = layer_of(group, problem), group.build(common_of(problem))
    with pytest.raises(BatchError, match=r"^kv_cache has strides \(76800, 600, 1\): accepted is a contiguous cache"):
        layer(problem.query, problem.key, problem.value, wide, metadata)


@pytest.mark.parametrize("provider", NAMES)
def test_a_full_batch_with_graphs(emulate: Emulate, provider: str) -> None:
    """As many requests as there may be, with the widest tables: every buffer is large enough for exactly that."""
    emulate(provider)
    options = {} if provider == "flashinfer-python" else {"num_kv_splits": 16}
    group = group_of(layer_config(), provider, cuda_graphs=True, workspace_bytes=MIB, **options)
    problem = decodes(group, [512, 0, 9, 0, 128, 300, 1, 0])
    assert len(problem.requests) == CAPACITY.max_num_seqs
    table = problem.block_table
    assert table is not None
    wide = torch.full((len(table), table.shape[1] + 5), 7, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    common = common_of(problem, block_table_tensor=wide[:, : table.shape[1]])
    assert common.block_table_tensor is not None
    assert not common.block_table_tensor.is_contiguous()
    inner = group.build_for_cudagraph_capture(common).parts[0].metadata
    assert torch.equal(inner.page_table, table)
    assert inner.empty.tolist() == [False, True, False, True, False, False, False, True]
    addresses = [inner.page_table.data_ptr(), inner.empty.data_ptr(), inner.workspace.data_ptr()]
    check(group, [], problem, block_table_tensor=wide[:, : table.shape[1]])
    smaller = group.build(common_of(decodes(group, [5, 512]))).parts[0].metadata
    assert [smaller.empty.data_ptr(), smaller.workspace.data_ptr()] == addresses[1:]


# --- KV splits and the workspace ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "options", "variables", "splits"),
    [
        ("vllm", {}, {}, -1),
        ("sgl-kernel", {}, {}, 1),
        ("flashinfer-python", {}, {}, -1),
        ("vllm", {"num_kv_splits": 4}, {}, 4),
        ("sgl-kernel", {"num_kv_splits": 16}, {}, 16),
        ("vllm", {"num_kv_splits": 4}, {"FORCE_NUM_KV_SPLITS": "2"}, 2),
        ("vllm", {"num_kv_splits": 4}, {"FORCE_NUM_KV_SPLITS": "-1"}, -1),
        ("sgl-kernel", {}, {"FORCE_NUM_KV_SPLITS": "-1"}, 1),
    ],
    ids=str,
)
def test_kv_splits(
    emulate: Emulate, provider: str, options: dict[str, Any], variables: dict[str, str], splits: int
) -> None:
    calls = emulate(provider)
    check(group_of(layer_config(), provider, variables=variables, **options), DECODES)
    assert [call["splits"] for call in calls] == [splits]


def workspace_of(group: AttentionGroup, requests: int = 1, width: int = 1) -> torch.Tensor:
    """Return the workspace of a batch."""
    problem = decodes(group, [1] * requests)
    table = torch.zeros(requests, width, dtype=torch.int32)
    inner = group.build(common_of(problem, block_table_tensor=table)).parts[0].metadata
    found: torch.Tensor = inner.workspace
    return found


@pytest.mark.parametrize("provider", NAMES)
def test_the_workspace_is_reserved_for_the_largest_batch(emulate: Emulate, provider: str) -> None:
    emulate(provider)
    assert len(workspace_of(group_of(layer_config(), provider))) == 128 * MIB
    options: dict[str, Any] = {"workspace_bytes": MIB, "capacity": Capacity(40, 64, 2048)}
    if provider != "flashinfer-python":
        options["num_kv_splits"] = 16
    group = group_of(layer_config(), provider, **options)
    batches = [(40, 16), (1, 16), (40, 1), (7, 11), (13, 16)]
    hangs = provider == "vllm"
    for requests, width in batches:
        needed = emulated.workspace_size(128 * width, requests, 148, options.get("num_kv_splits", -1), hangs)
        assert len(workspace_of(group, requests, width)) >= needed
    assert len({workspace_of(group, *batch).data_ptr() for batch in batches}) == 1


def test_small_batches_may_need_the_most(emulate: Emulate) -> None:
    """One request alone is split, several are not: not only the largest batch is asked about."""
    emulate("vllm")
    group = group_of(layer_config(), workspace_bytes=MIB, capacity=Capacity(4, 64, 4096))
    assert len(workspace_of(group, 4, 32)) == emulated.workspace_size(4096, 1, 148, -1, hangs=True)


def test_it_grows_for_wider_tables(emulate: Emulate) -> None:
    """The kernel's own choice of splits follows the width."""
    emulate("vllm")
    group = group_of(layer_config(), workspace_bytes=MIB, capacity=Capacity(2, 64, 256))
    first = len(workspace_of(group, 1, 2))
    assert len(workspace_of(group, 1, 16)) == 4202496 > first
    assert len(workspace_of(group, 1, 2)) == 4202496


def test_it_does_not_grow_under_graphs(emulate: Emulate) -> None:
    emulate("vllm")
    options: dict[str, Any] = {"workspace_bytes": MIB, "capacity": Capacity(2, 64, 256), "cuda_graphs": True}
    group = group_of(layer_config(), "vllm", **options)
    assert len(workspace_of(group, 1, 3)) > 0
    with pytest.raises(BatchError, match=r"of 16 blocks needs a workspace of 4202496 bytes"):
        workspace_of(group, 1, 16)
