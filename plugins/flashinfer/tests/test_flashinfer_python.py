"""FlashInfer's own Python over emulated kernels gives what the emulated entries give: scales, shapes, layouts, lists.

Runs without a GPU: what the library would compile or download is replaced where its Python gets it, and computed by
the oracle from the very arguments that the kernel would have got.
"""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import flashinfer_batches as layers
import flashinfer_emulated as fi
import flashinfer_groups as groups
import torch
from flashinfer_emulated import paged, trtllm

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention

flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Kernels:
    """What a compiled prefill module offers, in NHD and HND; ``planned`` are the last plan's arguments."""

    def __init__(self, backend: str, variant: bool = False) -> None:
        self.backend, self.variant, self.planned = backend, variant, []

    def plan(self, *arguments: Any) -> list[int]:
        self.planned.append(arguments)
        return [len(self.planned)]

    def paged_run(self, *arguments: Any) -> None:
        q, k, v, queries, pages, indices, last, out, lse, mask, layout, window = arguments[3:15]
        if self.variant:
            sinks, scale = arguments[16:18]
            cap, fp8 = 0.0, (None, None, None)
        else:
            sinks, (cap, scale), fp8 = None, arguments[22:24], arguments[24:27]
        order, size = ("NHD", k.shape[1]) if layout == 0 else ("HND", k.shape[2])
        group = q.shape[1] // k.shape[2 if order == "NHD" else 1]
        factors = [1.0 if each is None else each for each in fp8]
        q_factor, k_factor, v_factor = (
            each.repeat_interleave(times)[:, None] if torch.is_tensor(each) else each
            for each, times in zip(factors, (1, group, group), strict=True)
        )
        for request in range(len(last)):
            rows, own = (slice(*each[request : request + 2].tolist()) for each in (queries, pages))
            count = own.stop - own.start
            length = (count - 1) * size + int(last[request]) if count else 0
            halves = [fi.gather(half, indices[own].tolist(), length, order) for half in (k, v)]
            found, found_lse = fi.attend(
                q[rows].double() * q_factor * k_factor, *halves, scale, causal=mask == 1, window_left=window,
                soft_cap=cap, sinks=sinks,
            )  # fmt: skip
            out[rows] = (found * v_factor).to(out.dtype)
            if lse is not None:
                lse[rows] = found_lse.float()


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what needs a GPU."""
    fi.reset()
    prefill, decode, xqa = (importlib.import_module(f"flashinfer.{name}") for name in ("prefill", "decode", "xqa"))
    plain = torch.empty
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: plain(*sizes, **options))
    for module in (prefill, decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", lambda backend, *kind: Kernels(backend))
        monkeypatch.setattr(module, "get_device_sm_count", lambda device: 132)
        monkeypatch.setattr(module, "get_trtllm_gen_fmha_module", lambda: SimpleNamespace(
            trtllm_paged_attention_decode=gen_decode, trtllm_paged_attention_context=gen_context
        ))  # fmt: skip
    monkeypatch.setattr(prefill, "get_customize_batch_prefill_module", lambda backend, *kind, **flags: backend)
    monkeypatch.setattr(prefill, "get_batch_prefill_jit_module", lambda name, made: Kernels(made, variant=True))
    monkeypatch.setattr(xqa, "get_xqa_module", lambda *kind: SimpleNamespace(xqa=xqa_kernel))
    for module in (decode, xqa):
        monkeypatch.setattr(module, "get_compute_capability", lambda device: fi.world.capability)


def assert_both_agree(batch: Any, run: Any) -> None:
    """Compare output (and LSE) of ``run(entries, batch)``: the library's over emulated kernels, and the emulated's."""
    real = SimpleNamespace(
        **{name: getattr(flashinfer, name) for name in dir(flashinfer) if name.startswith("Batch")},
        trtllm_batch_decode_with_kv_cache=flashinfer.decode.trtllm_batch_decode_with_kv_cache,
        trtllm_batch_context_with_kv_cache=flashinfer.prefill.trtllm_batch_context_with_kv_cache,
    )
    own = SimpleNamespace(**fi.entries())
    results = []
    for entries in (real, own):
        batch.out.fill_(torch.nan)
        results.append([each.clone() for each in run(entries, batch) if each is not None])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-2, atol=1e-3)
        assert not wanted.isnan().any()


CASES = list(itertools.product(["fa2", "fa3"], ["NHD", "HND"], ["bf16", "fp8"]))


@pytest.mark.parametrize(("backend", "layout", "cache"), CASES)
def test_paged_prefill(backend: str, layout: str, cache: str) -> None:
    query = E4M3 if cache == "fp8" and backend == "fa3" else BF16
    batch = layers.Batch([2, 0, 5], [20, 3, 33], layout=layout, dtype=query, kv_dtype=E4M3 if cache == "fp8" else None)

    def run(entries: Any, batch: Any) -> Any:
        wrapper = entries.BatchPrefillWithPagedKVCacheWrapper(layers.workspace(), layout, backend=backend)
        plan = {"q_data_type": query, "kv_data_type": batch.cache.dtype, "o_data_type": BF16, "causal": True}
        window = -1 if query == E4M3 else 7
        wrapper.plan(*batch.lists, *batch.shape, sm_scale=0.3, window_left=window, **plan)
        torch.manual_seed(0)
        fp8 = (torch.rand(4), torch.rand(2), 2.0) if query == E4M3 else ()
        scales = {"k_scale": 0.5, "v_scale": torch.tensor(2.0)} if query == BF16 and cache == "fp8" else {}
        return wrapper.run(batch.query, batch.cache, *fp8, out=batch.out, lse=batch.lse, return_lse=True, **scales)

    assert_both_agree(batch, run)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_sinks(backend: str) -> None:
    sinks = torch.randn(4)
    tensors, numbers = ["sink"], ["sm_scale"]
    names = ["own", BF16, BF16, BF16, torch.int32, 64, 64, tensors, ["float"], numbers, ["double"], "AttentionSink"]

    def run(entries: Any, batch: Any) -> Any:
        wrapper = entries.BatchPrefillWithPagedKVCacheWrapper(
            layers.workspace(), backend=backend, jit_args=[*names, fi.SINK_DECLARATIONS[backend]],
            jit_kwargs={"use_sliding_window": False},
        )  # fmt: skip
        wrapper.plan(*batch.lists, *batch.shape, causal=True, q_data_type=BF16, sm_scale=0.9)
        return wrapper.run(batch.query, batch.cache, sinks, 0.2, return_lse=True)

    paged._VARIANTS.clear()
    assert_both_agree(layers.Batch([3, 1], [30, 1]), run)
    paged._VARIANTS.clear()


@pytest.mark.parametrize("graph", [False, True])
def test_decode_wrapper(graph: bool) -> None:
    def run(entries: Any, batch: Any) -> Any:
        made = {"use_cuda_graph": graph, "use_tensor_cores": True}
        if graph:
            made["paged_kv_indptr_buffer"] = torch.zeros(4, dtype=torch.int32)
            made["paged_kv_indices_buffer"] = torch.zeros(50, dtype=torch.int32)
            made["paged_kv_last_page_len_buffer"] = torch.zeros(3, dtype=torch.int32)
        wrapper = entries.BatchDecodeWithPagedKVCacheWrapper(layers.workspace(), **made)
        wrapper.plan(*batch.lists[1:], *batch.shape, window_left=9, logits_soft_cap=3.0, q_data_type=BF16)
        return wrapper.run(batch.query, batch.cache, q_scale=2.0, return_lse=True, out=batch.out)

    assert_both_agree(layers.Batch([1] * 3, [40, 1, 0]), run)


def test_decode_steps_planned_by_the_compiled_function(emulate: Any) -> None:
    """The third step on gets what the first two had from ``plan``, but for the lists; rows of the table are read."""
    emulate(BatchDecodeWithPagedKVCacheWrapper=flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    group = groups.made(options={"use_trtllm": False}, block_size=16, sliding_window=40)
    wrappers = groups.builder_of(group).native.pool
    for step, seq_lens in enumerate(([40, 1], [33, 64, 17], [16, 70], [1, 90, 31])):
        common, cache = random_batch(group, [1] * len(seq_lens), seq_lens)
        layer = Attention(group, caller_writes=True)
        output, lse = groups.run(group, common, cache, layer)
        expected, expected_lse = groups.reference(group, common, cache, layer)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=0)
        (wrapper,) = wrappers._eager.values()
        planned = wrapper.made._cached_module.planned
        assert (wrapper.compiled == {}, len(planned)) == (step == 0, step + 1)
        first, last = planned[0], planned[-1]
        assert [each.tolist() for each in last[3:6]] == [
            [*range(len(seq_lens) + 1)],
            [0, *itertools.accumulate(-(-each // 16) for each in seq_lens)],
            seq_lens,
        ]
        assert last[6:8] == (len(seq_lens),) * 2
        assert last[8:] == first[8:]
        assert all(one is other for one, other in zip(last[:2], first[:2], strict=True))


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_prefill_steps_planned_by_the_compiled_function(kernel: str, emulate: Any) -> None:
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    emulate(**{name: getattr(flashinfer, name) for name in names})
    group = groups.made(options={"use_trtllm": False, "prefill_kernel": kernel}, block_size=16)
    steps = [([20, 5], [20, 48]), ([1, 30, 7], [90, 40, 9]), ([1, 1, 40], [17, 3, 64]), ([64], [80])]
    for step, (query_lens, seq_lens) in enumerate(steps):
        common, cache = random_batch(group, query_lens, seq_lens)
        output, lse = groups.run(group, common, cache, Attention(group, caller_writes=True))
        expected, expected_lse = groups.reference(group, common, cache, Attention(group, caller_writes=True))
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=0)
        wrapper = next(
            found for (role, _), found in groups.builder_of(group).native.pool._eager.items() if role == "prefill"
        )
        planned = wrapper.made._cached_module.planned
        assert (wrapper.compiled == {}, len(planned)) == (step == 0, step + 1)
        first, last = planned[0], planned[-1]
        own = [(query, keys) for query, keys in zip(query_lens, seq_lens, strict=True) if query > 1]
        assert last[3].tolist() == [0, *itertools.accumulate(query for query, _ in own)]
        assert last[5].tolist() == [keys for _, keys in own]
        assert last[6:8] == (sum(query for query, _ in own), len(own))
        assert last[8:] == first[8:]


def gen_decode(*arguments: Any) -> None:
    out, _, q, k, v, space, table, lens, queries, keys, scale, factor = arguments[:12]
    batch, window, _, _, _, size, sinks, bounds = arguments[15:23]
    lse = arguments[27]
    assert size == space.numel()
    if bounds is None:
        bounds = torch.arange(batch + 1, dtype=torch.int32) * queries
    _gen(q, (k, v), space, (bounds, table, lens), out, lse, (scale, factor), sinks, (queries, keys), True, True, window)


def gen_context(*arguments: Any) -> None:
    out, _, q, k, v, space, table, lens, queries, keys, scale, factor = arguments[:12]
    _, window, bounds, _, _, _, size, sinks = arguments[15:23]
    causal, lse = arguments[27:29]
    assert size == space.numel()
    limits = (queries, keys)
    _gen(q, (k, v), space, (bounds, table, lens), out, lse, (scale, factor), sinks, limits, False, causal, window)


def _gen(
    q: Any, halves: Any, space: Any, lists: Any, out: Any, lse: Any, scales: Any, sinks: Any, limits: Any, decode: bool,
    causal: bool, window: int,
) -> None:  # fmt: skip
    scale, factor = scales
    if torch.is_tensor(scale):
        scale = scale / fi.LOG2E  # a number gets this factor in the launcher, a tensor before it
    call = {"limits": limits, "decode": decode, "causal": causal, "window": window}
    trtllm._gen(q, *halves, space, lists, out, lse, (scale, factor), sinks, call)


def xqa_kernel(*arguments: Any) -> None:
    _, _, heads, window, q_scale, out, inverse, q, sinks, k, v, _, _, table, longest, lens = arguments[:16]
    _, kv_scale, counters, scratch, _, each, mask = arguments[16:]
    assert longest == table.shape[1] * k.shape[1]
    assert heads == k.shape[2]
    assert counters.numel() == fi.SEMAPHORES
    assert scratch.data_ptr() == counters.data_ptr() + fi.SEMAPHORES
    space = torch.cat([counters, scratch])
    factor = float(kv_scale) if k.dtype == E4M3 else 1.0
    call = {"scale": float(q_scale) * factor * q.shape[-1] ** -0.5, "factor": factor * inverse, "window": window - 1}
    call |= {
        "each": each,
        "sinks": None if sinks is None else sinks.flatten(),
        "full_mask_fails": False,
        "reads_tails": False,
    }
    flat = q.flatten(0, -3)
    trtllm._xqa(flat, k, v, space, (table, lens.squeeze(1), mask), out.view(flat.shape), call)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("kernel", "cache"), [("xqa", "bf16"), ("xqa", "fp8"), ("trtllm-gen", "bf16"), ("trtllm-gen", "fp8")]
)
def test_trtllm_decode(kernel: str, cache: str, layout: str, tensors: bool) -> None:
    fi.reset((9, 0) if kernel == "xqa" else (10, 0))
    query = E4M3 if (kernel, cache) == ("trtllm-gen", "fp8") else BF16
    scales: dict[str, Any] = {"bmm1_scale": 0.2, "bmm2_scale": 0.5 if cache == "fp8" else 1.0}
    if tensors:
        scales = {name: torch.tensor([scale]) for name, scale in scales.items()}
    for drafts in (1, 3):
        batch = layers.Batch(
            [drafts] * 2, [40, 17], layout=layout, dtype=query, tails=9.0, kv_dtype=E4M3 if cache == "fp8" else None
        )
        options: dict[str, Any] = {"sinks": torch.randn(4), "window_left": 9 if drafts == 1 else -1, **scales}
        if kernel == "xqa" and drafts > 1:
            options["mask"] = layers.draft_mask(2, drafts)
        if kernel == "trtllm-gen":
            options["return_lse"] = True

        def run(entries: Any, batch: Any, options: Any = options, drafts: int = drafts) -> Any:
            found = entries.trtllm_batch_decode_with_kv_cache(
                batch.query, batch.cache, layers.workspace(), batch.table, layers.ints(batch.seq_lens), 64,
                out=batch.out, kv_layout=layout, backend=kernel, q_len_per_req=drafts, **options,
            )  # fmt: skip
            return found if isinstance(found, tuple) else (found,)

        assert_both_agree(batch, run)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [True, False])
def test_trtllm_prefill(layout: str, causal: bool) -> None:
    fi.reset((10, 0))
    sinks = torch.randn(4)

    def run(entries: Any, batch: Any) -> Any:
        return entries.trtllm_batch_context_with_kv_cache(
            batch.query, batch.cache, layers.workspace(), batch.table, layers.ints(batch.seq_lens), 5, 40,
            torch.tensor([0.2]), 1.0, 2, batch.qo_indptr, layers.ints([0, 40, 57]), window_left=7 if causal else -1,
            out=batch.out, kv_layout=layout, causal=causal, sinks=sinks, return_lse=True,
        )  # fmt: skip

    assert_both_agree(layers.Batch([5, 2], [40, 17], layout=layout, tails=9.0), run)
