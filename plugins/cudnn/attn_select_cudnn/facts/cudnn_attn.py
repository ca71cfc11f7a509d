"""``CUDNN_ATTN``: cuDNN's attention over a paged cache, by way of its Python frontend."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.backends.kernel_builds import KernelBuild
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
    Reason,
)
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment

TORCH = Library("torch", "torch", "pip install torch numpy")
FRONTEND = Library("nvidia-cudnn-frontend", "cudnn", "pip install nvidia-cudnn-frontend", ">=1.32,<2")
BUILD = KernelBuild(kernel="cuDNN attention", library=FRONTEND, module="cudnn")

SURFACE = "NVIDIA/cudnn-frontend include/cudnn_frontend/node/sdpa_support_surface.h 1.32.0"
MATRIX = "docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html (support matrix, cuDNN 9.18.1)"
RAN = "ran on H200, cuDNN 9.19.0, nvidia-cudnn-frontend 1.32.0, 2026-11-22"

LEAST_CUDNN = {8: 91801, 9: 91002, 10: 91002, 12: 91002}
"""The least cuDNN by major compute capability, as ``cudnn.backend_version()`` has it: 9.10.2 follows two releases
whose attention is known to be wrong, and packed queries came to 8.x with 9.18.1 (sdpa_support_surface.h 1.32.0)."""

DECODE_HEAD_SIZE = 128
"""The largest head size of a decode, on all but Hopper."""

CAPABILITIES = Capabilities(
    compute_capabilities=Fact(ComputeCapabilities((((8, 0), (10, 3)), ((12, 0), (12, 1)))), MATRIX),
    dtypes=Fact(("bfloat16", "float16"), f"{MATRIX}; {SURFACE}"),
    kv_cache_dtypes=Fact(("bfloat16", "float16"), f"{MATRIX}; an FP8 cache needs an FP8 query and other calls"),
    head_sizes=Fact(
        HeadSizes(multiple_of=8, minimum=8, maximum=256), f"{SURFACE} (multiples of 8); {MATRIX}; {RAN} (16 to 256)"
    ),
    block_sizes=Fact((1,), f"{RAN} (1 to 256; cuDNN refuses sizes that are no power of two: 24, 48)"),
    sliding_window=Fact(True, f"{SURFACE} (bounds with bottom-right alignment from cuDNN 9.6 on)"),
    alibi=Fact(False, f"{SURFACE} (none with bottom-right alignment, which cached keys need)"),
    sinks=Fact(False, f"{SURFACE} (none where the queries are single tokens)"),
    nan_tail_safe=Fact(False, f"{RAN}: queries of several tokens gave NaN, queries of one token were right"),
)

LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND)
"""Keys and values are given with their strides."""


@dataclass(frozen=True, slots=True)
class CudnnKernel:
    """What a plan runs: cuDNN has one operation for attention, and chooses among its engines itself."""

    name: str = "cudnn"


BLOCK_SIZES = (16, 8, 4, 2, 1)
_DRAFTS = "queries of several tokens took 4.3 times as long as FlashAttention 3's (B64 S4096, 4 tokens, H200)"
_BUILT = "builds a graph at the first step of each shape: 40 ms of host time, a second for the first of a kind"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or why cuDNN does not take the head size here."""
    capability, size = device.compute_capability, config.head_size
    if phase == "decode" and size > DECODE_HEAD_SIZE and capability is not None and capability[0] != 9:
        text = f"head size {size}: cuDNN decodes up to {DECODE_HEAD_SIZE} on compute capability {capability[0]}.x"
        return [Reason("head-size", text, size, DECODE_HEAD_SIZE)]
    drafts = phase == "decode" and config.num_speculative_tokens > 0
    return BackendPlan(
        kernel=CudnnKernel(),
        path="paged attention",
        because="cuDNN's one path",
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=LAYOUTS,
        kernel_block_sizes=BLOCK_SIZES,
        cuda_graph="UNIFORM_BATCH",
        provider=BUILD.provider,
        host_us_per_shape=40e3,
        notes=(_BUILT, _DRAFTS) if drafts else (_BUILT,),
        nan_tail_safe=False,
    )


def compile_key(config: AttentionConfig) -> object:
    """Return what layers have in common whose kernels cuDNN compiles together, a second for each of several."""
    size, page = config.head_size, config.block_size or BLOCK_SIZES[0]
    bucket = next((most for most in (64, 128) if size <= most), 256)
    return bucket, config.dtype, next(size for size in BLOCK_SIZES if page % size == 0), config.sliding_window is None


CUDNN_ATTN = BackendSpec(
    name="CUDNN_ATTN",
    summary="cuDNN's attention over a paged cache, compute capability 8.0 and up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    rank=("after", "FLEX_ATTENTION"),
    load="attn_select_cudnn.runtime.cudnn_attn:CudnnBackend",
    libraries=((TORCH,), (FRONTEND,)),
    compile_key=compile_key,
)
