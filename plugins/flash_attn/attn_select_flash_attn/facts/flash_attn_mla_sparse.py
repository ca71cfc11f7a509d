"""``FLASH_ATTN_MLA_SPARSE``: FlashAttention 3 over the token slots that an indexer chose, in pages of one token."""

from __future__ import annotations

from pydantic import Field

from attn_select.backends.kernel_builds import PROVIDER_OPTION, choose, pin_provider
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
    HOPPER,
    LIBRARIES,
    UPSTREAM_FA3,
    VLLM_FA3,
    FlashAttnBuild,
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
    compute_capabilities=Fact(ComputeCapabilities(((HOPPER, HOPPER),)), f"{UPSTREAM_FA3} (q_v: arch 90); {_RAN}"),
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
_LAYOUTS, _PAGES = (MLA,), (64, 1)
_BECAUSE = "FA3 packs the heads that there are and pads none; the indices are its page table"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashAttnMLASparseOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build of FA3, or what each one lacks; both phases run alike."""
    pins = pin_provider("FLASH_ATTN_MLA_SPARSE", options.provider)
    # The capabilities refuse other devices. For those Hopper's builds name further obstacles.
    chosen = choose(_FA3_ON_HOPPER, environment, lambda build: decode_objections(config), pins=pins, capability=HOPPER)
    if not isinstance(chosen, FlashAttnBuild):
        return chosen
    return BackendPlan(
        kernel=kernel_of(chosen, True),
        path="FA3 with q_v over pages of one token",
        because=_BECAUSE,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=_LAYOUTS,
        kernel_block_sizes=_PAGES,
        cuda_graph="UNIFORM_BATCH",
        provider=chosen.provider,
        notes=notes_on_build(chosen, HOPPER),
    )


FLASH_ATTN_MLA_SPARSE = BackendSpec(
    name="FLASH_ATTN_MLA_SPARSE",
    summary="sparse MLA on Hopper with a 16-bit cache: FlashAttention 3 over the chosen tokens",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flash_attn.runtime.flash_attn_mla_sparse:FlashAttnMLASparseBackend",
    libraries=LIBRARIES,
    options=FlashAttnMLASparseOptions,
)
