"""The builds of FlashMLA that users have, one table row per distribution, in the order in which they are tried.

FlashMLA's release of 2026-09-30 dropped SM90, dense decoding and the 656-byte FP8 format. vLLM and SGLang keep those
kernels in their own wheels, and no package index has upstream's, so upstream comes last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from attn_select.backends.kernel_builds import PROVIDER_OPTION, KernelBuild
from attn_select.backends.spec import BackendOptions, ComputeCapabilities, Fact, Library

TORCH = Library("torch", "torch", "pip install torch numpy")
VLLM = Library("vllm", "vllm", "pip install vllm", ">=0.26")
SGL_FLASH_MLA = Library("sgl-flash-mla", "flash_mla", "pip install sgl-flash-mla", ">=1.0")
SGLANG_KERNEL = Library("sglang-kernel", "sgl_kernel", "pip install sglang-kernel", ">=0.4.10")
SGL_KERNEL = Library("sgl-kernel", "sgl_kernel", "pip install sgl-kernel", ">=0.3.21")
# The version makes the distribution's own metadata necessary: sgl-flash-mla brings a module of the same name.
FLASH_MLA = Library("flash-mla", "flash_mla", "pip install vllm", ">=1.0")

LIBRARIES = ((TORCH,), (VLLM, SGL_FLASH_MLA, SGLANG_KERNEL, SGL_KERNEL, FLASH_MLA))

RAN = "ran on H100, FlashMLA of vLLM 0.26.0, 2026-11-21"
UPSTREAM = "deepseek-ai/FlashMLA csrc/api 9241ae3"
UPSTREAM_PYTHON = "deepseek-ai/FlashMLA flash_mla/flash_mla_interface.py 9241ae3"
VLLM_FP8 = "vllm-project/FlashMLA csrc/extension/sm90/dense_fp8/pybind.cpp 46d64a8"
VLLM_SPARSE = "vllm-project/vllm v1/attention/backends/mla/flashmla_sparse.py 0.33.0"
SGLANG_PYTHON = "sglang-kernel 0.4.10 sgl_kernel/flash_mla.py"
SGL_PYTHON = "sgl-kernel 0.3.21 sgl_kernel/flash_mla.py"

SM90 = ComputeCapabilities((((9, 0), (9, 0)),))
SM90_AND_SM100 = ComputeCapabilities((((9, 0), (9, 0)), ((10, 0), (10, 9))))

ProviderName = Literal["auto", "vllm", "sgl-flash-mla", "sglang-kernel", "sgl-kernel", "flash-mla"]
KernelFunction = Literal["dense", "dense_fp8", "sparse_decode", "sparse_prefill"]
"""What a build computes: decode over a 16-bit or an e4m3 cache; sparse attention over 656-byte FP8 tokens
(``sparse_decode``) or over bfloat16 (``sparse_prefill``, which serves decode too)."""


class FlashMLAOptions(BackendOptions):
    """``[backends.FLASHMLA]`` and ``[backends.FLASHMLA_SPARSE]``."""

    provider: ProviderName = Field("auto", description=PROVIDER_OPTION)


@dataclass(frozen=True, slots=True)
class FlashMLAKernel:
    """What a plan runs."""

    provider: str  # the distribution that the kernel is taken from
    function: KernelFunction  # which of its functions
    copies_cache: bool = False  # whether it reads a bfloat16 copy of an FP8 cache

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return self.function.replace("_", "-")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashMLABuild(KernelBuild):
    """FlashMLA as one distribution builds it."""

    kernel: str = "FlashMLA"
    dense_fp8: Fact[bool]  # whether dense decoding takes an FP8 e4m3 cache
    sparse: Fact[ComputeCapabilities]  # devices for which the sparse kernels are built
    sinks: Fact[bool]  # whether the sparse kernels take attention sinks, in decode and in prefill
    notes: tuple[str, ...] = ()  # what a plan with this build says, one clause each


BUILDS = (
    FlashMLABuild(
        library=VLLM,
        module="vllm.third_party.flashmla.flash_mla_interface",
        dense_fp8=Fact(True, f"{RAN} (_flashmla_extension_C)"),
        sparse=Fact(SM90_AND_SM100, "vLLM 0.33.0 _flashmla_C: sm_90a and sm_100f; its checks say SM90a and SM100f"),
        sinks=Fact(True, "vllm-project/vllm third_party/flashmla/flash_mla_interface.py 0.33.0 (attn_sink)"),
    ),
    FlashMLABuild(
        library=SGL_FLASH_MLA,
        module="flash_mla.flash_mla_interface",
        dense_fp8=Fact(True, "sgl-flash-mla 1.0.0 flash_mla/flash_mla_interface.py (use_legacy=True)"),
        sparse=Fact(SM90_AND_SM100, "sgl-flash-mla 1.0.0 flash_mla/_C_legacy: sm_90a, sm_100, sm_103"),
        sinks=Fact(True, "sgl-flash-mla 1.0.0 flash_mla/flash_mla_interface.py (attn_sink)"),
    ),
    FlashMLABuild(
        library=SGLANG_KERNEL,
        module="sgl_kernel.flash_mla",
        dense_fp8=Fact(True, f"{SGLANG_PYTHON} (fwd_kvcache_mla_fp8)"),
        sparse=Fact(SM90_AND_SM100, "sglang-kernel 0.4.10 flashmla_ops: sm_90a, sm_100, sm_103"),
        sinks=Fact(True, f"{SGLANG_PYTHON} (attn_sink)"),
    ),
    FlashMLABuild(
        library=SGL_KERNEL,
        module="sgl_kernel.flash_mla",
        dense_fp8=Fact(True, f"{SGL_PYTHON} (fwd_kvcache_mla_fp8)"),
        # Code for sm_100a runs on 10.0 alone.
        sparse=Fact(
            ComputeCapabilities((((9, 0), (9, 0)), ((10, 0), (10, 0)))),
            "sgl-kernel 0.3.21 flashmla_ops: sm_90a, sm_100a",
        ),
        sinks=Fact(False, SGL_PYTHON),
    ),
    FlashMLABuild(
        library=FLASH_MLA,
        module="flash_mla.flash_mla_interface",
        dense_fp8=Fact(False, f"{UPSTREAM}/dense_decode.h (query and cache bfloat16 or float16)"),
        sparse=Fact(SM90_AND_SM100, f"{UPSTREAM}/sparse_decode.h, sparse_fwd.h (is_sm90a, is_sm100f)"),
        sinks=Fact(True, f"{UPSTREAM_PYTHON} (attn_sink)"),
        notes=("needs a FlashMLA from before 2026-09-30, whose release dropped these kernels",),
    ),
)


def kernel_of(build: FlashMLABuild, function: KernelFunction, copies_cache: bool = False) -> FlashMLAKernel:
    """Return what a plan that runs this build carries."""
    return FlashMLAKernel(build.distribution, function, copies_cache)


def build_of(kernel: FlashMLAKernel) -> FlashMLABuild:
    """Return the build that a plan's kernel names."""
    return next(build for build in BUILDS if build.distribution == kernel.provider)
