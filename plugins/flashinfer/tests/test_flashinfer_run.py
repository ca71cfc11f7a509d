"""FLASHINFER's builder and layers on a CPU: which path runs, what reaches the kernel, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_groups as groups
import torch
from flashinfer_emulated import paged

from attn_select.backends.spec import BackendSpec
from attn_select.errors import KernelMismatchError
from attn_select.layer.layouts import FLASHINFER_HND, FLASHINFER_NHD
from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, BatchError, Scales
from attn_select_flashinfer.plugin import attn_select_register_backends
from attn_select_flashinfer.runtime import library, scores

Emulate = Callable[..., Any]
NATIVE = {"use_trtllm": False}
MIB = 1 << 20
LSE = 2e-3
E4M3 = torch.float8_e4m3fn
PREFILL_RUN = "BatchPrefillWithPagedKVCacheWrapper.run"
PREFILL_PLAN = "BatchPrefillWithPagedKVCacheWrapper.plan"
DECODE_PLAN = "BatchDecodeWithPagedKVCacheWrapper.plan"
DECODE_RUN = "BatchDecodeWithPagedKVCacheWrapper.run"


def parts_of(metadata: Any) -> list[Any]:
    return metadata.parts[0].metadata  # type: ignore[no-any-return]


def kernels_of(metadata: Any) -> list[str]:
    return [str(getattr(part.kernel, "kernel", part.kernel)) for part in parts_of(metadata)]


# --- Which path runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "options", "decode", "prefill"),
    [
        ("h100", {}, "TRT-LLM (XQA)", "native fa3"),
        ("h100", NATIVE, "native fa2", "native fa3"),
        ("h100", {**NATIVE, "prefill_kernel": "fa2"}, "native fa2", "native fa2"),
        ("a100", {}, "native fa2", "native fa2"),
        ("b200", {}, "TRT-LLM (trtllm-gen)", "TRT-LLM (trtllm-gen)"),
        ("b200", NATIVE, "native fa2", "native fa2"),
        ("rtx5090", {}, "TRT-LLM (XQA)", "native fa2"),
    ],
)
def test_each_phase_runs_by_its_plan(gpu: str, options: Any, decode: str, prefill: str, emulate: Emulate) -> None:
    emulate({"h100": (9, 0), "a100": (8, 0), "b200": (10, 0), "rtx5090": (12, 0)}[gpu])
    group = groups.made(gpu, options=options)
    for query_lens, seq_lens in (([1, 1, 20], [30, 5, 40]), ([1, 1], [31, 6])):
        common, _ = random_batch(group, query_lens, seq_lens)
        assert kernels_of(group.build(common)) == [decode, prefill][: len(set(query_lens))]
    for phase, path in (("decode", decode), ("prefill", prefill)):
        assert group.selection.plans[phase].path == path


@pytest.mark.parametrize(
    ("gpu", "fields"),
    [
        ("h100", {"options": NATIVE}),
        ("h100", {"options": {**NATIVE, "prefill_kernel": "fa2"}, "sinks": True}),
        ("h100", {}),
        ("b200", {}),
    ],
    ids=str,
)
def test_several_steps_may_be_built_before_the_first_one_runs(
    gpu: str, fields: dict[str, Any], emulate: Emulate
) -> None:
    """Each step runs by its own plan, in any order, also when the caller's lengths have changed since."""
    emulate({"h100": (9, 0), "b200": (10, 0)}[gpu])
    group = groups.made(gpu, **fields)
    sinks: dict[str, Any] = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.25])} if "sinks" in fields else {}
    batches = [([1, 1, 20], [30, 5, 40]), ([1, 7], [200, 64]), ([1], [9])]
    groups.check_in_any_order(group, Attention(group, caller_writes=True, **sinks), batches, **sinks)


def test_a_step_that_is_not_causal_is_prefilled_natively(emulate: Emulate) -> None:
    world = emulate((10, 0))
    group = groups.made("b200", kv_cache_dtype="fp8_e4m3")
    layer = Attention(group, caller_writes=True, scales=Scales.make("cpu", q=0.1, k=0.5, v=0.25))
    common, cache = random_batch(group, [1, 20], [30, 40])
    groups.run(group, common, cache, layer)
    assert groups.builder_of(group).native is None
    common.causal = False
    output, lse = groups.run(group, common, cache, layer)
    expected, expected_lse = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output[1:].double(), expected[1:], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse[1:].double(), expected_lse[1:], atol=LSE, rtol=0)
    assert kernels_of(group.build(common)) == ["native fa2"]
    assert world.named(PREFILL_RUN)[0]["q"].dtype == torch.bfloat16


def test_drafts_of_trtllm_gen_are_prefilled_where_the_step_is_not_causal(emulate: Emulate) -> None:
    emulate((10, 0))
    group = groups.made("b200", num_speculative_tokens=2)
    layer = Attention(group, caller_writes=True)
    common, cache = random_batch(group, [3, 3, 2], [30, 40, 2])
    common.causal = False
    output, _ = groups.run(group, common, cache, layer)
    expected, _ = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    assert kernels_of(group.build(common)) == ["native fa2"]


def test_native_kernels_refuse_a_window_in_a_step_that_is_not_causal(emulate: Emulate) -> None:
    emulate()
    group = groups.made(options=NATIVE, sliding_window=8)
    common, _ = random_batch(group, [1, 20], [30, 40])
    common.causal = False
    with pytest.raises(BatchError, match="the step is not causal and the layers have a sliding window"):
        group.build(common)


def test_single_tokens_with_sinks_and_a_window_need_no_causality(emulate: Emulate) -> None:
    """The variant with sinks decodes through the prefill wrapper; no key lies behind a sequence's last token."""
    emulate()
    group, sinks = groups.made(options=NATIVE, sliding_window=8, sinks=True), torch.tensor([0.5, -1.0, 2.0, 0.25])
    common, cache = random_batch(group, [1, 1], [30, 40])
    common.causal = False
    layer = Attention(group, caller_writes=True, sinks=sinks)
    output, _ = groups.run(group, common, cache, layer)
    expected, _ = groups.reference(group, common, cache, layer, sinks=sinks)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)


def test_requests_without_tokens_leave_single_tokens_alone(emulate: Emulate) -> None:
    """With a window, steps that are not causal are served where every query is its sequence's last token."""
    emulate()
    group = groups.made(options=NATIVE, sliding_window=8)
    common, cache = random_batch(group, [0, 1, 0, 1], [70, 30, 0, 40])
    common.causal = False
    layer = Attention(group, caller_writes=True)
    output, _ = groups.run(group, common, cache, layer)
    expected, _ = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)


# --- What reaches the native wrappers -------------------------------------------------------------


def test_page_lists_of_both_phases(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(options=NATIVE, block_size=16)
    common, cache = random_batch(group, [1, 1, 1, 20, 5], [33, 32, 1, 20, 48])
    decode, prefill = parts_of(group.build(common))
    (of_decode,), (of_prefill,) = world.named(DECODE_PLAN), world.named(PREFILL_PLAN)
    assert of_decode["indptr"].tolist() == [0, 3, 5, 6]
    assert of_decode["last_page_len"].tolist() == [1, 16, 1]
    assert of_prefill["paged_kv_indptr"].tolist() == [0, 2, 5]
    assert of_prefill["paged_kv_last_page_len"].tolist() == [4, 16]
    assert of_prefill["qo_indptr"].tolist() == [0, 20, 25]
    assert (decode.start, decode.end, prefill.start, prefill.end) == (0, 3, 3, 28)
    table = common.block_table_tensor
    assert of_decode["indices"].tolist() == [*table[0, :3].tolist(), *table[1, :2].tolist(), *table[2, :1].tolist()]
    assert of_prefill["paged_kv_indices"].tolist() == [*table[3, :2].tolist(), *table[4, :3].tolist()]
    assert world.syncs == []
    layer = Attention(group, caller_writes=True)
    output, lse = groups.run(group, common, cache, layer)
    expected, expected_lse = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=LSE, rtol=0)


def test_lists_that_a_plan_copies_to_the_device_are_its_own(emulate: Emulate) -> None:
    """An engine may keep its bounds in pinned memory, and write the next step's while a copy is under way."""
    world = emulate()
    group = groups.made(options=NATIVE, block_size=16)
    common, _ = random_batch(group, [20, 5], [20, 48])
    group.build(common)
    (call,) = world.named(PREFILL_PLAN)
    theirs = {common.query_start_loc_cpu.data_ptr(), common.seq_lens_cpu.data_ptr()}
    own = {call[name].data_ptr() for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens")}
    assert not theirs & own


@pytest.mark.parametrize("options", [{}, NATIVE], ids=str)
def test_both_layouts_and_rows_behind_the_batch(options: dict[str, Any], emulate: Emulate) -> None:
    emulate()
    outputs = []
    for layout in (FLASHINFER_NHD, FLASHINFER_HND):
        group = groups.made(layout=layout, options=options, block_size=32)
        assert group.kv_layout == layout
        common, cache = random_batch(group, [1, 9], [70, 40])
        draw = torch.Generator().manual_seed(5)
        numbers = torch.randn(len(cache), 2, 32, 2, 64, generator=draw)
        cache.copy_(numbers if layout == FLASHINFER_NHD else numbers.transpose(2, 3))
        output, _ = groups.run(group, common, cache, padding=3, lse=False)
        assert output[10:].isnan().all()
        outputs.append(output[:10])
    assert torch.equal(outputs[0], outputs[1])


def test_layers_of_a_kind_have_scales_of_their_own(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(options=NATIVE, kv_cache_dtype="fp8_e4m3")
    layers = [
        Attention(group, caller_writes=True, scale=0.3, scales=Scales.make("cpu", q=0.02, k=0.5, v=2.0)),
        Attention(group, caller_writes=True, scale=0.05, scales=Scales.make("cpu", q=0.04, k=0.25, v=1.0)),
    ]
    common, cache = random_batch(group, [1, 20], [30, 40])
    metadata = group.build(common)
    query = groups.drawn_query(group, 21)
    for layer in layers:
        output = layer(query, None, None, cache, metadata)
        expected, _ = groups.reference(group, common, cache, layer)
        error = (output.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
        assert error[0] < 1e-2
        assert error[1:].max() < 0.2  # the query is FP8 there
    assert len(world.named("BatchDecodeWithPagedKVCacheWrapper.plan")) == 1
    decodes, prefills = world.named(DECODE_RUN), world.named(PREFILL_RUN)
    assert [(call["q_scale"], call["v_scale"]) for call in decodes] == [(0.3 * 0.5, 2.0), (0.05 * 0.25, None)]
    assert all(call["q"].dtype == torch.bfloat16 for call in decodes)
    assert all(call["q"].dtype == E4M3 for call in prefills)
    assert [[scale.unique().item() for scale in call["args"]] for call in prefills] == [
        pytest.approx([0.02, 0.5, 2.0]),  # 0.3 of it are left: enough
        pytest.approx([0.04 * 8, 0.25, 1.0]),  # 0.05 of it were too little
    ]


@pytest.mark.parametrize("use", ["fa2", "fa3", "sinks", "16 bits"])
def test_masked_keys_are_far_away_with_small_scales_too(use: str, emulate: Emulate) -> None:
    """Kernels hide a key with a raw score of -5e4: what that is multiplied by must be large enough."""
    world = emulate()
    fields: dict[str, Any] = {} if use == "16 bits" else {"kv_cache_dtype": "fp8_e4m3"}
    sinks: dict[str, Any] = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.25])} if use == "sinks" else {}
    group = groups.made(
        options={**NATIVE, "prefill_kernel": use if use == "fa3" else "auto"}, sinks=bool(sinks), **fields
    )
    scale = 1e-4 if use == "16 bits" else 0.125
    layer = Attention(group, caller_writes=True, scale=scale, scales=Scales.make("cpu", q=0.01, k=1e-3, v=0.5), **sinks)
    common, cache = random_batch(group, [1, 20], [30, 40])
    if fields:
        cache.copy_((torch.randn(cache.shape) * 100).clamp(-448, 448).to(E4M3))
    output, _ = groups.run(group, common, cache, layer)
    expected, _ = groups.reference(group, common, cache, layer, **sinks)
    error = (output.double() - expected).norm() / expected.norm()
    assert error < (0.1 if use == "fa3" else 1e-2)
    for call in (*world.named(DECODE_RUN), *world.named(PREFILL_RUN)):
        total = call["args"][1] if use == "sinks" else call["q_scale"]
        if call["q"].dtype == E4M3:
            total *= float(call["args"][0].min() * call["args"][1].min())
        assert total * 5e4 >= 127.9


def test_scales_that_are_large_enough_are_left_alone() -> None:
    from attn_select_flashinfer.runtime.scores import LEAST_SCALE, power_for

    assert [power_for(scale) for scale in (1.0, 0.0625, LEAST_SCALE)] == [1.0, 1.0, 1.0]
    assert power_for(LEAST_SCALE * 0.99) == 2.0
    assert power_for(LEAST_SCALE / 100) == 128.0


def test_one_fp8_scale_per_head_in_both_phases(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(kv_cache_dtype="fp8_e4m3", per_head_quant_scales=True)
    scales = Scales.make("cpu", q=0.02, k=torch.tensor([0.5, 0.25]), v=torch.tensor([2.0, 1.0]), num_kv_heads=2)
    common, cache = random_batch(group, [1, 20], [30, 40])
    output, _ = groups.run(group, common, cache, Attention(group, caller_writes=True, scales=scales))
    assert output.isfinite().all()
    for call in (*world.named(DECODE_RUN), *world.named(PREFILL_RUN)):
        assert [each.tolist() for each in call["args"][1:]] == [[0.5, 0.25], [2.0, 1.0]]
        assert call["q"].dtype == E4M3


@pytest.mark.parametrize("options", [{}, NATIVE], ids=str)
def test_sinks_count_and_are_the_lse_of_requests_without_keys(options: dict[str, Any], emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(options=options, sinks=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    layer = Attention(group, caller_writes=True, sinks=sinks.bfloat16())
    common, cache = random_batch(group, [1, 1, 20], [30, 1, 40])
    common.seq_lens = common.seq_lens_cpu = torch.tensor([30, 0, 40], dtype=torch.int32)
    output, lse = groups.run(group, common, cache, layer, lse=bool(options))
    expected, expected_lse = groups.reference(group, common, cache, layer, sinks=sinks)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    assert not output[1].any()
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, atol=LSE, rtol=0)
        assert torch.equal(lse[1], sinks)
    names = {call["jit_args"][0] for call in world.calls if call.get("jit_args")}
    assert names <= {f"attn_select_sink_{k}_bfloat16_kv_bfloat16_head_64_swa_false" for k in ("fa2", "fa3")}
    assert len(names) == 1 + bool(options)


def test_the_module_with_sinks_is_named_by_all_that_it_is_compiled_for(emulate: Emulate) -> None:
    world = emulate()
    for fields in ({"head_size": 64}, {"head_size": 128}, {"kv_cache_dtype": "fp8_e4m3"}, {"sliding_window": 9}):
        group = groups.made("a100", options=NATIVE, sinks=True, **fields)
        common, _ = random_batch(group, [1, 20], [30, 40])
        group.build(common)
    assert len({call["jit_args"][0] for call in world.calls if call.get("jit_args")}) == 4


@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_requests_without_keys_give_zero_and_minus_infinity(gpu: str, emulate: Emulate) -> None:
    emulate({"h100": (9, 0), "b200": (10, 0)}[gpu])
    group = groups.made(gpu, options=NATIVE)
    common, cache = random_batch(group, [1, 1], [33, 1])
    common.seq_lens = common.seq_lens_cpu = torch.tensor([33, 0], dtype=torch.int32)
    output, lse = groups.run(group, common, cache)
    assert not output[1].any()
    assert lse[1].isneginf().all()
    assert lse[0].isfinite().all()


def test_drafts_and_requests_without_a_query_go_through_the_prefill_wrapper(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(options=NATIVE, num_speculative_tokens=3)
    layer = Attention(group, caller_writes=True)
    assert group.reorder_batch_threshold == 4
    for query_lens, seq_lens in (([4, 2, 1, 9], [30, 20, 5, 40]), ([1, 0, 1], [30, 7, 5])):
        common, cache = random_batch(group, query_lens, seq_lens)
        output, lse = groups.run(group, common, cache, layer)
        expected, expected_lse = groups.reference(group, common, cache, layer)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=LSE, rtol=0)
    assert world.named(DECODE_RUN) == []
    assert kernels_of(group.build(common)) == ["native fa2"]


def test_batch_invariant_layers_split_nothing_and_get_2_gib(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(batch_invariant=True, num_speculative_tokens=3)
    assert group.reorder_batch_threshold == 1
    common, _ = random_batch(group, [1, 4], [30, 40])
    group.build(common)
    (planned,) = world.named("BatchDecodeWithPagedKVCacheWrapper.plan")
    assert planned["disable_split_kv"]
    (made,) = world.named("BatchDecodeWithPagedKVCacheWrapper.__init__")
    assert made["float_workspace_buffer"].numel() == 2048 * MIB


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [-5e4, -torch.inf], ids=["0.6.14", "0.7.2"])
def test_rows_without_keys_in_every_release(nothing: float) -> None:
    lse = torch.tensor([[2.0, nothing], [nothing, -30.0]])
    ended = lse.clone()
    scores.natural_lse(ended, None)
    torch.testing.assert_close(ended, torch.tensor([[2.0 * scores.LN2, -torch.inf], [-torch.inf, -30 * scores.LN2]]))
    scores.natural_lse(lse, torch.tensor([0.5, 0.25]))
    torch.testing.assert_close(lse, torch.tensor([[2.0 * scores.LN2, 0.25], [0.5, -30 * scores.LN2]]))


def test_wrappers_without_the_pinned_buffer_are_a_mismatch(emulate: Emulate) -> None:
    class Bare(paged.BatchDecodeWithPagedKVCacheWrapper):  # type: ignore[misc]
        def reset_workspace_buffer(self, *args: Any) -> None:
            super().reset_workspace_buffer(*args)
            del self._pin_memory_int_workspace_buffer

    emulate(BatchDecodeWithPagedKVCacheWrapper=Bare)
    group = groups.made(options=NATIVE)
    common, _ = random_batch(group, [1], [30])
    with pytest.raises(KernelMismatchError, match="Bare of the installed FlashInfer has no _pin_memory") as info:
        group.build(common)
    assert info.value.hint == "pip install 'flashinfer-python>=0.7.2,<=0.7.2.post1'"


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
def test_load_needs_flashinfer(spec: BackendSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    library.flashinfer.cache_clear()
    monkeypatch.setattr("attn_select.machine.environment.installed_version", {"flashinfer-python": "0.6.13"}.get)
    monkeypatch.setattr("attn_select.machine.environment.has_module", {"flashinfer"}.__contains__)
    with pytest.raises(KernelMismatchError, match=r"flashinfer-python 0\.6\.13 is installed, >=0\.6\.14 is needed"):
        spec.get_class()
    library.flashinfer.cache_clear()
