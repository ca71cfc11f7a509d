"""The builds of FlashMLA that users have, one table row per distribution, and the choice among them.

FlashMLA's release of 2026-09-30 dropped SM90, dense decoding and the 656-byte FP8 format. vLLM and SGLang keep those
kernels in their own wheels, and no package index has upstream's, so upstream comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from attn_select.environment import WRONG_VERSION, Environment
from attn_select.spec import ComputeCapabilities, Fact, Library, Reason

TORCH = Library("torch", "torch", "pip install torch")
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

HOPPER = (9, 0)
SM90 = ComputeCapabilities((((9, 0), (9, 0)),))
SM90_AND_SM100 = ComputeCapabilities((((9, 0), (9, 0)), ((10, 0), (10, 9))))

ProviderName = Literal["auto", "vllm", "sgl-flash-mla", "sglang-kernel", "sgl-kernel", "flash-mla"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """FlashMLA as one distribution brings it.

    Attributes:
        library: the distribution.
        provider: distribution and module, as plans show it.
        dense_fp8: whether dense decoding takes an FP8 e4m3 cache.
        sparse: devices for which the sparse kernels are built.
        sinks: whether the sparse kernels take attention sinks, in decode and in prefill.
        notes: what a plan with this kernel should say.
    """

    library: Library
    provider: str
    dense_fp8: Fact[bool]
    sparse: Fact[ComputeCapabilities]
    sinks: Fact[bool]
    notes: tuple[str, ...] = ()


KERNELS = (
    Kernel(
        VLLM,
        "vllm (vllm.third_party.flashmla)",
        dense_fp8=Fact(True, f"{RAN} (_flashmla_extension_C)"),
        sparse=Fact(SM90_AND_SM100, "vLLM 0.33.0 _flashmla_C: sm_90a and sm_100f; its checks say SM90a and SM100f"),
        sinks=Fact(True, "vllm-project/vllm third_party/flashmla/flash_mla_interface.py 0.33.0 (attn_sink)"),
    ),
    Kernel(
        SGL_FLASH_MLA,
        "sgl-flash-mla (flash_mla, use_legacy=True)",
        dense_fp8=Fact(True, "sgl-flash-mla 1.0.0 flash_mla/flash_mla_interface.py (use_legacy=True)"),
        sparse=Fact(SM90_AND_SM100, "sgl-flash-mla 1.0.0 flash_mla/_C_legacy: sm_90a, sm_100, sm_103"),
        sinks=Fact(True, "sgl-flash-mla 1.0.0 flash_mla/flash_mla_interface.py (attn_sink)"),
    ),
    Kernel(
        SGLANG_KERNEL,
        "sglang-kernel (sgl_kernel.flash_mla)",
        dense_fp8=Fact(True, f"{SGLANG_PYTHON} (fwd_kvcache_mla_fp8)"),
        sparse=Fact(SM90_AND_SM100, "sglang-kernel 0.4.10 flashmla_ops: sm_90a, sm_100, sm_103"),
        sinks=Fact(True, f"{SGLANG_PYTHON} (attn_sink)"),
    ),
    Kernel(
        SGL_KERNEL,
        "sgl-kernel (sgl_kernel.flash_mla)",
        dense_fp8=Fact(True, f"{SGL_PYTHON} (fwd_kvcache_mla_fp8)"),
        # Code for sm_100a runs on 10.0 alone.
        sparse=Fact(
            ComputeCapabilities((((9, 0), (9, 0)), ((10, 0), (10, 0)))),
            "sgl-kernel 0.3.21 flashmla_ops: sm_90a, sm_100a",
        ),
        sinks=Fact(False, SGL_PYTHON),
    ),
    Kernel(
        FLASH_MLA,
        "flash-mla (flash_mla)",
        dense_fp8=Fact(False, f"{UPSTREAM}/dense_decode.h (query and cache bfloat16 or float16)"),
        sparse=Fact(SM90_AND_SM100, f"{UPSTREAM}/sparse_decode.h, sparse_fwd.h (is_sm90a, is_sm100f)"),
        sinks=Fact(True, f"{UPSTREAM_PYTHON} (attn_sink)"),
        notes=("needs a FlashMLA from before 2026-09-30, whose release dropped these kernels",),
    ),
)


Objection = tuple[str, str]
"""One thing that speaks against one kernel: the code of the reason it becomes, and what the kernel takes instead."""
Judged = Sequence[tuple[Kernel, Sequence[Objection]]]


class Subject(NamedTuple):
    """What an objection is about: the value by name and as data, and what would remove it in every kernel."""

    what: str
    observed: Any
    remedy: str | None = None


def pinned(provider: ProviderName) -> Sequence[Kernel]:
    """Return the kernels that the ``provider`` option leaves."""
    return KERNELS if provider == "auto" else [k for k in KERNELS if k.library.distribution == provider]


def refuse(
    judged: Judged,
    backend: str,
    provider: ProviderName,
    environment: Environment,
    objections: Callable[[Kernel], Sequence[Objection]],
    describe: Callable[[str], Subject],
) -> list[Reason]:
    """Return every reason why no installed FlashMLA serves the layer; at least one.

    Args:
        judged: the installed kernels that the options leave, each with what speaks against it.
        backend: the name of the backend, for its options.
        provider: the ``provider`` option.
        environment: says which kernels are installed.
        objections: what speaks against any kernel.
        describe: what an objection's code is about.
    """
    reasons: list[Reason] = []
    if not judged:
        kernels = pinned(provider)
        states = {kernel.library.distribution: environment.state(kernel.library) for kernel in kernels}
        pin = "" if provider == "auto" else f' (backends.{backend}.provider = "{provider}")'
        listing = "; ".join(_standing(kernel.library, environment) for kernel in kernels)
        code = "library-version" if WRONG_VERSION in states.values() else "library-missing"
        reasons.append(Reason(code, f"no usable FlashMLA{pin}: {listing}", states, list(states)))
        # The layer may have obstacles of its own in every kernel: they are named too.
        judged = [(kernel, objections(kernel)) for kernel in kernels]
    if all(found for _, found in judged):
        reasons += _merge(judged, describe)
    serving = [kernel.library for kernel in KERNELS if not objections(kernel)]
    remedy = next((library.install for library in serving if not environment.has(library)), None)
    if provider != "auto" and any(environment.has(library) for library in serving):
        remedy = f'backends.{backend}.provider = "auto"'
    for reason in reasons:
        reason.remedy = reason.remedy or remedy
    return reasons


def _standing(library: Library, environment: Environment) -> str:
    name = library.distribution
    if environment.state(library) == WRONG_VERSION:
        return f"{name} {environment.known_version(library)} (needs {library.version})"
    return f"{name} is {environment.state(library)}"


def _merge(judged: Judged, describe: Callable[[str], Subject]) -> list[Reason]:
    """Return one reason per code, which says what each kernel takes.

    Where one kernel lacks a part of what another lacks, the rest of the other is no news and is left out.
    """
    sets = {frozenset([code for code, _ in found]) for _, found in judged}
    decisive = {code for codes in sets if not any(other < codes for other in sets) for code in codes}
    by_code: dict[str, dict[str, list[str]]] = {}
    for kernel, found in judged:
        for code, accepts in found:
            if code in decisive:
                by_code.setdefault(code, {}).setdefault(accepts, []).append(kernel.library.distribution)
    reasons = []
    for code, accepted in by_code.items():
        what, observed, remedy = describe(code)
        says = [f"{_names(names, len(judged))}: {accepts}" for accepts, names in accepted.items()]
        reasons.append(Reason(code, f"{what} ({'; '.join(says)})", observed, list(accepted), remedy))
    return reasons


def _names(names: Sequence[str], judged: int) -> str:
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return "FlashMLA" if len(names) == judged > 1 else f"FlashMLA of {listed}"
