"""FlashInfer's kernels do what the emulated ones do: the same call of both, on a GPU and on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import flashinfer_batches as layers
import flashinfer_emulated as fi
import torch
from flashinfer_emulated import wrappers

Batch, ints = layers.Batch, layers.ints
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Run = Callable[[Any, Any, str], Any]

pytestmark = pytest.mark.gpu


@pytest.fixture
def real() -> Any:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"the emulated device is of compute capability 9.0, not {torch.cuda.get_device_capability()}")
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    from flashinfer.attention._core import attention_sink_decl

    fi.reset()
    names = [name for name in dir(flashinfer) if name.startswith(("Batch", "merge"))]
    return SimpleNamespace(
        **{name: getattr(flashinfer, name) for name in names},
        decode=flashinfer.decode.trtllm_batch_decode_with_kv_cache,
        sinks=attention_sink_decl,
    )


def assert_same(real: Any, batch: Any, run: Run, tolerance: float = 1e-2) -> None:
    """Compare outputs and LSE of ``run(entries, batch, device)``; rows without keys have about -5e4 in both."""
    names = fi.entries()
    own = SimpleNamespace(**names, decode=names["trtllm_batch_decode_with_kv_cache"], sinks=fi.SINK_DECLARATIONS)
    wanted = run(own, batch, "cpu")
    found = run(real, batch.on("cuda"), "cuda")
    torch.cuda.synchronize()
    for mine, theirs in zip(wanted, found, strict=True):
        theirs = theirs.double().cpu()
        assert not theirs.isnan().any(), f"NaN in rows {theirs.isnan().flatten(1).any(1).nonzero().flatten().tolist()}"
        empty = mine.double() <= -4e4
        assert torch.equal(theirs <= -4e4, empty)
        torch.testing.assert_close(
            theirs.masked_fill(empty, 0.0), mine.double().masked_fill(empty, 0.0), rtol=tolerance, atol=tolerance
        )


def space(device: str) -> Any:
    return torch.zeros(32 << 20, dtype=torch.uint8, device=device)


LENS = ([2, 0, 5, 3, 6, 1], [20, 3, 33, 0, 4, 200])
"""Query and sequence lengths: without queries, without keys, with rows that see none, a full page and long ones."""


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 7])
@pytest.mark.parametrize("cache", [BF16, E4M3])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_paged_prefill(real: Any, backend: str, cache: Any, window: int, causal: bool, layout: str) -> None:
    query = E4M3 if cache == E4M3 and backend == "fa3" else BF16
    if cache == E4M3 and window >= 0:
        pytest.skip("FP8 fa3 with a window waits forever before 0.6.15; fa2 compiles one module more")
    scales = (torch.tensor([0.5, 1.0, 2.0, 0.7]), torch.tensor([0.5, 2.0]), torch.tensor([0.5, 1.5]))

    def run(entries: Any, batch: Any, device: str) -> Any:
        wrapper = entries.BatchPrefillWithPagedKVCacheWrapper(space(device), layout, backend=backend)
        wrapper.plan(
            *batch.lists, *batch.shape, causal=causal, sm_scale=1.0, window_left=window, q_data_type=query,
            kv_data_type=cache, o_data_type=BF16,
        )  # fmt: skip
        options: dict[str, Any] = {"q_scale": 0.2, "out": batch.out, "lse": batch.lse, "return_lse": True}
        if cache == E4M3 and backend == "fa2":
            options |= {"k_scale": 0.5, "v_scale": 2.0}
        by_head = [each.to(device) for each in scales] if query == E4M3 else []
        return wrapper.run(batch.query, batch.cache, *by_head, **options)

    queries, lens = LENS
    if backend == "fa3" and causal:  # it gives rows that see no key of a request with keys the mean of masked values
        queries = [min(query, length or query) for query, length in zip(queries, lens, strict=True)]
    batch = Batch(queries, lens, layout=layout, dtype=query, kv_dtype=cache)
    assert_same(real, batch, run, 8e-2 if query == E4M3 else 1e-2)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_prefill_with_sinks(real: Any, backend: str) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])

    def run(entries: Any, batch: Any, device: str) -> Any:
        uri = f"sinks_of_a_test_{backend}"
        made = [uri, BF16, BF16, BF16, torch.int32, 64, 64, ["sink"], ["float"], ["sm_scale"], ["double"]]
        wrapper = entries.BatchPrefillWithPagedKVCacheWrapper(
            space(device), backend=backend, jit_args=[*made, "AttentionSink", entries.sinks[backend]],
            jit_kwargs={"use_sliding_window": False},
        )  # fmt: skip
        wrapper.plan(*batch.lists, *batch.shape, causal=True, q_data_type=BF16)
        return wrapper.run(batch.query, batch.cache, sinks.to(device), 0.2, return_lse=True)

    assert_same(real, Batch([2, 0, 5, 1], [20, 3, 33, 200]), run)


@pytest.mark.parametrize("cache", [BF16, E4M3])
def test_decode(real: Any, cache: Any) -> None:
    def run(entries: Any, batch: Any, device: str) -> Any:
        wrapper = entries.BatchDecodeWithPagedKVCacheWrapper(space(device), use_tensor_cores=True, backend="fa2")
        wrapper.plan(*batch.lists[1:], *batch.shape, q_data_type=BF16, kv_data_type=cache, sm_scale=1.0)
        return wrapper.run(batch.query, batch.cache, q_scale=0.2, out=batch.out, return_lse=True)

    assert_same(real, Batch([1] * 5, [20, 1, 0, 16, 3000], kv_dtype=cache), run)


def test_a_query_may_have_strides_in_prefill(real: Any) -> None:
    for backend in ("fa2", "fa3"):

        def run(entries: Any, batch: Any, device: str, backend: str = backend) -> Any:
            wrapper = entries.BatchPrefillWithPagedKVCacheWrapper(space(device), backend=backend)
            wrapper.plan(*batch.lists, *batch.shape, causal=True, q_data_type=BF16)
            wide = torch.cat([batch.query, batch.query], -1)[..., :64]
            return (wrapper.run(wide, batch.cache),)

        assert_same(real, Batch([2, 5], [20, 33]), run)


def test_merges(real: Any) -> None:
    parts, lses = torch.randn(2, 5, 4, 64).bfloat16(), torch.randn(2, 5, 4)
    parts[1, 2], lses[1, 2] = 0, -5e4
    parts[:, 3], lses[:, 3] = 0, -5e4

    def run(entries: Any, batch: Any, device: str) -> Any:
        v, s = parts.to(device).clone(), lses.to(device).clone()
        entries.merge_state_in_place(v[0], s[0], v[1], s[1])
        return v[0], s[0]

    assert_same(real, Batch([1], [1]), run)


def decode(entries: Any, batch: Any, device: str, **options: Any) -> Any:
    buffer = space(device)
    tensors = {name: each.to(device) if torch.is_tensor(each) else each for name, each in options.items()}
    out = entries.decode(
        batch.query, batch.cache, buffer, batch.table, ints(batch.seq_lens).to(device), max(batch.seq_lens),
        kv_layout=batch.layout, out=batch.out, backend="xqa", **tensors,
    )  # fmt: skip
    assert not buffer[: fi.SEMAPHORES].any(), "XQA leaves its counters at zero"
    return (out,)


XQA = list(itertools.product([BF16, E4M3], ["NHD", "HND"], [False, True]))


@pytest.mark.parametrize(("cache", "layout", "sinks"), XQA)
def test_xqa(real: Any, cache: Any, layout: str, sinks: bool) -> None:
    options: dict[str, Any] = {"bmm1_scale": 0.2, "bmm2_scale": 0.5 if cache == E4M3 else 1.0}
    if sinks:
        options["sinks"] = torch.tensor([0.5, -1.0, 3.0, 0.0])
    # With 16 bits NaN behind a sequence's end is not read; FP8 reads it.
    batch = Batch(
        [1] * 4, [20, 1, 16, 3000], layout=layout, kv_dtype=cache, tails=torch.nan if cache == BF16 else 400.0
    )
    assert_same(real, batch, lambda entries, batch, device: decode(entries, batch, device, **options), 8e-2)


def test_xqa_with_a_window(real: Any) -> None:
    batch = Batch([1] * 3, [20, 5, 300])
    run: Run = lambda entries, batch, device: decode(entries, batch, device, bmm1_scale=0.2, window_left=7)  # noqa: E731
    assert_same(real, batch, run)


@pytest.mark.parametrize("tensors", [False, True])
def test_xqa_divides_by_a_scale_that_a_16_bit_cache_has_not(real: Any, tensors: bool) -> None:
    scales: dict[str, Any] = {"bmm1_scale": 0.2, "bmm2_scale": 0.5}
    if tensors:
        scales = {name: torch.tensor([scale]) for name, scale in scales.items()}
    batch = Batch([1] * 2, [20, 300])
    assert_same(real, batch, lambda entries, batch, device: decode(entries, batch, device, **scales))


def test_xqa_with_drafts(real: Any) -> None:
    options = {"bmm1_scale": 0.2, "q_len_per_req": 3, "mask": layers.draft_mask(2, 3)}
    batch = Batch([3] * 2, [20, 300])
    assert_same(real, batch, lambda entries, batch, device: decode(entries, batch, device, **options))


@pytest.mark.parametrize("cache", [BF16, E4M3])
def test_xqa_leaves_other_requests_alone_where_one_has_no_keys(real: Any, cache: Any) -> None:
    """Captured batches are padded with such requests; their rows are nobody's."""
    batch = Batch([1] * 4, [20, 0, 300, 0], kv_dtype=cache, tails=400.0)

    def run(entries: Any, batch: Any, device: str) -> Any:
        (out,) = decode(entries, batch, device, bmm1_scale=0.2)
        return (out[[0, 2]],)

    assert_same(real, batch, run, 8e-2)


@pytest.mark.parametrize("graph", [False, True])
def test_scratch_is_as_large_as_emulated(real: Any, graph: bool) -> None:
    batch = Batch([3, 40, 1], [2000, 300, 5000])
    lists = tuple(tuple(each.tolist()) for each in (batch.qo_indptr, batch.indptr))
    schedule = wrappers.Schedule(*lists, tuple(batch.seq_lens), 4, 2, 16, True, -1)
    _, needed = wrappers.fa2_bytes(schedule, 44, 64, graph, True, -1)
    assert needed > 0
    fast = batch.on("cuda")
    buffers: dict[str, Any] = {}
    if graph:
        sizes = {"qo_indptr": 4, "paged_kv_indptr": 4, "paged_kv_indices": 1000, "paged_kv_last_page_len": 3}
        buffers = {f"{name}_buf": torch.zeros(size, dtype=torch.int32, device="cuda") for name, size in sizes.items()}
        buffers["use_cuda_graph"] = True
    for size, fits in ((needed + 32, True), (needed - 64, False)):
        buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
        wrapper = real.BatchPrefillWithPagedKVCacheWrapper(buffer, backend="fa2", **buffers)
        try:
            wrapper.plan(*fast.lists, *fast.shape, causal=True, q_data_type=BF16)
            assert fits, f"{size} bytes are enough, {needed} are emulated"
        except RuntimeError as error:
            assert not fits, f"{size} bytes are not enough, {needed} are emulated: {error}"  # noqa: PT017
            assert "workspace buffer" in str(error)  # noqa: PT017
