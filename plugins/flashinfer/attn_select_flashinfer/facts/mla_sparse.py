"""``FLASHINFER_MLA_SPARSE``: sparse MLA (DeepSeek Sparse Attention) on Blackwell, both phases through one kernel.

It is called through ``trtllm_batch_decode_with_kv_cache_mla`` with ``sparse_mla_top_k`` and one row of token slots per
query token. On 10.x that is trtllm-gen, whose batch, here the query tokens, ends at 8192 (``_TRTLLM_GEN_MLA_MAX_BATCH``
in flashinfer/mla/_core.py 0.6.14); on 12.x it is FlashInfer's own kernel for the 656-byte token format.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from attn_select.backends.reasons import block_size_reason
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
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import (
    CONVERTED,
    DECODERS,
    LAUNCHER,
    LIBRARIES,
    MIB,
    MLA_CORE,
    NO_V_HEAD_SIZE,
    NO_VARIANTS,
    ONE_CACHE_DTYPE,
    TRTLLM_GEN_CAPABILITIES,
    Release,
    padded_heads,
    pages,
    release,
    upgrade,
    wrong_device,
)
from attn_select_flashinfer.facts.mla_kernels import MAX_HEADS, MLAKernel

_VLLM_SPARSE = "vllm-project/vllm v1/attention/backends/mla/flashinfer_mla_sparse.py 0.33.0"
_SM120 = "flashinfer-ai/flashinfer csrc/sparse_mla_sm120_prefill.cu v0.6.14"
NAN_SLOT_SAFE_12 = Fact(
    False,
    "flashinfer include/flashinfer/attention/sparse_mla_sm120/decode_dsv3_2_kernel.cuh v0.6.14: slots of -1 are read "
    "as slot 0 and masked by their score; vllm-project/vllm #57158",
)
TOP_K_SM12X = 2048
"""The only top-k with a 12.x prefill kernel before 0.7 (csrc/sparse_mla_sm120_prefill.cu v0.6.14, dispatch_v32)."""
ANY_TOP_K_SM12X: Fact[Release] = Fact(
    (0, 7, 0),
    "flashinfer/mla/_sparse_mla_sm120.py 0.7.0: the top-k is an argument of the kernels, of prefill in tiles of 64",
)
TOP_K_STEP = 64
"""What a top-k is a multiple of since then."""

CAPABILITIES = Capabilities(
    mla=True,
    sparse=True,
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)), ((12, 0), (12, 0)), ((12, 1), (12, 1)))),
        f"{MLA_CORE} trtllm_batch_decode_with_kv_cache_mla (trtllm-gen; backend sparse on 12.x)",
    ),
    dtypes=Fact(
        ("bfloat16", "float16"),
        f"{MLA_CORE}: with an FP8 cache the query is quantised from either; out is bfloat16, which is converted",
    ),
    kv_cache_dtypes=Fact(
        ("bfloat16", "fp8_e4m3", "fp8_ds_mla"), f"{MLA_CORE}; flashinfer tests/attention/test_trtllm_gen_mla.py v0.6.14"
    ),
    head_sizes=Fact(HeadSizes((576,)), f"{MLA_CORE}; {_SM120}"),
    block_sizes=Fact(
        (64, 32), f"{MLA_CORE} (32 and 64 on 10.x); flashinfer/mla/_sparse_mla_sm120.py 0.6.14 (64 on 12.x)"
    ),
    attn_types=DECODERS,
    mixed_kv_cache_dtype=ONE_CACHE_DTYPE,
    v_head_size_differs=NO_V_HEAD_SIZE,
    sliding_window=NO_VARIANTS,
    logits_soft_cap=NO_VARIANTS,
    alibi=NO_VARIANTS,
    mm_prefix=NO_VARIANTS,
    sinks=Fact(True, f"{MLA_CORE} (sinks; attn_sink on 12.x)"),
    non_causal=Fact(True, f"{MLA_CORE}: what a token sees is the list of slots that it is given"),
    batch_invariant=Fact(False, "flashinfer-ai/flashinfer #2107"),
    per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
    output_quantizations=Fact((), f"{MLA_CORE}: out is bfloat16"),
    decode_context_parallel=Fact(True, f"{LAUNCHER} (lse); {_VLLM_SPARSE} supports_dcp"),
    nan_tail_safe=Fact(
        False,
        f"on 12.x: {NAN_SLOT_SAFE_12.source}; on 10.x a row is filled up with slots of its own, so no other's is read",
    ),
    speculative_tokens=Fact(1024, f"{_VLLM_SPARSE}: every query token is a row of its own"),
)


class FlashInferMLASparseOptions(BackendOptions):
    """``[backends.FLASHINFER_MLA_SPARSE]``."""

    workspace_bytes: Annotated[int, Field(ge=40 * MIB, le=1 << 40, strict=True)] = Field(
        394 * MIB, description="zeroed scratch, shared by both phases"
    )


_DEVICES = frozenset((*TRTLLM_GEN_CAPABILITIES, (12, 0), (12, 1)))
_PAGES_10, _PAGES_12 = (64, 32), (64,)
_CACHE_ON_10 = ("bfloat16", "fp8_e4m3")
_CACHE_ON_12 = ("fp8_ds_mla", "fp8_e4m3")
_ALIAS = "fp8_e4m3 is stored as fp8_ds_mla, the one FP8 format of sparse MLA here"
_NOTES_12 = (
    "both phases share the workspace",
    "one row of top-k token slots per query token",
    "slot 0 is read for indices of -1, so block 0 must be no request's: BlockPool(..., null_block=True)",
)
_NOTES_10 = (
    "both phases share the workspace, which is zeroed before its first use",
    "one row of top-k token slots per query token, valid ones moved to its front",
    "at most 8192 query tokens per call: longer prefills are cut",
)
_DCP_NOTE = "with the log-sum-exp calls are cut as the workspace demands, 2 KiB per query token and head"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashInferMLASparseOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Plan one phase; both run the same kernel and differ in nothing but their queries."""
    capability = device.compute_capability
    if capability not in _DEVICES:
        return wrong_device(CAPABILITIES, device)
    on_10 = capability in TRTLLM_GEN_CAPABILITIES
    reasons: list[Reason] = []
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (512, 64):
        seen = f"{config.kv_lora_rank} + {config.qk_rope_head_dim}"
        reasons.append(
            Reason("mla-dims", f"kv_lora_rank + qk_rope_head_dim {seen} (supported: 512 + 64)", seen, ["512 + 64"])
        )
    if config.num_heads > MAX_HEADS:
        message = f"{config.num_heads} query heads (supported: 1 to {MAX_HEADS})"
        reasons.append(Reason("num-heads", message, config.num_heads, f"1 to {MAX_HEADS}"))
    cache = config.cache_dtype
    if config.dtype == "float16" and not (on_10 and cache == "fp8_e4m3"):
        message = "float16 (supported: bfloat16; on compute capability 10.x float16 too with an fp8_e4m3 cache)"
        reasons.append(Reason("dtype", message, "float16", ["bfloat16"], "--dtype bfloat16"))
    if on_10:
        if cache not in _CACHE_ON_10:
            reasons.append(_cache_reason(cache, _CACHE_ON_10, "10.x", "--kv-cache-dtype auto"))
    else:
        if cache not in _CACHE_ON_12:
            reasons.append(_cache_reason(cache, _CACHE_ON_12, "12.x", "--kv-cache-dtype fp8_ds_mla"))
        reasons += _against_top_k(config.sparse_top_k or 0, environment)
    sizes = _PAGES_10 if on_10 else _PAGES_12
    if config.block_size is not None and not any(config.block_size % size == 0 for size in sizes):
        reasons.append(block_size_reason(config.block_size, sizes))
    return reasons or _plan(config, options, on_10)


def _plan(config: AttentionConfig, options: FlashInferMLASparseOptions, on_10: bool) -> BackendPlan:
    notes: tuple[str, ...] = _NOTES_10 if on_10 else _NOTES_12
    heads = padded_heads(config.num_heads)
    if heads != config.num_heads:
        notes = (*notes, f"query heads are padded from {config.num_heads} to {heads}")
    if on_10 and config.decode_context_parallel_size > 1:
        notes = (*notes, _DCP_NOTE)
    fp8 = config.kv_cache_dtype == "fp8_e4m3"
    if fp8 and not on_10:
        notes = (*notes, _ALIAS)
    if config.dtype == "float16":
        notes = (*notes, CONVERTED)
    fp8_query = fp8 and on_10
    return BackendPlan(
        kernel=MLAKernel("trtllm-gen" if on_10 else "sparse", heads, fp8_query),
        path="TRT-LLM (trtllm-gen, sparse)" if on_10 else "FlashInfer sparse (12.x)",
        because="Blackwell's own sparse MLA kernel" if on_10 else "the sparse MLA kernel for compute capability 12.x",
        query_dtype="fp8_e4m3" if fp8_query else config.dtype,
        returns_lse=True,
        kv_layouts=(MLA,) if on_10 else (FP8_DS_MLA,),
        kernel_block_sizes=pages(_PAGES_10 if on_10 else _PAGES_12, config.block_size),
        cuda_graph="UNIFORM_BATCH",
        workspace_bytes=options.workspace_bytes,
        nan_tail_safe=on_10 or NAN_SLOT_SAFE_12.value,
        notes=notes,
    )


def _against_top_k(top_k: int, environment: Environment) -> list[Reason]:
    """Return the reason against a top-k on 12.x, where the release or the kernels' tile does not take it."""
    if top_k == TOP_K_SM12X:
        return []
    if release(environment) < ANY_TOP_K_SM12X.value:
        accepts: Any = [TOP_K_SM12X]
        needed = f"{TOP_K_SM12X}; others need flashinfer-python {'.'.join(map(str, ANY_TOP_K_SM12X.value))}"
        remedy = upgrade(ANY_TOP_K_SM12X) if top_k % TOP_K_STEP == 0 else f"--sparse-top-k {TOP_K_SM12X}"
    elif top_k % TOP_K_STEP:
        accepts = needed = f"multiples of {TOP_K_STEP}"
        remedy = f"--sparse-top-k {-(-top_k // TOP_K_STEP) * TOP_K_STEP}"
    else:
        return []
    message = f"top-k {top_k} (supported on compute capability 12.x: {needed})"
    return [Reason("sparse-top-k", message, top_k, accepts, remedy)]


def _cache_reason(cache: str, accepted: tuple[str, ...], where: str, remedy: str) -> Reason:
    message = f"KV-cache dtype {cache} (supported on compute capability {where}: {', '.join(accepted)})"
    return Reason("kv-cache-dtype", message, cache, list(accepted), remedy)


def compile_key(config: AttentionConfig) -> object:
    """Return what FlashInfer compiles one module for on 12.x; trtllm-gen comes compiled."""
    return config.kv_cache_dtype


FLASHINFER_MLA_SPARSE = BackendSpec(
    name="FLASHINFER_MLA_SPARSE",
    summary="FlashInfer sparse MLA: trtllm-gen on 10.x, its own kernel for fp8_ds_mla on 12.x",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flashinfer.runtime.mla_sparse:FlashInferMLASparseBackend",
    libraries=LIBRARIES,
    options=FlashInferMLASparseOptions,
    compile_key=compile_key,
)
