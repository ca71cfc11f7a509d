"""What FlashInfer's backends for layers that keep a state have in common: the plan of a phase and its notes."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.backends.spec import BackendPlan, Fact
from attn_select.layer.config import Phase
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS
from attn_select.layer.layouts import STATE_VK
from attn_select.layer.state import StateConfig

PREFILL_DRAFTS = Fact(
    MOST_SPECULATIVE_TOKENS, "prefills see no drafts; layers that have drafts take another backend's decodes"
)
"""Of every prefill of states."""
COPIES = "copies the states that it reads out of the pool, and back"
RAW_GATES = "activates the gates itself: give the layers raw gates"
"""A note of every plan whose kernel takes gates before their activation."""


@dataclass(frozen=True, slots=True)
class StateKernel:
    """What runs a phase; ``name``: FlashInfer's entry, behind a hyphen which of its kernels where it has several."""

    name: str


def state_plan(
    config: StateConfig,
    phase: Phase,
    kernels: dict[Phase, str],
    notes: dict[Phase, tuple[str, ...]],
    unverified: tuple[str, ...],
    chunked: str = "",
) -> BackendPlan:
    """Return the plan of a phase."""
    # chunked: what is said of prefills beside the usual
    prefill = phase == "prefill"
    because = f"chunks turn the recurrence into matrix products{chunked}"
    return BackendPlan(
        kernel=StateKernel(kernels[phase]),
        path="chunked" if prefill else "in the pool",
        because=because if prefill else "one launch reads and writes each state once, in the pool",
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_VK,),
        kernel_block_sizes=(),
        cuda_graph="NEVER" if prefill else "UNIFORM_SINGLE_TOKEN_DECODE",
        notes=notes[phase],
        unverified=unverified,
    )
