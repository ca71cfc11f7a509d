"""``FLEX_ATTENTION``: torch's FlexAttention, compiled, with a block mask over the paged cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from attn_select.backends.compilers import compiler_reason
from attn_select.backends.reasons import unsupported
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
from attn_select.layer.dtypes import BITS
from attn_select.layer.layouts import FLASH_ATTN_NHD
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_torch.facts.torch_library import PADDED_V, RAN_ON_CPU, TORCH

TRITON = Library("triton", "triton", "pip install triton")
"""On a GPU inductor generates Triton; PyPI's torch for Linux brings it."""

_FLEX = "pytorch/pytorch torch/nn/attention/flex_attention.py v2.13.0"
_LOWERING = "pytorch/pytorch torch/_inductor/kernel/flex v2.13.0"
_RAN_ON_H100 = "ran on H100, torch 2.11.0, 2026-11-21"
_MASK_MOD = f"{_FLEX}: mask_mod decides each pair of positions; paged mask {_RAN_ON_H100}"
_NO_SCORE_MOD = "own masks: this backend brings a mask_mod and no score_mod"

CAPABILITIES = Capabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((7, 0), (12, 9)),), cpu=True),
        "pytorch/pytorch torch/_dynamo/device_interface.py v2.13.0 is_triton_capable (7.0 and up); "
        f"{_LOWERING}/flex_cpu.py, {RAN_ON_CPU}",
    ),
    dtypes=Fact(("bfloat16", "float16", "float32"), f"{_LOWERING}/flex_cpu.py; {RAN_ON_CPU}; {_RAN_ON_H100}"),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "float32"), f"{_LOWERING}/flex_cpu.py; FP8 scales: {_NO_SCORE_MOD}"),
    head_sizes=Fact(HeadSizes(), f"{RAN_ON_CPU} (1 to 512); {_RAN_ON_H100} (16 to 2048)"),
    block_sizes=Fact((16,), f"{_RAN_ON_H100} (BLOCK_M and BLOCK_N 16: tl.dot takes no less)"),
    attn_types=Fact(("decoder", "encoder", "encoder_only"), f"{_MASK_MOD}; an encoder is the case without a cache"),
    mixed_kv_cache_dtype=Fact(
        True, f"{_LOWERING}/templates/common.py.jinja (k and v are cast to q's dtype); GPUs only"
    ),
    v_head_size_differs=Fact(True, f"{_RAN_ON_H100}; {RAN_ON_CPU} (192 and 128, 12 and 20)"),
    sliding_window=Fact(True, _MASK_MOD),
    attention_chunk_size=Fact(True, _MASK_MOD),
    logits_soft_cap=Fact(False, _NO_SCORE_MOD),
    alibi=Fact(False, _NO_SCORE_MOD),
    sinks=Fact(False, _NO_SCORE_MOD),
    mm_prefix=Fact(True, _MASK_MOD),
    non_causal=Fact(True, _MASK_MOD),
    batch_invariant=Fact(True, f"{_RAN_ON_H100}: bitwise equal with fixed tiles (FORCE_USE_FLEX_ATTENTION); GPUs only"),
    decode_context_parallel=Fact(True, f"{_RAN_ON_H100}: AuxRequest(lse=True); GPUs only"),
)

_CPU_COMPILES = "compiles C++ at the first call of each shape class, for a CPU with AVX2"
_GPU_COMPILES = "compiles at the first call of each head count, head size and dtype"
_FIXED_TILES = "batch invariance: tiles of 16 by 16, keys in a request's own order"

LEAST_HEAD_SIZE = 16
TILE = 16
"""Queries and keys of the smallest tile."""
_SHARED_KIB = {(7, 0): 96, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
"""Shared memory of one block (CUDA C++ Programming Guide 13.0, technical specifications per compute capability); 64 KiB
on 7.5, 99 KiB on 8.6, 8.9 and 12.x. The smallest tiles of Q, K and V must fit, head sizes padded to powers of two: 2048
in bfloat16 and 512 in float32 ran on H100, torch 2.11.0, 2026-11-21 (BLOCK_M and BLOCK_N 16, num_stages 1)."""


def _cpu_has_template() -> bool:
    """Whether inductor's C++ template exists for this CPU (flex_cpu.py v2.13.0 check_cpu_supported)."""
    import platform  # only the CPU asks

    return sys.platform != "darwin" and platform.machine().lower() in ("x86_64", "amd64")


@dataclass(frozen=True, slots=True)
class FlexKernel:
    """What inductor compiles."""

    language: Literal["C++", "Triton"]  # of the template
    # tiles of keys and values that a GPU's kernel loads ahead: two where shared memory holds them, else one
    stages: int

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return "flex-cpp" if self.language == "C++" else "flex-triton"


def _cpu_reasons(config: AttentionConfig, environment: Environment, device: Device) -> list[Reason]:
    found: list[Reason] = []
    if device.local and not environment.assume_installed and not _cpu_has_template():
        message = "inductor's C++ template needs x86-64 with AVX2, and not macOS"
        found.append(Reason("cpu-architecture", message, None, "x86-64"))
    cache, ranks = config.cache_dtype, config.decode_context_parallel_size
    if config.has_cache and cache in BITS and cache != config.dtype:
        what = f"beside dtype {config.dtype} on a CPU KV-cache dtype"
        found.append(unsupported("kv-cache-dtype", what, config.kv_cache_dtype, ["auto"], "--kv-cache-dtype auto"))
    if config.batch_invariant:
        # torch/_inductor/codegen/cpp_flex_attention_template.py v2.13.0: need_pack.
        message = "no batch invariance on a CPU: the C++ template packs or not by the number of tokens in the batch"
        found.append(Reason("batch-invariant", message, True, False))
    if ranks > 1:
        what = "the C++ template returns no LSE, so on a CPU decode context parallel size"
        found.append(unsupported("decode-context-parallel", what, ranks, 1, "--dcp 1"))
    return found


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _shared_room(capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that one block may have."""
    return _SHARED_KIB.get(capability, 64 if capability < (8, 0) else 99) * 1024


def _shared_need(k_size: int, v_size: int, dtype: str, stages: int) -> int:
    """Return the bytes that one tile of Q and ``stages`` of K and V take."""
    k_padded, v_padded = _padded(k_size), _padded(v_size)
    return TILE * (k_padded + stages * (k_padded + v_padded)) * BITS[dtype] // 8


def _stages(k_size: int, v_size: int, dtype: str, capability: tuple[int, int]) -> int:
    """Return how many tiles of K and V shared memory holds beside one of Q, at most 2; 0: the layer does not fit."""
    room = _shared_room(capability)
    return next((stages for stages in (2, 1) if _shared_need(k_size, v_size, dtype, stages) <= room), 0)


def _gpu_reasons(config: AttentionConfig, environment: Environment, capability: tuple[int, int]) -> list[Reason]:
    found: list[Reason] = []
    if not environment.has(TRITON):
        message = "triton is not installed, which inductor compiles with on a GPU"
        states = {"triton": environment.state(TRITON)}
        found.append(Reason("library-missing", message, states, ["triton"], TRITON.install))
    if capability < (8, 0) and config.dtype == "bfloat16":
        # torch/_inductor/compile_fx.py v2.13.0 _check_triton_bf16_support: such graphs are skipped.
        what, accepted = "below compute capability 8.0 dtype", ["float16", "float32"]
        found.append(unsupported("dtype", what, "bfloat16", accepted, "--dtype float16"))
    k_size, v_size, least = config.head_size, config.value_head_size, f"{LEAST_HEAD_SIZE} and up"
    if k_size < LEAST_HEAD_SIZE:
        found.append(unsupported("head-size", "on a GPU head size", k_size, least))
    if v_size < LEAST_HEAD_SIZE and config.v_head_size is not None:
        found.append(unsupported("v-head-size", "on a GPU V head size", v_size, least))
    if not _stages(k_size, v_size, config.dtype, capability):
        need, room = _shared_need(k_size, v_size, config.dtype, 1), f"{_shared_room(capability)} bytes of shared memory"
        what = f"tiles of {need} bytes in {config.dtype}, by head size"
        found.append(unsupported("head-size", what, k_size, room))
    return found


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what the templates cannot do on this device."""
    capability = device.compute_capability
    if capability is None:
        reasons = _cpu_reasons(config, environment, device)
    else:
        reasons = _gpu_reasons(config, environment, capability)
    # On a CPU inductor calls $CXX or g++ (torch/_inductor/config.py v2.13.0, cpp.cxx). On a GPU Triton builds its
    # driver module with $CC, gcc or clang (triton/runtime/build.py v3.6.0).
    variable, names = ("CXX", ("g++",)) if capability is None else ("CC", ("gcc", "clang"))
    if (missing := compiler_reason(device, environment, variable, names, "to compile with")) is not None:
        reasons.append(missing)
    if reasons:
        return reasons
    cached, on_cpu = config.has_cache, capability is None
    own_notes = [_CPU_COMPILES if on_cpu else _GPU_COMPILES]
    if config.batch_invariant:
        own_notes.append(_FIXED_TILES)
    if cached and config.v_head_size is not None and config.v_head_size != config.head_size:
        own_notes.append(PADDED_V)
    stages = 1 if capability is None else _stages(config.head_size, config.value_head_size, config.dtype, capability)
    # One token dimension over all blocks is a view of this layout alone. Graph replay on a GPU with another block table
    # and other lengths ran on H100 (torch 2.11.0, 2026-11-21): the mask reads persistent tensors, and the block lists
    # are built without the host.
    kernel = FlexKernel("C++" if on_cpu else "Triton", stages)
    return BackendPlan(
        kernel=kernel,
        path=kernel.language,
        because=f"inductor's {kernel.language} template",
        query_dtype=config.dtype,
        returns_lse=not on_cpu,
        kv_layouts=(FLASH_ATTN_NHD,) if cached else (),
        kernel_block_sizes=(TILE,) if cached else (),
        cuda_graph="NEVER" if on_cpu else "ALWAYS",
        masks_chunks=True,
        notes=tuple(own_notes),
    )


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: head counts and sizes are static (flex_attention.py v2.13.0)."""
    # Causality, windows and lengths are numbers that the mask reads; only image ranges, and the way from a place in the
    # cache to a position, are code.
    return (
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        config.value_head_size,
        config.dtype,
        config.cache_dtype,
        config.has_cache,
        config.mm_prefix,
    )


FLEX_ATTENTION = BackendSpec(
    name="FLEX_ATTENTION",
    summary="torch's compiled FlexAttention with a block mask over the paged cache",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_torch.runtime.flex:FlexBackend",
    libraries=((TORCH,),),
    variables=("CC", "CXX", "PATH"),
    compile_key=compile_key,
)
