"""``FLA``: layers that keep a state, by the Triton kernels of flash-linear-attention (fla-core)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
    Reason,
    StateCapabilities,
)
from attn_select.layer.config import Phase
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS
from attn_select.layer.layouts import STATE_KV, STATE_VK
from attn_select.layer.state import RECURRENCES, StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment

FLA_CORE = Library("fla-core", "fla", "pip install fla-core triton", ">=0.6,<0.7")
_OPS = "fla-org/flash-linear-attention fla/ops"
_RELEASE = "fla-core 0.6.0"
_FP32_DOTS = f"{_OPS}/common/chunk_delta_h.py: tl.dot of the inputs' dtype, accumulated in float32, {_RELEASE}"

CAPABILITIES = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((8, 0), (12, 9)),)), "triton-lang/triton README.md v3.6.0: compute capability 8.0 and up"
    ),
    recurrences=Fact(
        RECURRENCES,
        f"{_OPS}/gated_delta_rule, kda and simple_gla, {_RELEASE}: the last one is a scalar decay without the delta "
        "rule, which Mamba-2 and lightning attention are",
    ),
    dtypes=Fact(("bfloat16", "float16"), _FP32_DOTS),
    state_dtypes=Fact(
        ("float32", "bfloat16", "float16"),
        f"{_OPS}/kda/chunk.py, {_RELEASE}: initial_state must be in float32; the runtime converts what it gathers",
    ),
    head_sizes=Fact(
        HeadSizes(maximum=256),
        f"{_OPS}/common/chunk_delta_h.py, {_RELEASE}: K <= 256; {_OPS}/kda/chunk.py: key headdim <= 256",
    ),
    v_head_sizes=Fact(HeadSizes(), f"{_OPS}/gated_delta_rule/fused_recurrent.py, {_RELEASE}: V in tiles of any number"),
    speculative_tokens=Fact(MOST_SPECULATIVE_TOKENS, "the runtime runs decodes token by token"),
)

LEAST_LOG_DECAY = Fact(
    -60.0,
    f"{_OPS}/common/chunk_o.py, chunk_scaled_dot_kkt.py and kda/chunk_intra.py, {_RELEASE}: decays between tokens are "
    "differences of running sums over a chunk of 64 tokens in float32: the digits of small ones are lost behind a "
    "large one, and all are NaN behind minus infinity. exp(-60) of a state is nothing beside 16-bit numbers",
)
"""What prefills take in the place of anything less."""


@dataclass(frozen=True, slots=True)
class FlaKernel:
    """The operation of fla-core."""

    module: str
    function: str

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return self.function


_FAMILIES = {
    "gated_delta_net": ("fla.ops.gated_delta_rule", "gated_delta_rule"),
    "kda": ("fla.ops.kda", "kda"),
    "mamba2": ("fla.ops.simple_gla", "simple_gla"),
    "lightning": ("fla.ops.simple_gla", "simple_gla"),
}
_BECAUSE: dict[Phase, str] = {
    "decode": "one launch reads and writes each state once",
    "prefill": "chunks turn the recurrence into matrix products",
}
_COPIES = "copies the states that it reads out of the pool, and back"
_TUNES = "tries many tiles at the first prefill of each number of heads: a minute or more (over 90 s on an H200)"


def kernel_of(config: StateConfig, phase: Phase) -> FlaKernel:
    """Return the operation for a phase of a layer."""
    module, family = _FAMILIES[config.recurrence]
    how: Literal["chunk", "fused_recurrent"] = "fused_recurrent" if phase == "decode" else "chunk"
    return FlaKernel(module, f"{how}_{family}")


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; plain capabilities say all reasons against it."""
    kernel = kernel_of(config, phase)
    return BackendPlan(
        kernel=kernel,
        path=kernel.function,
        because=_BECAUSE[phase],
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_KV, STATE_VK),
        kernel_block_sizes=(),
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE" if phase == "decode" else "NEVER",
        notes=(_COPIES, *([_TUNES] if phase == "prefill" else [])),
    )


FLA = BackendSpec(
    name="FLA",
    summary="Layers that keep a state by the Triton kernels of flash-linear-attention.",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    libraries=((FLA_CORE,),),
    compile_key=lambda config: (config.recurrence, config.head_size, config.v_head_size, config.dtype),
    load="attn_select_fla.runtime.fla:FlaBackend",
)
