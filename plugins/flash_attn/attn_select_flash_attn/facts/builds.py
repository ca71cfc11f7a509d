"""The builds of FlashAttention that users have, one table row per distribution and major version.

All come from Dao-AILab/flash-attention, but each distribution builds it for other devices and offers other arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from attn_select.backends.kernel_builds import KernelBuild, Pin, device_text, pin_provider
from attn_select.backends.spec import ComputeCapabilities, Fact, Library

# The wheels of vLLM and SGLang hold compiled kernels.
TORCH = Library("torch", "torch", "pip install torch numpy")
VLLM = Library("vllm", "vllm", "pip install vllm", ">=0.26")
# flash-attn is published as source whose build needs nvcc and was not seen to succeed; upstream's FA3 is not on PyPI.
# So the command for both brings vLLM's wheel, which holds FA2 and FA3.
FLASH_ATTN_2 = Library("flash-attn", "flash_attn", "pip install vllm", ">=2.7")
FLASH_ATTN_3 = Library("flash-attn-3", "flash_attn_interface", "pip install vllm")
# Looked into: sgl-kernel 0.3.21 (the last of that name) and sglang-kernel 0.4.10.
SGLANG_KERNEL = Library("sglang-kernel", "sgl_kernel", "pip install sglang-kernel", ">=0.4")
SGL_KERNEL = Library("sgl-kernel", "sgl_kernel", "pip install sgl-kernel", ">=0.3.21")
# The wheel adds a folder to the namespace flash_attn and needs CuTe DSL, whose module is cutlass. There are only
# pre-releases.
FLASH_ATTN_4 = Library("flash-attn-4", "cutlass", "pip install 'flash-attn-4[cu13]>=4.0.0b36'", ">=4.0.0b36")
VLLM_WITH_FA4 = Library("vllm", "vllm", "pip install vllm", ">=0.33")

LIBRARIES = ((TORCH,), (VLLM, FLASH_ATTN_3, FLASH_ATTN_4, FLASH_ATTN_2, SGLANG_KERNEL, SGL_KERNEL))
ProviderName = Literal["auto", "vllm", "flash-attn-4", "flash-attn-3", "flash-attn", "sglang-kernel", "sgl-kernel"]
Version = Literal["auto", 2, 3, 4]

HOPPER = (9, 0)
ANY_HEADS = 2**31 - 1

RAN = "ran on H100, FA3 of vLLM 0.26.0, 2026-11-21"
UPSTREAM_FA3 = "Dao-AILab/flash-attention hopper/flash_api.cpp 0251105"
UPSTREAM_FA3_PYTHON = "Dao-AILab/flash-attention hopper/flash_attn_interface.py 0251105"
UPSTREAM_FA2 = "Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp v2.8.3"
UPSTREAM_FA2_PYTHON = "Dao-AILab/flash-attention flash_attn/flash_attn_interface.py v2.8.3"
VLLM_FA3 = "vllm-project/flash-attention hopper/flash_api.cpp 617264c"
VLLM_PYTHON = "vllm-project/vllm vllm_flash_attn/flash_attn_interface.py 0.33.0"
SGLANG_PYTHON = "sglang-kernel 0.4.10 sgl_kernel/flash_attn.py"
SGL_PYTHON = "sgl-kernel 0.3.21 sgl_kernel/flash_attn.py"
FA4 = "flash-attn-4 4.0.0b36 flash_attn/cute/interface.py"
VLLM_FA4 = "vllm-project/vllm vllm_flash_attn/cute/interface.py 0.33.0"
SGLANG_FA3 = "sgl-project/sgl-flash-attn hopper/flash_api.cpp branch sgl-kernel (2026-01-23)"


@dataclass(frozen=True, slots=True)
class FlashAttnKernel:
    """What a plan runs: one build, and how it is called."""

    version: int  # FlashAttention's major version: 2, 3 or 4
    provider: str  # the distribution that it is taken from
    paged: bool  # whether it reads K and V from a paged cache, or packed one request behind the other
    value_padding: int = 0  # columns that V is padded with, because the kernel takes it as wide as Q and K only
    splits_keys: bool = True  # whether it can split a request's keys among thread blocks

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return f"fa{self.version}" if self.paged else f"fa{self.version}-varlen"


@dataclass(frozen=True, slots=True)
class GatherKernel(FlashAttnKernel):
    """A kernel that reads the rows of K and V that a list of each token names."""

    @property
    def name(self) -> str:
        return f"fa{self.version}-gather"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashAttnBuild(KernelBuild):
    """FA2, FA3 or FA4 as one distribution builds it."""

    version: int  # FlashAttention's major version: 2, 3 or 4
    # devices for which the build holds code (or PTX, or a source that is compiled there)
    compute_capabilities: Fact[ComputeCapabilities]
    page_multiple: Fact[int]  # a page (kernel block) holds a multiple of this many tokens
    sink_heads: Fact[int]  # the most query heads with attention sinks, 0 for none; FA3's work on 9.0 only
    sinks_with_other_v_size: Fact[bool]  # whether sinks go together with a V head size that differs from K's
    out: Fact[bool]  # whether it writes into the caller's output tensor


_SM90A = ComputeCapabilities(((HOPPER, HOPPER),))
_SM8X_AND_90A = ComputeCapabilities((((8, 0), (8, 9)), (HOPPER, HOPPER)))
_NO_SINKS_IN_FA2 = Fact(0, VLLM_PYTHON)

_SGLANG_FA3 = FlashAttnBuild(
    kernel="FA3",
    version=3,
    library=SGLANG_KERNEL,
    module="sgl_kernel.flash_attn",
    compute_capabilities=Fact(_SM8X_AND_90A, f"{SGLANG_PYTHON} is_fa3_supported; flash_ops: sm_80, sm_86, sm_90a"),
    page_multiple=Fact(1, "sgl-project/sglang srt/layers/attention/flashattention_backend.py 0.5.23 (page_size 1)"),
    sink_heads=Fact(ANY_HEADS, SGLANG_FA3),
    sinks_with_other_v_size=Fact(True, SGLANG_FA3),
    out=Fact(True, SGLANG_PYTHON),
)
# The older distribution of the same kernel.
_SGL_FA3 = replace(
    _SGLANG_FA3,
    library=SGL_KERNEL,
    compute_capabilities=Fact(_SM8X_AND_90A, f"{SGL_PYTHON} is_fa3_supported; flash_ops: sm_80, sm_86, sm_90a"),
    out=Fact(False, SGL_PYTHON),
)

_FA4 = FlashAttnBuild(
    kernel="FA4",
    version=4,
    library=FLASH_ATTN_4,
    module="flash_attn.cute.interface",
    compute_capabilities=Fact(
        ComputeCapabilities(((HOPPER, HOPPER), ((10, 0), (12, 9)))), f"{FA4} _flash_attn_fwd (8.x, 9.x to 12.x)"
    ),
    page_multiple=Fact(1, f"{FA4} (page_size != tile_n: rows are gathered one by one)"),
    sink_heads=Fact(ANY_HEADS, f"{FA4} learnable_sink"),
    sinks_with_other_v_size=Fact(True, f"{FA4} learnable_sink"),
    out=Fact(True, f"{FA4} _flash_attn_fwd"),
)

# In order of preference within one major version. Among FA3 a package of its own comes before an engine's copy. Among
# FA2 vLLM's comes first: upstream's wants pages of 256 tokens, which would force that size on all that share the pool.
BUILDS = (
    FlashAttnBuild(
        kernel="FA3",
        version=3,
        library=FLASH_ATTN_3,
        module="flash_attn_interface",
        compute_capabilities=Fact(_SM90A, "Dao-AILab/flash-attention README.md 0251105 (H100, H800)"),
        page_multiple=Fact(1, f"{UPSTREAM_FA3_PYTHON} (page_block_size can be arbitrary)"),
        sink_heads=Fact(0, UPSTREAM_FA3_PYTHON),
        sinks_with_other_v_size=Fact(False, UPSTREAM_FA3_PYTHON),
        out=Fact(False, UPSTREAM_FA3_PYTHON),
    ),
    FlashAttnBuild(
        kernel="FA3",
        version=3,
        library=VLLM,
        module="vllm.vllm_flash_attn.flash_attn_interface",
        compute_capabilities=Fact(_SM90A, "vLLM 0.33.0 _vllm_fa3_C: code for sm_90a only"),
        page_multiple=Fact(1, f"{RAN} (1, 4, 8, 16, 24, 48, 64, 256)"),
        sink_heads=Fact(64, f"{VLLM_FA3}; vLLM 0.33.0 _vllm_fa3_C checks it"),
        sinks_with_other_v_size=Fact(False, f"{VLLM_FA3}; vLLM 0.33.0 _vllm_fa3_C checks it"),
        out=Fact(True, VLLM_PYTHON),
    ),
    _SGLANG_FA3,
    _SGL_FA3,
    _FA4,
    # vLLM's copy of the same kernels, older than that release.
    replace(
        _FA4,
        library=VLLM_WITH_FA4,
        module="vllm.vllm_flash_attn.flash_attn_interface",
        compute_capabilities=Fact(
            ComputeCapabilities(((HOPPER, HOPPER), ((10, 0), (11, 9)))), f"{VLLM_PYTHON} _is_fa4_supported"
        ),
        page_multiple=Fact(1, f"{VLLM_FA4} (page_size != tile_n: rows are gathered one by one)"),
        sink_heads=Fact(ANY_HEADS, VLLM_FA4),
        sinks_with_other_v_size=Fact(True, VLLM_FA4),
        out=Fact(True, VLLM_PYTHON),
    ),
    FlashAttnBuild(
        kernel="FA2",
        version=2,
        library=VLLM,
        module="vllm.vllm_flash_attn.flash_attn_interface",
        compute_capabilities=Fact(
            ComputeCapabilities((((8, 0), (99, 9)),)),
            "vllm-project/flash-attention CMakeLists.txt 617264c (8.0+PTX); vLLM 0.33.0 _vllm_fa2_C: sm_80, PTX",
        ),
        page_multiple=Fact(
            16, "vllm-project/flash-attention csrc/flash_attn/flash_api.cpp 617264c; vLLM 0.33.0 _vllm_fa2_C checks it"
        ),
        sink_heads=_NO_SINKS_IN_FA2,
        sinks_with_other_v_size=Fact(False, VLLM_PYTHON),
        out=Fact(True, VLLM_PYTHON),
    ),
    FlashAttnBuild(
        kernel="FA2",
        version=2,
        library=FLASH_ATTN_2,
        module="flash_attn",
        compute_capabilities=Fact(
            ComputeCapabilities((((8, 0), (9, 9)), ((10, 0), (10, 9)), ((12, 0), (12, 9)))),
            "Dao-AILab/flash-attention setup.py v2.8.3 (sm_80, sm_90; with CUDA 12.8 sm_100, sm_120; no PTX)",
        ),
        page_multiple=Fact(256, UPSTREAM_FA2),
        sink_heads=Fact(0, UPSTREAM_FA2_PYTHON),
        sinks_with_other_v_size=Fact(False, UPSTREAM_FA2_PYTHON),
        out=Fact(False, UPSTREAM_FA2_PYTHON),
    ),
)


VERSIONS = Fact(
    {9: (3, 4, 2), 10: (4, 2, 3)},
    "vllm-project/vllm v1/attention/backends/fa_utils.py 0.33.0 get_flash_attn_version: FA3 on 9.x, FA4 where FA3 does "
    "not serve the layer, FA4 on 10.x, FA2 elsewhere",
)
"""Major versions by the device's, preferred first; elsewhere FA2 leads."""


INVARIANCE_UNPROVEN = "no source says that FA4's results do not depend on the batch off compute capability 9.0"
"""On 9.0 the conformance suite compared bits. Elsewhere the number of tiles that a thread block has follows the longest
query (flash-attn-4 4.0.0b36 flash_attn/cute/interface.py, ``q_stage``); each row is still computed by itself
(flash_fwd_sm100.py), so that bits may well be equal."""


def proves_invariance(build: FlashAttnBuild, capability: tuple[int, int] | None) -> bool:
    """Return whether a build's results were seen, or are said, not to depend on the batch."""
    return build.version != 4 or capability == HOPPER


def builds_for(capability: tuple[int, int] | None, batch_invariant: bool = False) -> tuple[FlashAttnBuild, ...]:
    """Return the builds that a device of this compute capability can run, preferred first."""
    # For a device that runs none (CPU, below 8.0) it is all, so that a layer's other obstacles can still be named.
    # batch_invariant: whether those whose batch invariance nobody proved come last
    if capability is None or capability < (8, 0):
        return BUILDS
    fitting = [build for build in BUILDS if build.compute_capabilities.value.accepts(capability)]
    order = VERSIONS.value.get(capability[0], (2, 4, 3))
    fitting.sort(key=lambda build: order.index(build.version))  # stable: the table's order within one
    if batch_invariant:
        fitting.sort(key=lambda build: not proves_invariance(build, capability))
    return tuple(fitting)


FA4_WIDE: Fact[dict[str, tuple[tuple[int, int], ...]]] = Fact(
    {"flash-attn-4": ((192, 128), (256, 256)), "vllm": ((192, 128),)},
    f"{FA4} _validate_head_dims; {VLLM_FA4} (256 has a kernel of its own there, which wants a block table that ends "
    "with the step's longest request: no CUDA graph keeps that)",
)
"""Pairs of Q and V head sizes above 128 that FA4 takes off 9.0, by distribution."""


FA4_ON_HOPPER: Fact[dict[str, int]] = Fact(
    {"flash-attn-4": 256, "vllm": 512},
    f"{FA4} _validate_head_dims; {VLLM_FA4} (512 with tiles of 64 keys; vllm-project/vllm v1/attention/backends/"
    "fa_utils.py 0.33.0 takes it above 256, where FA3 ends)",
)
"""The largest head size that FA4 takes on 9.0, by distribution."""


def fa4_accepts(build: FlashAttnBuild, head_size: int, v_head_size: int, major: int, paged: bool) -> str | None:
    """Return which head sizes FA4 takes instead on devices of a major compute capability, None where these fit."""
    if paged and (head_size % 16 or v_head_size % 16):
        # Only pages of exactly one tile of keys may have other widths (flash_fwd_sm90.py, flash_fwd_sm100.py).
        return "multiples of 16 with a paged cache"
    if major == 9:
        most = FA4_ON_HOPPER.value[build.distribution]
        if max(head_size, v_head_size) > most:
            return f"up to {most}"
        if head_size <= 96 and v_head_size > NARROW_V.value:
            return f"V head sizes up to {NARROW_V.value} with head sizes up to 96"
        return None if not paged or _gathers(head_size, v_head_size) else _GATHERED.value
    wide = FA4_WIDE.value[build.distribution]
    if max(head_size, v_head_size) <= 128 or (head_size, v_head_size) in wide:
        return None
    return " and ".join(["up to 128", *(f"{qk} with V head size {v}" for qk, v in wide)])


NARROW_V = Fact(
    128,
    "ran on H200, 2026-11-22: 192 rows of queries with V of 192 or 256 do not compile, do not launch, or read outside "
    "memory (64 or 96 with 192 or 256, 32 with 256); 64 with 128 and 128 with 256 are right",
)
"""The widest V that FA4 takes on 9.0 beside the head sizes whose tile has 192 rows (_tile_size_fwd_sm90)."""

_GATHERED = Fact(
    "16, 32, 48, 64, 112, 128, 192 and 256 with a paged cache",
    "flash-attn-4 4.0.0b36 flash_attn/cute/paged_kv.py load_KV (128 threads gather rows in waves, and the last one is "
    "not cut at the end of a tile) and interface.py _tile_size_fwd_sm90 (tiles of keys by head size and mask); ran on "
    "H200, 2026-11-22: 160 and 224 read outside memory; 32, 80, 96, 112, 128, 256, 64 with 128, 128 with 64, 192 with "
    "64 and 128, and 256 with 64 and 128 are right under causality",
)


def _gathers(head_size: int, v_head_size: int) -> bool:
    """Return whether FA4's tiles of keys on 9.0 hold whole waves of rows, under every mask."""
    rows = 1024 // gcd(head_size, v_head_size, 64)
    tiles: tuple[int, ...] = (64, 80)
    if head_size <= 64 or 96 < head_size <= 128:
        tiles = (128,)
    elif head_size <= 96:
        tiles = (128, 144)
    elif head_size <= 192:
        tiles = (96, 128 if v_head_size <= 128 else 112)
    elif head_size > 256:
        tiles = (64,)
    return all(tile % rows == 0 for tile in tiles)


def kernel_of(build: FlashAttnBuild, paged: bool, value_padding: int = 0, splits_keys: bool = True) -> FlashAttnKernel:
    """Return what a plan that runs this build carries."""
    return FlashAttnKernel(build.version, build.distribution, paged, value_padding, splits_keys)


def build_of(kernel: FlashAttnKernel) -> FlashAttnBuild:
    """Return the build that a plan's kernel names."""
    return next(b for b in BUILDS if (b.version, b.distribution) == (kernel.version, kernel.provider))


def pins_of(backend: str, option: str, version: Version, provider: ProviderName) -> tuple[Pin[Any], ...]:
    """Return what a backend's options pin; ``option`` is the key of the one for FlashAttention's version."""
    pins = pin_provider(backend, provider)
    if version == "auto":
        return pins
    return (Pin(f"backends.{backend}.{option}", version, lambda build: build.version == version), *pins)


def why_this_build(build: FlashAttnBuild, capability: tuple[int, int] | None) -> str:
    """Return why a device runs this build, for the plan's text."""
    if build.version == 3 and capability == HOPPER:
        return "Hopper's own kernel"
    if capability == HOPPER:
        return "no installed FA3 serves this layer"
    if build.version == 4 and capability is not None and capability[0] == 10:
        return "Blackwell's own kernel"
    if build.version == 2 and capability is not None and capability[0] == 10:
        return "no installed FA4 serves this layer"
    if build.version == 2:
        return f"FA3 is Hopper's kernel, this is {device_text(capability)}"
    has = f"{build.distribution} builds {build.kernel} for {device_text(capability)}"
    return f"no installed FA2 serves this layer, and {has}"


ALLOCATES_OUTPUT = "the kernel allocates its output, which is copied into the caller's tensor"


def notes_on_build(build: FlashAttnBuild, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return what a plan with this build says whatever the layer."""
    found = []
    if not build.out.value:
        found.append(ALLOCATES_OUTPUT)
    if build.version == 2 and build.library is VLLM and capability is not None and capability >= HOPPER:
        found.append("the driver compiles vLLM's FA2 from PTX at the first call (50 to 115 s per kernel on an H100)")
    if build.version == 4:
        found.append("CuTe DSL compiles the kernel at its first call, once for each kind of layer")
    return tuple(found)
