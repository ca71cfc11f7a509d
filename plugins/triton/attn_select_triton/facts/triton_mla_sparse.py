"""``TRITON_MLA_SPARSE``: multi-head latent attention over the token slots that an indexer chose, in own kernels."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.facts.planned_kernels import MLASparseKernel
from attn_select_triton.facts.triton_mla import DECODE, LORA_RANKS, PROGRAMS_PER_SM, ROPE_SIZES, dim_reason
from attn_select_triton.facts.triton_support import (
    COMPILED,
    COMPILER_VARIABLES,
    KV_CACHE_DTYPES,
    LIBRARIES,
    OWN,
    device_reasons,
    gluon_marks,
    marked,
    notes,
    split_workspace,
)
from attn_select_triton.limits import GLUON_CAPABILITY, GLUON_RANKS, GLUON_ROPE


class TritonMLASparseOptions(BackendOptions):
    """The ``[backends.TRITON_MLA_SPARSE]`` table."""

    gather_workspace_mib: int = Field(
        256,
        ge=0,
        description="MiB for latents that prefills on Hopper copy: of FP8 caches, and without a rope part; 0: none",
    )


_RAN = "ran on an H200, triton 3.6.0"
_ONE_TOKEN = f"{OWN}: every token is a request of one query, whose chosen slots are blocks of one token"

CAPABILITIES = replace(
    DECODE,
    dtypes=Fact(("bfloat16", "float16"), f"{_RAN}; {COMPILED}: from 7.5 on; {OWN}: no float32 latent"),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"), KV_CACHE_DTYPES.source),
    head_sizes=Fact(HeadSizes(multiple_of=16, minimum=16, maximum=640), f"{OWN}: rank and rope part by themselves"),
    block_sizes=Fact((1,), f"{OWN}: latents are read by slot"),
    sparse=True,
    non_causal=Fact(True, f"{OWN}: the chosen tokens are all that a query sees"),
    batch_invariant=Fact(True, f"{_ONE_TOKEN}; its keys are not split"),
    decode_context_parallel=Fact(True, f"{OWN}: the runtime leaves out the slots of other ranks' tokens"),
)

_LAYOUTS, _BLOCKS = (MLA,), (64, 1)
_GATHER = "warp-specialised for Hopper, four warps copy the chosen latents"
_SPLIT = "each token's chosen keys split until every SM has work"
_WHOLE = "keys are not split: batch invariance"


def gather_lacks(config: AttentionConfig, device: Device) -> str | None:
    """Return what keeps the warp-specialised kernel from these layers, as a predicate; None: it takes them."""
    if device.compute_capability != GLUON_CAPABILITY:
        return "is for compute capability 9.0"
    if config.kv_lora_rank not in GLUON_RANKS or config.qk_rope_head_dim != GLUON_ROPE:
        accepted = " or ".join(f"{some} + {GLUON_ROPE}" for some in GLUON_RANKS)
        return f"takes latents of {accepted}, not {config.kv_lora_rank} + {config.qk_rope_head_dim}"
    if config.cache_dtype != config.dtype:
        return f"reads no {config.cache_dtype} cache for a {config.dtype} query"
    return None


def copies_help(config: AttentionConfig, device: Device) -> bool:
    """Whether the warp-specialised kernel takes copies of the latents: in the query's dtype, with a rope part of 0."""
    # A batch-invariant result may not depend on what a step copies, and of a rank's part no request is whole. Over
    # latents of the query's dtype the portable kernel is as fast with up to 16 heads.
    return (
        device.compute_capability == GLUON_CAPABILITY
        and config.kv_lora_rank in GLUON_RANKS
        and config.qk_rope_head_dim in (0, GLUON_ROPE)
        and not config.batch_invariant
        and config.decode_context_parallel_size == 1
        and (config.num_heads > 16 or config.cache_dtype != config.dtype)
    )


def _dim_reasons(config: AttentionConfig) -> list[Reason]:
    rank, rope = config.kv_lora_rank or 0, config.qk_rope_head_dim or 0
    found = []
    if not LORA_RANKS.accepts(rank):
        found.append(dim_reason("kv_lora_rank", rank, str(LORA_RANKS)))
    if rope and not ROPE_SIZES.accepts(rope):
        found.append(dim_reason("qk_rope_head_dim", rope, f"0, {ROPE_SIZES}"))
    return found


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what the kernels and Triton cannot do for these dimensions on this device."""
    reasons = device_reasons(config, device, environment) + _dim_reasons(config)
    if reasons:
        return reasons
    assert isinstance(options, TritonMLASparseOptions)
    lacks, gather_bytes = gather_lacks(config, device), 0
    noted = notes(config, device)
    # A release in which that kernel never ran runs the portable one alone.
    if phase == "prefill" and lacks and copies_help(config, device) and not gluon_marks(environment):
        gather_bytes = options.gather_workspace_mib << 20
    because = f"the Gluon kernel {lacks}" if lacks else _GATHER
    if gather_bytes:
        because += "; prefills copy their latents for it where that is cheaper"
        noted = (*noted, f"{gather_bytes >> 20} MiB of the workspace hold these copies")
    rows = min(64, -(-config.num_heads // 16) * 16)
    workspace = 0
    if not config.batch_invariant:
        workspace = split_workspace(device, PROGRAMS_PER_SM, rows, config.kv_lora_rank or 0)
    made = BackendPlan(
        kernel=MLASparseKernel(lacks is None, gather_bytes),
        path="portable gather" if lacks else "Gluon gather",
        because=f"{because}; {_WHOLE if config.batch_invariant else _SPLIT}",
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=_LAYOUTS,
        kernel_block_sizes=_BLOCKS,
        cuda_graph="UNIFORM_BATCH",
        workspace_bytes=workspace + gather_bytes,
        notes=noted,
        unverified=() if lacks else gluon_marks(environment),
    )
    return marked(made, config, device.compute_capability)


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    return (
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.num_heads,
        config.sparse_top_k,
        config.dtype,
        config.cache_dtype,
        config.batch_invariant,
    )


TRITON_MLA_SPARSE = BackendSpec(
    name="TRITON_MLA_SPARSE",
    summary="own Triton kernels for sparse MLA on the chosen latents, any NVIDIA GPU from Turing up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    options=TritonMLASparseOptions,
    load="attn_select_triton.runtime.triton_mla_sparse:TritonMLASparseBackend",
    libraries=LIBRARIES,
    variables=COMPILER_VARIABLES,
    compile_key=compile_key,
)
