"""The torch backends answer every valid config on every device, and the defaults take all that they should."""

from __future__ import annotations

from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st

from attn_select.backends.spec import BackendPlan, Reason
from attn_select.decide.gate import check
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import LAYOUTS
from attn_select.machine.device import CPU, Device
from attn_select.machine.environment import Environment
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA

SPECS = (TORCH_SDPA, FLEX_ATTENTION, TORCH_MLA, TORCH_MLA_SPARSE)
ASSUMED = Environment(assume_installed=True)
GPUS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
MLA_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def device_of(capability: tuple[int, int] | None) -> Device:
    return CPU if capability is None else Device("gpu", capability)


def codes(outcome: Any) -> set[str]:
    return set() if isinstance(outcome, BackendPlan) else {reason.code for reason in outcome}


SIZES = st.sampled_from([1, 2, 3, 8, 15, 16, 20, 32, 48, 64, 96, 128, 192, 256, 264, 512, 576, 1024, 2048, 8192])


@st.composite
def configs(draw: st.DrawFn, mla: bool | None = None) -> AttentionConfig:
    """Draw any valid config, most fields at their default; with or without MLA where asked."""
    heads = draw(st.sampled_from([1, 2, 7, 32, 96, 128, 256]))
    asked: dict[str, Any] = {"num_heads": heads}
    if draw(st.booleans()) if mla is None else mla:
        asked |= {name: draw(SIZES) for name in MLA_DIMS}
    else:
        asked |= {"head_size": draw(SIZES), "num_kv_heads": draw(st.sampled_from([1, heads]))}
    flags = ("alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant", "per_head_quant_scales")
    some = {
        **dict.fromkeys(flags, st.just(True)),
        "v_head_size": SIZES,
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "kv_cache_dtype": st.sampled_from(["bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"]),
        "block_size": SIZES,
        "attn_type": st.sampled_from(["encoder", "encoder_only", "encoder_decoder"]),
        "sliding_window": SIZES,
        "logits_soft_cap": st.just(30.0),
        "decode_context_parallel_size": st.integers(2, 8),
        "num_speculative_tokens": st.integers(1, 5),
        "cuda_graph": st.sampled_from(["UNIFORM_BATCH", "ALWAYS"]),
        "output_quantization": st.sampled_from(["fp8", "fp4"]),
        "sparse_top_k": SIZES,
    }
    for name in draw(st.lists(st.sampled_from(sorted(some)), unique=True, max_size=6)):
        asked[name] = draw(some[name])
    try:
        return AttentionConfig(**asked)
    except ConfigError:
        reject()


@given(config=configs(), capability=st.sampled_from([None, *GPUS]))
def test_plan_answers_every_config_of_its_kind(config: AttentionConfig, capability: tuple[int, int] | None) -> None:
    for spec in SPECS:
        if config.sort not in {capabilities.sort for capabilities in spec.capabilities.values()}:
            continue
        answers = [spec.plan(config, device_of(capability), ASSUMED, spec.options(), phase) for phase in config.phases]
        for outcome in answers:
            if isinstance(outcome, BackendPlan):
                assert set(outcome.kv_layouts) <= set(LAYOUTS)
                assert bool(outcome.kv_layouts) == bool(outcome.kernel_block_sizes)
                assert outcome.kv_layouts == () or config.has_cache
            else:
                assert outcome
                assert all(type(reason) is Reason and reason.message for reason in outcome)
        hash(spec.compile_key(config))


def rank_codes(config: AttentionConfig) -> set[str]:
    """Return the codes against what no backend does over several ranks: distances, and FP4 outputs of merged parts."""
    if config.decode_context_parallel_size == 1:
        return set()
    found = {"decode-context-parallel-distance"} if config.alibi or config.sliding_window is not None else set()
    return found | ({"decode-context-parallel-output"} if config.output_quantization == "fp4" else set())


def graph_codes(config: AttentionConfig, phase: str) -> set[str]:
    """Return the code against a wish for CUDA graphs, which concerns prefill only where it is for all batches."""
    wished = config.cuda_graph == "ALWAYS" or (config.cuda_graph != "NEVER" and phase == "decode")
    return {"cuda-graph-level"} if wished else set()


@given(config=configs(mla=False), capability=st.sampled_from([None, *GPUS]))
def test_sdpa_takes_every_layer_without_mla(config: AttentionConfig, capability: tuple[int, int] | None) -> None:
    expected = rank_codes(config)
    if config.kv_cache_dtype == "nvfp4":
        expected.add("kv-cache-dtype")
    if config.output_quantization != "none":
        expected.add("output-quantization")
    for phase in config.phases:
        outcome = check(TORCH_SDPA, config, device_of(capability), ASSUMED, TORCH_SDPA.options(), phase)
        assert codes(outcome) == expected | graph_codes(config, phase)


@given(config=configs(mla=True), capability=st.sampled_from([None, *GPUS]))
def test_torch_mla_takes_every_dense_mla_layer(config: AttentionConfig, capability: tuple[int, int] | None) -> None:
    device = device_of(capability)
    if config.sparse:
        outcome = check(TORCH_MLA, config, device, ASSUMED, TORCH_MLA.options(), "decode")
        assert "sparse-unsupported" in codes(outcome)
        return
    for phase in config.phases:
        expected = rank_codes(config)
        if config.kv_cache_dtype == "nvfp4":  # which nothing can allocate, so that prefill refuses it too
            expected.add("kv-cache-dtype")
        if config.output_quantization != "none":
            expected.add("output-quantization")
        expected |= graph_codes(config, phase)
        assert codes(check(TORCH_MLA, config, device, ASSUMED, TORCH_MLA.options(), phase)) == expected


@given(config=configs(mla=True), capability=st.sampled_from([None, *GPUS]))
def test_the_sparse_backend_takes_sparse_mla_alone(config: AttentionConfig, capability: tuple[int, int] | None) -> None:
    device = device_of(capability)
    for phase in config.phases:
        found = codes(check(TORCH_MLA_SPARSE, config, device, ASSUMED, TORCH_MLA_SPARSE.options(), phase))
        assert ("sparse-only" in found) is not config.sparse
        if config.kv_cache_dtype == "fp8_ds_mla" and (config.kv_lora_rank, config.qk_rope_head_dim) != (512, 64):
            assert "head-size" in found
