"""The gate: everything that rejects one backend for one config on one device.

It returns every reason, never only the first. What it accepts and cannot run is a bug, and so is what it rejects and
could run. Unsupported is data; an exception here is a bug of ours or of a plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from attn_select.backends.reasons import (
    MLA_ONLY,
    MLA_UNSUPPORTED,
    SPARSE_ONLY,
    block_size_reason,
    device_reasons,
    library_reasons,
    refusal,
    unsupported,
)
from attn_select.backends.spec import (
    UNVERIFIED,
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    Reason,
    StateCapabilities,
)
from attn_select.decide.amd import on_amd
from attn_select.decide.state_gate import state_reasons
from attn_select.errors import shorten, show
from attn_select.layer.config import CUDA_GRAPH_LEVELS, AttentionConfig, Phase
from attn_select.layer.dtypes import KV_CACHE_DTYPES, is_quantized
from attn_select.layer.features import FEATURES, Feature
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.layouts import LAYOUTS, STATE_LAYOUTS
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment

DENIED = "denied-by-rule"
_LEVEL_RANK = {level: rank for rank, level in enumerate(CUDA_GRAPH_LEVELS)}
_CHUNKS_APART = "each chunk is a request of its own to the kernel, so CUDA graphs hold single-token decodes alone"
_PLACE = ("compute-capability", "library-missing", "library-version")
"""Codes of the reasons that speak of the device and its libraries, and not of the layer."""
_STATE_ONLY = Reason("state-only", "serves layers that keep a state only", "attention", "a recurrence")
_STATE_UNSUPPORTED = Reason("state-unsupported", "serves no layers that keep a state", "a recurrence", "attention")


def check(
    spec: BackendSpec,
    config: LayerConfig,
    device: Device,
    environment: Environment,
    options: BackendOptions,
    phase: Phase,
) -> BackendPlan | list[Reason]:
    """Return the plan by which ``spec`` would run ``phase``, or every reason (at least one) why it cannot.

    A ``plan`` function that raises or returns something else is reported as reason ``plugin-error``.
    """
    capabilities = spec.capabilities.get(phase)
    if capabilities is None:
        served = list(spec.capabilities)
        return [Reason("phase-not-served", f"serves {', '.join(served)} only", phase, served)]
    marks: list[str] = []
    if device.arch is None:
        elsewhere = device_reasons(capabilities.compute_capabilities.value, device)
    else:
        elsewhere, unproved = on_amd(spec.name, config, device)
        marks.append(unproved)
    elsewhere += library_reasons(spec, environment)
    if isinstance(config, StateConfig):
        if not isinstance(capabilities, StateCapabilities):
            return [_STATE_UNSUPPORTED]
        against = state_reasons(capabilities, config, elsewhere)
    else:
        if isinstance(capabilities, StateCapabilities):
            return [_STATE_ONLY]
        against = capability_reasons(capabilities, config, device, elsewhere)
    if capabilities.sort != config.sort:
        return against
    plan = _planned(spec, config, device, environment, options, phase)
    if isinstance(plan, list):
        return _together(against, plan)
    if not _captures(plan, config, phase):
        message = f"CUDA graphs up to {plan.cuda_graph} with {plan.path} (asked for {config.cuda_graph})"
        remedy = f"--cuda-graph {plan.cuda_graph}"
        return [*against, Reason("cuda-graph-level", message, config.cuda_graph, plan.cuda_graph, remedy)]
    if against:
        return against
    if problem := _plan_problem(plan, capabilities, config):
        return [_plugin_error(spec, problem)]
    marks += _unverified(capabilities, config)
    return replace(plan, unverified=(*plan.unverified, *marks)) if marks else plan


def _together(against: list[Reason], of_plan: list[Reason]) -> list[Reason]:
    """Return the reasons of the capabilities and of the plan, one per code.

    Capabilities hold for every device. The plan knows this one, so its answer about the layer is more exact.
    """
    answers = {reason.code: reason for reason in of_plan}
    exact = [reason if reason.code in _PLACE else answers.get(reason.code, reason) for reason in against]
    codes = {reason.code for reason in against}
    return exact + [reason for reason in of_plan if reason.code not in codes]


# What the capabilities say.


def capability_reasons(
    capabilities: Capabilities, config: AttentionConfig, device: Device, elsewhere: Sequence[Reason]
) -> list[Reason]:
    """Return what speaks against a layer, ``elsewhere`` of device and libraries; its kind of attention comes first."""
    found: list[Reason] = []
    accepted = capabilities.head_sizes.value
    if capabilities.sort == config.sort and not accepted.accepts(config.head_size):
        found.append(unsupported("head-size", "head size", config.head_size, str(accepted)))
    return [
        *found,
        *_against_kind(capabilities, config),
        *elsewhere,
        *_against_types(capabilities, config, device),
        *_against_sizes(capabilities, config),
        *_beyond_ranks(config),
        *_against_features(capabilities, config),
    ]


def _against_kind(capabilities: Capabilities, config: AttentionConfig) -> list[Reason]:
    if capabilities.mla is not config.mla:
        return [MLA_ONLY if capabilities.mla else MLA_UNSUPPORTED]
    if capabilities.sparse is config.sparse:
        return []
    if capabilities.sparse:
        return [SPARSE_ONLY]
    return [Reason("sparse-unsupported", "serves no sparse MLA", f"sparse_top_k {config.sparse_top_k}", "dense MLA")]


def _against_types(capabilities: Capabilities, config: AttentionConfig, device: Device) -> list[Reason]:
    """Return the reasons against the dtype, the attention type and the KV-cache dtype."""
    found: list[Reason] = []
    dtypes, types = capabilities.dtypes.value, capabilities.attn_types.value
    if config.dtype not in dtypes:
        found.append(unsupported("dtype", "dtype", config.dtype, list(dtypes), f"--dtype {dtypes[0]}"))
    if config.attn_type not in types:
        found.append(unsupported("attn-type", "attention type", config.attn_type, list(types)))
    if config.has_cache:
        found += _against_cache_dtype(capabilities, config, device)
    return found


def _against_cache_dtype(capabilities: Capabilities, config: AttentionConfig, device: Device) -> list[Reason]:
    """Return the reason against storing the KV-cache dtype under the compute dtype.

    NVFP4 is refused whatever the backend lists: the runtime has no layout for NVFP4 data with its block scales. A phase
    that does not read the cache refuses nothing else: the layer's tokens are still stored there.
    """
    stored, dtype = config.cache_dtype, config.dtype
    allocatable, reads = stored != "nvfp4", capabilities.reads_cache
    listed = capabilities.kv_cache_dtypes.value if reads else KV_CACHE_DTYPES
    mixed = capabilities.mixed_kv_cache_dtype.value or not reads
    if allocatable and stored in listed and (stored == dtype or mixed or is_quantized(stored)):
        return []
    if stored == dtype and dtype not in capabilities.dtypes.value:
        return []  # the compute dtype is a reason of its own
    if reads:
        reads_quantized = capabilities.quantized_kv_cache_on.value.accepts(device.compute_capability)
        offered = [name for name in listed if reads_quantized or not is_quantized(name)]
    else:
        offered = [name for name in KV_CACHE_DTYPES if name not in ("auto", "fp8_ds_mla")]  # the latter is sparse MLA's
    supported = [d for d in offered if d != "nvfp4" and (mixed or is_quantized(d) or d == dtype)]
    if dtype in listed:
        supported = ["auto", *supported]
    remedy = f"--kv-cache-dtype {supported[0]}" if supported else None
    what = "KV-cache dtype" if allocatable else "attn_select.runtime cannot allocate a KV cache of dtype"
    return [unsupported("kv-cache-dtype", what, stored, supported, remedy)]


def _against_sizes(capabilities: Capabilities, config: AttentionConfig) -> list[Reason]:
    """Return the reasons against the block size and the V head size."""
    found: list[Reason] = []
    if config.block_size is not None and config.has_cache and capabilities.reads_cache:
        kernels = capabilities.block_sizes.value
        if not any(config.block_size % kernel == 0 for kernel in kernels):
            found.append(block_size_reason(config.block_size, kernels))
    width = config.v_head_size
    if width not in (None, config.head_size) and not capabilities.v_head_size_differs.value:
        found.append(unsupported("v-head-size", "V head size", width, config.head_size))
    return found


def _against_features(capabilities: Capabilities, config: AttentionConfig) -> list[Reason]:
    """Return the reasons against the features that are asked for: first the features that the backend lacks."""
    lacked: list[Reason] = []
    limited: list[Reason] = []
    for feature, value in _features_of(config):
        declared = getattr(capabilities, feature.fact).value
        if declared is False:
            lacked.append(refusal(feature, value, False))
        elif declared != feature.most and not feature.accepts(declared, value):
            limited.append(refusal(feature, value, declared))
    return [*lacked, *limited]


def _features_of(config: AttentionConfig) -> list[tuple[Feature, Any]]:
    """Return the features that a layer asks for, with their values."""
    return [(each, value) for each in FEATURES if (value := getattr(config, each.field)) != each.off]


_DISTANCES = {"sliding_window": "a sliding window of {}", "attention_chunk_size": "chunks of {}", "alibi": "ALiBi"}


def _beyond_ranks(config: AttentionConfig) -> list[Reason]:
    """Return what nothing can do under decode context parallelism, whatever the backend."""
    ranks = config.decode_context_parallel_size
    if ranks == 1:
        return []
    features = {feature.field: value for feature, value in _features_of(config)}
    found: list[Reason] = []
    if names := [text.format(features[field]) for field, text in _DISTANCES.items() if field in features]:
        why = "a kernel measures distance within one rank's share"  # a rank counts only its own, interleaved tokens
        text = f"{' and '.join(names)} over {ranks} ranks (supported: 1): {why}"
        found.append(Reason("decode-context-parallel-distance", text, ranks, 1, "--dcp 1"))
    if config.output_quantization == "fp4":
        text = f"FP4 output over {ranks} ranks (supported: none, fp8): outputs are quantised after they are merged"
        found.append(Reason("decode-context-parallel-output", text, "fp4", ["none", "fp8"], "--dcp 1"))
    if config.draft_tree and config.mla:
        text = f"draft trees of MLA layers over {ranks} ranks (supported: 1): each query is a request of its own there"
        found.append(Reason("decode-context-parallel-draft-tree", text, True, False, "--dcp 1"))
    return found


def _unverified(capabilities: Capabilities | StateCapabilities, config: LayerConfig) -> list[str]:
    """Return a clause for everything that the layer uses and that no source proves, or that never ran anywhere."""
    if isinstance(config, StateConfig) or isinstance(capabilities, StateCapabilities):
        return [
            f"no source proves the capability {field.name}"
            for field in fields(capabilities)
            if getattr(capabilities, field.name).source == UNVERIFIED
        ]
    features = _features_of(config)
    used = {"compute_capabilities", "dtypes", "head_sizes", "attn_types", *[feature.fact for feature, _ in features]}
    if config.v_head_size not in (None, config.head_size):
        used.add("v_head_size_differs")
    if config.has_cache and capabilities.reads_cache:
        used |= {"kv_cache_dtypes", "block_sizes"}
        if config.cache_dtype != config.dtype and not is_quantized(config.cache_dtype):
            used.add("mixed_kv_cache_dtype")
    unproved = [
        field.name
        for field in fields(capabilities)
        if field.name in used and getattr(getattr(capabilities, field.name), "source", None) == UNVERIFIED
    ]
    never = [
        each.never_executed for each, value in features if each.executed is not None and value not in each.executed
    ]
    return [*[f"no source proves the capability {name}" for name in unproved], *never]


# What the plan says.


def _planned(
    spec: BackendSpec,
    config: LayerConfig,
    device: Device,
    environment: Environment,
    options: BackendOptions,
    phase: Phase,
) -> BackendPlan | list[Reason]:
    """Return what ``spec.plan`` says of a phase and kind of attention that the spec serves."""
    try:
        outcome = spec.plan(config, device, environment, options, phase)
    except Exception as error:  # a plugin's bug must not take the other candidates down; it is shown, not hidden
        return [_plugin_error(spec, f"plan() raised {type(error).__name__}: {shorten(error)}")]
    if type(outcome) is BackendPlan:
        if outcome.masks_chunks or isinstance(config, StateConfig) or config.attention_chunk_size is None:
            return outcome
        return _in_virtual_batches(outcome, config, config.attention_chunk_size)
    if type(outcome) is list and set(map(type, outcome)) == {Reason}:
        return outcome
    return [_plugin_error(spec, f"plan() returned {show(outcome)} instead of a BackendPlan or reasons")]


def _in_virtual_batches(plan: BackendPlan, config: AttentionConfig, chunk: int) -> BackendPlan | list[Reason]:
    """Return the plan for a kernel that gets every chunk of ``chunk`` tokens as a request of its own."""
    sizes = tuple(k for k in plan.kernel_block_sizes if chunk % k == 0 and (config.block_size or k) % k == 0)
    if not sizes:
        needed = " or ".join(map(str, plan.kernel_block_sizes))
        supported = f"multiples of a block size of the kernel, {needed}"
        return [unsupported("attention-chunk-size", "attention inside chunks of", chunk, supported)]
    level = min(plan.cuda_graph, "UNIFORM_SINGLE_TOKEN_DECODE", key=lambda level: _LEVEL_RANK.get(level, 0))
    return replace(plan, kernel_block_sizes=sizes, cuda_graph=level, notes=(*plan.notes, _CHUNKS_APART))


def _captures(plan: BackendPlan, config: LayerConfig, phase: Phase) -> bool:
    """Whether the plan captures what the layer asks for: the uniform levels speak of decodes alone."""
    if phase == "prefill" and config.cuda_graph != "ALWAYS":
        return True
    return _LEVEL_RANK.get(plan.cuda_graph, 0) >= _LEVEL_RANK[config.cuda_graph]


def _plan_problem(plan: BackendPlan, capabilities: Capabilities | StateCapabilities, config: LayerConfig) -> str | None:
    """Return what is wrong with a plan: what the decision would stumble over, or blocks that the capabilities accept
    and the plan cannot read."""
    marks, sizes = plan.unverified, plan.kernel_block_sizes
    if not isinstance(marks, tuple) or not all(isinstance(clause, str) for clause in marks):
        return f"plan().unverified = {show(marks)} (accepted: a tuple of strings)"
    if plan.cuda_graph not in _LEVEL_RANK:
        return f"plan().cuda_graph = {show(plan.cuda_graph)} (accepted: {', '.join(_LEVEL_RANK)})"
    if plan.kv_layouts and set(plan.kv_layouts) <= set(STATE_LAYOUTS):
        return None if not sizes else f"plan().kernel_block_sizes = {show(sizes)} (accepted: (), states have no blocks)"
    if unknown := [name for name in plan.kv_layouts if name not in LAYOUTS]:
        return f"plan().kv_layouts names {show(unknown[0])} (accepted: {', '.join(LAYOUTS)})"
    if not all(type(size) is int and size > 0 for size in sizes) or (plan.kv_layouts and not sizes):
        return f"plan().kernel_block_sizes = {show(sizes)} (accepted: positive integers, at least one with a KV layout)"
    if isinstance(config, StateConfig) or isinstance(capabilities, StateCapabilities):
        return None
    size = config.block_size if plan.kv_layouts and config.has_cache and capabilities.reads_cache else None
    if size is None or any(size % kernel == 0 for kernel in sizes):
        return None
    return (
        f"block_sizes declares that blocks of {size} are read, and plan().kernel_block_sizes = {show(sizes)} "
        "(accepted: a size that divides it, or a reason against it)"
    )


def _plugin_error(spec: BackendSpec, what: str) -> Reason:
    return Reason("plugin-error", spec.bug(what), None, None)
