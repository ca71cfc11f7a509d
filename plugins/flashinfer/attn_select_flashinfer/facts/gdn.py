"""``FLASHINFER_GDN``: prefills of gated delta net layers by FlashInfer's chunked kernels."""

from __future__ import annotations

from dataclasses import dataclass

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
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS
from attn_select.layer.layouts import STATE_VK
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import LIBRARIES

_GDN = "flashinfer-ai/flashinfer flashinfer/gdn_prefill.py chunk_gated_delta_rule 0.6.14 and 0.7.2.post1"
_ENGINE = "vllm-project/vllm model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py 0.32.0"

CAPABILITIES = StateCapabilities(
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
    speculative_tokens=Fact(MOST_SPECULATIVE_TOKENS, "decodes are another backend's"),
)


@dataclass(frozen=True, slots=True)
class GdnPrefillKernel:
    """The one kernel of this backend."""

    name: str = "chunk_gated_delta_rule"


_BECAUSE = "chunks turn the recurrence into matrix products; vLLM 0.32 takes it on Hopper"
_COPIES = "copies the states that it reads out of the pool, and back"
_NEVER_RUN = "FlashInfer's gated delta net was never run here; its call is held to the signatures of two releases"


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; plain capabilities say everything that speaks against it."""
    return BackendPlan(
        kernel=GdnPrefillKernel(),
        path="chunked",
        because=_BECAUSE,
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_VK,),
        kernel_block_sizes=(),
        cuda_graph="NEVER",
        notes=(_COPIES,),
        unverified=(_NEVER_RUN,),
    )


FLASHINFER_GDN = BackendSpec(
    name="FLASHINFER_GDN",
    summary="Prefills of gated delta net layers by FlashInfer, on Hopper and Blackwell.",
    capabilities={"prefill": CAPABILITIES},
    plan=plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.num_heads, config.num_v_heads, config.dtype),
    load="attn_select_flashinfer.runtime.gdn:FlashInferGdnBackend",
)
