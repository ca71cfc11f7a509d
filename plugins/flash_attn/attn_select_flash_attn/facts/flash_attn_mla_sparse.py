"""``FLASH_ATTN_MLA_SPARSE``: FlashAttention over the token slots that an indexer chose.

FlashAttention 3 reads them as pages of one token, on Hopper; FlashAttention 4 gathers the rows itself, on Blackwell.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from attn_select.backends.kernel_builds import PROVIDER_OPTION, Objection, choose, pin_provider
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
)
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flash_attn.facts.builds import (
    ALLOCATES_OUTPUT,
    HOPPER,
    LIBRARIES,
    UPSTREAM_FA3,
    VLLM_FA3,
    VLLM_FA4,
    VLLM_WITH_FA4,
    FlashAttnBuild,
    GatherKernel,
    ProviderName,
    builds_for,
    kernel_of,
    notes_on_build,
)
from attn_select_flash_attn.facts.flash_attn_mla import decode_objections

_VLLM_BACKEND = "vllm-project/vllm v1/attention/backends/mla/flashattn_mla_sparse.py 0.33.0"
_RAN = "ran on H200, FA3 of vLLM 0.26.0, 2026-11-22"
_ONE_QUERY = "every token is a request of one query, whose keys are a page table"

CAPABILITIES = Capabilities(
    mla=True,
    sparse=True,
    compute_capabilities=Fact(
        ComputeCapabilities(((HOPPER, HOPPER), ((10, 0), (10, 3)))),
        f"{UPSTREAM_FA3} (q_v: arch 90); {_RAN}; {VLLM_FA4} (qv: arch 100)",
    ),
    dtypes=Fact(("bfloat16", "float16"), f"{UPSTREAM_FA3} (q_v: fp16 and bf16)"),
    kv_cache_dtypes=Fact(("bfloat16", "float16"), f"{UPSTREAM_FA3} (q_v: fp16 and bf16)"),
    # q is the rope part (at most 64, zeros where there is none), v the latent (256 to 512): `decode_objections`.
    head_sizes=Fact(
        HeadSizes(multiple_of=8, minimum=256, maximum=576), f"{UPSTREAM_FA3}; {_VLLM_BACKEND} (rope 64, 0); {_RAN}"
    ),
    block_sizes=Fact((1,), f"{UPSTREAM_FA3} (pages of one token: the cache is one flat run of tokens)"),
    sinks=Fact(False, f"{VLLM_FA3} (none where K and V differ in width)"),
    # Nothing is masked but by the indices.
    non_causal=Fact(True, _ONE_QUERY),
    batch_invariant=Fact(True, f"{_ONE_QUERY}; {_VLLM_BACKEND} (num_splits=1)"),
    decode_context_parallel=Fact(False, "the slots of other ranks would be void ones between the own: pages have none"),
)


class FlashAttnMLASparseOptions(BackendOptions):
    """``[backends.FLASH_ATTN_MLA_SPARSE]``."""

    provider: ProviderName = Field("auto", description=PROVIDER_OPTION)


_FA3_ON_HOPPER = tuple(build for build in builds_for(HOPPER) if build.version == 3)
_FA4_IN_VLLM = tuple(build for build in builds_for((10, 0)) if build.library is VLLM_WITH_FA4)

GATHERED_HEADS = Fact(
    (8, 16, 32, 64, 128), f"{VLLM_FA4} use_sparse_decode; {_VLLM_BACKEND} FlashAttnMLASparseFA4Backend"
)
"""Numbers of query heads that FA4 gathers for."""
_GATHERED_KEYS = 128
"""FA4's lists of rows hold a multiple of this many (``gather_kv_length``)."""
_NEVER_RUN = "FlashAttention 4's sparse MLA was never run here; its call is held to vLLM 0.33's source"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashAttnMLASparseOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build of FA3, on Blackwell vLLM's FA4, or what each one lacks; phases run alike."""
    gathers = device.compute_capability is not None and device.compute_capability[0] == 10
    # The capabilities refuse other devices. For those Hopper's builds name further obstacles.
    capability = device.compute_capability if gathers else HOPPER
    chosen = choose(
        _FA4_IN_VLLM if gathers else _FA3_ON_HOPPER,
        environment,
        lambda build: _gather_objections(config) if gathers else decode_objections(config),
        pins=pin_provider("FLASH_ATTN_MLA_SPARSE", options.provider),
        capability=capability,
    )
    if not isinstance(chosen, FlashAttnBuild):
        return chosen
    made = BackendPlan(
        kernel=kernel_of(chosen, True),
        path="FA3 with q_v over pages of one token",
        because="FA3 packs the heads that there are and pads none; the indices are its page table",
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(MLA,),
        kernel_block_sizes=(64, 1),
        cuda_graph="UNIFORM_BATCH",
        provider=chosen.provider,
        notes=notes_on_build(chosen, capability),
    )
    if not gathers:
        return made
    return replace(
        made,
        kernel=GatherKernel(4, chosen.distribution, paged=False),
        path="FA4 with q_v over gathered rows",
        because="one launch gathers the chosen rows of every token, and splits them where tokens are few",
        notes=(ALLOCATES_OUTPUT, *made.notes),
        unverified=(_NEVER_RUN,),
    )


def _gather_objections(config: AttentionConfig) -> list[Objection]:
    """Return the reasons against FA4 (vLLM 0.33.0 vllm_flash_attn/cute/interface.py, ``gather_kv_indices``)."""
    rank, rope, heads = config.kv_lora_rank or 0, config.qk_rope_head_dim or 0, config.num_heads
    top_k = config.sparse_top_k or 0
    found: list[Objection] = []
    if config.dtype != "bfloat16":
        found.append(Objection("dtype", "bfloat16", f"dtype {config.dtype}", config.dtype))
    if rank != 512:
        found.append(Objection("kv-lora-rank", "512", f"kv_lora_rank {rank}", rank))
    if rope != 64:
        found.append(Objection("qk-rope-head-dim", "64", f"qk_rope_head_dim {rope}", rope))
    if heads not in GATHERED_HEADS.value:
        accepted = ", ".join(map(str, GATHERED_HEADS.value))
        found.append(Objection("num-heads", accepted, f"{heads} query heads", heads))
    if top_k % _GATHERED_KEYS:
        found.append(Objection("sparse-top-k", f"multiples of {_GATHERED_KEYS}", f"sparse_top_k {top_k}", top_k))
    if config.batch_invariant:
        found.append(Objection("batch-invariant", "False", "batch_invariant", True))
    return found


FLASH_ATTN_MLA_SPARSE = BackendSpec(
    name="FLASH_ATTN_MLA_SPARSE",
    summary="sparse MLA with a 16-bit cache: FlashAttention 3 on Hopper, 4 on Blackwell, over the chosen tokens",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flash_attn.runtime.flash_attn_mla_sparse:FlashAttnMLASparseBackend",
    libraries=LIBRARIES,
    options=FlashAttnMLASparseOptions,
)
