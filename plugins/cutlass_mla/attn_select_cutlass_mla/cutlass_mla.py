"""``CUTLASS_MLA``: decode of dense multi-head latent attention on Blackwell, one query token per request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from attn_select.config import AttentionConfig, Phase
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.errors import shorten
from attn_select.layouts import MLA
from attn_select.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
)
from attn_select_cutlass_mla.providers import LIBRARIES, PROVIDERS, Provider, ProviderName, choose

if TYPE_CHECKING:
    from attn_select_cutlass_mla.runtime import CutlassMLABackend

MIB = 1 << 20
HEADS = 128
"""Query heads that the kernel computes, whatever is asked for."""
MAX_SPLITS = 16
"""The kernel's own choice stops there, to avoid hangs (vLLM 0.33.0 v1/attention/backends/mla/cutlass_mla.py)."""
SPLITS_VARIABLE = "FORCE_NUM_KV_SPLITS"
PATHS = {-1: "CUTLASS MLA", **{n: f"CUTLASS MLA, {n} KV split{'s' * (n > 1)}" for n in range(1, MAX_SPLITS + 1)}}
"""By number of KV splits, -1 being the kernel's own choice: what a plan is called, and so what the runtime passes."""

_VLLM = "vllm-project/vllm v1/attention/backends/mla/cutlass_mla.py 0.33.0"
_VLLM_CSRC = "vllm-project/vllm csrc/attention/mla/sm100_cutlass_mla_kernel.cu 0f5257e"
_NO_VARIANTS = Fact(False, f"{_VLLM_CSRC}: no such argument")

CAPABILITIES = Capabilities(
    mla=True,
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)))),
        "vLLM 0.33.0 _C_stable_libtorch: code for sm_100f; flashinfer/jit/mla.py 0.6.14",
    ),
    dtypes=Fact(("bfloat16", "float16"), f"{_VLLM_CSRC}; sgl-kernel 0.3.21 sgl_kernel/attention.py"),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3"), f"{_VLLM_CSRC} (FP8 with an FP8 query)"),
    head_sizes=Fact(HeadSizes((576,)), f"{_VLLM_CSRC}: tile 128 x 128 x (512, 64)"),
    block_sizes=Fact((128,), _VLLM),
    attn_types=Fact(("decoder",), "MLA layers are decoders"),
    mixed_kv_cache_dtype=Fact(False, f"{_VLLM_CSRC}: query and cache have one dtype"),
    v_head_size_differs=Fact(False, "MLA layers have v_head_dim instead"),
    sliding_window=_NO_VARIANTS,
    logits_soft_cap=_NO_VARIANTS,
    alibi=_NO_VARIANTS,
    sinks=_NO_VARIANTS,
    mm_prefix=_NO_VARIANTS,
    non_causal=Fact(False, f"{_VLLM}: not declared"),
    batch_invariant=Fact(False, f"{_VLLM}: not declared; the number of KV splits follows the batch ({_VLLM_CSRC})"),
    per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
    output_quantizations=Fact((), f"{_VLLM_CSRC}: writes 16 bits"),
    decode_context_parallel=Fact(True, f"{_VLLM_CSRC} (lse); vLLM's kernel only"),
    nan_tail_safe=Fact(False, f"unproved: {_VLLM_CSRC} masks scores, and a weight of 0 times NaN is NaN"),
    speculative_tokens=Fact(0, f"{_VLLM_CSRC}: one query token per request"),
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
    provider: ProviderName = Field(
        "auto", description="the distribution to take the kernel from; auto is the first that serves the layer"
    )
    workspace_bytes: Annotated[int, Field(ge=MIB, le=1 << 40, strict=True)] = Field(
        128 * MIB, description="scratch; it grows to what the kernel asks for before CUDA graphs are captured"
    )


_DEVICES = ((10, 0), (10, 3))
_LABELS = {provider.library.distribution: provider.label for provider in PROVIDERS}
_PINNED = "its only kernel, from the provider that the options name"
_BECAUSE = {name: f"its only kernel, from {name}: the first usable provider that runs the layer" for name in _LABELS}
_CONVERTED = "with FP8 the kernel writes bfloat16, which is converted to float16"
_SCALES = "FP8 scales become part of the softmax scale, and that of the latent multiplies the output"
_GROWS = "the workspace grows to the kernel's own size before CUDA graphs are captured"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: CutlassMLAOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Plan decode: from which provider the kernel comes; or every reason why it does not run."""
    capability = device.compute_capability
    if capability not in _DEVICES:
        seen, accepted = device.capability_text, str(CAPABILITIES.compute_capabilities.value)
        return [Reason("compute-capability", f"compute capability {seen} (supported: {accepted})", seen, accepted)]
    reasons = _objections(config)
    splits, set_by = options.num_kv_splits, None
    if (forced := environment.variables.get(SPLITS_VARIABLE)) is not None:
        set_by = f"{SPLITS_VARIABLE}={shorten(forced)}"
        parsed = _parse_splits(forced)
        if parsed is None:
            message = f"environment variable {set_by} (supported: -1, or 1 to {MAX_SPLITS})"
            remedy = f"unset {SPLITS_VARIABLE}"
            reasons.append(Reason("environment-variable", message, forced, ["-1", f"1 to {MAX_SPLITS}"], remedy))
            return reasons
        splits = parsed
    if splits == -1:
        set_by = None
    elif set_by is None:
        set_by = f"num_kv_splits = {splits}"
    chosen = choose(config, capability, environment, options.provider, set_by)
    if type(chosen) is list:
        return reasons + chosen
    assert isinstance(chosen, Provider)
    return reasons or _plan(config, chosen, options, splits, set_by)


def _objections(config: AttentionConfig) -> list[Reason]:
    reasons: list[Reason] = []
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (512, 64):
        seen = f"{config.kv_lora_rank} + {config.qk_rope_head_dim}"
        message = f"kv_lora_rank + qk_rope_head_dim {seen} (supported: 512 + 64)"
        reasons.append(Reason("mla-dims", message, seen, ["512 + 64"]))
    if config.num_heads > HEADS:
        message = f"{config.num_heads} query heads (supported: 1 to {HEADS})"
        reasons.append(Reason("num-heads", message, config.num_heads, f"1 to {HEADS}"))
    return reasons


def _parse_splits(text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        return None
    return value if value == -1 or 1 <= value <= MAX_SPLITS else None


def _plan(
    config: AttentionConfig, provider: Provider, options: CutlassMLAOptions, splits: int, set_by: str | None
) -> BackendPlan:
    name, fp8 = provider.library.distribution, config.kv_cache_dtype == "fp8_e4m3"
    notes: tuple[str, ...] = (_GROWS, *provider.notes)
    if fp8:
        notes = (*notes, _SCALES)
        if config.dtype == "float16":
            notes = (*notes, _CONVERTED)
    if config.num_heads != HEADS:
        notes = (*notes, f"query heads are padded from {config.num_heads} to {HEADS}")
    if set_by is not None:
        notes = (*notes, f"KV splits fixed by {set_by}")
    return BackendPlan(
        path=PATHS[provider.default_splits.value if splits == -1 else splits],
        because=_BECAUSE[name] if options.provider == "auto" else _PINNED,
        query_dtype="fp8_e4m3" if fp8 else config.dtype,
        returns_lse=provider.returns_lse.value,
        kv_layouts=(MLA,),
        kernel_block_sizes=(128,),
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE",
        workspace_bytes=options.workspace_bytes,
        block_table_width_multiple=1,
        provider=_LABELS[name],
        notes=notes,
        nan_tail_safe=False,
    )


def load() -> type[CutlassMLABackend]:
    """Import torch and return the runtime backend; the kernel is imported when a group is made.

    Raises:
        ImportError: torch is not installed.
    """
    from attn_select_cutlass_mla.runtime import CutlassMLABackend

    return CutlassMLABackend


def compile_key(config: AttentionConfig) -> object:
    """Return what FlashInfer's copy compiles one module for; vLLM's and sgl-kernel's come compiled."""
    return None


CUTLASS_MLA = BackendSpec(
    name="CUTLASS_MLA",
    summary="CUTLASS MLA decode on Blackwell, from vLLM, sgl-kernel or FlashInfer",
    capabilities={"decode": CAPABILITIES},
    plan=plan,
    load=load,
    libraries=LIBRARIES,
    options=CutlassMLAOptions,
    variables=(SPLITS_VARIABLE,),
    compile_key=compile_key,
)
