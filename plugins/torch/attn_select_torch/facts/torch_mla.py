"""``TORCH_MLA``: dense multi-head latent attention (arXiv 2405.04434) in torch operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_torch.facts.torch_library import (
    ANY_BLOCK,
    DTYPES,
    EVERY_DEVICE,
    KV_CACHE_DTYPES,
    MASKED,
    OWN,
    PER_REQUEST,
    TORCH,
    notes,
)


def _capabilities(reads_cache: bool) -> Capabilities:
    return Capabilities(
        compute_capabilities=EVERY_DEVICE,
        dtypes=DTYPES,
        kv_cache_dtypes=KV_CACHE_DTYPES,
        head_sizes=Fact(HeadSizes(), f"{OWN}: matmul takes any width"),
        block_sizes=Fact((1,), f"{OWN}: blocks are gathered by index"),
        mla=True,
        reads_cache=reads_cache,
        mixed_kv_cache_dtype=Fact(True, f"{OWN}: the gather converts to the compute dtype"),
        sliding_window=Fact(True, MASKED),
        logits_soft_cap=Fact(True, f"{OWN}: matmul, tanh, softmax, matmul"),
        alibi=Fact(True, MASKED),
        sinks=Fact(True, f"{OWN}: one more column of scores, its value zero"),
        mm_prefix=Fact(True, MASKED),
        non_causal=Fact(True, MASKED),
        batch_invariant=Fact(True, PER_REQUEST),
        draft_tree=Fact(True, MASKED),
        per_head_quant_scales=Fact(True, f"{OWN}: the latent is one KV head, so both kinds of scale are one number"),
        decode_context_parallel=Fact(True, f"{OWN}: the scores are there to take the log-sum-exp of"),
    )


PREFILL = _capabilities(reads_cache=False)
DECODE = _capabilities(reads_cache=True)


@dataclass(frozen=True, slots=True)
class TorchMLAKernel:
    """The computation path: on decompressed keys and values, or on the latent with absorbed projections."""

    path: Literal["multi-head", "latent"]

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return f"torch-{self.path}"


_PREFILL = "decompressed keys and values: least arithmetic per new token"
_DECODE = "absorbed projections over the latent: least memory traffic per cached token"
_GATHER = "copies the latents it reads out of the cache at each call; nothing is reserved"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; plain capabilities say all reasons against it."""
    own_notes, prefill = notes(config, device), phase == "prefill"
    kernel = TorchMLAKernel("multi-head" if prefill else "latent")
    # The gather's shapes come from host lengths, which a captured graph cannot change: never graphs.
    return BackendPlan(
        kernel=kernel,
        path=kernel.path,
        because=_PREFILL if prefill else _DECODE,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=() if prefill else (MLA,),
        kernel_block_sizes=() if prefill else ANY_BLOCK,
        cuda_graph="NEVER",
        notes=own_notes if prefill else (*own_notes, _GATHER),
    )


TORCH_MLA = BackendSpec(
    name="TORCH_MLA",
    summary="dense MLA in torch operators on the gathered latents, CPU and every GPU",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    load="attn_select_torch.runtime.mla:TorchMLABackend",
    libraries=((TORCH,),),
)
