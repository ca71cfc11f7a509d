"""``CUTLASS_MLA``: decode of dense multi-head latent attention on Blackwell, one query token per request."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from attn_select.backends.kernel_builds import PROVIDER_OPTION, Objection, choose, describe_pins, pin_provider
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
from attn_select.errors import shorten
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_cutlass_mla.facts.builds import (
    BUILDS,
    LIBRARIES,
    VLLM_BACKEND,
    VLLM_CSRC,
    CutlassMLABuild,
    ProviderName,
    kernel_of,
)

MIB = 1 << 20
HEADS = 128
"""Query heads that the kernel computes, whatever the layer has."""
MAX_SPLITS = 16
"""The kernel's own choice stops there, to avoid hangs (vLLM 0.33.0 v1/attention/backends/mla/cutlass_mla.py)."""
SPLITS_VARIABLE = "FORCE_NUM_KV_SPLITS"

# What is not named is not served: VLLM_CSRC has no such argument.
CAPABILITIES = Capabilities(
    mla=True,
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)))),
        "vLLM 0.33.0 _C_stable_libtorch: code for sm_100f; flashinfer/jit/mla.py 0.6.14",
    ),
    dtypes=Fact(("bfloat16", "float16"), f"{VLLM_CSRC}; sgl-kernel 0.3.21 sgl_kernel/attention.py"),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3"), f"{VLLM_CSRC} (FP8 with an FP8 query)"),
    head_sizes=Fact(HeadSizes((576,)), f"{VLLM_CSRC}: tile 128 x 128 x (512, 64)"),
    block_sizes=Fact((128,), VLLM_BACKEND),
    mixed_kv_cache_dtype=Fact(False, f"{VLLM_CSRC}: query and cache have one dtype"),
    batch_invariant=Fact(
        False, f"{VLLM_BACKEND}: not declared; the number of KV splits follows the batch ({VLLM_CSRC})"
    ),
    per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
    decode_context_parallel=Fact(True, f"{VLLM_CSRC} (lse); vLLM's kernel only"),
    nan_tail_safe=Fact(
        False,
        "vllm-project/vllm csrc/attention/mla/cutlass_sm100_mla/kernel/sm100_fmha_mla_tma_warpspecialized.hpp 236e0fe: "
        "load_tma copies whole pages of 128 tokens; softmax masks scores alone, and a weight of 0 times NaN is NaN",
    ),
    speculative_tokens=Fact(0, f"{VLLM_CSRC}: one query token per request"),
)


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError(f"0 splits: use -1 for the kernel's own choice, or 1 to {MAX_SPLITS}")
    return value


class CutlassMLAOptions(BackendOptions):
    """``[backends.CUTLASS_MLA]``."""

    num_kv_splits: Annotated[int, Field(ge=-1, le=MAX_SPLITS, strict=True), AfterValidator(_not_zero)] = Field(
        -1,
        description=f"parts into which a request's KV is split; -1: the kernel chooses (sgl-kernel: 1); "
        f"{SPLITS_VARIABLE} overrides it",
    )
    provider: ProviderName = Field("auto", description=PROVIDER_OPTION)
    workspace_bytes: Annotated[int, Field(ge=MIB, le=1 << 40, strict=True)] = Field(
        128 * MIB, description="scratch; it grows to what the kernel asks for before CUDA graphs are captured"
    )


_DEVICES = ((10, 0), (10, 3))
_CONVERTED = "with FP8 the kernel writes bfloat16, which is converted to float16"
_SCALES = "FP8 scales become part of the softmax scale, and the latent's scale multiplies the output"
_GROWS = "the workspace grows to the kernel's own size before CUDA graphs are captured"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: CutlassMLAOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build that serves the layer, or every reason why none does."""
    capability = device.compute_capability
    if capability not in _DEVICES:
        return device_reasons(CAPABILITIES.compute_capabilities.value, device)
    splits, set_by = options.num_kv_splits, f"num_kv_splits = {options.num_kv_splits}"
    malformed: list[Reason] = []
    if (forced := environment.variables.get(SPLITS_VARIABLE)) is not None:
        set_by = f"{SPLITS_VARIABLE}={shorten(forced)}"
        parsed = _parse_splits(forced)
        if parsed is None:
            supported, remedy = ["-1", f"1 to {MAX_SPLITS}"], f"unset {SPLITS_VARIABLE}"
            malformed = [unsupported("environment-variable", SPLITS_VARIABLE, shorten(forced), supported, remedy)]
        splits = parsed or -1
    fixed_by = None if splits == -1 else set_by
    pins = pin_provider("CUTLASS_MLA", options.provider)
    chosen = choose(
        BUILDS,
        environment,
        lambda build: objections(build, config, capability, fixed_by),
        pins=pins,
        capability=capability,
    )
    if not isinstance(chosen, CutlassMLABuild):
        return malformed + chosen
    if malformed:
        return malformed
    fp8, kernel = config.kv_cache_dtype == "fp8_e4m3", kernel_of(chosen, splits)
    heads, number = config.num_heads * config.decode_context_parallel_size, kernel.num_kv_splits
    notes = {
        _SCALES: fp8,
        _CONVERTED: fp8 and config.dtype == "float16",
        f"query heads are padded from {heads} to {HEADS}": heads != HEADS,
        f"KV splits fixed by {fixed_by}": fixed_by is not None,
    }
    first = f"{chosen.distribution} is the first installed package whose build serves the layer"
    return BackendPlan(
        kernel=kernel,
        path="CUTLASS MLA" if number == -1 else f"CUTLASS MLA, {number} KV split{'s' * (number > 1)}",
        because=describe_pins(pins) or first,
        query_dtype="fp8_e4m3" if fp8 else config.dtype,
        returns_lse=chosen.returns_lse.value,
        kv_layouts=(MLA,),
        kernel_block_sizes=(128,),
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE",
        workspace_bytes=options.workspace_bytes,
        provider=chosen.provider,
        notes=(_GROWS, *chosen.notes, *(note for note, holds in notes.items() if holds)),
        nan_tail_safe=False,
    )


def objections(
    build: CutlassMLABuild, config: AttentionConfig, capability: tuple[int, int], splits_fixed_by: str | None
) -> list[Objection]:
    """Return the reasons against one build."""
    # splits_fixed_by: names what fixes the number of KV splits, if anything
    # They have no remedy of their own: vLLM's build removes all that depend on the build.
    found: list[Objection] = []
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (512, 64):
        dims = f"{config.kv_lora_rank} + {config.qk_rope_head_dim}"
        found.append(Objection("mla-dims", "512 + 64", f"kv_lora_rank + qk_rope_head_dim {dims}", dims))
    ranks = config.decode_context_parallel_size
    heads = config.num_heads * ranks  # those of all context-parallel ranks
    if heads > HEADS:
        what = f"{heads} query heads" + f", {config.num_heads} from each of {ranks} ranks" * (ranks > 1)
        found.append(Objection("num-heads", f"1 to {HEADS}", what, heads))
    if capability not in build.compute_capabilities.value:
        accepts = ", ".join(f"{major}.{minor}" for major, minor in build.compute_capabilities.value)
        seen = f"{capability[0]}.{capability[1]}"
        found.append(Objection("compute-capability", accepts, f"compute capability {seen}", seen))
    if config.kv_cache_dtype == "fp8_e4m3" and not build.fp8.value:
        found.append(Objection("kv-cache-dtype", f"auto, {config.dtype}", "KV-cache dtype fp8_e4m3", "fp8_e4m3"))
    if ranks > 1 and not build.returns_lse.value:
        what = f"decode context parallel size {ranks}, which needs the LSE"
        found.append(Objection("decode-context-parallel", 1, what, ranks))
    if splits_fixed_by is not None and not build.splits.value:
        what = f"a number of KV splits fixed by {splits_fixed_by}"
        found.append(Objection("num-kv-splits", -1, what, splits_fixed_by))
    return found


def _parse_splits(text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        return None
    return value if value == -1 or 1 <= value <= MAX_SPLITS else None


CUTLASS_MLA = BackendSpec(
    name="CUTLASS_MLA",
    summary="CUTLASS MLA decode on Blackwell, from vLLM, sgl-kernel or FlashInfer",
    capabilities={"decode": CAPABILITIES},
    plan=plan,
    load="attn_select_cutlass_mla.runtime.cutlass_mla:CutlassMLABackend",
    libraries=LIBRARIES,
    options=CutlassMLAOptions,
    variables=(SPLITS_VARIABLE,),
)
