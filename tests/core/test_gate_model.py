"""The gate against a model of it: which codes speak against a layer, written down a second time."""

from __future__ import annotations

from typing import Any

from gate_cases import H100, MLA, PLAIN, SPARSE, T4, MakeCapabilities, MakeSpec, reasons
from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.spec import ComputeCapabilities, HeadSizes
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import CPU, Device

FLAGS = ["sliding_window", "logits_soft_cap", "alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"]


def expected_codes(facts: dict[str, Any], config: AttentionConfig, device: Device) -> set[str]:
    codes: set[str] = set()
    kind_is_right = False
    if config.mla and not facts["mla"]:
        codes.add("mla-unsupported")
    elif facts["mla"] and not config.mla:
        codes.add("mla-only")
    elif config.sparse and not facts["sparse"]:
        codes.add("sparse-unsupported")
    elif facts["sparse"] and not config.sparse:
        codes.add("sparse-only")
    else:
        kind_is_right = True
    if kind_is_right and config.head_size not in facts["head_sizes"].values:
        codes.add("head-size")
    low, high = facts["compute_capabilities"].ranges[0]
    if device.compute_capability is None or not low <= device.compute_capability <= high:
        codes.add("compute-capability")
    if config.dtype not in facts["dtypes"]:
        codes.add("dtype")
    if config.attn_type not in facts["attn_types"]:
        codes.add("attn-type")
    if config.has_cache and facts["reads_cache"]:
        stored = config.cache_dtype
        if stored == config.dtype:
            wrong = stored in facts["dtypes"] and stored not in facts["kv_cache_dtypes"]
        elif stored in ("bfloat16", "float16", "float32"):
            wrong = stored not in facts["kv_cache_dtypes"] or not facts["mixed_kv_cache_dtype"]
        else:
            wrong = stored not in facts["kv_cache_dtypes"]
        if wrong:
            codes.add("kv-cache-dtype")
        if config.block_size and all(config.block_size % size for size in facts["block_sizes"]):
            codes.add("block-size")
    if config.value_head_size != config.head_size and not facts["v_head_size_differs"]:
        codes.add("v-head-size")
    codes |= {flag.replace("_", "-") for flag in FLAGS if getattr(config, flag) and not facts[flag]}
    if config.output_quantization not in ("none", *facts["output_quantizations"]):
        codes.add("output-quantization")
    if config.decode_context_parallel_size > 1 and not facts["decode_context_parallel"]:
        codes.add("decode-context-parallel")
    if config.decode_context_parallel_size > 1 and (config.sliding_window or config.alibi):
        codes.add("decode-context-parallel-distance")
    if config.decode_context_parallel_size > 1 and config.output_quantization == "fp4":
        codes.add("decode-context-parallel-output")
    if config.num_speculative_tokens > facts["speculative_tokens"]:
        codes.add("speculative-tokens")
    return codes


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


FACTS = st.fixed_dictionaries(
    {
        "mla": st.booleans(),
        "sparse": st.booleans(),
        "reads_cache": st.sampled_from([True, True, False]),
        "compute_capabilities": st.sampled_from(
            [ComputeCapabilities((((8, 0), (9, 9)),)), ComputeCapabilities((((9, 0), (99, 9)),))]
        ),
        "dtypes": some("bfloat16", "float16", "float32"),
        "kv_cache_dtypes": some("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
        "head_sizes": some(64, 128, 576).map(HeadSizes),
        "block_sizes": some(1, 16, 64),
        "attn_types": some("decoder", "encoder_only", "encoder_decoder"),
        "output_quantizations": some("fp8", "fp4"),
        "speculative_tokens": st.sampled_from([0, 1, 1024]),
        **dict.fromkeys(
            [*FLAGS, "mixed_kv_cache_dtype", "v_head_size_differs", "decode_context_parallel"], st.booleans()
        ),
    }
)
LAYERS = st.builds(
    lambda shape, values: {**shape, **values},
    st.sampled_from([PLAIN, {**PLAIN, "head_size": 64, "v_head_size": 32}, {**PLAIN, "v_head_size": 128}, MLA, SPARSE]),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
            "kv_cache_dtype": st.sampled_from(["auto", "bfloat16", "float16", "fp8", "fp8_e5m2"]),
            "block_size": st.sampled_from([1, 16, 24, 64, 128]),
            "sliding_window": st.just(128),
            "logits_soft_cap": st.just(30.0),
            "output_quantization": st.sampled_from(["none", "fp8", "fp4"]),
            "decode_context_parallel_size": st.sampled_from([1, 2]),
            "num_speculative_tokens": st.sampled_from([0, 1, 3]),
            **dict.fromkeys(["alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"], st.booleans()),
        },
    ),
)


@given(FACTS, LAYERS, st.sampled_from([H100, T4, CPU, Device("b200", (10, 0))]))
def test_the_gate_agrees_with_the_model(
    spec: MakeSpec, capabilities: MakeCapabilities, facts: dict[str, Any], values: dict[str, Any], device: Device
) -> None:
    config = AttentionConfig(**values)
    found = reasons(spec(capabilities={"decode": capabilities(**facts)}), values, device)
    assert {reason.code for reason in found} == expected_codes(facts, config, device)
    assert len(found) == len({reason.code for reason in found})
    for reason in found:
        assert reason.message.isprintable()
        assert reason.observed is not None
        assert reason.supported is not None


@given(FACTS, LAYERS)
def test_a_remedy_removes_its_reason(
    spec: MakeSpec, capabilities: MakeCapabilities, facts: dict[str, Any], values: dict[str, Any]
) -> None:
    """What a reason tells the user to do makes that reason go away."""
    fields = {"dcp": "decode_context_parallel_size", "speculative_tokens": "num_speculative_tokens"}
    backend = spec(capabilities={"decode": capabilities(**facts)})
    for reason in reasons(backend, values):
        if reason.remedy is None:
            continue
        flag, text = reason.remedy.removeprefix("--").replace("-", "_").split(" ")
        if reason.code == "kv-cache-dtype" and values.get("dtype", "bfloat16") not in facts["dtypes"]:
            continue  # another dtype comes first, and changes what `auto` is
        changed = {**values, fields.get(flag, flag): int(text) if text.isdigit() else text}
        assert reason.code not in {other.code for other in reasons(backend, changed)}
