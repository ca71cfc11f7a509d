"""``FLASHMLA_SPARSE``: FlashMLA's token-sparse prefill and decode on Hopper and SM100."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from attn_select.config import AttentionConfig, Phase
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.gate import block_size_reason
from attn_select.layouts import FP8_DS_MLA, MLA
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select_flashmla.providers import (
    LIBRARIES,
    SM90_AND_SM100,
    UPSTREAM,
    VLLM_SPARSE,
    Kernel,
    Objection,
    ProviderName,
    Subject,
    pinned,
    refuse,
)

if TYPE_CHECKING:
    from attn_select_flashmla.sparse_runtime import FlashMLASparseBackend

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
    head_sizes=Fact(HeadSizes(values=(576,)), f"{_BOTH} (576; 512 is another model's format)"),
    block_sizes=Fact((1,), f"{_PREFILL} (the cache is one flat run of tokens); FP8: {VLLM_SPARSE} (64-token pages)"),
    sinks=Fact(True, f"{_BOTH} (attn_sink)"),
    # Nothing is masked but by the indices.
    non_causal=Fact(True, _BOTH),
    # vLLM declares none; enable_batch_invariant of its flash_mla_interface.py 0.33.0 raises on SM90.
    batch_invariant=Fact(False, "unverified"),
    decode_context_parallel=Fact(True, f"{_BOTH} (return the LSE); {VLLM_SPARSE} (other ranks' indices become -1)"),
)


class FlashMLASparseOptions(BackendOptions):
    """``[backends.FLASHMLA_SPARSE]``."""

    provider: ProviderName = Field(
        "auto", description="the distribution to take the kernel from; auto is the first that serves the layer"
    )


MOST_HEADS = 128
"""Query heads are padded to 64 or 128 (csrc/api/sparse_decode.h and sparse_fwd.h 9241ae3)."""
FEW_HEADS = 32
"""Below this FP8 prefill runs through the decode kernel, as in vLLM (MIN_HEADS_FOR_BF16_PREFILL, 0.33.0)."""

DEQUANTISED = "sparse bf16 over dequantised KV"
"""The path of a prefill that reads a bfloat16 copy of an FP8 cache."""

_FP8_LAYOUTS, _FP8_BLOCKS = (FP8_DS_MLA,), (64,)
_BF16_LAYOUTS, _BF16_BLOCKS = (MLA,), (64, 1)
_ALIAS = "fp8_e4m3 is stored as fp8_ds_mla (656 bytes a token)"
_PATHS = {
    (False, "prefill"): ("sparse bf16", "the prefill kernel reads the bfloat16 cache"),
    (False, "decode"): ("sparse bf16", "the decode kernel reads FP8 only, so the prefill kernel serves decode"),
    (True, "decode"): ("sparse FP8", "the decode kernel reads fp8_ds_mla"),
}
_FEW = ("sparse FP8", f"below {FEW_HEADS} query heads the decode kernel serves prefill without a bfloat16 copy")
_MANY = (
    DEQUANTISED,
    f"from {FEW_HEADS} query heads on the bfloat16 kernel is worth a copy",
)
_WORKSPACE = "prefill gathers and dequantises the context: 1152 bytes a token"


def objections(kernel: Kernel, config: AttentionConfig, capability: tuple[int, int] | None) -> list[Objection]:
    """Return what speaks against one build on a device of that compute capability; empty: it runs."""
    found: list[Objection] = []
    if config.kv_lora_rank != 512:
        found.append(("kv-lora-rank", "512"))
    if config.num_heads * config.decode_context_parallel_size > MOST_HEADS:
        found.append(("num-heads", f"at most {MOST_HEADS}"))
    if not kernel.sparse.value.accepts(capability):
        found.append(("compute-capability", str(kernel.sparse.value)))
    if config.sinks and not kernel.sinks.value:
        found.append(("sinks", "none"))
    return found


def _describe(code: str, config: AttentionConfig, device: Device) -> Subject:
    if code == "kv-lora-rank":
        return Subject(f"kv_lora_rank {config.kv_lora_rank}", config.kv_lora_rank)
    if code == "num-heads":
        ranks = config.decode_context_parallel_size
        heads = config.num_heads * ranks
        return Subject(
            f"{heads} query heads" + (f", {config.num_heads} from each of {ranks} ranks" * (ranks > 1)), heads
        )
    if code == "compute-capability":
        return Subject(f"compute capability {device.capability_text}", device.capability_text)
    return Subject("attention sinks", True)


def _wrong_device(device: Device) -> Reason:
    """Return the reason against a device that no build has kernels for; which build lacks what does not matter then."""
    seen, accepted = device.capability_text, str(CAPABILITIES.compute_capabilities.value)
    return Reason("compute-capability", f"compute capability {seen} (supported: {accepted})", seen, accepted)


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashMLASparseOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build that runs the phase, or what each one lacks."""
    capability = device.compute_capability
    if not CAPABILITIES.compute_capabilities.value.accepts(capability):
        return [_wrong_device(device)]
    fp8 = config.kv_cache_dtype in ("fp8_ds_mla", "fp8_e4m3")
    size = config.block_size
    pages = [block_size_reason(size, _FP8_BLOCKS)] if fp8 and size is not None and size % 64 else []
    judged = []
    for kernel in pinned(options.provider):
        if environment.has(kernel.library):
            found = objections(kernel, config, capability)
            if not found:
                return pages or _plan(kernel, config, phase, fp8)
            judged.append((kernel, found))
    return pages + refuse(
        judged,
        "FLASHMLA_SPARSE",
        options.provider,
        environment,
        lambda kernel: objections(kernel, config, capability),
        lambda code: _describe(code, config, device),
    )


def _plan(kernel: Kernel, config: AttentionConfig, phase: Phase, fp8: bool) -> BackendPlan:
    heads = config.num_heads * config.decode_context_parallel_size
    notes = kernel.notes
    if fp8 and phase == "prefill":
        path, because = _FEW if heads < FEW_HEADS else _MANY
        if path == _MANY[0]:
            notes = (*notes, _WORKSPACE)
    else:
        path, because = _PATHS[fp8, phase]
    if config.kv_cache_dtype == "fp8_e4m3":
        notes = (*notes, _ALIAS)
    if heads not in (64, MOST_HEADS):
        notes = (*notes, f"query heads are padded from {heads} to {64 if heads < 64 else MOST_HEADS}")
    # 64 in the FP8 kernel, 128 in the others (csrc/sm90, csrc/sm100 9241ae3); -1 marks an index as void.
    multiple = 64 if path == _FEW[0] else 128
    if (config.sparse_top_k or 0) % multiple:
        notes = (*notes, f"top-k indices are padded with -1 from {config.sparse_top_k} to a multiple of {multiple}")
    return BackendPlan(
        path=path,
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=_FP8_LAYOUTS if fp8 else _BF16_LAYOUTS,
        kernel_block_sizes=_FP8_BLOCKS if fp8 else _BF16_BLOCKS,
        cuda_graph="UNIFORM_BATCH",
        provider=kernel.provider,
        notes=notes,
    )


def load() -> type[FlashMLASparseBackend]:
    """Import torch and return the runtime backend; the kernels are imported when a group is made.

    Raises:
        ImportError: torch is not installed.
    """
    from attn_select_flashmla.sparse_runtime import FlashMLASparseBackend

    return FlashMLASparseBackend


FLASHMLA_SPARSE = BackendSpec(
    name="FLASHMLA_SPARSE",
    summary="FlashMLA's token-sparse MLA on Hopper and SM100, bfloat16 or 656-byte FP8 cache",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load=load,
    libraries=LIBRARIES,
    options=FlashMLASparseOptions,
)
