"""The builds of CUTLASS MLA, one table row per distribution, in the order in which they are tried.

All three build NVIDIA's example 77 (Blackwell MLA), but take different arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.backends.kernel_builds import KernelBuild
from attn_select.backends.spec import Fact, Library

TORCH = Library("torch", "torch", "pip install torch numpy")
# The log-sum-exp came with vllm-project/vllm #24385, in the releases since 0.11.
VLLM = Library("vllm", "vllm", "pip install vllm", ">=0.11")
# The function is in sgl-kernel 0.3.21, the last of that name; sglang-kernel 0.4.10 has dropped it.
SGL_KERNEL = Library("sgl-kernel", "sgl_kernel", "pip install sgl-kernel", ">=0.3.21")
FLASHINFER = Library("flashinfer-python", "flashinfer", "pip install --upgrade flashinfer-python", ">=0.6.14")

LIBRARIES = ((TORCH,), (VLLM, SGL_KERNEL, FLASHINFER))
ProviderName = Literal["auto", "vllm", "sgl-kernel", "flashinfer-python"]

VLLM_CSRC = "vllm-project/vllm csrc/attention/mla/sm100_cutlass_mla_kernel.cu 0f5257e"
VLLM_BACKEND = "vllm-project/vllm v1/attention/backends/mla/cutlass_mla.py 0.33.0"
_SGL = "sgl-kernel 0.3.21 sgl_kernel/attention.py"
_FLASHINFER = "flashinfer-ai/flashinfer include/flashinfer/attention/cutlass_mla.cuh v0.6.14"


@dataclass(frozen=True, slots=True)
class CutlassMLAKernel:
    """What a plan runs."""

    provider: str  # the distribution that the kernel is taken from
    num_kv_splits: int  # parts into which a request's keys are split; -1: the kernel chooses

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return "cutlass-mla" if self.num_kv_splits < 1 else f"cutlass-mla-{self.num_kv_splits}-splits"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CutlassMLABuild(KernelBuild):
    """CUTLASS MLA decode as one distribution builds it."""

    kernel: str = "CUTLASS MLA"
    compute_capabilities: Fact[tuple[tuple[int, int], ...]]  # devices for which it holds code, or compiles it
    fp8: Fact[bool]  # whether it reads an FP8 cache (with an FP8 query, writing bfloat16)
    returns_lse: Fact[bool]  # whether it returns the log-sum-exp
    splits: Fact[bool]  # whether the caller may set the number of KV splits
    default_splits: Fact[int]  # the number that is passed where nobody sets it; -1: the kernel chooses
    notes: tuple[str, ...] = ()  # what a plan with this build says, one clause each


BUILDS = (
    CutlassMLABuild(
        library=VLLM,
        module="vllm._custom_ops",
        compute_capabilities=Fact(((10, 0), (10, 3)), "vLLM 0.33.0 _C_stable_libtorch: code for sm_100f"),
        fp8=Fact(True, f"{VLLM_CSRC} (Float8_e4m3fn in, bfloat16 out)"),
        returns_lse=Fact(True, VLLM_CSRC),
        splits=Fact(True, VLLM_CSRC),
        default_splits=Fact(-1, VLLM_BACKEND),
    ),
    CutlassMLABuild(
        library=SGL_KERNEL,
        module="sgl_kernel",
        compute_capabilities=Fact(((10, 0),), "sgl-kernel 0.3.21 sm100/common_ops: code for sm_100a"),
        fp8=Fact(False, _SGL),
        returns_lse=Fact(False, _SGL),
        splits=Fact(True, _SGL),
        # Its kernel is from before vllm-project/vllm #26026, which ended hangs of split batches.
        default_splits=Fact(1, f"{_SGL} (its own default)"),
        notes=("sgl-kernel's function returns an output of its own, which is copied",),
    ),
    CutlassMLABuild(
        library=FLASHINFER,
        module="flashinfer.mla",
        compute_capabilities=Fact(
            ((10, 0), (10, 3)), "flashinfer-ai/flashinfer flashinfer/jit/mla.py 0.6.14 (10.x, 11.x)"
        ),
        fp8=Fact(False, "flashinfer-ai/flashinfer csrc/cutlass_mla.cu v0.6.14"),
        returns_lse=Fact(False, f"{_FLASHINFER} (its pointer is null)"),
        splits=Fact(False, f"{_FLASHINFER} (split_kv = -1)"),
        default_splits=Fact(-1, f"{_FLASHINFER} (split_kv = -1)"),
        notes=(
            "FlashInfer's function scales by 1 / sqrt(192): the query is scaled for other softmax scales",
            "FlashInfer compiles its kernel at first use",
        ),
    ),
)


def kernel_of(build: CutlassMLABuild, num_kv_splits: int) -> CutlassMLAKernel:
    """Return what a plan that runs this build carries; ``num_kv_splits`` -1 stands for the build's default."""
    splits = build.default_splits.value if num_kv_splits == -1 else num_kv_splits
    return CutlassMLAKernel(build.distribution, splits)


def build_of(kernel: CutlassMLAKernel) -> CutlassMLABuild:
    """Return the build that a plan's kernel names."""
    return next(build for build in BUILDS if build.distribution == kernel.provider)
