"""``TRITON_STATE``: decodes of layers that keep a state, by a Triton kernel of our own."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Fact,
    HeadSizes,
    Reason,
    StateCapabilities,
)
from attn_select.layer.config import Phase
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS
from attn_select.layer.layouts import STATE_KV, STATE_VK
from attn_select.layer.state import RECURRENCES, StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.facts.triton_support import (
    COMPILER_VARIABLES,
    DTYPES,
    LIBRARIES,
    OWN,
    TURING_AND_UP,
    machine_reasons,
)

_TILE = f"{OWN}: the tile is padded to a power of two under a mask"

CAPABILITIES = StateCapabilities(
    compute_capabilities=TURING_AND_UP,
    recurrences=Fact(RECURRENCES, f"{OWN}: delta rule, decay and write strength are chosen at compilation"),
    dtypes=DTYPES,
    state_dtypes=Fact(("float32", "bfloat16", "float16"), f"{OWN}: computed in float32, rounded when it is stored"),
    head_sizes=Fact(HeadSizes(maximum=256), f"{OWN}: a program holds all key channels in registers"),
    v_head_sizes=Fact(HeadSizes(maximum=8192), _TILE),
    speculative_tokens=Fact(MOST_SPECULATIVE_TOKENS, f"{OWN}: runs a request's tokens one after the other"),
)


@dataclass(frozen=True, slots=True)
class StateDecodeKernel:
    """The one kernel of this backend."""

    name: str = "state-decode"


_BECAUSE = "one launch reads each state in its slot and writes it there, drafts' states included"


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what keeps Triton from compiling here."""
    if found := machine_reasons(device, environment) if device.compute_capability is not None else []:
        return found
    return BackendPlan(
        kernel=StateDecodeKernel(),
        path="decode",
        because=_BECAUSE,
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_KV, STATE_VK),
        kernel_block_sizes=(),
        cuda_graph="UNIFORM_BATCH",
    )


def compile_key(config: StateConfig) -> object:
    """Group layers that share one compilation: what the kernel takes as constants."""
    heads = (config.num_heads, config.num_v_heads)
    return (config.recurrence, heads, config.head_size, config.v_head_size, config.dtype, config.state_dtype)


TRITON_STATE = BackendSpec(
    name="TRITON_STATE",
    summary="Decodes of layers that keep a state, in Triton, any NVIDIA GPU from Turing up.",
    capabilities={"decode": CAPABILITIES},
    plan=plan,
    libraries=LIBRARIES,
    variables=COMPILER_VARIABLES,
    compile_key=compile_key,
    load="attn_select_triton.runtime.triton_state:TritonStateBackend",
)
