"""What ``CUDNN_ATTN`` takes and refuses, and where it stands."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select import select
from attn_select.testing import check_sources, codes_of, gqa_layer, plan_of, reasons_of
from attn_select_cudnn.facts.cudnn_attn import BLOCK_SIZES, CUDNN_ATTN


def test_every_fact_names_its_source() -> None:
    check_sources(CUDNN_ATTN)


@pytest.mark.parametrize(
    ("fields", "gpu", "phase", "codes"),
    [
        ({}, "h100", "decode", set()),
        ({}, "a100", "prefill", set()),
        ({}, "b200", "decode", set()),
        ({}, "rtx5090", "prefill", set()),
        ({}, "t4", "prefill", {"compute-capability"}),
        ({"head_size": 256}, "h100", "decode", set()),
        ({"head_size": 256}, "b200", "prefill", set()),
        ({"head_size": 256}, "b200", "decode", {"head-size"}),
        ({"head_size": 136}, "a100", "decode", {"head-size"}),
        ({"head_size": 100}, "h100", "prefill", {"head-size"}),
        ({"head_size": 264}, "h100", "prefill", {"head-size"}),
        ({"dtype": "float16", "sliding_window": 128, "block_size": 24}, "h100", "prefill", set()),
        ({"dtype": "float32"}, "h100", "prefill", {"dtype"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, "h100", "decode", {"kv-cache-dtype"}),
        ({"sinks": True}, "h100", "decode", {"sinks"}),
        ({"alibi": True}, "h100", "prefill", {"alibi"}),
        ({"logits_soft_cap": 30.0}, "h100", "prefill", {"logits-soft-cap"}),
        ({"batch_invariant": True}, "h100", "decode", {"batch-invariant"}),
        ({"non_causal": True}, "h100", "prefill", {"non-causal"}),
        ({"attn_type": "encoder"}, "h100", "prefill", {"attn-type"}),
        ({"cuda_graph": "UNIFORM_BATCH"}, "h100", "decode", set()),
        ({"cuda_graph": "ALWAYS"}, "h100", "decode", {"cuda-graph-level"}),
    ],
)
def test_what_it_takes(fields: dict[str, Any], gpu: str, phase: Any, codes: set[str]) -> None:
    assert codes_of(CUDNN_ATTN, gqa_layer(**fields), gpu, phase) == codes


def test_a_refused_head_size_names_what_is_accepted() -> None:
    reason = reasons_of(CUDNN_ATTN, gqa_layer(head_size=192), "b200", "decode")["head-size"]
    assert (reason.observed, reason.supported) == (192, 128)
    assert "up to 128 on compute capability 10.x" in reason.message


def test_drafts_are_said_to_be_slow() -> None:
    with_drafts = plan_of(CUDNN_ATTN, gqa_layer(num_speculative_tokens=3), "h100", "decode").notes
    assert len(with_drafts) == 1 + len(plan_of(CUDNN_ATTN, gqa_layer(), "h100", "decode").notes)


def test_layers_compile_together_by_what_the_kernels_are_made_for() -> None:
    keys = {CUDNN_ATTN.compile_key(gqa_layer(head_size=size)) for size in (40, 64, 80, 128, 160, 256)}
    assert len(keys) == 3
    sizes = [CUDNN_ATTN.compile_key(gqa_layer(block_size=size)) for size in (None, 16, 48, 24, 20, 3)]
    assert [key[2] for key in sizes] == [16, 16, 16, 8, 4, 1]  # type: ignore[index]
    assert set(BLOCK_SIZES) >= {key[2] for key in sizes}  # type: ignore[index]


def test_it_is_ranked_behind_the_kernels_that_are_as_fast_or_faster() -> None:
    for gpu in ("a100", "h100", "b200"):
        order = [candidate.backend for candidate in select(gqa_layer(), gpu).candidates]
        assert order.index("TRITON_ATTN") < order.index("CUDNN_ATTN") < order.index("TORCH_SDPA")
