"""Which of FlashInfer's MLA kernels runs a phase of ``FLASHINFER_MLA``, and what each cannot.

*Decode* runs on the latent cache. ``trtllm-gen`` and ``xqa`` stand behind ``trtllm_batch_decode_with_kv_cache_mla``,
``fa3`` and ``fa2`` behind ``BatchMLAPagedAttentionWrapper``. Its ``cutlass`` back end is not used: it concatenates the
whole pool each time.

*Prefill* is ragged attention on decompressed K and V, QK dim nope + rope, V dim its own. ``fa2`` and ``fa3`` stand
behind ``BatchPrefillWithRaggedKVCacheWrapper``, ``trtllm-gen`` behind ``trtllm_ragged_attention_deepseek``, ``cutlass``
behind ``fmha_varlen`` (its wrapper reads prefix sums back from the device).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from attn_select.backends.reasons import unsupported
from attn_select.backends.spec import Fact, Reason
from attn_select.layer.config import AttentionConfig, CudaGraphLevel, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import (
    INT_WORKSPACE,
    MIB,
    MLA_CORE,
    NATIVE_MLA_RELEASES,
    PREFILL,
    RAN,
    TRTLLM_GEN_CAPABILITIES,
    merge_refusals,
    padded_heads,
    page_reasons,
    wrong_release,
)

MLAKernelName = Literal["fa2", "fa3", "trtllm-gen", "xqa", "cute-dsl", "sparse"]


@dataclass(frozen=True, slots=True)
class MLAKernel:
    """A kernel on the latent cache as a plan names it."""

    name: MLAKernelName  # ``sparse``: the sparse kernel of compute capability 12.x
    heads: int  # the query heads that it works on, at least the layer's
    fp8_query: bool = False  # whether it takes an FP8 query
    implementation: Literal["monolithic", "modular"] = "monolithic"  # which of ``cute-dsl``'s


@dataclass(frozen=True, slots=True)
class RaggedKernel:
    """A kernel on decompressed K and V as a plan names it."""

    name: Literal["fa2", "fa3", "trtllm-gen", "cutlass"]


DEEPSEEK = (512, 64)
SMALL = (256, 64)
"""kv_lora_rank and qk_rope_head_dim of the two MLA shapes that FlashInfer knows."""
MAX_HEADS = 128
TILE = Fact(
    128,
    f"{RAN}: under causality fa2 and fa3 leave a key out for a query that the end of a tile cuts in two, where the key "
    "is the first of a tile of keys; flashinfer 0.7.2 refuses such plans (mla/_batch_mla/_backends/_fa_common.py)",
)
"""Rows of query heads that a cluster of fa2 or fa3 works on; 64 where queries are short."""


@dataclass(slots=True, eq=False)
class DecodeFacts:
    """What is true of one MLA decode kernel."""

    name: Literal["fa2", "fa3", "trtllm-gen", "xqa"]  # FlashInfer's name of it
    path: str  # its name in words
    because: str  # why it runs where it is the best
    dims: Fact[tuple[tuple[int, int], ...]]  # accepted ``(kv_lora_rank, qk_rope_head_dim)``
    pages: Fact[tuple[int, ...]]  # page sizes in tokens, preferred first
    aligned_tables: Fact[bool]  # whether block tables are a multiple of 128 tokens wide
    fp8_query: bool  # whether an FP8 cache wants an FP8 query
    workspace_note: str  # what the scratch is
    nan_tail_safe: Fact[bool]  # whether NaN behind a sequence's end in its last page leaves the result alone
    against: Callable[[AttentionConfig], list[Reason]]  # the reasons against a config beside dims and pages
    heads: Callable[[int], int] = padded_heads  # the query heads that it works on, by a layer's query heads
    returns_lse: bool = True  # whether it returns the log-sum-exp
    cuda_graph: CudaGraphLevel = "UNIFORM_BATCH"  # the level of its metadata builder
    workspace_bytes: int = 128 * MIB  # scratch, as vLLM and FlashInfer recommend it
    releases: Fact[str] | None = None  # a range as in PEP 440, where not all releases have an entry that is called here

    def objections(self, config: AttentionConfig, environment: Environment) -> list[Reason]:
        """Return every reason against running ``config`` on this kernel."""
        reasons = wrong_release(environment, self.path, self.releases) if self.releases else []
        reasons += self.against(config)
        return [*reasons, *dims_reasons(config, self.dims.value), *page_reasons(self.pages.value, config.block_size)]


def dims_reasons(config: AttentionConfig, accepted: tuple[tuple[int, int], ...]) -> list[Reason]:
    """Return the reason against MLA dimensions that a kernel does not have, if there is one."""
    if (config.kv_lora_rank, config.qk_rope_head_dim) in accepted:
        return []
    seen, known = f"{config.kv_lora_rank} + {config.qk_rope_head_dim}", [f"{rank} + {rope}" for rank, rope in accepted]
    return [unsupported("mla-dims", "kv_lora_rank + qk_rope_head_dim", seen, known)]


def head_reasons(config: AttentionConfig) -> list[Reason]:
    """Return the reason against more query heads than one tile holds, if there is one."""
    heads = config.num_heads
    return [] if heads <= MAX_HEADS else [unsupported("num-heads", "query heads", heads, f"1 to {MAX_HEADS}")]


def blackwell_reasons(config: AttentionConfig, path: str) -> list[Reason]:
    """Return what all kernels of FlashInfer's MLA entry refuse of a dense layer: dtypes and too many heads."""
    # They write bfloat16. With an FP8 cache the query is quantised from either 16-bit dtype, and the output converted.
    if config.dtype == "bfloat16" or config.kv_cache_dtype == "fp8_e4m3":
        return head_reasons(config)
    against = unsupported("dtype", f"{path} in dtype", config.dtype, ["bfloat16"], "--dtype bfloat16")
    return [against, *head_reasons(config)]


def _against_xqa(config: AttentionConfig) -> list[Reason]:
    reasons, drafts = blackwell_reasons(config, "XQA MLA"), config.num_speculative_tokens
    ranks = config.decode_context_parallel_size
    if config.num_heads < MAX_HEADS and config.kv_cache_dtype != "fp8_e4m3":
        # With an FP8 cache no other kernel is left, so the query is padded; otherwise fa2 does no work for padding.
        reasons.append(unsupported("num-heads", "XQA MLA's query heads", config.num_heads, MAX_HEADS))
    if config.sinks:
        reasons.append(Reason("sinks", "XQA MLA takes no attention sinks", True, False))
    if drafts:
        text = "XQA MLA takes queries of one token"
        reasons.append(Reason("speculative-tokens", text, drafts, 0, "--speculative-tokens 0"))
    if ranks > 1:
        text = "XQA MLA returns no log-sum-exp, which decode context parallelism needs"
        reasons.append(Reason("decode-context-parallel", text, ranks, 1, "--dcp 1"))
    return reasons


def _against_wrapper(config: AttentionConfig) -> list[Reason]:
    if config.sinks:
        return [Reason("sinks", "BatchMLAPagedAttentionWrapper takes no attention sinks", True, False)]
    return []


def _against_fa3(config: AttentionConfig) -> list[Reason]:
    reasons, dtype = _against_wrapper(config), config.dtype
    if config.kv_cache_dtype == "fp8_e4m3" and dtype != "bfloat16":
        what = "with an FP8 latent cache fa3's dtype"
        reasons.append(unsupported("dtype", what, dtype, ["bfloat16"], "--dtype bfloat16"))
    return reasons


def _against_fa2(config: AttentionConfig) -> list[Reason]:
    reasons, known = _against_wrapper(config), ["auto", config.dtype]
    if config.kv_cache_dtype == "fp8_e4m3":
        reasons.append(unsupported("kv-cache-dtype", "fa2's latent cache", "fp8_e4m3", known, "--kv-cache-dtype auto"))
    return reasons


_ALIGNED = Fact(True, f"{MLA_CORE} _check_trtllm_gen_mla_shape")
_ANY_WIDTH = Fact(False, f"{MLA_CORE} BatchMLAPagedAttentionWrapper.plan: page indices, no table")

TRTLLM_GEN = DecodeFacts(
    name="trtllm-gen",
    path="TRT-LLM (trtllm-gen)",
    because="Blackwell's own MLA kernel",
    dims=Fact((DEEPSEEK, SMALL), f"{MLA_CORE} supported_mla_head_dimensions"),
    pages=Fact((64, 32), f"{MLA_CORE} trtllm_batch_decode_with_kv_cache_mla"),
    aligned_tables=_ALIGNED,
    fp8_query=True,
    workspace_note="the workspace is zeroed before its first use",
    nan_tail_safe=Fact(
        False, "scores alone are masked: vllm-project/vllm #57716 (NaN bytes of an FP8 latent cache reach the output)"
    ),
    against=lambda config: blackwell_reasons(config, "trtllm-gen MLA"),
)
XQA = DecodeFacts(
    name="xqa",
    path="TRT-LLM (XQA)",
    because="the MLA kernel for compute capability 12.x",
    dims=Fact((DEEPSEEK,), "flashinfer-ai/flashinfer flashinfer/jit/xqa.py 0.6.14 gen_xqa_module_mla (576 wide)"),
    pages=Fact((64, 32, 128, 16), "flashinfer-ai/flashinfer flashinfer/jit/xqa.py 0.6.14 gen_xqa_module_mla"),
    aligned_tables=_ALIGNED,
    fp8_query=True,
    heads=lambda heads: MAX_HEADS,
    returns_lse=False,
    cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE",
    workspace_note="the workspace is zeroed before its first use and holds semaphores in its first 8 MiB",
    nan_tail_safe=Fact(False, "flashinfer csrc/xqa/mla_sm120.cu v0.6.14: whole pages by TMA, scores alone are masked"),
    against=_against_xqa,
)
FA3 = DecodeFacts(
    name="fa3",
    path="native fa3",
    because="Hopper's own MLA kernel",
    dims=Fact((DEEPSEEK,), f"{RAN} (256 + 64 gives wrong values without an error)"),
    pages=Fact((64, 32, 16, 1), f"{RAN} (1, 16, 64, 128; 16-bit and FP8 cache)"),
    aligned_tables=_ANY_WIDTH,
    fp8_query=False,
    heads=lambda heads: heads,
    workspace_bytes=128 * MIB + INT_WORKSPACE,
    workspace_note="8 MiB of the workspace are for the schedule",
    nan_tail_safe=Fact(
        True, f"flashinfer include/flashinfer/attention/mla_hopper.cuh v0.6.14 load_kv: zeros behind the end; {RAN}"
    ),
    against=_against_fa3,
    releases=NATIVE_MLA_RELEASES,
)
FA2 = replace(
    FA3,
    name="fa2",
    path="native fa2",
    because="the MLA kernel for every compute capability from 8.0 up",
    dims=Fact((DEEPSEEK, SMALL), f"{RAN} (512 + 64 and 256 + 64)"),
    pages=Fact((64, 32, 16, 1), f"{RAN} (1, 64)"),
    nan_tail_safe=Fact(
        True, f"flashinfer include/flashinfer/attention/mla.cuh v0.6.14 load_kv: zeros behind the end; {RAN}"
    ),
    against=_against_fa2,
)

KERNELS: dict[str, DecodeFacts] = {facts.name: facts for facts in (TRTLLM_GEN, XQA, FA3, FA2)}


@dataclass(slots=True, eq=False)
class PrefillFacts:
    """What is true of one ragged prefill kernel: ``(QK, V)`` head dims, dtypes, whether it takes sinks."""

    name: Literal["fa2", "fa3", "trtllm-gen", "cutlass"]
    path: str
    because: str
    dims: Fact[tuple[tuple[int, int], ...]]
    workspace_bytes: int
    workspace_note: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    sinks: bool = False

    def objections(self, config: AttentionConfig, environment: Environment) -> list[Reason]:
        """Return every reason against running ``config`` on this kernel."""
        reasons = list[Reason]()
        qk, v = (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0), config.v_head_dim or 0
        if (qk, v) not in self.dims.value:
            accepted = [f"{qk} / {v}" for qk, v in self.dims.value]
            reasons.append(unsupported("mla-dims", f"{self.path} with QK / V head dims", f"{qk} / {v}", accepted))
        if config.dtype not in self.dtypes:
            remedy = f"--dtype {self.dtypes[0]}"
            reasons.append(unsupported("dtype", f"{self.path} in dtype", config.dtype, list(self.dtypes), remedy))
        if config.sinks and not self.sinks:
            reasons.append(Reason("sinks", f"{self.path} takes no attention sinks", True, False))
        return reasons


K = TypeVar("K", DecodeFacts, PrefillFacts)
_FA = ((192, 128), (128, 128), (64, 64), (256, 256))

_CUTLASS = PrefillFacts(
    name="cutlass",
    path="CUTLASS (ragged)",
    because="Blackwell's own ragged kernel",
    dims=Fact(
        ((192, 128), (128, 128), (64, 64)),
        "flashinfer-ai/flashinfer csrc/fmha_cutlass_sm100.cu v0.6.14 DISPATCH_head_dim",
    ),
    workspace_bytes=32 * MIB,
    workspace_note="FlashInfer keeps the workspace itself",
)
_RAGGED_GEN = PrefillFacts(
    name="trtllm-gen",
    path="TRT-LLM (trtllm-gen, ragged)",
    because="Blackwell's own ragged kernel",
    dims=Fact(((192, 128), (128, 128), (256, 256)), f"{PREFILL} trtllm_ragged_attention_deepseek"),
    dtypes=("bfloat16",),
    sinks=True,
    workspace_bytes=394 * MIB,
    workspace_note="the workspace is zeroed before its first use",
)
_RAGGED_FA3 = PrefillFacts(
    name="fa3",
    path="native fa3 (ragged)",
    because="Hopper's own ragged kernel",
    dims=Fact(_FA, f"{RAN} (192 / 128); flashinfer include/flashinfer/attention/hopper/prefill_sm90.cuh v0.6.14"),
    workspace_bytes=394 * MIB + INT_WORKSPACE,
    workspace_note="8 MiB of the workspace are for the schedule; each chunk of context adds one, no larger",
)
_RAGGED_FA2 = replace(
    _RAGGED_FA3,
    name="fa2",
    path="native fa2 (ragged)",
    because="the ragged kernel for every compute capability from 8.0 up",
    dims=Fact(_FA, f"{RAN} (192 / 128); flashinfer tests/attention/test_deepseek_mla.py v0.6.14"),
)
PREFILL_KERNELS: dict[str, PrefillFacts] = {
    facts.name: facts for facts in (_CUTLASS, _RAGGED_GEN, _RAGGED_FA3, _RAGGED_FA2)
}

# vLLM 0.33.0 (platforms/interface.py) has trtllm-gen before CUTLASS, too.
_OWN: dict[Phase, dict[tuple[int, ...], tuple[str, ...]]] = {
    "prefill": {
        (9,): ("fa3",),
        **dict.fromkeys(TRTLLM_GEN_CAPABILITIES, ("trtllm-gen", "cutlass")),
        (11,): ("cutlass",),
    },
    "decode": {(9,): ("fa3",), **dict.fromkeys(TRTLLM_GEN_CAPABILITIES, ("trtllm-gen",)), (12,): ("xqa",)},
}
"""The kernels of some devices, best first, by capability or its major number; fa2 is all devices' last one."""


def choose_kernel(
    phase: Phase,
    wanted: str,
    kernels: Mapping[str, K],
    config: AttentionConfig,
    device: Device,
    environment: Environment,
) -> tuple[K, str] | list[Reason]:
    """Return the first of a device's kernels that runs the layer and why, or every reason why none runs it."""
    # wanted: value of the option that names one kernel
    own: dict[tuple[int, ...], tuple[str, ...]] = _OWN[phase]
    capability: tuple[int, ...] = device.compute_capability or ()
    names: tuple[str, ...] = (*own.get(capability, own.get(capability[:1], ())), "fa2")
    option = f"{phase}_kernel"
    if wanted not in ("auto", *names):
        where = f"compute capability {device.capability_text}"
        message = f'{option} = "{wanted}" does not exist for {where} ({", ".join(names)})'
        return [Reason("forced-path", message, wanted, [*names], f'backends.FLASHINFER_MLA.{option} = "auto"')]
    because = ""
    if wanted != "auto":
        names, because = (wanted,), f'{option} = "{wanted}"'
    refused: list[list[Reason]] = []
    for name in names:
        reasons = kernels[name].objections(config, environment)
        if not reasons:
            return kernels[name], because or kernels[name].because
        because = because or reasons[0].message
        refused.append(reasons)
    return merge_refusals(refused)
