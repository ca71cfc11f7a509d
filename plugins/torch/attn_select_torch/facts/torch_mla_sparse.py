"""``TORCH_MLA_SPARSE``: multi-head latent attention over the tokens that an indexer chose, in torch operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_torch.facts.torch_library import (
    ANY_BLOCK,
    DTYPES,
    EVERY_DEVICE,
    KV_CACHE_DTYPES,
    OWN,
    RAN_ON_CPU,
    TORCH,
    notes,
)

_BY_TOKEN = f"{OWN}: one call per token, whose shapes depend on top-k alone"
_CHOSEN = f"{OWN}: the chosen tokens are all that a query sees"

CAPABILITIES = Capabilities(
    compute_capabilities=EVERY_DEVICE,
    dtypes=DTYPES,
    kv_cache_dtypes=Fact((*KV_CACHE_DTYPES.value, "fp8_ds_mla"), f"{KV_CACHE_DTYPES.source}; fp8_ds_mla: {RAN_ON_CPU}"),
    head_sizes=Fact(HeadSizes(), f"{OWN}: matmul takes any width"),
    block_sizes=Fact((1,), f"{OWN}: tokens are gathered by slot"),
    mla=True,
    sparse=True,
    mixed_kv_cache_dtype=Fact(True, f"{OWN}: the gather converts to the compute dtype"),
    logits_soft_cap=Fact(True, f"{OWN}: matmul, tanh, softmax, matmul"),
    sinks=Fact(True, f"{OWN}: one more column of scores, its value zero"),
    non_causal=Fact(True, _CHOSEN),
    batch_invariant=Fact(True, _BY_TOKEN),
    per_head_quant_scales=Fact(True, f"{OWN}: the latent is one KV head, so both kinds of scale are one number"),
    decode_context_parallel=Fact(True, f"{OWN}: the runtime leaves out the slots of other ranks' tokens"),
)


@dataclass(frozen=True, slots=True)
class TorchMLASparseKernel:
    """The one computation path."""

    name: Literal["torch-sparse-latent"] = "torch-sparse-latent"


_KERNEL = TorchMLASparseKernel()
_BECAUSE = "absorbed projections over the latents that were chosen"
_GATHER = "copies the chosen latents out of the cache at each call; nothing is reserved"
_DS_MLA_DIMS = (512, 64)


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or why the 656-byte token does not hold these latents; both phases run alike."""
    packed = config.kv_cache_dtype == "fp8_ds_mla"
    dims = (config.kv_lora_rank, config.qk_rope_head_dim)
    if packed and dims != _DS_MLA_DIMS:
        text = "fp8_ds_mla holds kv_lora_rank 512 and qk_rope_head_dim 64"
        return [Reason("head-size", f"{text} (asked for {dims[0]} and {dims[1]})", config.head_size, 576)]
    return BackendPlan(
        kernel=_KERNEL,
        path="sparse latent",
        because=_BECAUSE,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(FP8_DS_MLA,) if packed else (MLA,),
        kernel_block_sizes=ANY_BLOCK,
        cuda_graph="UNIFORM_BATCH",
        notes=(*notes(config, device), _GATHER),
    )


TORCH_MLA_SPARSE = BackendSpec(
    name="TORCH_MLA_SPARSE",
    summary="sparse MLA in torch operators on the chosen latents, CPU and every GPU",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_torch.runtime.mla_sparse:TorchMLASparseBackend",
    libraries=((TORCH,),),
)
