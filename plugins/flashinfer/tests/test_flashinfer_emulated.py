"""The emulated entries compute attention, and refuse what the real ones would do wrongly."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

pytest.importorskip("torch")
import flashinfer_batches as layers
import flashinfer_emulated as fi
import torch
from flashinfer_emulated import functions, paged, ragged, trtllm

from attn_select.reference.oracle import attention_reference, merge_reference

Batch, ints, packed, workspace = layers.Batch, layers.ints, layers.packed, layers.workspace
E4M3 = torch.float8_e4m3fn
Misuse = fi.Misuse
LN2 = math.log(2.0)


@pytest.fixture(autouse=True)
def _alone() -> Any:
    fi.reset()
    yield
    fi.reset()


def assert_close(found: Any, wanted: Any, rtol: float = 1e-2) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=rtol, atol=rtol)


def prefill(
    batch: Batch, backend: str = "fa2", wrapper: Any = None, run: dict[str, Any] | None = None, **plan: Any
) -> Any:
    wrapper = wrapper or paged.BatchPrefillWithPagedKVCacheWrapper(workspace(), batch.layout, backend=backend)
    plan = {"causal": True, "q_data_type": batch.query.dtype, "kv_data_type": batch.cache.dtype, **plan}
    plan.setdefault("o_data_type", batch.out.dtype)
    wrapper.plan(*batch.lists, *batch.shape, **plan)
    wrapper.run(batch.query, batch.cache, out=batch.out, lse=batch.lse, return_lse=True, **(run or {}))
    return wrapper


@pytest.mark.parametrize("seed", range(6))
def test_paged_prefill_in_random_shapes(seed: int) -> None:
    draw = random.Random(seed)
    seq_lens = [draw.randint(0, 70) for _ in range(draw.randint(1, 4))]
    query_lens = [draw.randint(0, length + 3) for length in seq_lens]
    kv_heads = draw.choice([1, 2])
    batch = Batch(
        [*query_lens, 2], [*seq_lens, 9], page=draw.choice([1, 5, 16]), heads=kv_heads * draw.choice([1, 3]),
        kv_heads=kv_heads, layout=draw.choice(["NHD", "HND"]), seed=seed,
    )  # fmt: skip
    causal, window = draw.choice([True, False]), draw.choice([-1, 0, 7])
    if not causal:
        window = -1
    cap = draw.choice([None, 5.0])
    prefill(batch, draw.choice(["fa2", "fa3"]), causal=causal, window_left=window, logits_soft_cap=cap, sm_scale=0.3)
    window_size = None if window < 0 else window + 1
    out, lse = batch.reference(0.3, causal=causal, sliding_window=window_size, logits_soft_cap=cap)
    assert_close(batch.out, out)
    assert_close(batch.lse, lse, 1e-5)


def test_without_causality_a_window_hides_only_what_is_before() -> None:
    batch = Batch([3], [8])
    prefill(batch, causal=False, window_left=2, sm_scale=0.2)
    for row, first in enumerate((3, 4, 5)):
        part = attention_reference(
            batch.query[row : row + 1].double(), batch.keys[0][first:], batch.values[0][first:], scale=0.2, causal=False
        )
        assert_close(batch.out[row], part[0][0])


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_an_fp8_cache(backend: str) -> None:
    fp8 = backend == "fa3"
    batch = Batch([2, 5], [20, 33], dtype=E4M3 if fp8 else torch.bfloat16, kv_dtype=E4M3)
    args = (torch.full((4,), 0.5), torch.full((2,), 0.25), 2.0) if fp8 else ()
    wrapper = paged.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="auto")
    wrapper.plan(
        *batch.lists,
        *batch.shape,
        causal=True,
        q_data_type=batch.query.dtype,
        kv_data_type=E4M3,
        o_data_type=torch.bfloat16,
    )
    assert wrapper._backend == backend
    scales = {} if fp8 else {"k_scale": 0.125, "v_scale": 2.0}
    out = wrapper.run(batch.query, batch.cache, *args, **scales)
    assert_close(out, batch.reference(0.125, 0.125, 2.0)[0])


def test_prefill_with_sinks() -> None:
    batch, sinks = Batch([3, 1], [30, 1]), torch.tensor([0.5, -1.0, 3.0, 0.0])
    bf16 = torch.bfloat16

    def wrapper(backend: str, head_size: int) -> Any:
        made = [f"sinks_{backend}", bf16, bf16, bf16, torch.int32, head_size, head_size, ["sink"], ["float"]]
        made += [["sm_scale"], ["double"], "AttentionSink", fi.SINK_DECLARATIONS[backend]]
        return paged.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend, jit_args=made)

    for backend in ("fa2", "fa3"):
        planned = wrapper(backend, 64)
        planned.plan(*batch.lists, *batch.shape, causal=True, q_data_type=bf16)
        out, lse = planned.run(batch.query, batch.cache, sinks, 0.2, return_lse=True)
        wanted = batch.reference(0.2, sinks=sinks)
        assert_close(out, wanted[0])
        assert_close(lse, wanted[1], 1e-5)
    with pytest.raises(Misuse, match="was compiled for"):
        wrapper("fa3", 128)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode(layout: str) -> None:
    batch = Batch([1, 1, 1], [40, 1, 0], layout=layout, page=8)
    wrapper = paged.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout, use_tensor_cores=True)
    wrapper.plan(*batch.lists[1:], *batch.shape, window_left=5, logits_soft_cap=4.0, q_data_type=torch.bfloat16)
    out, lse = wrapper.run(batch.query, batch.cache, out=batch.out, return_lse=True, v_scale=0.5)
    wanted = batch.reference(0.125, 1.0, 0.5, sliding_window=6, logits_soft_cap=4.0)
    assert_close(out, wanted[0])
    assert_close(lse, wanted[1], 1e-5)
    with pytest.raises(Misuse, match="one token per request"):
        wrapper.run(torch.cat([batch.query] * 2), batch.cache)


def test_ragged_prefill_with_different_sizes() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 4, size, generator=draw).bfloat16() for size in (192, 192, 128))
    for backend in ("fa2", "fa3"):
        wrapper = ragged.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)
        wrapper.plan(
            ints([0, 2, 6]), ints([0, 5, 9]), 4, 4, 192, 128, causal=True, sm_scale=0.1, q_data_type=torch.bfloat16
        )
        out, lse = wrapper.run(q[:6], k, v, return_lse=True)
        for rows, keys in ((slice(0, 2), slice(0, 5)), (slice(2, 6), slice(5, 9))):
            wanted = attention_reference(q[rows], k[keys], v[keys], scale=0.1)
            assert_close(out[rows], wanted[0])
            assert_close(lse[rows], wanted[1] / LN2, 1e-5)


XQA = {"backend": "xqa", "bmm1_scale": 0.2}
GEN = {"backend": "trtllm-gen", "bmm1_scale": 0.2}


def decode(batch: Batch, **options: Any) -> Any:
    options = {"kv_layout": batch.layout, "out": batch.out, "workspace_buffer": workspace(), **options}
    return trtllm.trtllm_batch_decode_with_kv_cache(
        batch.query, batch.cache, block_tables=batch.table, seq_lens=ints(batch.seq_lens),
        max_seq_len=max(batch.seq_lens), **options,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", ["xqa", "trtllm-gen"])
def test_trtllm_decode_in_random_shapes(seed: int, backend: str) -> None:
    draw = random.Random(seed)
    fi.reset((9, 0) if backend == "xqa" else (10, 0))
    fp8 = draw.random() < 0.5
    dtype = E4M3 if fp8 and backend == "trtllm-gen" else torch.bfloat16
    lens = [draw.randint(1, 100) for _ in range(3)]
    batch = Batch([1] * 3, lens, page=draw.choice([16, 32]), layout=draw.choice(["NHD", "HND"]), dtype=dtype,
                  kv_dtype=E4M3 if fp8 else None, tails=9.0 if fp8 or backend == "trtllm-gen" else torch.nan,
                  seed=seed)  # fmt: skip
    sinks, window = draw.choice([None, torch.randn(4)]), draw.choice([-1, 9])
    v_scale = 0.5 if fp8 else 1.0
    scales: dict[str, Any] = {"bmm1_scale": 0.2, "bmm2_scale": v_scale}
    if draw.random() < 0.5:
        scales = {name: torch.tensor([scale]) for name, scale in scales.items()}
    options = {} if backend == "xqa" else {"lse": batch.lse, "return_lse": True}
    decode(batch, backend=backend, window_left=window, sinks=sinks, **scales, **options)
    wanted = batch.reference(0.2, 1.0, v_scale, sinks=sinks, sliding_window=None if window < 0 else window + 1)
    assert_close(batch.out, wanted[0])
    if options:
        assert_close(batch.lse, wanted[1], 1e-5)


def test_xqa_masks_drafts() -> None:
    batch = Batch([3, 3], [40, 3])
    causal = packed([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    decode(batch, **XQA, q_len_per_req=3, mask=torch.stack([causal, causal]))
    assert_close(batch.out, batch.reference(0.2)[0])
    full = packed([[1, 1, 1]] * 3)
    decode(batch, **XQA, q_len_per_req=3, mask=torch.stack([full, full]))
    assert_close(batch.out, batch.reference(0.2, causal=False)[0])
    with pytest.raises(AssertionError, match="Mask is required"):
        decode(batch, **XQA, q_len_per_req=3)


def test_gen_decodes_several_tokens_per_request() -> None:
    fi.reset((10, 3))
    batch = Batch([3, 3], [40, 3], tails=9.0)
    decode(batch, **GEN, q_len_per_req=3)
    assert_close(batch.out, batch.reference(0.2)[0])
    batch = Batch([3, 1], [40, 3], tails=9.0)
    decode(batch, **GEN, q_len_per_req=None, max_q_len=3, cum_seq_lens_q=batch.qo_indptr)
    assert_close(batch.out, batch.reference(0.2)[0])


def context(batch: Batch, buffer: Any, **options: Any) -> Any:
    keys = ints(itertools.accumulate(batch.seq_lens, initial=0))
    options = {"kv_layout": batch.layout, "out": batch.out, **options}
    return trtllm.trtllm_batch_context_with_kv_cache(
        batch.query, batch.cache, buffer, batch.table, ints(batch.seq_lens), max(batch.query_lens), max(batch.seq_lens),
        0.2, 1.0, len(batch.seq_lens), batch.qo_indptr, keys, **options,
    )  # fmt: skip


@pytest.mark.parametrize("start", [0, 100])
def test_gen_writes_fp4(start: int) -> None:
    """Rows of decode and prefill share one tensor of scales, each from its first token."""
    fi.reset((10, 0))
    batch = Batch([1, 1], [40, 9], dtype=E4M3, tails=9.0)
    data = torch.zeros(2, 4, 32, dtype=torch.uint8)
    scales = torch.zeros(128, 16, dtype=torch.uint8).view(E4M3)
    decode(batch, **GEN, out=functions.FP4Tensor(data, scales, start), o_sf_scale=300.0)
    found, wanted = functions.read(functions.FP4Tensor(data, scales, start), 300.0), batch.reference(0.2)[0]
    largest = wanted.view(2, -1, 16).abs().amax(-1, keepdim=True).expand(-1, -1, 16).reshape(wanted.shape)
    assert ((found - wanted).abs() <= largest * 0.2).all()
    assert (scales.view(torch.uint8) != 0).sum() == 2 * 16
    with pytest.raises(ValueError, match="127, 2 of 128 rows"):
        functions.FP4Tensor(data, scales, 127)
    with pytest.raises(AssertionError, match="query must be fp8"):
        decode(Batch([1], [9]), **GEN, out_dtype="nvfp4", o_sf_scale=1.0)


@pytest.mark.parametrize("causal", [True, False])
def test_gen_prefill(causal: bool) -> None:
    fi.reset((10, 0))
    batch, sinks = Batch([5, 20, 1], [40, 20, 7], layout="HND", tails=9.0), torch.randn(4)
    _, lse = context(batch, workspace(), causal=causal, sinks=sinks, return_lse=True)
    wanted = batch.reference(0.2, sinks=sinks, causal=causal)
    assert_close(batch.out, wanted[0])
    assert_close(lse, wanted[1], 1e-5)


def test_gen_ragged_prefill() -> None:
    fi.reset((10, 0))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 4, size, generator=draw).bfloat16() for size in (192, 192, 128))
    out, lse = trtllm.trtllm_ragged_attention_deepseek(
        q[:6].contiguous(), k, v, workspace(), ints([5, 4]), 4, 5, 0.1, 2.0, 1.0, 2, -1, ints([0, 2, 6]),
        ints([0, 5, 9]), None, True, True,
    )  # fmt: skip
    for rows, keys in ((slice(0, 2), slice(0, 5)), (slice(2, 6), slice(5, 9))):
        wanted = attention_reference(q[rows], k[keys], v[keys], scale=0.1)
        assert_close(out[rows], wanted[0] * 2)
        assert_close(lse[rows], wanted[1] / LN2, 1e-5)


def test_merges() -> None:
    parts, lses = torch.randn(2, 5, 2, 64).bfloat16(), torch.randn(2, 5, 2)
    parts[1, 2], lses[1, 2] = 0, -5e4
    wanted, wanted_lse = merge_reference(list(parts), list(lses * LN2))
    functions.merge_state_in_place(parts[0], lses[0], parts[1], lses[1])
    assert_close(parts[0], wanted)
    assert_close(lses[0], wanted_lse / LN2, 1e-5)
