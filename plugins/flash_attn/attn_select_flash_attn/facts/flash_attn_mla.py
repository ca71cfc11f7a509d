"""``FLASH_ATTN_MLA``: FlashAttention 3 with a separate latent query for MLA decode, FA2, FA3 or FA4 for MLA prefill."""

from __future__ import annotations

from pydantic import Field

from attn_select.backends.kernel_builds import PROVIDER_OPTION, Objection, choose, describe_pins
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
    INVARIANCE_UNPROVEN,
    LIBRARIES,
    RAN,
    UPSTREAM_FA2,
    UPSTREAM_FA3,
    VLLM_FA3,
    FlashAttnBuild,
    ProviderName,
    Version,
    builds_for,
    fa4_accepts,
    kernel_of,
    notes_on_build,
    pins_of,
    proves_invariance,
    why_this_build,
)

_VLLM_BACKEND = "vllm-project/vllm v1/attention/backends/mla/flashattn_mla.py 0.33.0"
_VLLM_PREFILL = "vllm-project/vllm v1/attention/backends/mla/prefill/flash_attn.py 0.33.0"
_BOTH = f"{UPSTREAM_FA2}; {UPSTREAM_FA3}"

# FlashAttnMLAImpl of _VLLM_BACKEND raises for alibi_slopes, sliding_window and logits_soft_cap.
DECODE = Capabilities(
    mla=True,
    compute_capabilities=Fact(ComputeCapabilities(((HOPPER, HOPPER),)), f"{UPSTREAM_FA3} (q_v: arch 90); {RAN}"),
    dtypes=Fact(("bfloat16", "float16"), f"{UPSTREAM_FA3} (q_v: fp16 and bf16)"),
    kv_cache_dtypes=Fact(("bfloat16", "float16"), f"{UPSTREAM_FA3} (q_v: fp16 and bf16)"),
    # q is the rope part (at most 64, zeros where there is none), v the latent (256 to 512); `plan` compares both.
    head_sizes=Fact(HeadSizes(multiple_of=8, minimum=256, maximum=576), f"{UPSTREAM_FA3}; {RAN} (512 + 64)"),
    block_sizes=Fact((1,), f"{UPSTREAM_FA3} (any page size); {RAN} (64 with q_v, 1 to 256 without)"),
    sinks=Fact(False, f"{VLLM_FA3} (none where K and V differ in width)"),
    non_causal=Fact(True, f"{UPSTREAM_FA3} (is_causal)"),
    batch_invariant=Fact(True, f"{_VLLM_BACKEND} (num_splits=1)"),
    decode_context_parallel=Fact(True, f"{RAN} (returns the LSE); {_VLLM_BACKEND}"),
    nan_tail_safe=Fact(
        False,
        f"{UPSTREAM_FA3} and {VLLM_FA3} (get_pagedkv_tma: pages of 64 tokens are loaded whole where a request has more "
        "than 64 query rows; scores alone are masked, and 0 times NaN is NaN); seen on H200 with batch invariance, "
        "2026-11-22; a row-by-row load fills V with zeros (hopper/paged_kv.h load_V)",
    ),
)

PREFILL = Capabilities(
    mla=True,
    reads_cache=False,
    compute_capabilities=Fact(
        ComputeCapabilities((((8, 0), (99, 9)),)),
        f"{UPSTREAM_FA2} (Ampere GPUs or newer); vLLM 0.33.0 _vllm_fa2_C holds PTX, which ran on H100, 2026-11-21",
    ),
    dtypes=Fact(("bfloat16", "float16"), _BOTH),
    kv_cache_dtypes=Fact(("bfloat16", "float16"), f"{_VLLM_PREFILL} (K and V are decompressed to the compute dtype)"),
    head_sizes=Fact(HeadSizes(), f"{_VLLM_PREFILL} (the latent is decompressed before)"),
    block_sizes=Fact((1,), f"{_VLLM_PREFILL} (the cache is gathered before)"),
    sinks=Fact(False, f"{VLLM_FA3} (none where K and V differ in width)"),
    non_causal=Fact(True, f"{_BOTH} (is_causal)"),
    batch_invariant=Fact(True, f"{_VLLM_PREFILL} (num_splits=1)"),
    per_head_quant_scales=Fact(True, f"{_VLLM_PREFILL} (scales are applied when the cache is gathered)"),
    decode_context_parallel=Fact(True, f"{_VLLM_PREFILL} (returns the LSE)"),
)


class FlashAttnMLAOptions(BackendOptions):
    """``[backends.FLASH_ATTN_MLA]``."""

    prefill_version: Version = Field(
        "auto",
        description="FlashAttention's major version in prefill (decode: 3); auto is 3 on 9.0, 4 on 10.x, else 2",
    )
    provider: ProviderName = Field("auto", description=PROVIDER_OPTION)


_FA3_ON_HOPPER = tuple(build for build in builds_for(HOPPER) if build.version == 3)
_PAGES = (64, 32, 16, 1)
"""Any size runs. FA3 loads pages of 64 whole, its tile for a latent of 512, and gathers other pages row by row
(hopper/flash_api.cpp 0251105, get_pagedkv_tma)."""
_TILE = 64
"""FA3's tile with a latent above 256: query rows (tokens times heads) and keys (hopper/tile_size.h 0251105)."""
_GATHERED_BLOCKS = "with block_size 32 the kernel reads single rows, and no unused one"
_SPLIT_BYTES = (
    "inside CUDA graphs FA3's split-KV partial sums take num_splits x query heads x (kv_lora_rank + 1) x 4 bytes "
    "per token (vLLM 0.33 caps num_splits at 32)"
)


def decode_objections(config: AttentionConfig) -> list[Objection]:
    """Return the reasons against every FA3 build in decode (hopper/flash_api.cpp 0251105, q_v)."""
    rank, rope = config.kv_lora_rank or 0, config.qk_rope_head_dim or 0
    found: list[Objection] = []
    if rope > 64 or rope % 8:
        found.append(Objection("qk-rope-head-dim", "multiples of 8 up to 64", f"qk_rope_head_dim {rope}", rope))
    if not 256 <= rank <= 512 or rank % 8:
        found.append(Objection("kv-lora-rank", "multiples of 8 from 256 to 512", f"kv_lora_rank {rank}", rank))
    return found


def prefill_objections(
    build: FlashAttnBuild, config: AttentionConfig, capability: tuple[int, int] | None
) -> list[Objection]:
    """Return the reasons against a build in prefill, where V is padded to the width of K if the kernel wants it."""
    qk, v = _prefill_sizes(config)
    found: list[Objection] = []
    accepts = "multiples of 8 up to 256" if qk > 256 or qk % 8 else None
    if build.version == 4:
        major = 9 if capability is None else capability[0]
        accepts = accepts or fa4_accepts(build, qk, v if _fa4_takes(qk, v) else qk, major, False)
    if accepts is not None:
        what = f"QK head size {qk} (qk_nope_head_dim + qk_rope_head_dim)"
        found.append(Objection("qk-head-size", accepts, what, qk))
    if v > qk:
        found.append(
            Objection("v-head-size", "V as wide as QK or narrower", f"v_head_dim {v} with QK head size {qk}", v)
        )
    return found


def _prefill_sizes(config: AttentionConfig) -> tuple[int, int]:
    return (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0), config.v_head_dim or 0


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashAttnMLAOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build that runs the phase, or what each one lacks."""
    decode = phase == "decode"
    # Decode runs on Hopper alone, which the capabilities say. For other devices Hopper's builds name further obstacles.
    capability = HOPPER if decode else device.compute_capability
    pins = pins_of("FLASH_ATTN_MLA", "prefill_version", "auto" if decode else options.prefill_version, options.provider)
    chosen = choose(
        _FA3_ON_HOPPER if decode else builds_for(capability, config.batch_invariant),
        environment,
        lambda build: decode_objections(config) if decode else prefill_objections(build, config, capability),
        pins=pins,
        capability=capability,
    )
    if not isinstance(chosen, FlashAttnBuild):
        return chosen
    if decode:
        why = "FA3 scores the rope part and the latent apart and reads the latent once"
        return _decode_plan(chosen, config, describe_pins(pins) or why)
    return _prefill_plan(chosen, config, capability, describe_pins(pins) or why_this_build(chosen, capability))


def _loads_whole_pages(config: AttentionConfig) -> bool:
    """Return whether FA3 may load the unused rows of a request's last page (hopper/flash_api.cpp, get_pagedkv_tma)."""
    # The page has 64 tokens where the block size is a multiple of that; None may become one. A batch-invariant layer
    # passes the largest query length that the capacity allows (``runtime.schedule``).
    if (config.kv_lora_rank or 0) <= 256 or (config.block_size is not None and config.block_size % _TILE):
        return False
    rows = config.max_decode_query_len * config.num_heads * config.decode_context_parallel_size
    return config.batch_invariant or rows > _TILE


def _decode_plan(build: FlashAttnBuild, config: AttentionConfig, because: str) -> BackendPlan:
    whole = _loads_whole_pages(config)
    notes = {_SPLIT_BYTES: config.cuda_graph != "NEVER", _GATHERED_BLOCKS: whole}
    return BackendPlan(
        kernel=kernel_of(build, True),
        path="FA3 with q_v",
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(MLA,),
        kernel_block_sizes=_PAGES,
        cuda_graph="UNIFORM_BATCH",
        provider=build.provider,
        notes=(*notes_on_build(build, HOPPER), *(note for note, holds in notes.items() if holds)),
        nan_tail_safe=not whole,
    )


def _prefill_plan(
    build: FlashAttnBuild, config: AttentionConfig, capability: tuple[int, int] | None, because: str
) -> BackendPlan:
    qk, v = _prefill_sizes(config)
    own_notes, padding = notes_on_build(build, capability), 0
    fa3 = build.version == 3 and capability == HOPPER
    if v != qk and not (fa3 and _fa3_takes(qk, v)) and not (build.version == 4 and _fa4_takes(qk, v)):
        padding = qk - v
        own_notes = (*own_notes, f"V is padded from {v} to {qk} columns, as wide as QK")
    unproven = config.batch_invariant and not proves_invariance(build, capability)
    return BackendPlan(
        kernel=kernel_of(build, False, padding, splits_keys=build.version != 4 or capability != HOPPER),
        path=f"{build.kernel} varlen",
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(),
        kernel_block_sizes=(),
        cuda_graph="UNIFORM_BATCH",
        provider=build.provider,
        notes=own_notes,
        unverified=(INVARIANCE_UNPROVEN,) if unproven else (),
    )


def _fa3_takes(qk: int, v: int) -> bool:
    """Return whether FA3 takes these widths on Hopper without padding (hopper/flash_api.cpp 0251105, mha_fwd)."""
    return v % 8 == 0 and ((128 < qk <= 192 and 96 < v <= 128) or (qk <= 64 and v <= 512))


def _fa4_takes(qk: int, v: int) -> bool:
    """Return whether FA4 takes these widths without padding (tests/cute/test_flash_attn.py 0251105, dv_vals)."""
    return (qk, v) in ((192, 128), (128, 64))


FLASH_ATTN_MLA = BackendSpec(
    name="FLASH_ATTN_MLA",
    summary="MLA: FlashAttention 3 in decode on Hopper; FlashAttention 2, 3 or 4 in prefill",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    load="attn_select_flash_attn.runtime.flash_attn_mla:FlashAttnMLABackend",
    libraries=LIBRARIES,
    options=FlashAttnMLAOptions,
)
