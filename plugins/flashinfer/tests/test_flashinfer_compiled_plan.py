"""Decode steps of FLASHINFER that its wrapper's compiled function plans: what it gets, and what the kernel reads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_groups as groups
import torch
from flashinfer_emulated import paged

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, BatchError, Capacity
from attn_select_flashinfer.runtime import compiled_plan

Emulate = Callable[..., Any]
NATIVE = {"use_trtllm": False}
PLAN = "BatchDecodeWithPagedKVCacheWrapper.plan"
LENS = [[40, 1], [33, 64, 17], [16, 70], [90, 1, 31], [1]]
BEHIND = 1 << 30
"""A block that no cache has."""


def spoiled(group: Any, query_lens: list[int], seq_lens: list[int]) -> tuple[Any, Any]:
    """Return a batch behind whose last keys the block table holds ids of no block, and a cache."""
    common, cache = random_batch(group, query_lens, seq_lens)
    common.block_table_tensor = common.block_table_tensor.clone()
    for row, length in zip(common.block_table_tensor, seq_lens, strict=True):
        row[-(-length // group.block_size) :] = BEHIND
    return common, cache


def check(group: Any, common: Any, cache: Any) -> None:
    layer = Attention(group, caller_writes=True)
    output, lse = groups.run(group, common, cache, layer)
    expected, expected_lse = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=0)


def decode_of(group: Any, common: Any) -> Any:
    return group.build(common).parts[0].metadata[0]


def test_rows_of_the_table_are_read_where_they_lie(emulate: Emulate) -> None:
    """From the third step on, also beside prefills; what lies behind a request's last key is no block."""
    world = emulate()
    group = groups.made(options=NATIVE, block_size=16)
    for step, seq_lens in enumerate(LENS):
        common, cache = spoiled(group, [1] * len(seq_lens), seq_lens)
        check(group, common, cache)
        assert len(world.named(PLAN)) == min(step + 1, 2)
    common, cache = spoiled(group, [1, 1, 20], [30, 65, 40])
    check(group, common, cache)
    decode = decode_of(group, common)
    assert isinstance(decode.plan, compiled_plan.RowsPlan)
    made = decode.plan.wrapper.made
    assert made._paged_kv_indices_buf.data_ptr() == common.block_table_tensor.data_ptr()
    assert made._paged_kv_indptr_buf.tolist() == [0, 5, 10]
    assert made._paged_kv_last_page_len_buf.tolist() == [30 - 64, 65 - 64]
    assert made._max_kv_len == common.max_seq_len
    assert len(world.named(PLAN)) == 2
    assert world.syncs == []


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_prefills_read_rows_too(fields: dict[str, Any], kernel: str, emulate: Emulate) -> None:
    """Behind decodes and alone, causal and not, which are planned apart."""
    world = emulate()
    group = groups.made(options={**NATIVE, "prefill_kernel": kernel}, block_size=16, **fields)
    logits: dict[str, Any] = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.25])} if "sinks" in fields else {}
    layer, routes = Attention(group, caller_writes=True, **logits), []
    steps = [([20, 5], [20, 48]), ([1, 30, 7], [90, 40, 9]), ([1, 1, 40], [17, 3, 64]), ([64], [80]), ([9, 9], [9, 30])]
    for step, (query_lens, seq_lens) in enumerate([*steps, *steps]):
        common, cache = spoiled(group, query_lens, seq_lens)
        common.causal = step % 4 != 3 or kernel == "fa3"
        output, lse = groups.run(group, common, cache, layer)
        expected, expected_lse = groups.reference(group, common, cache, layer, **logits)
        close = {"atol": 0.2 if fields and kernel == "fa3" and "sinks" not in fields else 2e-2, "rtol": 0}
        torch.testing.assert_close(output.double(), expected, **close)
        torch.testing.assert_close(lse.double(), expected_lse, **close)
        prefill = group.build(common).parts[0].metadata[-1]
        routes.append(isinstance(prefill.plan, compiled_plan.RowsPlan))
    assert routes == [False] + [True] * (len(routes) - 1)  # each step is built twice, and ``plan`` is asked twice
    assert world.syncs == []


def test_a_batch_keeps_its_lengths_and_is_planned_again(emulate: Emulate) -> None:
    """Steps are run in another order than they were built in, and the caller's lengths have changed since."""
    world = emulate()
    group = groups.made(options=NATIVE, block_size=16)
    groups.check_in_any_order(group, Attention(group, caller_writes=True), [([1] * len(lens), lens) for lens in LENS])
    assert len(world.named(PLAN)) == 6  # the first two steps, built once and run twice


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_outputs_are_the_same_on_the_gpu(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, "kv_cache_dtype": cache}
    check_equal(lambda: groups.on_gpu(options=NATIVE, group_capacity=Capacity(200, 2048, 4096), **fields), monkeypatch)


def check_equal(made: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, most: int = 200) -> None:
    """Compare decodes of up to ``most`` requests, prefills, and both in one step, to the bit."""
    draw = random.Random(0)
    queries = [[1], [1, 1], [1] * 7, [1] * 40, [1] * most, [300], [16, 500, 3], [1, 1, 90], [1] * 30 + [700]]
    batches = [spoiled(made(), each, [tokens + draw.randint(0, 1500) for tokens in each]) for each in queries]

    def outputs() -> list[torch.Tensor]:
        group = made()
        layer = Attention(group, caller_writes=True)
        return [groups.run(group, *batch, layer)[0] for batch in (*batches, *reversed(batches))]

    with monkeypatch.context() as patch:
        patch.setattr(compiled_plan.Recorder, "compiled", lambda *_: None)
        wanted = outputs()
    calls, call = [], compiled_plan.CompiledPlan.__call__
    monkeypatch.setattr(compiled_plan.CompiledPlan, "__call__", lambda *given: (calls.append(given), call(*given))[1])
    found = outputs()
    assert len(calls) > len(queries)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"step {number}"


@pytest.mark.parametrize("cut", ["columns in front", "one row for all", "columns as rows"])
def test_tables_whose_rows_do_not_lie_one_behind_the_other_are_flattened(cut: str, emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(options=NATIVE, block_size=16)
    for _ in range(4):
        common, cache = random_batch(group, [1, 1], [40, 40])
        table = common.block_table_tensor
        if cut == "columns in front":
            common.block_table_tensor = torch.cat((torch.full((2, 1), BEHIND).int(), table), 1)[:, 1:]
        elif cut == "one row for all":
            common.block_table_tensor = table[:1].expand(2, -1)
        else:
            common.block_table_tensor = table.T.contiguous().T
        check(group, common, cache)
    assert len(world.named(PLAN)) == 4


def test_a_release_without_the_attributes_plans_every_step(emulate: Emulate) -> None:
    class Other(paged.BatchDecodeWithPagedKVCacheWrapper):  # type: ignore[misc]
        def plan(self, *args: Any, **kwargs: Any) -> None:
            self._jit_module = None
            super().plan(*args, **kwargs)
            del self._jit_module

    world = emulate(BatchDecodeWithPagedKVCacheWrapper=Other)
    group = groups.made(options=NATIVE, block_size=16)
    for seq_lens in LENS:
        check(group, *random_batch(group, [1] * len(seq_lens), seq_lens))
    assert len(world.named(PLAN)) == len(LENS)


def test_scratch_that_is_too_small_names_the_option(emulate: Emulate) -> None:
    emulate()
    fields = {"num_heads": 128, "num_kv_heads": 8, "head_size": 128}
    group = groups.made(options={**NATIVE, "native_workspace_bytes": 16 << 20}, **fields)
    small, _ = random_batch(group, [1], [30])
    assert [isinstance(decode_of(group, small).plan, compiled_plan.RowsPlan) for _ in range(3)] == [False, False, True]
    common, _ = random_batch(group, [1] * 16, [1000] * 16)
    with pytest.raises(BatchError, match=r"batch of 16 requests .*\n.*native_workspace_bytes"):
        group.build(common)


def test_captured_steps_read_rows_of_their_buffers(emulate: Emulate) -> None:
    """Sizes take turns: a size that is new is planned by ``plan``, whose lists replace the rows in the same buffers."""
    world = emulate()
    group = groups.made(options=NATIVE, block_size=16, group_cuda_graphs=True, group_capacity=Capacity(4, 64, 200))
    buffers = groups.builder_of(group).native.pool.buffers
    routes = []
    for size in (4, 4, 4, 2, 4, 2, 2, 4):
        common, cache = spoiled(group, [1] * size, [150, 1, 33, 16][:size])
        metadata = group.build_for_cudagraph_capture(common) if len(routes) < 4 else group.build(common)
        decode = metadata.parts[0].metadata[0]
        routes.append(isinstance(decode.plan, compiled_plan.RowsPlan))
        query = groups.drawn_query(group, size)
        output, layer = torch.empty_like(query), Attention(group, caller_writes=True)
        layer.forward(query, None, None, cache, metadata, output)
        expected, _ = groups.reference(group, common, cache, layer)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
        assert decode.plan.wrapper.made._paged_kv_indices_buf.data_ptr() == buffers.paged_kv_indices.data_ptr()
    assert routes == [False, False, True, False, True, False, True, True]
    assert len(world.named(PLAN)) == 4
    assert buffers.paged_kv_indptr.tolist() == [0, 13, 26, 39, 52]
    assert buffers.paged_kv_last_page_len.tolist() == [length - 12 * 16 for length in (150, 1, 33, 16)]
    wide = dataclasses.replace(common, block_table_tensor=torch.nn.functional.pad(common.block_table_tensor, (0, 9)))
    check(group, wide, cache)


def change(arguments: list[Any], what: str) -> list[Any]:
    """Return the compiled function's arguments as another release might pass them."""
    other = torch.ones(3, dtype=torch.int32)
    changed = {
        "too few": arguments[:8],
        "workspaces swapped": [arguments[1], arguments[0], *arguments[2:]],
        "another pinned buffer": [*arguments[:2], other, *arguments[3:]],
        "lists swapped": [*arguments[:4], arguments[5], arguments[4], *arguments[6:]],
        "no tensor": [*arguments[:4], [0, 2, 3], *arguments[5:]],
        "another number of tokens": [*arguments[:6], 4, *arguments[7:]],
        "another number of requests": [*arguments[:7], 4, *arguments[8:]],
        "another tensor": [*arguments, other],
        "as known": arguments,
    }
    return changed[what]


@pytest.mark.parametrize(
    "what",
    ["too few", "workspaces swapped", "another pinned buffer", "lists swapped", "no tensor", "another number of tokens",
     "another number of requests", "another tensor", "as known"],
)  # fmt: skip
def test_arguments_in_other_places_are_not_taken(what: str) -> None:
    scratch, ints, pinned, queries = (torch.zeros(size, dtype=torch.int32) for size in (4, 5, 6, 3))
    lists = SimpleNamespace(
        num_reqs=2, paged_kv_indptr=torch.tensor([0, 2, 3]).int(), seq_lens=torch.tensor([20, 5]).int()
    )
    arguments = [scratch, ints, pinned, queries, lists.paged_kv_indptr, lists.seq_lens, 5, 2, 32, 8, False]
    module, names = SimpleNamespace(plan=lambda *given: given), (*compiled_plan.LISTS, *compiled_plan.PLANNED)
    made = SimpleNamespace(
        **dict.fromkeys(names) | {"_cached_module": module},
        _float_workspace_buffer=scratch, _int_workspace_buffer=ints, _pin_memory_int_workspace_buffer=pinned,
    )  # fmt: skip
    with compiled_plan.Recorder(made) as recorder:
        made._jit_module.plan(*change(arguments, what))
        made._cached_module = made._jit_module
    assert (made._cached_module, made._jit_module) == (module, None)
    found = recorder.compiled(lists, 5)
    if what != "as known":
        assert found is None
        return
    later = [torch.zeros(size, dtype=torch.int32) for size in (7, 5, 5, 4)]
    planned = found(*later, 9)
    assert all(one is other for one, other in zip(planned[:6], (scratch, ints, *later), strict=True))
    assert planned[6:] == (9, 4, 32, 8, False)
