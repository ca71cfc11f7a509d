"""What Triton can compile for which GPU, and what the backends have in common."""

from __future__ import annotations

from dataclasses import replace

from attn_select.backends.compilers import compiler_reason
from attn_select.backends.spec import BackendPlan, ComputeCapabilities, Fact, HeadSizes, Library, Reason
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.limits import MEASURED_CAPABILITY

# ``triton.compile`` with a target, ptxas included, of loads, stores, casts and ``tl.dot``; nothing was run.
COMPILED = "compiled ahead of time, triton 3.6.0"

TORCH = Library("torch", "torch", "pip install torch numpy", ">=2.5")
# 3.6 is the first release that compiled for 10.3 and 12.1 (3.5.1: ptxas knows neither); 3.3.1 fails on ``tl.dot`` of
# float16 for 7.5.
TRITON = Library("triton", "triton", "pip install triton", ">=3.6")
LIBRARIES = ((TORCH,), (TRITON,))

COMPILER_VARIABLES = ("CC", "PATH")  # What ``machine_reasons`` reads of the environment
# Triton builds its driver module with ``$CC`` or one of these (triton-lang/triton python/triton/runtime/build.py
# v3.6.0).
C_COMPILERS = ("gcc", "clang")

# Releases of Triton with which the kernels in Gluon, its experimental language of explicit layouts, were run.
GLUON_RAN = ((3, 6), (3, 7))
GLUON_COMPILED = "3.6.0, 3.7.1, 3.8.0 and 3.9.0"  # Those with which all of them were compiled ahead of time

OWN = "own kernel"
TURING_AND_UP: Fact[ComputeCapabilities] = Fact(
    ComputeCapabilities((((7, 5), (12, 9)),)),
    f"{COMPILED} for 7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0 and 12.1; triton 3.7.0 for 11.0",
)
DTYPES: Fact[tuple[str, ...]] = Fact(
    ("bfloat16", "float16", "float32"),
    f"{COMPILED}: tl.dot of each from 7.5 on (below 8.0 bfloat16 becomes float32 FMAs and integer rounding)",
)
KV_CACHE_DTYPES: Fact[tuple[str, ...]] = Fact(
    ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
    f"{COMPILED}: fp8e5 from 7.5 on, fp8e4nv from 8.9 on; {OWN}: casts to the query's dtype as it loads",
)
# Of QK and of V, each by itself: own prefill and decode kernels; rows are padded to a power of two under a mask.
PREFILL_HEAD_SIZES = HeadSizes(multiple_of=8, minimum=32, maximum=512)

ANY_STRIDE = f"{OWN}: reads the cache by strides, one page-table entry per tile of 16 tokens or more"
NAN_TAIL_SAFE = Fact(True, f"{OWN}: what lies behind a sequence's end is loaded as 0 or cleared on chip")
MASK = f"{OWN}: a term of the mask or the score, chosen at compilation"

E4M3_FROM = (8, 9)
THOR = (11, 0)
THOR_TRITON = (3, 7)
_NEVER_MEASURED = "tiles and splits for this compute capability follow from a model and were never measured on it"
_EMULATED_BF16 = "bfloat16 is emulated below compute capability 8.0"
_NO_MMA = "below compute capability 8.0 Triton compiles tl.dot to scalar FMAs: no tensor cores"


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, empty where it starts with none."""
    parts = version.split(".", 2)[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def device_reasons(
    config: AttentionConfig, device: Device, environment: Environment, reads_cache: bool = True
) -> list[Reason]:
    """Return what Triton cannot compile for this device, or on this machine."""
    capability = device.compute_capability
    if capability is None:
        return []  # the capabilities already say that a CPU will not do
    found = machine_reasons(device, environment) if device.local or capability == THOR else []
    if reads_cache and config.kv_cache_dtype == "fp8_e4m3" and capability < E4M3_FROM:
        message = (
            f"KV-cache dtype fp8_e4m3 on compute capability {device.capability_text} "
            "(supported: auto, fp8_e5m2; e4m3 from 8.9 on)"
        )
        found.append(
            Reason("kv-cache-dtype", message, "fp8_e4m3", ["auto", "fp8_e5m2"], "--kv-cache-dtype auto"),
        )
    return found


def machine_reasons(device: Device, environment: Environment) -> list[Reason]:
    """Return what keeps Triton from compiling anything for this device, or on this machine."""
    found: list[Reason] = []
    if device.compute_capability == THOR:
        version = environment.version("triton")
        if version is not None and () < _release(version) < THOR_TRITON:
            message = f"triton {version} has no code for compute capability 11.0 (needs >=3.7)"
            install = "pip install 'triton>=3.7'"
            found.append(Reason("library-version", message, {"triton": version}, ["triton>=3.7"], install))
    missing = compiler_reason(device, environment, "CC", C_COMPILERS, "for Triton to build its driver with")
    if missing is not None:
        found.append(missing)
    return found


def notes(config: AttentionConfig, device: Device) -> tuple[str, ...]:
    """Return what a user should know about Triton on this device, one clause each."""
    capability = device.compute_capability
    if capability is None or capability == MEASURED_CAPABILITY:
        return ()
    if capability >= (8, 0):
        return (_NEVER_MEASURED,)
    return (_NEVER_MEASURED, _NO_MMA, *([_EMULATED_BF16] if config.dtype == "bfloat16" else []))


_BF16_BELOW_8_0 = "bfloat16 below compute capability 8.0 was compiled and never executed"
_E5M2_BELOW_8_9 = "an fp8_e5m2 cache below compute capability 8.9 was compiled and never executed"


def marked(
    plan: BackendPlan | list[Reason], config: AttentionConfig, capability: tuple[int, int] | None
) -> BackendPlan | list[Reason]:
    """Return a plan, marked where its kernel was compiled for older devices and ran on none."""
    if isinstance(plan, list) or capability is None or capability >= E4M3_FROM:
        return plan
    marks = [_BF16_BELOW_8_0] if config.dtype == "bfloat16" and capability < (8, 0) else []
    if plan.kv_layouts and config.cache_dtype == "fp8_e5m2":
        marks.append(_E5M2_BELOW_8_9)
    return replace(plan, unverified=(*plan.unverified, *marks)) if marks else plan


def gluon_marks(environment: Environment) -> tuple[str, ...]:
    """Return the mark of a plan whose kernel is written in Gluon: none with a release that ran it, or one not known."""
    version = environment.version("triton")
    if version is None or _release(version) in GLUON_RAN:
        return ()
    ran = ", ".join(f"{major}.{minor}" for major, minor in GLUON_RAN)
    return (f"the Gluon kernel never ran with Triton {version} (ran with {ran}; compiled with {GLUON_COMPILED})",)


# Taken where a device's count is unknown: a full GB202, the largest single die in a product line (NVIDIA RTX Blackwell
# architecture whitepaper).
MOST_SMS = 192


def split_workspace(device: Device, programs_per_sm: int, rows: int, width: int) -> int:
    """Return the bytes that split-KV decode reserves for partial results."""
    # With G programs unsplit and a target T = ``programs_per_sm`` x SMs, it takes ceil(T / G) splits where G < T, hence
    # fewer than T + G < 2 T programs. Each writes, in float32, ``rows`` accumulators of ``width`` elements with their
    # maximum and sum. The kernel's choice of splits keeps to this bound.
    return 2 * programs_per_sm * (device.sm_count or MOST_SMS) * rows * (width + 2) * 4
