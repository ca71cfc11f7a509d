"""``TORCH_SDPA``: torch's ``scaled_dot_product_attention`` on keys and values gathered from the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_torch.facts.torch_library import (
    ANY_BLOCK,
    DTYPES,
    EVERY_DEVICE,
    KV_CACHE_DTYPES,
    MASKED,
    OWN,
    PADDED_V,
    PER_REQUEST,
    RAN_ON_CPU,
    TORCH,
    notes,
    takes_varlen,
)

CAPABILITIES = Capabilities(
    compute_capabilities=EVERY_DEVICE,
    dtypes=DTYPES,
    kv_cache_dtypes=KV_CACHE_DTYPES,
    head_sizes=Fact(HeadSizes(), f"{RAN_ON_CPU} (1, 7, 64, 80, 513)"),
    block_sizes=Fact((1,), f"{OWN}: blocks are gathered by index"),
    attn_types=Fact(("decoder", "encoder", "encoder_only", "encoder_decoder"), f"{OWN}: masks and lengths are free"),
    mixed_kv_cache_dtype=Fact(True, f"{OWN}: the gather converts to the compute dtype"),
    v_head_size_differs=Fact(True, f"{RAN_ON_CPU} (80 and 48, 513 and 512)"),
    sliding_window=Fact(True, MASKED),
    logits_soft_cap=Fact(True, f"{OWN}: matmul, tanh, softmax, matmul"),
    alibi=Fact(True, MASKED),
    sinks=Fact(True, f"{OWN}: the output is weighed by the log-sum-exp and the sink"),
    mm_prefix=Fact(True, MASKED),
    draft_tree=Fact(True, MASKED),
    non_causal=Fact(True, MASKED),
    batch_invariant=Fact(True, PER_REQUEST),
    per_head_quant_scales=Fact(True, f"{OWN}: the query is multiplied by K's scales and the output by V's"),
    decode_context_parallel=Fact(True, f"{OWN}: the scores are there to take the log-sum-exp of, positions are free"),
)

LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND)
"""Gathered through strides. The classic layout splits the head dimension of K, which a gather would have to undo."""

SdpaFunction = Literal["scaled_dot_product_attention", "varlen_attn", "cuDNN and varlen_attn", "matmul and softmax"]
_NAMES: dict[SdpaFunction, str] = {
    "scaled_dot_product_attention": "torch-sdpa",
    "varlen_attn": "torch-varlen",
    "cuDNN and varlen_attn": "torch-cudnn",
    "matmul and softmax": "torch-matmul",
}


# With ``cuDNN and varlen_attn`` whole prompts of some length are computed by cuDNN, everything else by the other.
@dataclass(frozen=True, slots=True)
class SdpaKernel:
    """What attends. Where the installed torch lacks ``varlen_attn``, ``scaled_dot_product_attention`` does its work."""

    function: SdpaFunction

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return _NAMES[self.function]


_PLAIN = "torch's fused kernels take the whole layer"
_PACKED = "torch's FlashAttention takes the packed batch"
_PROMPTS = "cuDNN takes whole prompts of 512 tokens and more, torch's FlashAttention the rest"
_MASKED = "windows, slopes and image ranges go in as an additive mask"
_SOFT_CAP = "scaled_dot_product_attention has no soft cap"
_FAR_SLOPES = (
    "the fused kernels take no float32 bias beside 16-bit queries, and 16 bits round the distances to far keys"
)
_LSE = "scaled_dot_product_attention returns no log-sum-exp on a GPU, which decode context parallelism merges"
_FEW_ROWS = "few query rows each: the heads of a group fill one tile, requests of similar length one call"
_GATHER = "copies the keys and values it reads out of the cache at each call; nothing is reserved"
_OR_SDPA = "scaled_dot_product_attention instead where the installed torch's varlen_attn takes no window"
_GRAPHS = "torch builds a graph of cuDNN for each of a few lengths, which takes the host tens of milliseconds"
_FLOAT32 = "computes in float32: this dtype has no fast kernels on a CPU"


def _decodes_by_sdpa(config: AttentionConfig) -> bool:
    """Whether a GPU's decodes do without ``varlen_attn``: no LSE is sure to be wanted, and requests may be joined."""
    wants_lse = config.sinks or config.decode_context_parallel_size > 1
    return config.has_cache and not wants_lse and not config.batch_invariant


def _prompts_by_cudnn(config: AttentionConfig, capability: tuple[int, int] | None) -> bool:
    """Whether cuDNN computes whole prompts."""
    # Where it was measured: 88 us beside 175 for 2048 tokens (H200, torch 2.11). It has causality from the first key on
    # and no windows (pytorch/pytorch aten/src/ATen/native/cudnn/MHA.cpp v2.11.0).
    plain = config.attn_type == "decoder" and not config.non_causal and config.sliding_window is None
    return capability == (9, 0) and plain and config.head_size <= 128


def _function(config: AttentionConfig, capability: tuple[int, int] | None, phase: Phase) -> tuple[SdpaFunction, str]:
    """Return what attends, and why."""
    if config.logits_soft_cap is not None:
        return "matmul and softmax", _SOFT_CAP
    if takes_varlen(config, capability):
        if phase == "decode" and _decodes_by_sdpa(config):
            return "scaled_dot_product_attention", _FEW_ROWS
        if phase == "prefill" and _prompts_by_cudnn(config, capability):
            return "cuDNN and varlen_attn", _PROMPTS
        return "varlen_attn", _PACKED
    if capability is not None and config.alibi and config.attn_type != "decoder":
        return "matmul and softmax", _FAR_SLOPES
    if capability is not None and config.decode_context_parallel_size > 1:
        return "matmul and softmax", _LSE
    if config.sliding_window is not None or config.alibi or config.mm_prefix or config.draft_tree:
        return "scaled_dot_product_attention", _MASKED
    return "scaled_dot_product_attention", _PLAIN


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; plain capabilities say all reasons against it."""
    capability = device.compute_capability
    function, because = _function(config, capability, phase)
    cached = config.has_cache
    own_notes = {
        _OR_SDPA: function in ("varlen_attn", "cuDNN and varlen_attn"),
        _GRAPHS: function == "cuDNN and varlen_attn",
        _FLOAT32: capability is None and config.dtype == "float16",
        _GATHER: cached,
        PADDED_V: cached and config.value_head_size != config.head_size,
    }
    # The gather's shapes come from host lengths, which a captured graph cannot change: never graphs.
    return BackendPlan(
        kernel=SdpaKernel(function),
        path=function,
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=LAYOUTS if cached else (),
        kernel_block_sizes=ANY_BLOCK if cached else (),
        cuda_graph="NEVER",
        notes=(*notes(config, device), *(note for note, holds in own_notes.items() if holds)),
    )


TORCH_SDPA = BackendSpec(
    name="TORCH_SDPA",
    summary="scaled_dot_product_attention on the gathered cache: every layer but MLA, CPU and every GPU",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_torch.runtime.sdpa:SDPABackend",
    libraries=((TORCH,),),
)
