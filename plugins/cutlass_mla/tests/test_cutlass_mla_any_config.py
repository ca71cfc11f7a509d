"""The plan function answers every valid config on every device with every set of providers."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st

from attn_select import gate
from attn_select.config import AttentionConfig
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.errors import ConfigError
from attn_select.spec import BackendPlan
from attn_select_cutlass_mla.cutlass_mla import CUTLASS_MLA
from attn_select_cutlass_mla.providers import LIBRARIES, PROVIDERS

CAPABILITIES = [None, (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)]
NAMES = [provider.library.distribution for provider in PROVIDERS]


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Draw any valid config with or without MLA, most fields at their default."""
    fields: dict[str, Any] = {"num_heads": draw(st.sampled_from([1, 16, 128, 160]))}
    if draw(st.integers(0, 3)):
        fields |= {
            "kv_lora_rank": draw(st.sampled_from([256, 512, 512])),
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": draw(st.sampled_from([64, 64, 128])),
            "v_head_dim": 128,
        }
    else:
        fields["head_size"] = draw(st.sampled_from([64, 576]))
    some = {
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "kv_cache_dtype": st.sampled_from(["float16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"]),
        "block_size": st.sampled_from([1, 16, 64, 128, 192, 256]),
        "sliding_window": st.integers(1, 4096),
        "logits_soft_cap": st.just(30.0),
        "decode_context_parallel_size": st.integers(2, 8),
        "num_speculative_tokens": st.integers(1, 5),
        "cuda_graph": st.sampled_from(["UNIFORM_BATCH", "ALWAYS"]),
        "output_quantization": st.just("fp8"),
        "sparse_top_k": st.just(2048),
        **dict.fromkeys(("alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"), st.just(True)),
        "per_head_quant_scales": st.just(True),
    }
    for name in draw(st.lists(st.sampled_from(sorted(some)), unique=True, max_size=4)):
        fields[name] = draw(some[name])
    try:
        return AttentionConfig(**fields)
    except ConfigError:
        reject()


@given(
    config=configs(),
    capability=st.sampled_from(CAPABILITIES),
    missing=st.sets(st.sampled_from(LIBRARIES[1])),
    provider=st.sampled_from(["auto", *NAMES]),
    splits=st.sampled_from([-1, 1, 16]),
    forced=st.none() | st.sampled_from(["-1", "8", "many"]) | st.text(max_size=8),
)
def test_plan_answers_every_config(
    config: AttentionConfig,
    capability: tuple[int, int] | None,
    missing: set[Any],
    provider: Any,
    splits: int,
    forced: str | None,
) -> None:
    variables = {} if forced is None else {"FORCE_NUM_KV_SPLITS": forced}
    environment = Environment(assume_installed=True, variables=variables)
    environment._states.update(dict.fromkeys(missing, "missing"))
    device = CPU if capability is None else Device("gpu", capability)
    options = CUTLASS_MLA.options(provider=provider, num_kv_splits=splits)
    outcome = CUTLASS_MLA.plan(config, device, environment, options, "decode")
    if isinstance(outcome, BackendPlan):
        assert capability in ((10, 0), (10, 3))
        assert outcome.provider is not None
        name = outcome.provider.split()[0]
        assert provider in ("auto", name)
        assert len(missing) == len(NAMES) or name not in {library.distribution for library in missing}
    else:
        assert outcome
        assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", reason.code) and reason.message for reason in outcome)
    checked = gate.check(CUTLASS_MLA, config, device, environment, options, "decode")
    codes = set() if isinstance(checked, BackendPlan) else {reason.code for reason in checked}
    assert "plugin-error" not in codes
    assert isinstance(checked, list) or len(missing) < len(NAMES)
