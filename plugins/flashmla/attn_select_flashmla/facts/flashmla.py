"""``FLASHMLA``: FlashMLA's dense decoding on Hopper."""

from __future__ import annotations

from attn_select.backends.kernel_builds import Objection, choose, describe_pins, pin_provider
from attn_select.backends.spec import BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashmla.facts.builds import (
    BUILDS,
    LIBRARIES,
    RAN,
    SM90,
    UPSTREAM,
    VLLM_FP8,
    FlashMLABuild,
    FlashMLAOptions,
    kernel_of,
)

_DENSE = f"{UPSTREAM}/dense_decode.h"
_VLLM_BACKEND = "vllm-project/vllm v1/attention/backends/mla/flashmla.py 0.33.0"

DECODE = Capabilities(
    mla=True,
    # vLLM's backend declares 10.x too and then asserts Hopper.
    compute_capabilities=Fact(SM90, f"{_DENSE} (is_sm90a); {VLLM_FP8} (major 9, minor 0); {RAN}"),
    dtypes=Fact(("bfloat16", "float16"), _DENSE),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3"), f"{_DENSE}; {VLLM_FP8}; {RAN}"),
    # Upstream takes 512 as well, without a rope part. With vLLM 0.26.0 the suite's process ended on an H200 while this
    # width was drawn; that the width is the cause is inferred.
    head_sizes=Fact(HeadSizes(values=(576,)), f"{_DENSE} (576 or 512, V 512); {VLLM_FP8} (576, V 512); {RAN}"),
    block_sizes=Fact((64,), f"{_DENSE} (page_block_size 64); {VLLM_FP8} (64); {RAN}"),
    sinks=Fact(False, f"{UPSTREAM} and flash_mla/flash_mla_interface.py (attn_sink must be None when dense)"),
    non_causal=Fact(True, f"{_DENSE} (is_causal)"),
    # The scheduler splits by the lengths of the whole batch, and the number of its parts is checked.
    batch_invariant=Fact(False, _DENSE),
    per_head_quant_scales=Fact(True, f"{VLLM_FP8} (one scale; there is one KV head)"),
    decode_context_parallel=Fact(True, f"{RAN} (returns the LSE); {_VLLM_BACKEND}"),
)


_SPLITS = (
    "split-KV partial sums take (batch + SM parts) x query heads x query length x (kv_lora_rank + 1) x 4 bytes per call"
)
_CONVERTED = "with FP8 the kernel writes bfloat16, which is converted to float16"


def objections(build: FlashMLABuild, config: AttentionConfig) -> list[Objection]:
    """Return the reasons against one build; nothing: it serves the layer."""
    found: list[Objection] = []
    if config.kv_lora_rank != 512:
        found.append(Objection("kv-lora-rank", "512", f"kv_lora_rank {config.kv_lora_rank}", config.kv_lora_rank))
    if config.kv_cache_dtype == "fp8_e4m3" and not build.dense_fp8.value:
        accepts, remedy = "16-bit KV only in dense decode", "--kv-cache-dtype auto"
        found.append(Objection("kv-cache-dtype", accepts, "KV-cache dtype fp8_e4m3", "fp8_e4m3", remedy))
    return found


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashMLAOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build that runs the layer, or what each one lacks."""
    pins = pin_provider("FLASHMLA", options.provider)
    # The static facts reject every other device.
    chosen = choose(BUILDS, environment, lambda build: objections(build, config), pins=pins, capability=(9, 0))
    if not isinstance(chosen, FlashMLABuild):
        return chosen
    fp8 = config.kv_cache_dtype == "fp8_e4m3"
    notes = {_CONVERTED: fp8 and config.dtype == "float16", _SPLITS: config.cuda_graph != "NEVER"}
    return BackendPlan(
        kernel=kernel_of(chosen, "dense_fp8" if fp8 else "dense"),
        path="dense FP8" if fp8 else "dense",
        because=describe_pins(pins) or "Hopper's dense decode",
        query_dtype="fp8_e4m3" if fp8 else config.dtype,
        returns_lse=True,
        kv_layouts=(MLA,),
        kernel_block_sizes=(64,),
        cuda_graph="UNIFORM_BATCH",
        provider=chosen.provider,
        notes=(*chosen.notes, *(note for note, holds in notes.items() if holds)),
    )


FLASHMLA = BackendSpec(
    name="FLASHMLA",
    summary="FlashMLA's dense MLA decode on Hopper, 16-bit or FP8 cache",
    capabilities={"decode": DECODE},
    plan=plan,
    load="attn_select_flashmla.runtime.flashmla:FlashMLABackend",
    libraries=LIBRARIES,
    options=FlashMLAOptions,
)
