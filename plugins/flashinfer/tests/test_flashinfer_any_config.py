"""The plan functions answer every valid config on every device, whatever options and release."""

from __future__ import annotations

import re
from typing import Any, get_args

from hypothesis import given, reject
from hypothesis import strategies as st

from attn_select import gate
from attn_select.config import CUDA_GRAPH_LEVELS, AttentionConfig
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.errors import ConfigError
from attn_select.layouts import LAYOUTS
from attn_select.spec import BackendPlan
from attn_select_flashinfer.facts import mla_kernels
from attn_select_flashinfer.facts.mha_kernels import OBSTACLES, Case, PrefillKernel, kernel_for, plain
from attn_select_flashinfer.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)]
VERSIONS = [None, "0.6.14", "0.6.15", "0.6.16", "0.7.2.post1"]
SIZES = st.sampled_from([1, 5, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 576, 2048])
LATENT = {"kv_lora_rank": (256, 448, 512), "qk_nope_head_dim": (64, 128, 192), "qk_rope_head_dim": (0, 64, 128)}
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "use_trtllm": st.sampled_from(["auto", True, False]),
        "prefill_kernel": st.sampled_from(get_args(PrefillKernel)),
        "mla_decode": st.sampled_from(get_args(mla_kernels.DecodeKernel)),
        "mla_prefill": st.sampled_from(get_args(mla_kernels.PrefillKernel)),
    },
)


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Draw any valid config, most fields at their default."""
    heads = draw(st.sampled_from([1, 5, 8, 16, 64, 71, 96, 128, 160]))
    fields: dict[str, Any] = {"num_heads": heads}
    if draw(st.booleans()):
        fields |= {name: draw(st.sampled_from([s for s in sizes if s])) for name, sizes in LATENT.items()}
        fields["v_head_dim"] = draw(st.sampled_from([64, 128, 256]))
        fields["sparse_top_k"] = draw(st.sampled_from([None, None, 512, 2048]))
    else:
        fields |= {"head_size": draw(SIZES), "num_kv_heads": draw(st.sampled_from([1, heads]))}
    some = {
        "v_head_size": SIZES,
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "kv_cache_dtype": st.sampled_from(["float16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"]),
        "block_size": SIZES,
        "attn_type": st.sampled_from(["encoder", "encoder_only", "encoder_decoder"]),
        "sliding_window": SIZES,
        "logits_soft_cap": st.just(30.0),
        "decode_context_parallel_size": st.integers(2, 8),
        "num_speculative_tokens": st.integers(1, 5),
        "cuda_graph": st.sampled_from(["UNIFORM_BATCH", "ALWAYS"]),
        "output_quantization": st.sampled_from(["fp8", "fp4"]),
        **dict.fromkeys(("alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"), st.just(True)),
        "per_head_quant_scales": st.just(True),
    }
    for name in draw(st.lists(st.sampled_from(sorted(some)), unique=True, max_size=5)):
        fields[name] = draw(some[name])
    try:
        return AttentionConfig(**fields)
    except ConfigError:
        reject()


def environment(version: str | None) -> Environment:
    pins = {} if version is None else {"flashinfer-python": version}
    return Environment(assume_installed=True, pins=pins, variables={})


@given(
    config=configs(),
    capability=st.sampled_from([None, *CAPABILITIES]),
    drawn=OPTIONS,
    version=st.sampled_from(VERSIONS),
)
def test_plan_answers_every_config(
    config: AttentionConfig, capability: tuple[int, int] | None, drawn: dict[str, Any], version: str | None
) -> None:
    device = CPU if capability is None else Device("gpu", capability)
    if config.sparse:
        spec, options = SPECS["FLASHINFER_MLA_SPARSE"], {}
    elif config.mla:
        spec = SPECS["FLASHINFER_MLA"]
        options = {f"{key[4:]}_kernel": drawn[key] for key in ("mla_decode", "mla_prefill") if key in drawn}
    else:
        spec = SPECS["FLASHINFER"]
        options = {key: drawn[key] for key in ("use_trtllm", "prefill_kernel") if key in drawn}
    wanted = spec.options(**options)
    for phase in config.phases:
        outcome = spec.plan(config, device, environment(version), wanted, phase)
        if isinstance(outcome, BackendPlan):
            assert capability is not None
            assert capability >= (8, 0)
            assert outcome.path
            assert outcome.because
            assert set(outcome.kv_layouts) <= set(LAYOUTS)
            assert outcome.cuda_graph in CUDA_GRAPH_LEVELS
            assert outcome.workspace_bytes > 0
            if config.block_size is not None:
                assert all(config.block_size % size == 0 for size in outcome.kernel_block_sizes)
            assert bool(outcome.kernel_block_sizes) is spec.capabilities[phase].reads_cache
        else:
            assert outcome
            for reason in outcome:
                assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", reason.code)
                assert reason.message
        checked = gate.check(spec, config, device, environment(version), wanted, phase)
        codes = set() if isinstance(checked, BackendPlan) else {reason.code for reason in checked}
        assert "plugin-error" not in codes
        hash(spec.compile_key(config))


@given(config=configs(), capability=st.sampled_from(CAPABILITIES), version=st.sampled_from(VERSIONS))
def test_plain_layers_meet_no_obstacle(
    config: AttentionConfig, capability: tuple[int, int], version: str | None
) -> None:
    for phase in config.phases:
        kernel = kernel_for(capability, phase)
        if kernel is not None and plain(config):
            case = Case(config, phase, capability, kernel, "auto", "auto", environment(version))
            assert [obstacle.name for obstacle in OBSTACLES if obstacle.holds(case)] == []
