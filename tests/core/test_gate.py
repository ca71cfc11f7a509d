"""What speaks against a backend by its capabilities: every reason, with the value seen and the values supported."""

from __future__ import annotations

from typing import Any

import pytest
from gate_cases import H100, MLA, PLAIN, SPARSE, T4, WIDE_HEADS, MakeCapabilities, MakeSpec, reasons

from attn_select.backends.spec import ComputeCapabilities, HeadSizes
from attn_select.layer.config import PHASES
from attn_select.machine.device import CPU, Device

# One row per question: what the spec says, what the layer asks, the code, observed, supported, remedy.
ROWS: list[tuple[dict[str, Any], dict[str, Any], str, Any, Any, str | None]] = [
    ({}, MLA, "mla-unsupported", "MLA", "MHA, GQA, MQA", None),
    ({"mla": True}, PLAIN, "mla-only", "no MLA dims", "MLA", None),
    ({"mla": True, **WIDE_HEADS}, SPARSE, "sparse-unsupported", "sparse_top_k 2048", "dense MLA", None),
    ({"mla": True, "sparse": True, **WIDE_HEADS}, MLA, "sparse-only", "dense MLA", "sparse MLA (sparse_top_k)", None),
    ({}, {**PLAIN, "head_size": 80 + 4}, "head-size", 84, "multiples of 8 from 1 to 256", None),
    ({"head_sizes": HeadSizes(minimum=64)}, {**PLAIN, "head_size": 56}, "head-size", 56, "from 64", None),
    ({"mla": True}, MLA, "head-size", 576, "multiples of 8 from 1 to 256", None),
    ({}, {**PLAIN, "dtype": "float32"}, "dtype", "float32", ["bfloat16", "float16"], "--dtype bfloat16"),
    ({}, {**PLAIN, "attn_type": "encoder_only"}, "attn-type", "encoder_only", ["decoder"], None),
    ({}, {**PLAIN, "v_head_size": 64}, "v-head-size", 64, 128, None),
    ({}, {**PLAIN, "sliding_window": 128}, "sliding-window", 128, False, None),
    (
        {"output_quantizations": ("fp8",)},
        {**PLAIN, "output_quantization": "fp4"},
        "output-quantization",
        "fp4",
        ["none", "fp8"],
        "--output-quantization none",
    ),
    ({}, {**PLAIN, "decode_context_parallel_size": 4}, "decode-context-parallel", 4, 1, "--dcp 1"),
    (
        {"speculative_tokens": 1},
        {**PLAIN, "num_speculative_tokens": 3},
        "speculative-tokens",
        3,
        "at most 1",
        "--speculative-tokens 1",
    ),
    ({}, {**PLAIN, "block_size": 24}, "block-size", 24, "multiples of 16", "--block-size 32"),
    (
        {"block_sizes": (64, 48)},
        {**PLAIN, "block_size": 16},
        "block-size",
        16,
        "multiples of 64 or 48",
        "--block-size 48",
    ),
    (
        {},
        {**PLAIN, "kv_cache_dtype": "fp8"},
        "kv-cache-dtype",
        "fp8_e4m3",
        ["auto", "bfloat16"],
        "--kv-cache-dtype auto",
    ),
    (
        {"kv_cache_dtypes": ("fp8_ds_mla",), "mla": True, "sparse": True, **WIDE_HEADS},
        SPARSE,
        "kv-cache-dtype",
        "bfloat16",
        ["fp8_ds_mla"],
        "--kv-cache-dtype fp8_ds_mla",
    ),
]


@pytest.mark.parametrize(("facts", "values", "code", "observed", "supported", "remedy"), ROWS)
def test_one_reason(
    spec: MakeSpec,
    capabilities: MakeCapabilities,
    facts: dict[str, Any],
    values: dict[str, Any],
    code: str,
    observed: Any,
    supported: Any,
    remedy: str | None,
) -> None:
    (reason,) = reasons(spec(capabilities={"decode": capabilities(**facts)}), values)
    assert (reason.code, reason.observed, reason.supported, reason.remedy) == (code, observed, supported, remedy)
    for value in (observed, supported):
        for part in value if isinstance(value, list) else [value]:
            assert isinstance(part, bool) or str(part) in reason.message or "mla" in code or "sparse" in code


@pytest.mark.parametrize(
    ("accepted", "device", "supported"),
    [
        (ComputeCapabilities((((8, 0), (9, 9)),)), T4, "8.0 to 9.x"),
        (ComputeCapabilities((((9, 0), (9, 9)),)), Device("b200", (10, 0)), "9.x"),
        (ComputeCapabilities((((8, 0), (99, 9)),)), T4, "8.0 and up"),
        (ComputeCapabilities((((9, 0), (9, 0)), ((12, 0), (12, 1)))), T4, "9.0, 12.0 to 12.1"),
        (ComputeCapabilities((((8, 0), (8, 9)),)), CPU, "8.x"),
        (ComputeCapabilities(cpu=True), H100, "CPU"),
    ],
)
def test_devices_that_are_not_served(
    spec: MakeSpec, capabilities: MakeCapabilities, accepted: ComputeCapabilities, device: Device, supported: str
) -> None:
    backend = spec(capabilities={"decode": capabilities(compute_capabilities=accepted)})
    (reason,) = reasons(backend, PLAIN, device)
    assert reason.code == "compute-capability"
    assert (reason.observed, reason.supported) == (device.capability_text, supported)
    assert reason.observed in reason.message
    assert supported in reason.message


@pytest.mark.parametrize("values", [PLAIN, MLA])
@pytest.mark.parametrize("listed", [("bfloat16", "fp8_e4m3", "nvfp4"), ("bfloat16", "fp8_e4m3")])
def test_an_nvfp4_cache_is_refused_whatever_the_backend_lists(
    spec: MakeSpec, capabilities: MakeCapabilities, values: dict[str, Any], listed: tuple[str, ...]
) -> None:
    both = capabilities(kv_cache_dtypes=listed, mla=values is MLA, head_sizes=HeadSizes())
    backend = spec(capabilities={"prefill": both, "decode": both})
    for phase in PHASES:
        (reason,) = reasons(backend, {**values, "kv_cache_dtype": "nvfp4"}, phase=phase)
        assert (reason.code, reason.observed) == ("kv-cache-dtype", "nvfp4")
        assert (reason.supported, reason.remedy) == (["auto", "bfloat16", "fp8_e4m3"], "--kv-cache-dtype auto")
        assert "attn_select.runtime cannot allocate a KV cache of dtype nvfp4" in reason.message


@pytest.mark.parametrize(
    ("device", "supported"), [(H100, ["auto", "bfloat16", "fp8_e4m3"]), (T4, ["auto", "bfloat16"])]
)
def test_quantised_caches_are_offered_on_devices_that_read_them(
    spec: MakeSpec, capabilities: MakeCapabilities, device: Device, supported: list[str]
) -> None:
    served = capabilities(
        kv_cache_dtypes=("bfloat16", "fp8_e4m3"),
        quantized_kv_cache_on=ComputeCapabilities((((8, 9), (9, 9)),)),
        compute_capabilities=ComputeCapabilities((((7, 0), (99, 9)),)),
    )
    backend = spec(capabilities={"decode": served})
    (found,) = reasons(backend, {**PLAIN, "kv_cache_dtype": "fp8_e5m2"}, device=device)
    assert (found.code, found.supported) == ("kv-cache-dtype", supported)
