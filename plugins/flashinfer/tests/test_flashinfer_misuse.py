"""What the emulated entries refuse: late copies, stale plans, shared scratch, lists and tensors read wrongly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")
import flashinfer_batches as layers
import flashinfer_emulated as fi
import torch
from flashinfer_emulated import functions, paged, trtllm

Batch, ints, workspace = layers.Batch, layers.ints, layers.workspace
Misuse, E4M3, BF16 = fi.Misuse, torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture(autouse=True)
def _alone() -> Any:
    fi.reset()
    yield
    fi.reset()


def wrapper_for(batch: Any, backend: str = "fa2", **options: Any) -> Any:
    return paged.BatchPrefillWithPagedKVCacheWrapper(workspace(), batch.layout, backend=backend, **options)


def plan(wrapper: Any, batch: Any, **options: Any) -> None:
    options = {"causal": True, "q_data_type": batch.query.dtype, "kv_data_type": batch.cache.dtype, **options}
    wrapper.plan(*batch.lists, *batch.shape, **options)


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-2, atol=1e-2)


# --- The host and the GPU ---------------------------------------------------------------------


def test_a_plan_from_the_gpus_lists_waits_for_it() -> None:
    batch = Batch([2], [20])
    fi.on_device(batch.qo_indptr, batch.last, batch.indices)
    plan(wrapper_for(batch), batch)
    name = "BatchPrefillWithPagedKVCacheWrapper.plan"
    assert fi.world.syncs == [f"{name}.qo_indptr", f"{name}.paged_kv_last_page_len"]
    decode = paged.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    fi.on_device(batch.indptr)
    decode.plan(*batch.lists[1:], *batch.shape, q_data_type=BF16)
    assert "BatchDecodeWithPagedKVCacheWrapper.plan.paged_kv_indptr" in fi.world.syncs


def test_planning_again_before_the_copy_is_through_spoils_the_first_step() -> None:
    first, second = Batch([2], [20]), Batch([3], [50], seed=1)
    wrapper = wrapper_for(first)
    with fi.lagging():
        plan(wrapper, first)
        out = wrapper.run(first.query, first.cache)
        plan(wrapper, second)
        with pytest.raises(Misuse, match="schedule of another plan"):
            fi.finish()
    with fi.lagging():
        plan(wrapper, first)
        out = wrapper.run(first.query, first.cache)
        fi.Event().synchronize()
        plan(wrapper, second)
        late = wrapper.run(second.query, second.cache)
        assert not fi.Event().query()
    assert_close(out, first.reference(0.125)[0])
    assert_close(late, second.reference(0.125)[0])


def test_a_pinned_buffer_of_its_own_lets_plans_follow_each_other() -> None:
    first, second = Batch([2], [20]), Batch([3], [50], seed=1)
    wrapper = wrapper_for(first)
    with fi.lagging():
        plan(wrapper, first)
        out = wrapper.run(first.query, first.cache)
        wrapper._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        plan(wrapper, second)
        late = wrapper.run(second.query, second.cache)
    assert_close(out, first.reference(0.125)[0])
    assert_close(late, second.reference(0.125)[0])


def test_wrappers_that_share_a_schedule_are_run_before_the_next_is_planned() -> None:
    batch, ints8 = Batch([2], [20]), torch.empty(8 << 20, dtype=torch.uint8)
    both = [wrapper_for(batch), paged.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)]
    for wrapper in both:
        wrapper.reset_workspace_buffer(workspace(), ints8)
    plan(both[0], batch)
    both[0].run(batch.query, batch.cache)
    single = Batch([1], [20])
    both[1].plan(*single.lists[1:], *single.shape, q_data_type=BF16)
    assert_close(both[1].run(single.query, single.cache), single.reference(0.125)[0])
    with pytest.raises(Misuse, match="schedule of another plan"):
        both[0].run(batch.query, batch.cache)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_scratch_that_is_too_small(backend: str) -> None:
    batch = Batch([3, 2], [400, 700])
    plan(wrapper_for(batch, backend), batch)
    wrapper = paged.BatchPrefillWithPagedKVCacheWrapper(workspace(1000), backend=backend)
    if backend == "fa2":
        with pytest.raises(RuntimeError, match="Increase the workspace buffer size"):
            plan(wrapper, batch)
    plan(wrapper, batch, disable_split_kv=True)
    wrapper.reset_workspace_buffer(workspace(), torch.empty(64, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="of 64 bytes available"):
        plan(wrapper, batch)


def test_a_host_list_that_is_written_too_early_arrives_written() -> None:
    batch = Batch([2], [20])
    wrapper = wrapper_for(batch)
    with fi.lagging():
        plan(wrapper, batch)
        wrapper.run(batch.query, batch.cache)
        batch.indptr[1] = 1
        with pytest.raises(Misuse, match=r"not those of the plan|tokens in|last page length"):
            fi.finish()


def test_page_indices_are_not_copied() -> None:
    batch = Batch([1], [20])
    wrapper = wrapper_for(batch)
    plan(wrapper, batch)
    batch.indices.copy_(batch.indices.flip(0))
    assert not torch.allclose(wrapper.run(batch.query, batch.cache).double(), batch.reference(0.125)[0], atol=0.1)


# --- Graphs -----------------------------------------------------------------------------------


def captured(batch: Any, **options: Any) -> Any:
    requests, pages = len(batch.seq_lens), 20
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (requests + 1, pages, requests)]
    wrapper = paged.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", True, True, *buffers)
    wrapper.plan(*batch.lists[1:], *batch.shape, q_data_type=BF16, **options)
    return wrapper


def test_a_graph_runs_with_what_later_plans_wrote() -> None:
    first, second = Batch([1, 1], [40, 7]), Batch([1, 1], [9, 55], seed=1)
    wrapper = captured(first)
    with fi.capturing() as graph:
        wrapper.run(first.query, first.cache, out=first.out)
    assert first.out.isnan().all()
    graph.replay()
    assert_close(first.out, first.reference(0.125)[0])
    wrapper.plan(*second.lists[1:], *second.shape, q_data_type=BF16)
    pages = max(len(first.cache), len(second.cache))
    roomy = torch.zeros(pages, *first.cache.shape[1:], dtype=BF16)
    roomy[: len(first.cache)] = first.cache
    with fi.capturing() as graph:
        wrapper.run(first.query, roomy, out=first.out)
    roomy[: len(second.cache)] = second.cache
    first.query.copy_(second.query)
    graph.replay()
    assert_close(first.out, second.reference(0.125)[0])
    wrapper.plan(*second.lists[1:], *second.shape, q_data_type=BF16, window_left=3)
    with pytest.raises(Misuse, match="window_left is baked into the graph"):
        graph.replay()


def test_graph_buffers_bound_batch_and_pages() -> None:
    batch = Batch([1, 1], [40, 7])
    wrapper = captured(batch)
    with pytest.raises(ValueError, match="batch size 1, fixed 2"):
        wrapper.plan(*Batch([1], [40]).lists[1:], *batch.shape, q_data_type=BF16)
    with pytest.raises(ValueError, match="exceeds the allocated buffer"):
        wrapper.plan(*Batch([1, 1], [160, 200]).lists[1:], *batch.shape, q_data_type=BF16)
    eager = wrapper_for(batch)
    plan(eager, batch)
    with fi.capturing(), pytest.raises(Misuse, match="without use_cuda_graph"):
        eager.run(batch.query, batch.cache)
    with fi.capturing(), pytest.raises(Misuse, match="plan cannot be used"):
        plan(eager, batch)
    sizes = {"qo_indptr_buf": 3, "paged_kv_indptr_buf": 3, "paged_kv_indices_buf": 20, "paged_kv_last_page_len_buf": 2}
    buffers = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
    prefill = wrapper_for(batch, use_cuda_graph=True, **buffers)
    plan(prefill, batch)
    with pytest.raises(ValueError, match="total number of rows 5 cannot exceed 2"):
        plan(prefill, Batch([2, 3], [40, 7]))
    with pytest.raises(ValueError, match="in CUDA graph mode"):
        wrapper_for(batch, use_cuda_graph=True)


# --- Native -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [80, 96, 192, 512])
def test_head_sizes_without_a_kernel(size: int) -> None:
    batch = Batch([1], [3], size=size)
    with pytest.raises(RuntimeError, match="Unsupported head_dim"):
        plan(wrapper_for(batch), batch)
    decode = paged.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    with pytest.raises(RuntimeError, match="Unsupported head_dim"):
        decode.plan(*batch.lists[1:], *batch.shape, q_data_type=BF16)
    if size == 512:
        fi.reset((10, 0))
        plan(wrapper_for(batch), batch)


def test_dtypes_without_a_kernel() -> None:
    batch = Batch([1], [3], dtype=E4M3)
    with pytest.raises(AssertionError, match="fp8 tensor core is not supported in fa2"):
        plan(wrapper_for(batch), batch, o_data_type=BF16)
    with pytest.raises(AssertionError, match="FP8 output is not supported"):
        plan(wrapper_for(batch, "fa3"), batch)
    with pytest.raises(Misuse, match="waits forever"):
        plan(wrapper_for(batch, "fa3"), batch, o_data_type=BF16, window_left=3)
    with pytest.raises(Misuse, match="no soft cap"):
        plan(wrapper_for(batch, "fa3"), batch, o_data_type=BF16, logits_soft_cap=3.0)
    mixed = Batch([1], [3], kv_dtype=E4M3)
    with pytest.raises(Misuse, match="one dtype"):
        plan(wrapper_for(mixed, "fa3"), mixed)
    fi.reset((8, 0))
    with pytest.raises(RuntimeError, match="compute capability 9"):
        plan(wrapper_for(mixed, "fa3"), mixed)
    auto = wrapper_for(mixed, "auto")
    plan(auto, mixed)
    assert auto._backend == "fa2"


def test_lists_that_would_be_read_wrongly() -> None:
    batch = Batch([1, 1], [20, 3])
    queries, pages, indices, last = batch.lists
    wrapper = wrapper_for(batch)
    for lists, match in (
        ((queries.long(), pages, indices, last), "qo_indptr is torch.int64"),
        ((queries, pages, indices[:1], last), "1 page indices, paged_kv_indptr ends at 3"),
        ((queries, pages, indices, last * 0), "request 0: last page length 0 with 2 pages"),
        ((queries, pages, indices, last + 16), "request 0: last page length 20 with 2 pages of 16"),
        ((queries, pages, torch.stack([indices, indices], 1)[:, 0], last), "paged_kv_indices has strides"),
        ((queries + 1, pages, indices, last), "qo_indptr begins with 1"),
    ):
        with pytest.raises(Misuse, match=match):
            wrapper.plan(*lists, *batch.shape, q_data_type=BF16)
    with pytest.raises(RuntimeError, match="should be non-negative"):
        wrapper.plan(queries, ints([0, 3, 2]), indices, last, *batch.shape, q_data_type=BF16)
    with pytest.raises(ValueError, match="empty sequence"):
        wrapper.plan(ints([0]), ints([0]), indices[:0], last[:0], *batch.shape, q_data_type=BF16)
    wrapper.plan(queries, pages, indices + 99, last, *batch.shape, q_data_type=BF16)
    with pytest.raises(Misuse, match="out of bounds"):
        wrapper.run(batch.query, batch.cache)


def test_a_request_without_pages_in_fa3_has_the_length_of_its_last_page() -> None:
    batch = Batch([1, 1], [20, 0])
    for backend in ("fa2", "fa3"):
        wrapper = wrapper_for(batch, backend)
        wrapper.plan(*batch.lists[:3], ints([4, 1]), *batch.shape, causal=True, q_data_type=BF16)
        if backend == "fa2":
            assert_close(wrapper.run(batch.query, batch.cache), batch.reference(0.125)[0])
        else:
            with pytest.raises(Misuse, match="request 1: 1 tokens in 0 pages"):
                wrapper.run(batch.query, batch.cache)


def test_rows_without_keys() -> None:
    """Fewer keys than queries: fa2 gives 0 and about -5e4, fa3 does so only for a request without any key."""
    batch = Batch([6, 2], [4, 0])
    out, lse = batch.reference(0.125)
    wrapper = wrapper_for(batch)
    plan(wrapper, batch)
    found, found_lse = wrapper.run(batch.query, batch.cache, return_lse=True)
    assert_close(found, out)
    assert_close(found_lse, lse)
    assert (lse <= -4e4).all(1).tolist() == [True, True, False, False, False, False, True, True]
    wrapper = wrapper_for(batch, "fa3")
    plan(wrapper, batch)
    with pytest.raises(Misuse, match="request 0: fa3 gives queries that see none of 4 keys the mean"):
        wrapper.run(batch.query, batch.cache)
    plan(wrapper, batch, causal=False)
    assert_close(wrapper.run(batch.query, batch.cache), batch.reference(0.125, causal=False)[0])


def test_what_run_refuses() -> None:
    batch = Batch([2], [20])
    wrapper = wrapper_for(batch)
    plan(wrapper, batch)
    q, cache = batch.query, batch.cache
    k, v = cache.unbind(1)
    for arguments, options, match in (
        ((q[:1], cache), {}, r"does not match qo_indptr"),
        ((q.half(), cache), {}, "dtype of q"),
        ((q, cache.half()), {}, "dtype of k"),
        ((q, cache), {"out": batch.out.half()}, "dtype of out"),
        ((q, cache), {"lse": batch.lse.double(), "return_lse": True}, "dtype of lse"),
        ((q, (k, v.contiguous())), {}, "strides differs"),
        ((q, cache), {"k_scale": torch.tensor(2.0)}, "must not be tensors"),
        ((q, cache), {"window_left": 3}, "window_left"),
        ((q, cache), {"out": torch.cat([batch.out, batch.out], -1)[..., :64]}, "strides"),
        ((q, cache, 1.0, 1.0, 1.0), {}, "not read without an FP8 query"),
        ((q[:, :2], cache), {}, "2 query heads, planned 4"),
        ((q, cache.transpose(2, 3)), {}, "pages of 2, planned 16"),
    ):
        with pytest.raises((ValueError, AssertionError, RuntimeError, TypeError), match=match):
            wrapper.run(*arguments, **options)


# --- TRT-LLM ----------------------------------------------------------------------------------


def decode(batch: Any, **options: Any) -> Any:
    options = {"workspace_buffer": workspace(), "kv_layout": batch.layout, "bmm1_scale": 0.2, **options}
    lens, table = options.pop("seq_lens", ints(batch.seq_lens)), options.pop("block_tables", batch.table)
    query, cache = options.pop("query", batch.query), options.pop("kv_cache", batch.cache)
    longest = options.pop("max_seq_len", 64)
    arguments = (query, cache, options.pop("workspace_buffer"), table, lens, longest)
    return trtllm.trtllm_batch_decode_with_kv_cache(*arguments, **options)


def context(batch: Any, space: Any, **options: Any) -> Any:
    bounds = ints(itertools.accumulate(batch.seq_lens, initial=0))
    return trtllm.trtllm_batch_context_with_kv_cache(
        batch.query, batch.cache, space, batch.table, ints(batch.seq_lens), options.pop("max_q_len", 64), 64, 0.2, 1.0,
        len(batch.seq_lens), batch.qo_indptr, options.pop("bounds", bounds), kv_layout=batch.layout, **options,
    )  # fmt: skip


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_decode_counters_are_zero_and_nobodys_else(capability: tuple[int, int]) -> None:
    fi.reset(capability)
    batch, space = Batch([1, 1], [20, 3]), workspace()
    for _ in range(2):
        decode(batch, workspace_buffer=space)
    eager = paged.BatchPrefillWithPagedKVCacheWrapper(space, backend="fa2")
    plan(eager, batch)
    eager.run(batch.query, batch.cache)
    with pytest.raises(Misuse, match="counters are not zero"):
        decode(batch, workspace_buffer=space)
    with pytest.raises((Misuse, RuntimeError), match=r"first 8 MiB|8388608 are needed"):
        decode(batch, workspace_buffer=workspace(1 << 20))


def test_prefill_with_lse_writes_where_decode_counts() -> None:
    fi.reset((10, 0))
    batch, space = Batch([1, 1], [20, 3]), workspace()
    context(batch, space)
    decode(batch, workspace_buffer=space)
    context(batch, space[fi.SEMAPHORES :], return_lse=True)
    decode(batch, workspace_buffer=space)
    context(batch, space, return_lse=True)
    with pytest.raises(Misuse, match="counters are not zero"):
        decode(batch, workspace_buffer=space)
    with pytest.raises(RuntimeError, match="1064960 are needed"):
        context(batch, workspace(1 << 20), return_lse=True)


def test_one_scale_serves_k_and_v_in_xqa_and_a_plain_cache_has_none() -> None:
    batch = Batch([1], [20])
    found = decode(batch, bmm1_scale=0.2, bmm2_scale=0.5)
    assert_close(found, batch.reference(0.4)[0])


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_what_both_decodes_refuse(capability: tuple[int, int]) -> None:
    fi.reset(capability)
    batch = Batch([1, 1], [20, 3])
    wide = torch.cat([batch.table, batch.table], 1)
    for options, match in (
        ({"seq_lens": ints([20, 3]).long()}, "seq_lens is torch.int64"),
        ({"block_tables": batch.table.long()}, "block_tables is torch.int64"),
        ({"block_tables": wide[:, :2]}, "block_tables has strides"),
        ({"block_tables": batch.table[:1]}, "has 1 rows, not 2"),
        ({"block_tables": batch.table[:, :1].contiguous()}, "20 tokens"),
        ({"sinks": torch.zeros(4, dtype=BF16)}, "float"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"kv_cache": (batch.cache[:, 0], batch.cache[:, 1].contiguous())}, "strides differs"),
        ({"kv_layout": "HND"}, r"page_size: 2|num_kv_heads: 4, 16"),
    ):
        with pytest.raises((Misuse, ValueError, RuntimeError), match=match):
            decode(batch, **options)


def test_what_xqa_refuses() -> None:
    batch = Batch([1, 1], [20, 3])
    with pytest.raises(NotImplementedError, match="return_lse"):
        decode(batch, return_lse=True)
    with pytest.raises(ValueError, match="cum_seq_lens_q"):
        decode(batch, max_q_len=1)
    with pytest.raises(ValueError, match="Invalid page_size: 8"):
        decode(Batch([1], [20], page=8))
    with pytest.raises(ValueError, match="Invalid dtype"):
        decode(Batch([1], [20], dtype=E4M3))
    with pytest.raises(Misuse, match="contiguous"):
        decode(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(AssertionError, match="must be fp8"):
        decode(batch, out_dtype=E4M3)
    drafts = Batch([2, 2], [20, 3], kv_dtype=E4M3)
    with pytest.raises(Misuse, match=r"mask is torch\.bool"):
        decode(drafts, q_len_per_req=2, mask=torch.ones(2, 2, 2, dtype=torch.bool))
    full = torch.full((2, 2, 2), 3, dtype=torch.uint16)
    with pytest.raises(Misuse, match="masked causally"):
        decode(drafts, q_len_per_req=2, mask=full)
    with pytest.raises(Misuse, match="last one's window"):
        decode(drafts, q_len_per_req=2, mask=layers.draft_mask(2, 2), window_left=3)


@pytest.mark.parametrize(
    ("capability", "cache", "query", "safe"),
    [
        ((9, 0), BF16, BF16, True),
        ((9, 0), E4M3, BF16, False),
        ((12, 0), E4M3, BF16, True),
        ((10, 0), BF16, BF16, False),
        ((10, 0), E4M3, E4M3, False),
    ],
)
def test_nan_behind_the_end_of_a_sequence(capability: tuple[int, int], cache: Any, query: Any, safe: bool) -> None:
    fi.reset(capability)
    for tails, right in ((400.0, True), (torch.nan, safe)):
        batch = Batch([1], [20], dtype=query, kv_dtype=cache, tails=tails)
        assert bool(decode(batch).float().isfinite().all()) is right


def test_what_trtllm_gen_refuses() -> None:
    fi.reset((10, 0))
    batch = Batch([1, 1], [20, 3])
    with pytest.raises(RuntimeError, match=r"query torch\.bfloat16, cache torch\.float8_e4m3fn"):
        decode(Batch([1], [20], kv_dtype=E4M3))
    with pytest.raises(Misuse, match="pages of 8"):
        decode(Batch([1], [20], page=8))
    with pytest.raises(Misuse, match="20 tokens, at most 19"):
        decode(batch, max_seq_len=19)
    with pytest.raises(ValueError, match="Unsupported out_dtype"):
        decode(batch, out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="scales are float32"):
        decode(batch, bmm1_scale=torch.tensor(0.2, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="Sliding-window non-causal"):
        context(batch, workspace(), causal=False, window_left=3)
    with pytest.raises(Misuse, match="not the sum of seq_lens"):
        context(batch, workspace(), bounds=ints([0, 20, 20]))
    with pytest.raises(Misuse, match="1 queries, at most 0"):
        context(batch, workspace(), max_q_len=0)
    fi.reset((9, 0))
    with pytest.raises(RuntimeError, match="compute capability 10"):
        context(batch, workspace())


def test_what_merging_refuses() -> None:
    parts, lses = torch.randn(2, 3, 2, 64), torch.zeros(2, 3, 2)
    with pytest.raises(RuntimeError, match=r"merging torch\.float32"):
        functions.merge_state_in_place(parts[0], lses[0], parts[1], lses[1])
    halves = parts.bfloat16()
    with pytest.raises(RuntimeError, match="contiguous"):
        functions.merge_state_in_place(halves[0], lses[0], halves[1].transpose(0, 1), lses[1])
