"""What the choices inside ``FLASHINFER`` rest on."""

from __future__ import annotations

from typing import Literal, NamedTuple

from attn_select.config import AttentionConfig, Phase
from attn_select.environment import Environment

TrtllmKernel = Literal["trtllm-gen", "xqa"]
UseTrtllm = Literal["auto", True, False]
PrefillKernel = Literal["auto", "fa2", "fa3"]


class Case(NamedTuple):
    """One phase of one layer on one device; ``kernel`` is the TRT-LLM kernel that the device has for the phase."""

    config: AttentionConfig
    phase: Phase
    capability: tuple[int, int]
    kernel: TrtllmKernel | None
    use_trtllm: UseTrtllm
    prefill_kernel: PrefillKernel
    environment: Environment
