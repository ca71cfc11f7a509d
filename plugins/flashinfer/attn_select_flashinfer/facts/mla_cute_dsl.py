"""``FLASHINFER_MLA_CUTE_DSL``: decode of dense MLA on the latent cache by FlashInfer's kernels in CuTe DSL.

Both implementations stand behind ``trtllm_batch_decode_with_kv_cache_mla``, beside trtllm-gen (``FLASHINFER_MLA``).
*Monolithic* returns the log-sum-exp, masks draft tokens, and since 0.7.2 takes queries of unequal length. *Modular*
takes attention sinks, and none of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from attn_select.backends.reasons import device_reasons
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
    Reason,
)
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import (
    CONVERTED,
    LIBRARIES,
    MIB,
    MLA_CORE,
    TRTLLM_GEN_CAPABILITIES,
    page_reasons,
    pages,
)
from attn_select_flashinfer.facts.mla import DECODE
from attn_select_flashinfer.facts.mla_kernels import DEEPSEEK, MLAKernel, blackwell_reasons, dims_reasons

_FOLDER = "flashinfer-ai/flashinfer flashinfer/cute_dsl/attention 0.6.14 and 0.7.2.post1"
_MONOLITHIC = f"{_FOLDER} monolithic/mla_decode_fp16.py and mla_decode_fp8.py can_implement"
_DISPATCH = f"{_FOLDER} mla_dispatch.py"
PAGES = Fact((64, 32, 128, 16), f"{_MONOLITHIC}: divisors of 128 from 2 up")
WORKSPACE = Fact(128 * MIB, f"{_FOLDER} monolithic/mla_decode.py: covers all; it needs 18 MiB at most on 148 SMs")
CUTLASS_DSL = Library("nvidia-cutlass-dsl", "cutlass", "pip install --upgrade flashinfer-python", ">=4.5.0")
"""What 0.6.14 requires (METADATA); 0.7.2.post1 wants 4.6.2 or newer and brings it."""

CAPABILITIES = replace(
    DECODE,
    compute_capabilities=Fact(
        ComputeCapabilities(tuple((each, each) for each in TRTLLM_GEN_CAPABILITIES)),
        f"{MLA_CORE} _cute_dsl_incompatibility_reason: 10.x; Tensor Memory of 10.0 and 10.3",
    ),
    dtypes=Fact(("bfloat16", "float16"), f"{_MONOLITHIC}; {MLA_CORE}: out is bfloat16"),
    kv_cache_dtypes=Fact(("bfloat16", "fp8_e4m3"), f"{_MONOLITHIC}: the cache has the query's dtype"),
    head_sizes=Fact(HeadSizes((576,)), f"{_MONOLITHIC}: 512 + 64"),
    block_sizes=PAGES,
    sinks=Fact(True, f"{_DISPATCH} MODULAR_ONLY_KWARGS"),
    non_causal=Fact(True, f"{MLA_CORE}: no mask of one query; each draft token runs as a request of its own"),
    decode_context_parallel=Fact(True, f"{_FOLDER} monolithic/mla_decode.py: returns the LSE, in base e"),
    nan_tail_safe=Fact(False, f"{_FOLDER} monolithic: scores alone are masked"),
    speculative_tokens=Fact(1024, f"{_MONOLITHIC}: any query length from 1"),
)


class FlashInferMLACuteDslOptions(BackendOptions):
    """``[backends.FLASHINFER_MLA_CUTE_DSL]``."""

    implementation: Literal["auto", "monolithic", "modular"] = Field(
        "auto", description="which of the two runs; auto is modular for layers with attention sinks, else monolithic"
    )


_UNPROVEN = "it was never executed here: its calls were checked on an emulated kernel alone"
_PUBLISHED = (
    "8 draft tokens over a million keys took it 359 us, and trtllm-gen 1413 (flashinfer-ai/flashinfer #4390); of short "
    "contexts no figure is published"
)
_BY_TOKEN = "draft tokens run as requests of their own: the modular kernel has no mask for them"
_FIRST_CALL = "CuTe DSL compiles at the first call, once for each number of heads, query length and page size"


def plan(
    config: AttentionConfig,
    device: Device,
    environment: Environment,
    options: FlashInferMLACuteDslOptions,
    phase: Phase,
) -> BackendPlan | list[Reason]:
    """Plan the decode: which implementation, and why; or every reason why none runs."""
    if device.compute_capability not in TRTLLM_GEN_CAPABILITIES:
        return device_reasons(CAPABILITIES.compute_capabilities.value, device)
    wanted = options.implementation
    modular = config.sinks if wanted == "auto" else wanted == "modular"
    if reasons := _against(config, modular, wanted):
        return reasons
    fp8 = config.kv_cache_dtype == "fp8_e4m3"
    notes = [_PUBLISHED, _FIRST_CALL]
    if modular and config.num_speculative_tokens:
        notes.append(_BY_TOKEN)
    if fp8 and config.dtype == "float16":
        notes.append(CONVERTED)
    sizes = pages(PAGES.value, config.block_size)
    name: Literal["monolithic", "modular"] = "modular" if modular else "monolithic"
    why = "takes the sinks" if modular else "returns the log-sum-exp and masks draft tokens"
    return BackendPlan(
        kernel=MLAKernel("cute-dsl", config.num_heads, fp8, name),
        path=f"CuTe DSL, {name}",
        because=f"the {name} kernel {why}" if wanted == "auto" else f'implementation = "{wanted}"',
        query_dtype="fp8_e4m3" if fp8 else config.dtype,
        returns_lse=not modular,
        kv_layouts=(MLA,),
        kernel_block_sizes=sizes,
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE" if modular else "UNIFORM_BATCH",
        workspace_bytes=WORKSPACE.value,
        nan_tail_safe=CAPABILITIES.nan_tail_safe.value,
        block_table_width_multiple=128 // min(sizes),
        notes=tuple(notes),
        unverified=(_UNPROVEN,),
    )


def _against(config: AttentionConfig, modular: bool, wanted: str) -> list[Reason]:
    reasons = [*blackwell_reasons(config, "the CuTe DSL decode"), *dims_reasons(config, (DEEPSEEK,))]
    reasons += page_reasons(PAGES.value, config.block_size)
    if config.sinks and not modular:
        message = f'implementation = "{wanted}", but the monolithic kernel takes no attention sinks'
        remedy = 'backends.FLASHINFER_MLA_CUTE_DSL.implementation = "auto"'
        reasons.append(Reason("forced-path", message, wanted, ["auto", "modular"], remedy))
    if modular and config.decode_context_parallel_size > 1:
        message = "the modular CuTe DSL kernel returns no log-sum-exp, which decode context parallelism needs"
        reasons.append(Reason("decode-context-parallel", message, config.decode_context_parallel_size, 1, "--dcp 1"))
    return reasons


def compile_key(config: AttentionConfig) -> object:
    """Return what CuTe DSL compiles one kernel for (monolithic/mla_decode.py ``_get_compiled_mla_kernel``)."""
    return config.dtype, config.kv_cache_dtype, config.num_heads, config.max_decode_query_len, config.block_size


FLASHINFER_MLA_CUTE_DSL = BackendSpec(
    name="FLASHINFER_MLA_CUTE_DSL",
    summary="FlashInfer MLA decode in CuTe DSL, for compute capability 10.0 and 10.3",
    capabilities={"decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flashinfer.runtime.mla:FlashInferMLABackend",
    libraries=(*LIBRARIES, (CUTLASS_DSL,)),
    options=FlashInferMLACuteDslOptions,
    rank=("after", "FLASHINFER_MLA"),
    compile_key=compile_key,
)
