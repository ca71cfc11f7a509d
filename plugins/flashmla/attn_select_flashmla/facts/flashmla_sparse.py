"""``FLASHMLA_SPARSE``: FlashMLA's token-sparse prefill and decode on Hopper and SM100."""

from __future__ import annotations

from attn_select.backends.kernel_builds import Objection, choose, pin_provider
from attn_select.backends.reasons import device_reasons
from attn_select.backends.spec import BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashmla.facts.builds import (
    BUILDS,
    LIBRARIES,
    SM90_AND_SM100,
    UPSTREAM,
    VLLM_SPARSE,
    FlashMLABuild,
    FlashMLAOptions,
    KernelFunction,
    kernel_of,
)

_DECODE = f"{UPSTREAM}/sparse_decode.h"
_PREFILL = f"{UPSTREAM}/sparse_fwd.h"
_BOTH = f"{_DECODE}; {_PREFILL}"

# Both phases read the cache: bfloat16 through the prefill kernel, which serves decode too; FP8 has a decode kernel.
CAPABILITIES = Capabilities(
    mla=True,
    sparse=True,
    compute_capabilities=Fact(SM90_AND_SM100, f"{_BOTH} (is_sm90a, is_sm100f)"),
    dtypes=Fact(("bfloat16",), _BOTH),
    kv_cache_dtypes=Fact(
        ("bfloat16", "fp8_ds_mla", "fp8_e4m3"),
        f"{_DECODE} (656 bytes a token); {_PREFILL}; {VLLM_SPARSE} (fp8: alias)",
    ),
    # 512 in bfloat16 on SM90: no rope part. In FP8 it is the format of another model, and `objections` refuses it.
    head_sizes=Fact(
        HeadSizes(values=(576, 512)),
        f"{_DECODE} (576); {_PREFILL} (HEAD_DIM_576, HEAD_DIM_512); {VLLM_SPARSE} (512 on SM90 alone); "
        "512 ran on H200, FlashMLA of vLLM 0.26.0, 2026-11-22",
    ),
    block_sizes=Fact((1,), f"{_PREFILL} (the cache is one flat run of tokens); FP8: {VLLM_SPARSE} (64-token pages)"),
    sinks=Fact(True, f"{_BOTH} (attn_sink)"),
    # Nothing is masked but by the indices.
    non_causal=Fact(True, _BOTH),
    batch_invariant=Fact(
        False, f"{VLLM_SPARSE}: not declared; enable_batch_invariant of flash_mla_interface.py 0.33.0 raises on SM90"
    ),
    decode_context_parallel=Fact(True, f"{_BOTH} (return the LSE); {VLLM_SPARSE} (other ranks' indices become -1)"),
)


MOST_HEADS = 128
"""Query heads are padded to 64 or 128 (csrc/api/sparse_decode.h and sparse_fwd.h 9241ae3)."""
FEW_HEADS = 32
"""Below this FP8 prefill runs through the decode kernel, as in vLLM (MIN_HEADS_FOR_BF16_PREFILL, 0.33.0)."""


def objections(build: FlashMLABuild, config: AttentionConfig, device: Device) -> list[Objection]:
    """Return the reasons against one build on a device; nothing: it serves the layer."""
    found: list[Objection] = []
    size, ranks = config.block_size, config.decode_context_parallel_size
    heads = config.num_heads * ranks
    if _reads_fp8(config) and size is not None and size % 64:
        found.append(Objection("block-size", 64, f"block size {size}", size))
    if config.kv_lora_rank != 512:
        found.append(Objection("kv-lora-rank", "512", f"kv_lora_rank {config.kv_lora_rank}", config.kv_lora_rank))
    if config.head_size != 576 and (_reads_fp8(config) or device.compute_capability != (9, 0)):
        where = "with FP8" if _reads_fp8(config) else f"on compute capability {device.capability_text}"
        found.append(Objection("head-size", f"576 {where}", f"head size {config.head_size}", config.head_size))
    if heads > MOST_HEADS:
        what = f"{heads} query heads" + f", {config.num_heads} from each of {ranks} ranks" * (ranks > 1)
        found.append(Objection("num-heads", f"at most {MOST_HEADS}", what, heads))
    if not build.sparse.value.accepts(device.compute_capability):
        seen = device.capability_text
        found.append(Objection("compute-capability", str(build.sparse.value), f"compute capability {seen}", seen))
    if config.sinks and not build.sinks.value:
        found.append(Objection("sinks", "none", "attention sinks", True))
    return found


def _reads_fp8(config: AttentionConfig) -> bool:
    return config.kv_cache_dtype in ("fp8_ds_mla", "fp8_e4m3")


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashMLAOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build that runs the phase, or what each one lacks."""
    # Both phases get the same build: no reason against a build depends on the phase.
    if against := device_reasons(CAPABILITIES.compute_capabilities.value, device):
        return against  # no build has kernels for the device, so it does not matter what each of them lacks besides
    chosen = choose(
        BUILDS,
        environment,
        lambda build: objections(build, config, device),
        pins=pin_provider("FLASHMLA_SPARSE", options.provider),
        capability=device.compute_capability,
    )
    if not isinstance(chosen, FlashMLABuild):
        return chosen
    heads, fp8 = config.num_heads * config.decode_context_parallel_size, _reads_fp8(config)
    function, copies_cache, because = _function(fp8, phase, heads)
    # 64 in the FP8 kernel, 128 in the other (csrc/sm90, csrc/sm100 9241ae3); -1 marks an index as void.
    multiple = 64 if function == "sparse_decode" else 128
    padded = f"top-k indices are padded with -1 from {config.sparse_top_k} to a multiple of {multiple}"
    notes = {
        "prefill gathers and dequantises the context: 1152 bytes a token": copies_cache,
        "fp8_e4m3 is stored as fp8_ds_mla (656 bytes a token)": config.kv_cache_dtype == "fp8_e4m3",
        f"query heads are padded from {heads} to {64 if heads < 64 else MOST_HEADS}": heads not in (64, MOST_HEADS),
        padded: (config.sparse_top_k or 0) % multiple != 0,
    }
    path = "sparse FP8" if function == "sparse_decode" else "sparse bf16"
    return BackendPlan(
        kernel=kernel_of(chosen, function, copies_cache),
        path=f"{path} over dequantised KV" if copies_cache else path,
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(FP8_DS_MLA,) if fp8 else (MLA,),
        kernel_block_sizes=(64,) if fp8 else (64, 1),
        cuda_graph="UNIFORM_BATCH",
        provider=chosen.provider,
        notes=(*chosen.notes, *(note for note, holds in notes.items() if holds)),
    )


def _function(fp8: bool, phase: Phase, heads: int) -> tuple[KernelFunction, bool, str]:
    """Return which function runs, whether on a bfloat16 copy of the cache, and why."""
    if not fp8:
        if phase == "prefill":
            return "sparse_prefill", False, "the prefill kernel reads the bfloat16 cache"
        why = "the decode kernel reads FP8 only, so the prefill kernel serves decode"
        return "sparse_prefill", False, why
    if phase == "decode":
        return "sparse_decode", False, "the decode kernel reads fp8_ds_mla"
    if heads < FEW_HEADS:
        why = f"below {FEW_HEADS} query heads the decode kernel serves prefill without a bfloat16 copy"
        return "sparse_decode", False, why
    return "sparse_prefill", True, f"from {FEW_HEADS} query heads on the bfloat16 kernel is worth a copy"


FLASHMLA_SPARSE = BackendSpec(
    name="FLASHMLA_SPARSE",
    summary="FlashMLA's token-sparse MLA on Hopper and SM100, bfloat16 or 656-byte FP8 cache",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flashmla.runtime.flashmla_sparse:FlashMLASparseBackend",
    libraries=LIBRARIES,
    options=FlashMLAOptions,
)
