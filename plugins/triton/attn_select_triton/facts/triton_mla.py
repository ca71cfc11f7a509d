"""``TRITON_MLA``: dense multi-head latent attention (arXiv 2405.04434): prefill decompressed, decode on the latent."""

from __future__ import annotations

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.facts.planned_kernels import MLADecodeKernel, PrefillKernel
from attn_select_triton.facts.triton_support import (
    ANY_STRIDE,
    COMPILED,
    COMPILER_VARIABLES,
    KV_CACHE_DTYPES,
    LIBRARIES,
    NAN_TAIL_SAFE,
    OWN,
    PREFILL_HEAD_SIZES,
    TURING_AND_UP,
    device_reasons,
    gluon_marks,
    marked,
    notes,
    split_workspace,
)
from attn_select_triton.limits import GLUON_CAPABILITY, gluon_lacks

# Accepted ``kv_lora_rank``: the contraction of ``tl.dot`` goes in steps of 16; DeepSeek-V2 and V3 have 512.
LORA_RANKS = HeadSizes(multiple_of=16, minimum=16, maximum=512)
# Accepted ``qk_rope_head_dim``; DeepSeek-V2 and V3 have 64.
ROPE_SIZES = HeadSizes(multiple_of=16, minimum=16, maximum=128)
HEAD_TILE = 64  # The most query rows (heads x draft tokens) that one decode program holds
# Half the pieces per SM that the workspace of split-KV decode has room for, of requests in several pieces. One program
# fills an SM; the rest is for requests of unequal lengths: twice as much room was worth 0.2 % where the survey's were
# simulated.
PROGRAMS_PER_SM = 2


_RAN = "ran on an H100, triton 3.6.0"


def _capabilities(reads_cache: bool) -> Capabilities:
    return Capabilities(
        compute_capabilities=TURING_AND_UP,
        dtypes=Fact(("bfloat16", "float16"), f"{_RAN}; {COMPILED}: from 7.5 on; {OWN}: no float32 latent"),
        kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"), f"{_RAN}; {KV_CACHE_DTYPES.source}"),
        head_sizes=Fact(HeadSizes(multiple_of=16, minimum=32, maximum=640), f"{OWN}: rank and rope part by themselves"),
        block_sizes=Fact((16,), ANY_STRIDE),
        mla=True,
        reads_cache=reads_cache,
        mixed_kv_cache_dtype=Fact(True, f"{OWN}: casts the latent to the query's dtype as it loads"),
        non_causal=Fact(True, f"{OWN}: each query row has its own number of keys"),
        batch_invariant=Fact(True, f"{OWN}: splits of a fixed number of tokens"),
        per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
        output_quantizations=Fact((), f"{OWN}: no output scale"),
        decode_context_parallel=Fact(True, f"{OWN}: returns the log-sum-exp; positions come from a tensor"),
        nan_tail_safe=NAN_TAIL_SAFE,
    )


PREFILL = _capabilities(reads_cache=False)
DECODE = _capabilities(reads_cache=True)
# Of decode, preferred first: a tile of up to 64 keys then lies in one block. Other multiples of 16 run as they are.
BLOCK_SIZES = (64, 32, 16)

# Head sizes of QK and of V for which the warp-specialised prefill was run.
PREFILL_SIZES = ((96, 64), (192, 128), (256, 256))

_PREFILL = "TRITON_ATTN's prefill kernel on decompressed keys and values"
_WARPS = "TRITON_ATTN's warp-specialised prefill (Gluon) on decompressed keys and values"
_SPLIT = "keys split until every SM has work"
_FIXED = "splits of a fixed number of tokens: batch invariance"
_FIXED_GROWS = "partial results of fixed splits are reserved for the longest request and the largest batch of decodes"


def warp_specialised_prefill(config: AttentionConfig, device: Device) -> bool:
    """Whether the Gluon kernel computes these layers' prefills on this device."""
    qk_size = (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0)
    return device.compute_capability == GLUON_CAPABILITY and (qk_size, config.v_head_dim) in PREFILL_SIZES


def dim_reason(name: str, value: int, supported: str) -> Reason:
    """Return what speaks against a size of MLA's."""
    return Reason("mla-dims", f"{name} {value} (supported: {supported})", {name: value}, supported)


def _dim_reasons(config: AttentionConfig, phase: Phase) -> list[Reason]:
    rope, v_dim = config.qk_rope_head_dim or 0, config.v_head_dim or 0
    if phase == "prefill":
        dims = (
            ("qk_nope_head_dim + qk_rope_head_dim", (config.qk_nope_head_dim or 0) + rope, PREFILL_HEAD_SIZES),
            ("v_head_dim", v_dim, PREFILL_HEAD_SIZES),
        )
    else:
        dims = ("kv_lora_rank", config.kv_lora_rank or 0, LORA_RANKS), ("qk_rope_head_dim", rope, ROPE_SIZES)
    return [dim_reason(name, dim, str(sizes)) for name, dim, sizes in dims if not sizes.accepts(dim)]


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what the kernels and Triton cannot do for these dimensions on this device."""
    return marked(_plan(config, device, environment, phase), config, device.compute_capability)


def _plan(
    config: AttentionConfig, device: Device, environment: Environment, phase: Phase
) -> BackendPlan | list[Reason]:
    decode = phase == "decode"
    reasons = device_reasons(config, device, environment, decode) + _dim_reasons(config, phase)
    if reasons:
        return reasons
    said = notes(config, device)
    # Chunked prefill loops on host lengths, so mixed batches are not captured.
    if not decode:
        warps = warp_specialised_prefill(config, device)
        return BackendPlan(
            kernel=PrefillKernel(warps),
            path="warp-specialised prefill" if warps else "prefill",
            because=_WARPS if warps else _PREFILL,
            query_dtype=config.dtype,
            returns_lse=True,
            kv_layouts=(),
            kernel_block_sizes=(),
            cuda_graph="UNIFORM_BATCH",
            notes=said,
            unverified=gluon_marks(environment) if warps else (),
        )
    rank, rope, size = config.kv_lora_rank or 0, config.qk_rope_head_dim or 0, config.block_size or BLOCK_SIZES[0]
    capability = device.compute_capability or (0, 0)
    lacks = gluon_lacks(capability, rank, rope, size, config.dtype, config.cache_dtype)
    fp8_query = lacks is None and config.cache_dtype != config.dtype
    because = f"warp-specialised for Hopper, {rank} + {rope} in blocks of {size} by TMA"
    if fp8_query:
        because += ", scores as products in FP8"
    if lacks:
        because = f"the Gluon kernel {lacks}"
    workspace = 0
    if config.batch_invariant:
        said = (*said, _FIXED_GROWS)
    else:
        workspace = split_workspace(device, PROGRAMS_PER_SM, tile_rows(config), rank)
    because = f"{because}; {_FIXED if config.batch_invariant else _SPLIT}"
    sizes = BLOCK_SIZES if size in BLOCK_SIZES else (size, *BLOCK_SIZES)
    return BackendPlan(
        kernel=MLADecodeKernel(lacks is None, config.batch_invariant, fp8_query),
        path="portable decode" if lacks else "Gluon decode",
        because=because,
        query_dtype="fp8_e4m3" if fp8_query else config.dtype,
        returns_lse=True,
        kv_layouts=(MLA,),
        kernel_block_sizes=sizes,
        cuda_graph="UNIFORM_BATCH",
        workspace_bytes=workspace,
        notes=said,
        unverified=gluon_marks(environment) if lacks is None else (),
    )


def tile_rows(config: AttentionConfig) -> int:
    """Return the query rows of one decode program: all heads of all draft tokens, in steps of 16."""
    rows = config.num_heads * config.max_decode_query_len
    return min(HEAD_TILE, -(-rows // 16) * 16)


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    return (
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.num_heads,
        tile_rows(config),
        config.dtype,
        config.cache_dtype,
        config.block_size,
        config.non_causal,
        config.batch_invariant,
    )


TRITON_MLA = BackendSpec(
    name="TRITON_MLA",
    summary="own Triton kernels for dense MLA, any NVIDIA GPU from Turing up",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    load="attn_select_triton.runtime.triton_mla:TritonMLABackend",
    libraries=LIBRARIES,
    variables=COMPILER_VARIABLES,
    compile_key=compile_key,
)
