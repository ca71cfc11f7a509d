"""Prefill of ``FLASHINFER_MLA``: ragged attention on decompressed K and V, QK dim nope + rope, V dim its own.

``fa2`` and ``fa3`` stand behind ``BatchPrefillWithRaggedKVCacheWrapper``, ``trtllm-gen`` behind
``trtllm_ragged_attention_deepseek``, ``cutlass`` behind ``fmha_varlen`` (its wrapper reads prefix sums back from the
device).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.config import AttentionConfig
from attn_select.spec import BackendPlan, Fact, Reason
from attn_select_flashinfer.common import INT_WORKSPACE, MIB, PREFILL, RAN, TRTLLM_GEN_CAPABILITIES, merge_refusals

PrefillKernel = Literal["auto", "trtllm-gen", "cutlass", "fa3", "fa2"]


@dataclass(slots=True, eq=False)
class RaggedKernel:
    """One ragged prefill kernel: its name in plans, its ``(QK, V)`` head dims and dtypes, whether it takes sinks."""

    path: str
    dims: Fact[tuple[tuple[int, int], ...]]
    dtypes: tuple[str, ...]
    sinks: bool
    workspace_bytes: int
    workspace_note: str

    def objections(self, config: AttentionConfig) -> list[Reason]:
        """Return every reason against running ``config`` on this kernel."""
        reasons: list[Reason] = []
        dims = head_dims(config)
        if dims not in self.dims.value:
            accepted = [f"{qk} / {v}" for qk, v in self.dims.value]
            message = f"QK / V head dims {dims[0]} / {dims[1]} (supported by {self.path}: {', '.join(accepted)})"
            reasons.append(Reason("mla-dims", message, f"{dims[0]} / {dims[1]}", accepted))
        if config.dtype not in self.dtypes:
            message = f"{self.path} takes {', '.join(self.dtypes)}, not {config.dtype}"
            reasons.append(Reason("dtype", message, config.dtype, list(self.dtypes), f"--dtype {self.dtypes[0]}"))
        if config.sinks and not self.sinks:
            reasons.append(Reason("sinks", f"{self.path} takes no attention sinks", True, False))
        return reasons


def head_dims(config: AttentionConfig) -> tuple[int, int]:
    """Return the widths of one decompressed query or key head and of one value head."""
    return (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0), config.v_head_dim or 0


_BOTH = ("bfloat16", "float16")
_SCHEDULE = "8 MiB of the workspace are for the schedule; each chunk of context adds one, no larger"
_FA = ((192, 128), (128, 128), (64, 64), (256, 256))

PREFILL_KERNELS: dict[str, RaggedKernel] = {
    "cutlass": RaggedKernel(
        "CUTLASS (ragged)",
        Fact(
            ((192, 128), (128, 128), (64, 64)),
            "flashinfer-ai/flashinfer csrc/fmha_cutlass_sm100.cu v0.6.14 DISPATCH_head_dim",
        ),
        _BOTH,
        False,
        32 * MIB,
        "FlashInfer keeps the workspace itself",
    ),
    "trtllm-gen": RaggedKernel(
        "TRT-LLM (trtllm-gen, ragged)",
        Fact(((192, 128), (128, 128), (256, 256)), f"{PREFILL} trtllm_ragged_attention_deepseek"),
        ("bfloat16",),
        True,
        394 * MIB,
        "the workspace is zeroed before its first use",
    ),
    "fa3": RaggedKernel(
        "native fa3 (ragged)",
        Fact(_FA, f"{RAN} (192 / 128); flashinfer include/flashinfer/attention/hopper/prefill_sm90.cuh v0.6.14"),
        _BOTH,
        False,
        394 * MIB + INT_WORKSPACE,
        _SCHEDULE,
    ),
    "fa2": RaggedKernel(
        "native fa2 (ragged)",
        Fact(_FA, f"{RAN} (192 / 128); flashinfer tests/attention/test_deepseek_mla.py v0.6.14"),
        _BOTH,
        False,
        394 * MIB + INT_WORKSPACE,
        _SCHEDULE,
    ),
}

_FA2_ONLY = (("fa2", "the ragged kernel for every compute capability from 8.0 up"),)
_BY_MAJOR = {
    9: (("fa3", "Hopper's own ragged kernel"), ("fa2", "")),
    11: (("cutlass", "Blackwell's own ragged kernel"), ("fa2", "")),
}
# vLLM 0.33.0 (platforms/interface.py) has trtllm-gen before CUTLASS, too.
_ON_10 = (("trtllm-gen", "Blackwell's own ragged kernel"), ("cutlass", ""), ("fa2", ""))


def plan_prefill(
    config: AttentionConfig, capability: tuple[int, int], wanted: PrefillKernel
) -> BackendPlan | list[Reason]:
    """Plan prefill: the first kernel of the device that runs the layer, or every reason why none does."""
    offered = _ON_10 if capability in TRTLLM_GEN_CAPABILITIES else _BY_MAJOR.get(capability[0], _FA2_ONLY)
    if wanted != "auto":
        if all(name != wanted for name, _ in offered):
            names = [name for name, _ in offered]
            where = f"compute capability {capability[0]}.{capability[1]}"
            message = f'prefill_kernel = "{wanted}": {where} has {", ".join(names)}'
            return [Reason("forced-path", message, wanted, names, 'backends.FLASHINFER_MLA.prefill_kernel = "auto"')]
        offered = ((wanted, f'prefill_kernel = "{wanted}"'),)
    because = ""
    refused: list[list[Reason]] = []
    for name, why in offered:
        kernel = PREFILL_KERNELS[name]
        reasons = kernel.objections(config)
        if not reasons:
            return BackendPlan(
                path=kernel.path,
                because=why or because,
                query_dtype=config.dtype,
                returns_lse=True,
                kv_layouts=(),
                kernel_block_sizes=(),
                cuda_graph="UNIFORM_BATCH",
                workspace_bytes=kernel.workspace_bytes,
                notes=(kernel.workspace_note,),
            )
        because = because or reasons[0].message
        refused.append(reasons)
    return merge_refusals(refused)
