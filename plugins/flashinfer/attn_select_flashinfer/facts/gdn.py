"""``FLASHINFER_GDN``: gated delta net layers by FlashInfer: prefills in chunks, decodes in the pool of states."""

from __future__ import annotations

from attn_select.backends.reasons import unsupported
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
    StateCapabilities,
)
from attn_select.layer.config import Phase
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import GDN_STATE_WRONG, LIBRARIES, release
from attn_select_flashinfer.facts.state_plans import COPIES, PREFILL_DRAFTS, RAW_GATES, state_plan

_GDN = "flashinfer-ai/flashinfer flashinfer/gdn_prefill.py chunk_gated_delta_rule 0.6.14 and 0.7.2.post1"
_ENGINE = "vllm-project/vllm model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py 0.32.0"

_DECODE = (
    "flashinfer-ai/flashinfer flashinfer/gdn_decode.py gated_delta_rule_decode_pretranspose 0.6.14 and 0.7.2.post1"
)

PREFILL = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((9, 0), (9, 0)), ((10, 0), (10, 3)))), f"{_GDN}: requires SM90 or SM100; {_ENGINE}"
    ),
    recurrences=Fact(("gated_delta_net",), f"{_GDN}: one decay per value head"),
    dtypes=Fact(("bfloat16", "float16"), f"{_GDN}: q, k and v of the tensor cores' dtypes"),
    state_dtypes=Fact(
        ("float32", "bfloat16", "float16"), f"{_GDN}: float32; the runtime converts what it gathers, as {_ENGINE}"
    ),
    head_sizes=Fact(HeadSizes((128,)), f"{_GDN}: asserts 128 on SM100; no other size was looked into on SM90"),
    v_head_sizes=Fact(HeadSizes((128,)), f"{_GDN}: state of (head_size, head_size)"),
    speculative_tokens=PREFILL_DRAFTS,
)
DECODE = StateCapabilities(
    compute_capabilities=Fact(ComputeCapabilities((((9, 0), (12, 9)),)), f"{_DECODE}: requires SM90 and up"),
    recurrences=PREFILL.recurrences,
    dtypes=Fact(("bfloat16", "float16"), f"{_DECODE}: q must be float16/bfloat16"),
    state_dtypes=Fact(("float32", "bfloat16"), f"{_DECODE}: float32, or bfloat16 where heads have 128"),
    head_sizes=Fact(HeadSizes((128,)), f"{_DECODE}: at least 128, and 128 for states in bfloat16"),
    v_head_sizes=Fact(HeadSizes((128,)), f"{_DECODE}: likewise"),
    speculative_tokens=Fact(0, f"{_DECODE}: several tokens keep the state behind the last one alone"),
)


_KERNELS: dict[Phase, str] = {
    "prefill": "chunk_gated_delta_rule",
    "decode": "gated_delta_rule_decode_pretranspose",
}
_NOTES: dict[Phase, tuple[str, ...]] = {"prefill": (COPIES,), "decode": (RAW_GATES,)}
_READS_BFLOAT16 = Fact(
    "bfloat16",
    "flashinfer-ai/flashinfer flashinfer/gdn_kernels/gdn_decode_bf16_state.py 0.7.2.post1: with states in bfloat16 the "
    "kernel reads queries, keys and values as bfloat16, and the entry lets float16 pass: wrong numbers on an H200",
)
_NEVER_RUN = "FlashInfer's gated delta net ran on compute capability 9.0 alone; elsewhere calls are held to signatures"


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what is wrong in one release or for one pair of dtypes."""
    wrong = phase == "prefill" and (device.compute_capability or (0,))[0] == 10
    if wrong and release(environment)[:3] == GDN_STATE_WRONG.value:
        seen = environment.version("flashinfer-python")
        text = f"flashinfer-python {seen} leaves wrong states behind prefills on 10.x (needed: another release)"
        return [Reason("library-version", text, seen, "!=0.6.17", "pip install 'flashinfer-python>=0.6.18'")]
    read_as = _READS_BFLOAT16.value
    if phase == "decode" and config.state_dtype == read_as != config.dtype:
        return [unsupported("dtype", f"dtype with states in {read_as}", config.dtype, [read_as])]
    unverified = () if device.compute_capability == (9, 0) else (_NEVER_RUN,)
    return state_plan(config, phase, _KERNELS, _NOTES, unverified, "; vLLM 0.32 takes it on Hopper")


FLASHINFER_GDN = BackendSpec(
    name="FLASHINFER_GDN",
    summary="Gated delta net layers by FlashInfer, on Hopper and Blackwell.",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.num_heads, config.num_v_heads, config.dtype),
    load="attn_select_flashinfer.runtime.gdn:FlashInferGdnBackend",
)
