"""``TORCH_STATE``: layers that keep a state, in torch operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from attn_select_torch.facts.torch_library import DTYPES, EVERY_DEVICE, OWN, RAN_ON_CPU, TORCH

CAPABILITIES = StateCapabilities(
    compute_capabilities=EVERY_DEVICE,
    recurrences=Fact(RECURRENCES, f"{OWN}: all are one formula; {RAN_ON_CPU}"),
    dtypes=DTYPES,
    state_dtypes=Fact(("float32", "bfloat16", "float16"), f"{OWN}: computed in float32, rounded when it is stored"),
    head_sizes=Fact(HeadSizes(), f"{OWN}: matmul takes any width"),
    v_head_sizes=Fact(HeadSizes(), f"{OWN}: matmul takes any width"),
    speculative_tokens=Fact(MOST_SPECULATIVE_TOKENS, f"{OWN}: decodes run token by token"),
)


@dataclass(frozen=True, slots=True)
class TorchStateKernel:
    """The computation: token by token for all requests at once, or by chunks of one request."""

    path: Literal["recurrent", "chunked"]

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return f"torch-{self.path}"


_BECAUSE: dict[Phase, str] = {
    "decode": "one token reads and writes each state once, for all requests together",
    "prefill": "chunks turn the recurrence into matrix products",
}


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; plain capabilities say all reasons against it."""
    path: Literal["recurrent", "chunked"] = "recurrent" if phase == "decode" else "chunked"
    return BackendPlan(
        kernel=TorchStateKernel(path),
        path=path,
        because=_BECAUSE[phase],
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_KV, STATE_VK),
        kernel_block_sizes=(),
        # Host lengths decide the loops, which a captured graph cannot change.
        cuda_graph="NEVER",
    )


TORCH_STATE = BackendSpec(
    name="TORCH_STATE",
    summary="Layers that keep a state in torch operators, on any device: the default on a CPU.",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    libraries=((TORCH,),),
    load="attn_select_torch.runtime.state:TorchStateBackend",
)
