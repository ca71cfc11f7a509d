"""The plan functions answer every valid MLA config on every device with every set of installed builds."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st

from attn_select.config import AttentionConfig
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.errors import ConfigError
from attn_select.spec import BackendPlan
from attn_select_flashmla.flashmla import FLASHMLA
from attn_select_flashmla.flashmla_sparse import FLASHMLA_SPARSE
from attn_select_flashmla.providers import KERNELS, LIBRARIES

DISTRIBUTIONS = [kernel.library.distribution for kernel in KERNELS]
SIZES = st.sampled_from([1, 8, 16, 32, 64, 100, 128, 192, 256, 448, 512])


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Draw any valid MLA config, most fields at their default."""
    fields: dict[str, Any] = {"num_heads": draw(SIZES), "kv_lora_rank": draw(st.one_of(st.just(512), SIZES))}
    fields["qk_rope_head_dim"] = draw(st.one_of(st.just(64), SIZES))
    some = {
        "qk_nope_head_dim": SIZES,
        "v_head_dim": SIZES,
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "kv_cache_dtype": st.sampled_from(["float16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"]),
        "block_size": SIZES,
        "sparse_top_k": SIZES,
        "sliding_window": SIZES,
        "logits_soft_cap": st.just(30.0),
        "decode_context_parallel_size": st.integers(2, 8),
        "num_speculative_tokens": st.integers(1, 5),
        "cuda_graph": st.sampled_from(["UNIFORM_BATCH", "ALWAYS"]),
        **dict.fromkeys(("alibi", "sinks", "non_causal", "batch_invariant", "per_head_quant_scales"), st.just(True)),
    }
    for name in draw(st.lists(st.sampled_from(sorted(some)), unique=True, max_size=5)):
        fields[name] = draw(some[name])
    try:
        return AttentionConfig(**{"qk_nope_head_dim": 128, "v_head_dim": 128, **fields})
    except ConfigError:
        reject()


@given(
    config=configs(),
    capability=st.sampled_from([None, (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]),
    missing=st.sets(st.sampled_from(LIBRARIES[1])),
    provider=st.sampled_from(["auto", *DISTRIBUTIONS]),
)
def test_plan_answers_every_config(
    config: AttentionConfig, capability: tuple[int, int] | None, missing: set[Any], provider: str
) -> None:
    device = CPU if capability is None else Device("gpu", capability)
    environment = Environment(assume_installed=True)
    environment._states.update(dict.fromkeys(missing, "missing"))
    spec = FLASHMLA_SPARSE if config.sparse else FLASHMLA
    for phase in spec.capabilities:
        outcome = spec.plan(config, device, environment, spec.options(provider=provider), phase)
        if isinstance(outcome, BackendPlan):
            assert outcome.provider is not None
            distribution = outcome.provider.split()[0]
            assert provider in ("auto", distribution)
            assert distribution not in {library.distribution for library in missing}
            continue
        assert outcome
        for reason in outcome:
            assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", reason.code)
            assert type(reason.observed) not in (int, str) or str(reason.observed) in reason.message
