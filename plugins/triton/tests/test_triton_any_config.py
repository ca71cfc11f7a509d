"""The Triton backends answer every valid config on every device."""

from __future__ import annotations

from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st

from attn_select.config import AttentionConfig
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.errors import ConfigError
from attn_select.layouts import LAYOUTS
from attn_select.spec import BackendPlan, Reason
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA

SPECS = (TRITON_ATTN, TRITON_MLA, PAGED_ATTENTION)
GPUS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
MLA_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def device_of(capability: tuple[int, int] | None) -> Device:
    return CPU if capability is None else Device("gpu", capability)


SIZES = st.sampled_from([1, 2, 3, 8, 16, 20, 32, 40, 48, 64, 96, 120, 128, 192, 256, 264, 512, 576, 1024])


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Draw any valid config, most fields at their default."""
    heads = draw(st.sampled_from([1, 2, 7, 32, 96, 128, 1024]))
    asked: dict[str, Any] = {"num_heads": heads}
    if draw(st.booleans()):
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
        "num_speculative_tokens": st.integers(1, 1024),
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


@given(
    config=configs(),
    capability=st.sampled_from([None, (5, 0), (7, 0), *GPUS]),
    version=st.sampled_from([None, "3.6.0", "3.7.0", "3.7.0+git1234", "3", "4.0rc1", "nightly"]),
)
def test_plan_answers_every_config(
    config: AttentionConfig, capability: tuple[int, int] | None, version: str | None
) -> None:
    environment = Environment(assume_installed=True, pins={} if version is None else {"triton": version})
    for spec in SPECS:
        for phase in config.phases:
            outcome = spec.plan(config, device_of(capability), environment, spec.options(), phase)
            if isinstance(outcome, BackendPlan):
                assert set(outcome.kv_layouts) <= set(LAYOUTS)
                assert bool(outcome.kv_layouts) == bool(outcome.kernel_block_sizes)
                assert outcome.workspace_bytes >= 0
            else:
                assert outcome
                assert all(type(reason) is Reason and reason.message for reason in outcome)
        hash(spec.compile_key(config))
