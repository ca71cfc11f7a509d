"""``FLASHINFER_MLA_SPARSE``: sparse MLA (DeepSeek Sparse Attention), both phases through one kernel.

On 10.x and 12.x it is called through ``trtllm_batch_decode_with_kv_cache_mla`` with ``sparse_mla_top_k`` and one row of
token slots per query token. On 10.x that is trtllm-gen, whose batch, here the query tokens, ends at 8192
(``_TRTLLM_GEN_MLA_MAX_BATCH`` in flashinfer/mla/_core.py 0.6.14); on 12.x it is FlashInfer's own kernel for the
656-byte token format. On 9.0 it is the fa3 kernel of ``BatchMLAPagedAttentionWrapper`` on pages of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from attn_select.backends.reasons import device_reasons, unsupported
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
    LAUNCHER,
    LIBRARIES,
    MIB,
    MLA_CORE,
    NATIVE_MLA_RELEASES,
    TRTLLM_GEN_CAPABILITIES,
    Release,
    padded_heads,
    page_reasons,
    pages,
    release,
    text_of,
    upgrade,
    wrong_release,
)
from attn_select_flashinfer.facts.mla_kernels import MLAKernel, MLAKernelName, dims_reasons, head_reasons

_VLLM_SPARSE = "vllm-project/vllm v1/attention/backends/mla/flashinfer_mla_sparse.py 0.33.0"
_VLLM_SM90 = "vllm-project/vllm v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py 0.33.0"
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

WITHOUT_ROPE: Fact[Release] = Fact(
    (0, 6, 18),
    f"{_VLLM_SM90} supports_combination; csrc/batch_mla_sm90_run.cu and attention/mla_hopper.cuh 0.7.2.post1",
)
"""Since when fa3 takes latents of ``512 + 0``."""

CAPABILITIES = Capabilities(
    mla=True,
    sparse=True,
    compute_capabilities=Fact(
        ComputeCapabilities(
            (((9, 0), (9, 0)), ((10, 0), (10, 0)), ((10, 3), (10, 3)), ((12, 0), (12, 0)), ((12, 1), (12, 1)))
        ),
        f"{MLA_CORE} trtllm_batch_decode_with_kv_cache_mla (trtllm-gen; backend sparse on 12.x); {_VLLM_SM90} (9.0)",
    ),
    dtypes=Fact(
        ("bfloat16", "float16"),
        f"{MLA_CORE}: with an FP8 cache the query is quantised from either; out is bfloat16, which is converted",
    ),
    kv_cache_dtypes=Fact(
        ("bfloat16", "float16", "fp8_e4m3", "fp8_ds_mla"),
        f"{MLA_CORE}; flashinfer tests/attention/test_trtllm_gen_mla.py v0.6.14",
    ),
    head_sizes=Fact(HeadSizes((512, 576)), f"{MLA_CORE}; {_SM120}; {_VLLM_SM90} (512 on 9.0)"),
    block_sizes=Fact(
        (64, 32), f"{MLA_CORE} (32 and 64 on 10.x); flashinfer/mla/_sparse_mla_sm120.py 0.6.14 (64 on 12.x)"
    ),
    sinks=Fact(True, f"{MLA_CORE} (sinks; attn_sink on 12.x)"),
    non_causal=Fact(True, f"{MLA_CORE}: what a token sees is the list of slots that it is given"),
    batch_invariant=Fact(False, "flashinfer-ai/flashinfer #2107"),
    per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
    decode_context_parallel=Fact(True, f"{LAUNCHER} (lse); {_VLLM_SPARSE} supports_dcp"),
    nan_tail_safe=Fact(
        False,
        f"on 12.x: {NAN_SLOT_SAFE_12.source}; elsewhere a row is filled up with slots of its own, so no other's is "
        "read",
    ),
    speculative_tokens=Fact(1024, f"{_VLLM_SPARSE}: every query token is a row of its own"),
)


class FlashInferMLASparseOptions(BackendOptions):
    """``[backends.FLASHINFER_MLA_SPARSE]``."""

    workspace_bytes: Annotated[int, Field(ge=40 * MIB, le=1 << 40, strict=True)] | None = Field(
        None, description="scratch, shared by both phases; left out: 394 MiB, on compute capability 9.0 128 MiB"
    )


@dataclass(frozen=True, slots=True)
class SparseFacts:
    """What is true of one kernel."""

    name: MLAKernelName  # FlashInfer's name of it
    where: str  # the compute capabilities that have it, in words
    path: str  # path, because: as ``BackendPlan`` has them
    because: str
    caches: tuple[str, ...]  # accepted dtypes of the cache, the usual one first
    notes: tuple[str, ...]  # of every plan
    dims: tuple[tuple[int, int], ...] = ((512, 64),)  # accepted ``(kv_lora_rank, qk_rope_head_dim)``
    pages: tuple[int, ...] = (64, 32)  # sizes of blocks in tokens, preferred first
    layout: str = MLA  # of the cache
    fp8_query: bool = False  # whether an FP8 cache wants an FP8 query
    blackwell: bool = True  # whether query heads are padded, and it takes attention sinks
    workspace_bytes: int = 394 * MIB  # scratch
    nan_tail_safe: bool = True  # whether NaN in slots that nobody chose leaves the result alone
    unverified: tuple[str, ...] = ()  # what nobody has run


_ROWS = "one row of top-k token slots per query token"
_IN_FRONT = f"{_ROWS}, valid ones moved to its front"
_SHARED = "both phases share the workspace"
NATIVE = SparseFacts(
    name="fa3",
    where="9.0",
    path="native fa3 (sparse: pages of one token)",
    because="Hopper's own MLA kernel",
    dims=((512, 64), (512, 0)),
    caches=("bfloat16", "float16", "fp8_e4m3"),
    blackwell=False,
    workspace_bytes=128 * MIB,
    notes=(_SHARED, _IN_FRONT),
    unverified=("sparse MLA by FlashInfer's fa3 kernel was never executed on a GPU from here",),
)
TRTLLM_GEN = SparseFacts(
    name="trtllm-gen",
    where="10.x",
    path="TRT-LLM (trtllm-gen, sparse)",
    because="Blackwell's own sparse MLA kernel",
    caches=("bfloat16", "fp8_e4m3"),
    fp8_query=True,
    notes=(
        f"{_SHARED}, which is zeroed before its first use",
        _IN_FRONT,
        "at most 8192 query tokens per call: longer prefills are cut",
    ),
)
SPARSE_12 = SparseFacts(
    name="sparse",
    where="12.x",
    path="FlashInfer sparse (12.x)",
    because="the sparse MLA kernel for compute capability 12.x",
    caches=("fp8_ds_mla", "fp8_e4m3"),
    pages=(64,),
    layout=FP8_DS_MLA,
    nan_tail_safe=NAN_SLOT_SAFE_12.value,
    notes=(
        _SHARED,
        _ROWS,
        "slot 0 is read for indices of -1, so block 0 must be no request's: BlockPool(..., null_block=True)",
    ),
)
KERNELS = {(9, 0): NATIVE, (12, 0): SPARSE_12, (12, 1): SPARSE_12} | dict.fromkeys(TRTLLM_GEN_CAPABILITIES, TRTLLM_GEN)

_ALIAS = "fp8_e4m3 is stored as fp8_ds_mla, the one FP8 format of sparse MLA here"
_DCP_NOTE = "with the log-sum-exp calls are cut as the workspace demands, 2 KiB per query token and head"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashInferMLASparseOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Plan one phase; both run the same kernel and differ in nothing but their queries."""
    kernel = KERNELS.get(device.compute_capability) if device.compute_capability else None
    if kernel is None:
        return device_reasons(CAPABILITIES.compute_capabilities.value, device)
    reasons = wrong_release(environment, kernel.path, NATIVE_MLA_RELEASES) if kernel is NATIVE else []
    reasons += _against_dims(config, kernel, environment) + head_reasons(config)
    cache, caches = config.cache_dtype, [*kernel.caches]
    if cache not in kernel.caches:
        what = f"on compute capability {kernel.where} KV-cache dtype"
        usual = caches[0] if kernel is SPARSE_12 else "auto"
        reasons.append(unsupported("kv-cache-dtype", what, cache, caches, f"--kv-cache-dtype {usual}"))
    # Where the cache is not FP8, fa3 computes in either dtype; trtllm-gen converts what it writes of an FP8 query.
    fp8, kinds = cache == "fp8_e4m3", {"fa3": False, "trtllm-gen": True}
    if config.dtype == "float16" and kinds.get(kernel.name) is not fp8:
        what = f"with this cache on compute capability {kernel.where} dtype"
        reasons.append(unsupported("dtype", what, "float16", ["bfloat16"], "--dtype bfloat16"))
    if config.sinks and not kernel.blackwell:
        reasons.append(Reason("sinks", f"{kernel.path} takes no attention sinks", True, False))
    if kernel is SPARSE_12:
        reasons += _against_top_k(config.sparse_top_k or 0, environment)
    reasons += page_reasons(kernel.pages, config.block_size)
    if reasons:
        return reasons
    heads = padded_heads(config.num_heads) if kernel.blackwell else config.num_heads
    fp8_query = fp8 and kernel.fp8_query
    notes = {
        f"query heads are padded from {config.num_heads} to {heads}": heads != config.num_heads,
        _DCP_NOTE: kernel is TRTLLM_GEN and config.decode_context_parallel_size > 1,
        _ALIAS: fp8 and kernel is SPARSE_12,
        CONVERTED: config.dtype == "float16" and kernel is TRTLLM_GEN,
    }
    return BackendPlan(
        kernel=MLAKernel(kernel.name, heads, fp8_query),
        path=kernel.path,
        because=kernel.because,
        query_dtype="fp8_e4m3" if fp8_query else config.dtype,
        returns_lse=True,
        kv_layouts=(kernel.layout,),
        kernel_block_sizes=pages(kernel.pages, config.block_size),
        cuda_graph="UNIFORM_BATCH",
        workspace_bytes=options.workspace_bytes or kernel.workspace_bytes,
        nan_tail_safe=kernel.nan_tail_safe,
        notes=(*kernel.notes, *(note for note, holds in notes.items() if holds)),
        unverified=kernel.unverified,
    )


def _against_dims(config: AttentionConfig, kernel: SparseFacts, environment: Environment) -> list[Reason]:
    reasons = dims_reasons(config, kernel.dims)
    if not reasons and not config.qk_rope_head_dim and release(environment) < WITHOUT_ROPE.value:
        seen = f"{config.kv_lora_rank} + 0"
        text = f"kv_lora_rank + qk_rope_head_dim {seen} (needs flashinfer-python {text_of(WITHOUT_ROPE)})"
        return [Reason("mla-dims", text, seen, ["512 + 64"], upgrade(WITHOUT_ROPE))]
    return reasons


def _against_top_k(top_k: int, environment: Environment) -> list[Reason]:
    """Return the reason against a top-k on 12.x, where the release or the kernels' tile does not take it."""
    if top_k == TOP_K_SM12X:
        return []
    what, whole = "on compute capability 12.x top-k", -(-top_k // TOP_K_STEP) * TOP_K_STEP
    if release(environment) < ANY_TOP_K_SM12X.value:
        remedy = upgrade(ANY_TOP_K_SM12X) if top_k == whole else f"--sparse-top-k {TOP_K_SM12X}"
        return [unsupported("sparse-top-k", what, top_k, [TOP_K_SM12X], remedy)]
    if top_k == whole:
        return []
    return [unsupported("sparse-top-k", what, top_k, f"multiples of {TOP_K_STEP}", f"--sparse-top-k {whole}")]


def compile_key(config: AttentionConfig) -> object:
    """Return what FlashInfer compiles one module for on 9.0 and 12.x; trtllm-gen comes compiled."""
    return config.dtype, config.kv_cache_dtype, config.qk_rope_head_dim


FLASHINFER_MLA_SPARSE = BackendSpec(
    name="FLASHINFER_MLA_SPARSE",
    summary="FlashInfer sparse MLA: fa3 on 9.0, trtllm-gen on 10.x, its own kernel for fp8_ds_mla on 12.x",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flashinfer.runtime.mla_sparse:FlashInferMLASparseBackend",
    libraries=LIBRARIES,
    options=FlashInferMLASparseOptions,
    compile_key=compile_key,
)
