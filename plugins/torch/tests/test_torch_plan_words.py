"""The words of a plan are for people: with other words the same runs, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from torch_layers import check_words

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig
from attn_select.testing import plan_of
from attn_select.testing.toolkit import MLA_FIELDS
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION, FlexKernel
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA, SdpaKernel

GQA: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
LATENT: dict[str, Any] = {**MLA_FIELDS, "num_heads": 4, "dtype": "float32"}


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (TORCH_SDPA, GQA),
        (TORCH_SDPA, {**GQA, "logits_soft_cap": 30.0}),
        (TORCH_SDPA, {**GQA, "attn_type": "encoder"}),
        (TORCH_MLA, LATENT),
        (TORCH_MLA_SPARSE, {**LATENT, "sparse_top_k": 64}),
    ],
    ids=lambda value: getattr(value, "name", "") or "-".join(map(str, value.values())),
)
def test_words_decide_nothing(spec: BackendSpec, fields: dict[str, Any]) -> None:
    check_words(spec, AttentionConfig(**fields))


@pytest.mark.parametrize(
    ("gpu", "phase", "fields", "function"),
    [
        ("a100", "prefill", {}, "varlen_attn"),
        ("h100", "prefill", {}, "cuDNN and varlen_attn"),
        ("h100", "decode", {}, "scaled_dot_product_attention"),
        ("h100", "decode", {"sinks": True}, "varlen_attn"),
        ("h100", "prefill", {"logits_soft_cap": 30.0}, "matmul and softmax"),
        ("h100", "prefill", {"attn_type": "encoder", "alibi": True}, "matmul and softmax"),
        ("h100", "prefill", {"alibi": True}, "scaled_dot_product_attention"),
        ("t4", "prefill", {"dtype": "float16"}, "scaled_dot_product_attention"),
        ("cpu", "prefill", {"attn_type": "encoder", "alibi": True}, "scaled_dot_product_attention"),
    ],
)
def test_the_kernel_of_a_plan_is_data(gpu: str, phase: Any, fields: dict[str, Any], function: str) -> None:
    config = AttentionConfig(**{**GQA, "dtype": "bfloat16", **fields})
    kernel = plan_of(TORCH_SDPA, config, gpu, phase).kernel
    assert kernel == SdpaKernel(function)  # type: ignore[arg-type]
    assert hash(kernel) == hash(SdpaKernel(function))  # type: ignore[arg-type]


def test_flex_loads_two_tiles_ahead_where_shared_memory_holds_them() -> None:
    wide = AttentionConfig(num_heads=4, head_size=1024)
    assert plan_of(FLEX_ATTENTION, AttentionConfig(**GQA), "h100").kernel == FlexKernel("Triton", stages=2)
    assert plan_of(FLEX_ATTENTION, wide, "rtx5090").kernel == FlexKernel("Triton", stages=1)
