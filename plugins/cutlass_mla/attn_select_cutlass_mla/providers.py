"""The packages that bring the CUTLASS MLA kernel, one table row each, in the order in which they are tried.

All three build NVIDIA's example 77 (Blackwell MLA), but offer different arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_select.config import AttentionConfig
from attn_select.environment import WRONG_VERSION, Environment
from attn_select.spec import Fact, Library, Reason

TORCH = Library("torch", "torch", "pip install torch")
# The log-sum-exp came with vllm-project/vllm #24385, in the releases since 0.11.
VLLM = Library("vllm", "vllm", "pip install vllm", ">=0.11")
# The function is in sgl-kernel 0.3.21, the last of that name; sglang-kernel 0.4.10 has dropped it.
SGL_KERNEL = Library("sgl-kernel", "sgl_kernel", "pip install sgl-kernel", ">=0.3.21")
FLASHINFER = Library("flashinfer-python", "flashinfer", "pip install --upgrade flashinfer-python", ">=0.6.14")
LIBRARIES = ((TORCH,), (VLLM, SGL_KERNEL, FLASHINFER))

ProviderName = Literal["auto", "vllm", "sgl-kernel", "flashinfer-python"]
TO_AUTO = 'backends.CUTLASS_MLA.provider = "auto"'

_VLLM_CSRC = "vllm-project/vllm csrc/attention/mla/sm100_cutlass_mla_kernel.cu 0f5257e"
_SGL = "sgl-kernel 0.3.21 sgl_kernel/attention.py"
_FLASHINFER = "flashinfer-ai/flashinfer include/flashinfer/attention/cutlass_mla.cuh v0.6.14"


@dataclass(slots=True, eq=False)
class Provider:
    """One package's CUTLASS MLA decode.

    Attributes:
        library: the distribution.
        module: where the function is.
        function: what is called.
        compute_capabilities: devices for which it holds code, or compiles it.
        fp8: whether it reads an FP8 cache (with an FP8 query, writing bfloat16).
        returns_lse: whether it returns the log-sum-exp.
        splits: whether the caller may set the number of KV splits.
        default_splits: what is passed where nobody sets it; -1: the kernel chooses.
        notes: what its caller must know, one clause each.
    """

    library: Library
    module: str
    function: str
    compute_capabilities: Fact[tuple[tuple[int, int], ...]]
    fp8: Fact[bool]
    returns_lse: Fact[bool]
    splits: Fact[bool]
    default_splits: Fact[int]
    notes: tuple[str, ...]

    @property
    def label(self) -> str:
        """``vllm (vllm._custom_ops)``, as plans name a provider."""
        return f"{self.library.distribution} ({self.module})"

    def objections(
        self, config: AttentionConfig, capability: tuple[int, int], splits_set: str | None, remedy: str
    ) -> list[Reason]:
        """Return every reason against this provider.

        ``splits_set`` names what fixes the KV splits, if anything; ``remedy`` brings vLLM's kernel, which takes all.
        """
        reasons: list[Reason] = []
        name = self.library.distribution
        if capability not in self.compute_capabilities.value:
            accepted = ", ".join(f"{major}.{minor}" for major, minor in self.compute_capabilities.value)
            seen = f"{capability[0]}.{capability[1]}"
            message = f"{name} has the kernel for compute capability {accepted}, not {seen}"
            reasons.append(Reason("compute-capability", message, seen, accepted, remedy))
        if config.kv_cache_dtype == "fp8_e4m3" and not self.fp8.value:
            message = f"{name}'s kernel reads no FP8 cache"
            reasons.append(Reason("kv-cache-dtype", message, "fp8_e4m3", ["auto", config.dtype], remedy))
        if config.decode_context_parallel_size > 1 and not self.returns_lse.value:
            message = f"{name}'s kernel returns no log-sum-exp, which decode context parallelism needs"
            size = config.decode_context_parallel_size
            reasons.append(Reason("decode-context-parallel", message, size, 1, remedy))
        if splits_set is not None and not self.splits.value:
            message = f"{splits_set}, but {name}'s kernel chooses the number of KV splits itself"
            reasons.append(Reason("num-kv-splits", message, splits_set, -1, remedy))
        return reasons


PROVIDERS = (
    Provider(
        library=VLLM,
        module="vllm._custom_ops",
        function="sm100_cutlass_mla_decode",
        compute_capabilities=Fact(((10, 0), (10, 3)), "vLLM 0.33.0 _C_stable_libtorch: code for sm_100f"),
        fp8=Fact(True, f"{_VLLM_CSRC} (Float8_e4m3fn in, bfloat16 out)"),
        returns_lse=Fact(True, _VLLM_CSRC),
        splits=Fact(True, _VLLM_CSRC),
        default_splits=Fact(-1, "vllm-project/vllm v1/attention/backends/mla/cutlass_mla.py 0.33.0"),
        notes=(),
    ),
    Provider(
        library=SGL_KERNEL,
        module="sgl_kernel",
        function="cutlass_mla_decode",
        compute_capabilities=Fact(((10, 0),), "sgl-kernel 0.3.21 sm100/common_ops: code for sm_100a"),
        fp8=Fact(False, _SGL),
        returns_lse=Fact(False, _SGL),
        splits=Fact(True, _SGL),
        # Its kernel is from before vllm-project/vllm #26026, which ended hangs of split batches.
        default_splits=Fact(1, f"{_SGL} (its own default)"),
        notes=("sgl-kernel's function returns a tensor of its own, which is copied",),
    ),
    Provider(
        library=FLASHINFER,
        module="flashinfer.mla",
        function="get_mla_module().cutlass_mla_paged_attention",
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


BY_NAME: dict[str, Provider] = {provider.library.distribution: provider for provider in PROVIDERS}


def choose(
    config: AttentionConfig,
    capability: tuple[int, int],
    environment: Environment,
    wanted: ProviderName,
    splits_set: str | None,
) -> Provider | list[Reason]:
    """Return the first usable provider that runs the layer, or what the first one that is there lacks.

    Where none is there, the missing library is the gate's reason already; the preferred one is judged.
    """
    if wanted == "auto":
        candidates = [provider for provider in PROVIDERS if environment.has(provider.library)] or [PROVIDERS[0]]
        remedy = VLLM.install
    else:
        candidates = [BY_NAME[wanted]]
        others = any(environment.has(provider.library) for provider in PROVIDERS)
        remedy = TO_AUTO if others else VLLM.install
        if not environment.has(candidates[0].library):
            return [_missing(candidates[0].library, environment, TO_AUTO if others else candidates[0].library.install)]
    refused: list[Reason] = []
    for provider in candidates:
        reasons = provider.objections(config, capability, splits_set, remedy)
        if not reasons:
            return provider
        refused = refused or reasons
    return refused


def _missing(library: Library, environment: Environment, remedy: str) -> Reason:
    name, state = library.distribution, environment.state(library)
    pin = f'backends.CUTLASS_MLA.provider = "{name}"'
    if state == WRONG_VERSION:
        message = f"{name} {environment.known_version(library)} (needs {library.version}; {pin})"
        return Reason("library-version", message, {name: state}, [name + library.version], remedy)
    return Reason(
        "library-missing", f"{name} is not usable here ({pin})", {name: state}, [name + library.version], remedy
    )
