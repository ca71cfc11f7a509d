"""The plan functions answer every valid config on every device with every set of installed builds."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st

from attn_select.config import AttentionConfig
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.errors import ConfigError
from attn_select.layouts import LAYOUTS
from attn_select.spec import BackendPlan
from attn_select_flash_attn.facts.builds import BUILDS, LIBRARIES
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


SIZES = st.sampled_from([1, 2, 3, 8, 12, 16, 20, 32, 48, 64, 96, 128, 192, 256, 264, 512, 576])


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Draw any valid config, most fields at their default."""
    fields: dict[str, Any] = {"num_heads": draw(st.sampled_from([1, 8, 16, 64, 96, 128]))}
    if draw(st.booleans()):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        fields |= {name: draw(SIZES) for name in names}
    else:
        fields |= {
            "head_size": draw(SIZES),
            "num_kv_heads": fields["num_heads"] // draw(st.sampled_from([1, 1, 4])) or 1,
        }
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
        "output_quantization": st.just("fp8"),
        "sparse_top_k": SIZES,
        **dict.fromkeys(("alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"), st.just(True)),
        "per_head_quant_scales": st.just(True),
    }
    for name in draw(st.lists(st.sampled_from(sorted(some)), unique=True, max_size=5)):
        fields[name] = draw(some[name])
    try:
        return AttentionConfig(**fields)
    except ConfigError:
        reject()


OPTIONS = st.fixed_dictionaries({}, optional={"provider": st.sampled_from([k.library.distribution for k in BUILDS])})


@given(
    config=configs(),
    capability=st.sampled_from([None, *CAPABILITIES]),
    missing=st.sets(st.sampled_from(LIBRARIES[1])),
    options=OPTIONS,
    version=st.sampled_from(["auto", 2, 3]),
    hybrid=st.booleans(),
)
def test_plan_answers_every_config(
    config: AttentionConfig,
    capability: tuple[int, int] | None,
    missing: set[Any],
    options: dict[str, Any],
    version: Any,
    hybrid: bool,
) -> None:
    spec, key = (FLASH_ATTN_MLA, "prefill_version") if config.mla else (FLASH_ATTN, "version")
    if not config.mla:
        options = {**options, "hybrid": hybrid}
    device = CPU if capability is None else Device("gpu", capability)
    wanted = spec.options(**{key: version}, **options)
    environment = Environment(assume_installed=True)
    environment._states.update(dict.fromkeys(missing, "missing"))
    for phase in config.phases:
        outcome = spec.plan(config, device, environment, wanted, phase)
        if isinstance(outcome, BackendPlan):
            assert set(outcome.kv_layouts) <= set(LAYOUTS)
            assert outcome.provider is not None
            distribution = outcome.provider.split()[0]
            assert options.get("provider", distribution) == distribution
            assert distribution not in {library.distribution for library in missing}
            continue
        assert outcome
        for reason in outcome:
            assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", reason.code)
            assert type(reason.observed) not in (int, str) or str(reason.observed) in reason.message
