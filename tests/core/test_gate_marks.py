"""What the gate accepts and marks as unverified."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gate_cases import PLAIN, MakeCapabilities, MakeSpec, marks

from attn_select.backends.spec import ComputeCapabilities, Fact, HeadSizes
from attn_select.layer.config import PHASES

FP4 = "FP4 output was never executed on a GPU, and the conformance suite has no reference for it"


@pytest.mark.parametrize(
    ("facts", "values", "expected"),
    [
        ({}, PLAIN, ()),
        ({"decode_context_parallel": True}, {**PLAIN, "decode_context_parallel_size": 2}, ()),
        ({"output_quantizations": ("fp8", "fp4")}, {**PLAIN, "output_quantization": "fp4"}, (FP4,)),
        ({"output_quantizations": ("fp8", "fp4")}, {**PLAIN, "output_quantization": "fp8"}, ()),
    ],
)
def test_what_was_never_executed_is_marked_and_accepted(
    spec: MakeSpec,
    capabilities: MakeCapabilities,
    facts: dict[str, Any],
    values: dict[str, Any],
    expected: tuple[str, ...],
) -> None:
    both = capabilities(**facts)
    backend = spec(capabilities={"prefill": both, "decode": both})
    for phase in PHASES:
        assert marks(backend, values, phase) == expected


# A fact, its value, a layer that uses it, a layer that does not (None: every layer does).
UNPROVED: list[tuple[str, Any, dict[str, Any], dict[str, Any] | None]] = [
    ("compute_capabilities", ComputeCapabilities((((8, 0), (9, 9)),)), PLAIN, None),
    ("dtypes", ("bfloat16",), PLAIN, None),
    ("head_sizes", HeadSizes(), PLAIN, None),
    ("attn_types", ("decoder", "encoder"), PLAIN, None),
    ("kv_cache_dtypes", ("bfloat16",), PLAIN, {**PLAIN, "attn_type": "encoder"}),
    ("block_sizes", (16,), PLAIN, {**PLAIN, "attn_type": "encoder"}),
    ("mixed_kv_cache_dtype", True, {**PLAIN, "kv_cache_dtype": "float16"}, PLAIN),
    ("v_head_size_differs", True, {**PLAIN, "v_head_size": 64}, PLAIN),
    ("sliding_window", True, {**PLAIN, "sliding_window": 128}, PLAIN),
    ("sinks", True, {**PLAIN, "sinks": True}, PLAIN),
    ("output_quantizations", ("fp8",), {**PLAIN, "output_quantization": "fp8"}, PLAIN),
    ("speculative_tokens", 8, {**PLAIN, "num_speculative_tokens": 3}, PLAIN),
]


@pytest.mark.parametrize(("fact", "value", "uses", "leaves"), UNPROVED)
def test_a_fact_without_a_source_marks_the_layers_that_use_it(
    spec: MakeSpec,
    capabilities: MakeCapabilities,
    fact: str,
    value: Any,
    uses: dict[str, Any],
    leaves: dict[str, Any] | None,
) -> None:
    known = capabilities(attn_types=("decoder", "encoder"))
    both = replace(known, **{fact: Fact(value, "unverified")})
    backend = spec(capabilities={"prefill": both, "decode": both})
    assert marks(backend, uses, "prefill") == (f"no source proves the capability {fact}",)
    if leaves is not None:
        assert marks(backend, leaves, "prefill") == ()
