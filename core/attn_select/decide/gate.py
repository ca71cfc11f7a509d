"""The gate: everything that speaks against one backend for one config on one device.

It returns every reason, never only the first. What it accepts and cannot run is a bug, and so is what it rejects and
could run. Unsupported is data; an exception here is a bug of ours or of a plugin.

Every selection puts all backends through the gate, so what does not depend on the config is taken apart once
(``CapabilityGate``), and what does not depend on the backend is asked once per config (``Demands``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from attn_select.backends.reasons import block_size_reason, library_reasons, unsupported
from attn_select.backends.spec import (
    UNVERIFIED,
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    Reason,
)
from attn_select.errors import shorten, show
from attn_select.layer.config import ATTENTION_TYPES, CUDA_GRAPH_LEVELS, AttentionConfig, CudaGraphLevel, Phase
from attn_select.layer.dtypes import DTYPES, KV_CACHE_DTYPES, is_quantized
from attn_select.layer.features import FEATURES, Feature
from attn_select.layer.layouts import LAYOUTS
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment

DENIED = "denied-by-rule"
_LEVEL_RANK = {level: rank for rank, level in enumerate(CUDA_GRAPH_LEVELS)}
# The uniform levels speak of decode batches; a prefill can be captured at ALWAYS only.
_GRAPHS: dict[CudaGraphLevel, Mapping[Phase, int]] = {
    level: {"prefill": rank if level == "ALWAYS" else 0, "decode": rank} if rank else {}
    for level, rank in _LEVEL_RANK.items()
}

_CHUNKS_APART = "each chunk is a request of its own to the kernel, so CUDA graphs hold single-token decodes alone"

_PLACE = ("compute-capability", "library-missing", "library-version")
"""Codes of the reasons that speak of the device and its libraries, and not of the layer."""


def check(
    spec: BackendSpec,
    config: AttentionConfig,
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
        return [phase_not_served(spec, phase)]
    gate, demands = CapabilityGate(capabilities, device, library_reasons(spec, environment)), Demands(config)
    static = gate.reasons(demands)
    if gate.kind != demands.kind:
        return static
    return judge(spec, gate, demands, phase, planned(spec, demands, device, environment, options, phase), static)


def phase_not_served(spec: BackendSpec, phase: Phase) -> Reason:
    """Return the reason against a phase that the spec has no capabilities for."""
    served = list(spec.capabilities)
    return Reason("phase-not-served", f"serves {', '.join(served)} only", phase, served)


def planned(
    spec: BackendSpec,
    demands: Demands,
    device: Device,
    environment: Environment,
    options: BackendOptions,
    phase: Phase,
) -> BackendPlan | list[Reason]:
    """Return what ``spec.plan`` says of a phase and kind of attention that the spec serves.

    A ``plan`` function that raises or returns something else is reported as reason ``plugin-error``.
    """
    try:
        outcome = spec.plan(demands.config, device, environment, options, phase)
    except Exception as error:  # a plugin's bug must not take the other candidates down; it is shown, not hidden
        return [_plugin_error(spec, f"plan() raised {type(error).__name__}: {shorten(error)}")]
    if type(outcome) is BackendPlan:
        if outcome.masks_chunks or demands.config.attention_chunk_size is None:
            return outcome
        return _in_virtual_batches(outcome, demands.config, demands.config.attention_chunk_size)
    if type(outcome) is list and set(map(type, outcome)) == {Reason}:
        return outcome
    return [_plugin_error(spec, f"plan() returned {show(outcome)} instead of a BackendPlan or reasons")]


def _in_virtual_batches(plan: BackendPlan, config: AttentionConfig, chunk: int) -> BackendPlan | list[Reason]:
    """Return the plan for a kernel that gets every chunk of ``chunk`` tokens as a request of its own."""
    sizes = tuple([k for k in plan.kernel_block_sizes if chunk % k == 0 and (config.block_size or k) % k == 0])
    if not sizes:
        needed = " or ".join(map(str, plan.kernel_block_sizes))
        supported = f"multiples of a block size of the kernel, {needed}"
        return [unsupported("attention-chunk-size", "attention inside chunks of", chunk, supported)]
    level = min(plan.cuda_graph, "UNIFORM_SINGLE_TOKEN_DECODE", key=lambda level: _LEVEL_RANK.get(level, 0))
    return replace(plan, kernel_block_sizes=sizes, cuda_graph=level, notes=(*plan.notes, _CHUNKS_APART))


_said_of_cache = attrgetter("cuda_graph", "kv_layouts", "kernel_block_sizes")
_SOUND: set[tuple[object, ...]] = set()
"""The combinations that were checked before: nearly all plans share a few."""


def _are_clauses(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(clause, str) for clause in value)


def _plan_problem(plan: BackendPlan) -> str | None:
    """Return what is wrong with a plan that the decision would stumble over."""
    if plan.unverified != () and not _are_clauses(plan.unverified):
        return f"plan().unverified = {show(plan.unverified)} (accepted: a tuple of strings)"
    if plan.cuda_graph not in _LEVEL_RANK:
        return f"plan().cuda_graph = {show(plan.cuda_graph)} (accepted: {', '.join(_LEVEL_RANK)})"
    if unknown := [name for name in plan.kv_layouts if name not in LAYOUTS]:
        return f"plan().kv_layouts names {show(unknown[0])} (accepted: {', '.join(LAYOUTS)})"
    sizes = plan.kernel_block_sizes
    if not all(type(size) is int and size > 0 for size in sizes) or (plan.kv_layouts and not sizes):
        return f"plan().kernel_block_sizes = {show(sizes)} (accepted: positive integers, at least one with a KV layout)"
    _SOUND.add(_said_of_cache(plan))
    return None


_DISTANCES = {"sliding_window": "a sliding window of {}", "attention_chunk_size": "chunks of {}", "alibi": "ALiBi"}


def _beyond_ranks(asked: Mapping[str, Any], mla: bool) -> list[Reason]:
    """Return what nothing can do under decode context parallelism, whatever the backend. ``asked``: value by field."""
    ranks = asked.get("decode_context_parallel_size")
    if ranks is None:
        return []
    found: list[Reason] = []
    if names := [text.format(asked[field]) for field, text in _DISTANCES.items() if field in asked]:
        why = "a kernel measures distance within one rank's share"  # a rank counts only its own, interleaved tokens
        text = f"{' and '.join(names)} over {ranks} ranks (supported: 1): {why}"
        found.append(Reason("decode-context-parallel-distance", text, ranks, 1, "--dcp 1"))
    if asked.get("output_quantization") == "fp4":
        text = f"FP4 output over {ranks} ranks (supported: none, fp8): outputs are quantised after they are merged"
        found.append(Reason("decode-context-parallel-output", text, "fp4", ["none", "fp8"], "--dcp 1"))
    if "draft_tree" in asked and mla:
        text = f"draft trees of MLA layers over {ranks} ranks (supported: 1): each query is a request of its own there"
        found.append(Reason("decode-context-parallel-draft-tree", text, True, False, "--dcp 1"))
    return found


_kept = functools.lru_cache(maxsize=1024)

_FEATURE_VALUES = attrgetter(*[feature.field for feature in FEATURES])
_BITS = tuple([(1 << index, feature) for index, feature in enumerate(FEATURES)])
_NOBODY = 1 << len(FEATURES)
"""The bit of a combination of features that no backend has."""


class _Among(dict[int, tuple[object, ...]]):
    """The bits of some features → what is asked for among them; equal where layers ask for the same."""

    __slots__ = ("_features", "_nobody")

    def __init__(self, features: Sequence[tuple[int, Feature, Any]], nobody: Sequence[Reason]) -> None:
        self._features, self._nobody = features, nobody

    def __missing__(self, bits: int) -> tuple[object, ...]:
        seen = [(bit, value) for bit, _, value in self._features if bit & bits]
        found = self[bits] = (*seen, *[reason.message for reason in self._nobody])
        return found


class Wanted:
    """The features that layers of one kind ask for. Layers that ask for the same share one object.

    Attributes:
        bits: one bit per feature that is asked for, and one for a combination that nobody has.
        features: these features, each with its bit and the value asked for.
        among: the bits of some features → what a backend sees that looks at these alone.
        unverified: the marks that every plan for such a layer gets.
    """

    __slots__ = ("_nobody", "_refusals", "among", "bits", "features", "unverified")

    def __init__(self, values: Sequence[Any], mla: bool) -> None:
        self.features = [
            (bit, feature, value) for (bit, feature), value in zip(_BITS, values, strict=True) if value != feature.off
        ]
        self.unverified = tuple(
            feature.never_executed
            for _, feature, value in self.features
            if feature.executed is not None and value not in feature.executed
        )
        asked = {feature.field: value for _, feature, value in self.features}
        self._nobody = _beyond_ranks(asked, mla)
        self.bits = sum([bit for bit, _, _ in self.features], _NOBODY if self._nobody else 0)
        self._refusals: dict[int, list[Reason]] = {}
        self.among = _Among(self.features, self._nobody)

    def refusals(self, lacked: int) -> list[Reason]:
        """Return the reasons against a backend that lacks what these bits stand for. The list is shared."""
        found = self._refusals.get(lacked)
        if found is None:
            found = [*self._nobody]
            found += [_refusal(feature, value, False) for bit, feature, value in self.features if bit & lacked]
            self._refusals[lacked] = found
        return found


_wanted = _kept(Wanted)


class Demands:
    """What one config asks of every backend alike.

    Attributes:
        kind: the kind of attention, MLA and sparse or not; ``spec.plan`` is asked only where a gate has the same.
        config: the config.
        types: all that ``CapabilityGate.of_types`` depends on: few layers differ in it.
        cache: the stored dtype and the compute dtype.
        sizes: head size and V head size (elements), the latter None where it is the former; and the block size
            (tokens), None where it is open or there is no cache.
        other_sizes: the same without a head size that says nothing to backends of another kind.
        wanted: the features that are asked for.
        graph: rank of the least CUDA-graph level by phase; empty where none is asked for.
    """

    __slots__ = ("cache", "config", "graph", "has_cache", "kind", "other_sizes", "sizes", "types", "wanted")

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self.kind, self.has_cache = (config.mla, config.sparse), config.has_cache
        self.cache = (config.cache_dtype, config.dtype)
        self.types = (self.kind, self.cache, config.attn_type, config.sparse_top_k)
        size, width = config.head_size, config.v_head_size
        block = config.block_size if self.has_cache else None
        self.sizes: tuple[int, int | None, int | None] = (size, None if width == size else width, block)
        self.other_sizes = (block,) if self.sizes[1] is None else self.sizes
        self.wanted = _wanted(_FEATURE_VALUES(config), config.mla)
        self.graph: Mapping[Phase, int] = _GRAPHS[config.cuda_graph]


@_kept
def _refusal(feature: Feature, value: Any, declared: Any) -> Reason:
    """Return the reason against a backend whose fact ``declared`` does not accept this value of a feature."""
    if declared is False and feature.off in (None, False):
        text = f"no {feature.what}" if value is True else f"no {feature.what} (asked for {value})"
        return Reason(feature.code, text, value, False)
    supported, nearest = feature.off, feature.off
    if isinstance(declared, tuple):
        supported = [feature.off, *declared]
    elif declared is not False:
        supported, nearest = f"at most {declared}", declared
    return unsupported(feature.code, feature.what, value, supported, f"{feature.flag} {nearest}")


class CapabilityGate:
    """One set of capabilities, taken apart for comparison with many configs on one device.

    Attributes:
        kind: as in ``Demands``.
        refusing: the bits of the features that it refuses, or some of whose values it refuses.
        doubtful: the capabilities that no source proves.

    Args:
        capabilities: what the backend accepts.
        device: the device it is judged on.
        missing: the reasons that ``library_reasons`` found; they hold for every config.
    """

    __slots__ = (
        "_against_attn_type",
        "_against_cache_dtype",
        "_against_dtype",
        "_against_sizes",
        "_every",
        "_lacked",
        "_limits",
        "_reads_cache",
        "doubtful",
        "kind",
        "refusing",
    )

    def __init__(self, capabilities: Capabilities, device: Device, missing: Sequence[Reason]) -> None:
        self.kind = (capabilities.mla, capabilities.sparse)
        self._against_sizes = _kept(functools.partial(_against_sizes, capabilities))
        self._reads_cache = capabilities.reads_cache
        self._lacked = _NOBODY
        self._limits: dict[int, Any] = {}
        for bit, feature in _BITS:
            declared = getattr(capabilities, feature.fact).value
            if declared is False:
                self._lacked |= bit
            elif declared is not True and declared != feature.most:
                self._limits[bit] = declared
        self.refusing = self._lacked | sum(self._limits)
        self.doubtful = [
            field.name
            for field in fields(capabilities)
            if getattr(getattr(capabilities, field.name), "source", None) == UNVERIFIED
        ]
        self._every: list[Reason] = []
        accepted = capabilities.compute_capabilities.value
        if not accepted.accepts(device.compute_capability):
            what = "device" if device.compute_capability is None else "compute capability"
            self._every.append(unsupported("compute-capability", what, device.capability_text, str(accepted)))
        self._every += missing
        # Enumerated fields have few values: what speaks against each is written once.
        dtypes, types = capabilities.dtypes.value, capabilities.attn_types.value
        self._against_dtype = {
            dtype: unsupported("dtype", "dtype", dtype, list(dtypes), f"--dtype {dtypes[0]}")
            for dtype in DTYPES
            if dtype not in dtypes
        }
        self._against_attn_type = {
            name: unsupported("attn-type", "attention type", name, list(types))
            for name in ATTENTION_TYPES
            if name not in types
        }
        reads_quantized = capabilities.quantized_kv_cache_on.value.accepts(device.compute_capability)
        offered = [name for name in capabilities.kv_cache_dtypes.value if reads_quantized or not is_quantized(name)]
        self._against_cache_dtype = {
            (asked, dtype): reason
            for dtype in DTYPES
            for asked in (dtype, *KV_CACHE_DTYPES)
            if (reason := _against_cache_dtype(capabilities, offered, asked, dtype)) is not None
        }

    def reasons(self, demands: Demands) -> list[Reason]:
        """Return what plain capabilities and missing libraries say against a config; kind reasons come first."""
        return self.compare(self.of_types(demands), demands, self.kind == demands.kind)

    def of_types(self, demands: Demands) -> list[Reason]:
        """Return what speaks against all configs of the same ``demands.types``."""
        reasons: list[Reason] = []
        config = demands.config
        (mla, sparse), (asked_mla, asked_sparse) = self.kind, demands.kind
        if asked_mla is not mla:
            reasons.append(_MLA_ONLY if mla else _MLA_UNSUPPORTED)
        elif asked_sparse is not sparse:
            top_k = f"sparse_top_k {config.sparse_top_k}"
            unsupported = Reason("sparse-unsupported", "serves no sparse MLA", top_k, "dense MLA")
            reasons.append(_SPARSE_ONLY if sparse else unsupported)
        reasons += self._every
        if config.dtype in self._against_dtype:
            reasons.append(self._against_dtype[config.dtype])
        if config.attn_type in self._against_attn_type:
            reasons.append(self._against_attn_type[config.attn_type])
        if demands.has_cache and demands.cache in self._against_cache_dtype:
            reasons.append(self._against_cache_dtype[demands.cache])
        return reasons

    def compare(self, reasons: list[Reason], demands: Demands, same_kind: bool) -> list[Reason]:
        """Add what speaks against the sizes and features to the ``reasons`` of ``of_types``, which stay as they are.

        ``same_kind``: whether gate and config are of one ``kind``; head sizes of another say nothing.
        """
        wanted = demands.wanted
        (head, others), refused = self._against_sizes(demands.sizes), wanted.bits & self.refusing
        if not (refused or others or head):
            return reasons
        found = [*head, *reasons, *others] if same_kind else [*reasons, *others]
        if lacked := refused & self._lacked:
            found += wanted.refusals(lacked)
        if lacked != refused:
            for bit, feature, value in wanted.features:
                if bit in self._limits and not feature.accepts(self._limits[bit], value):
                    found.append(_refusal(feature, value, self._limits[bit]))
        return found

    def unverified(self, demands: Demands) -> tuple[str, ...]:
        """Return a clause for everything that the config uses and that no source proves, or that never ran anywhere."""
        if not self.doubtful:
            return demands.wanted.unverified
        used = {"compute_capabilities", "dtypes", "head_sizes", "attn_types"}
        used |= {feature.fact for _, feature, _ in demands.wanted.features}
        if demands.sizes[1] is not None:
            used.add("v_head_size_differs")
        if demands.has_cache and self._reads_cache:
            used |= {"kv_cache_dtypes", "block_sizes"}
            asked, dtype = demands.cache
            if asked != dtype and not is_quantized(asked):
                used.add("mixed_kv_cache_dtype")
        clauses = [f"no source proves the capability {name}" for name in self.doubtful if name in used]
        return (*clauses, *demands.wanted.unverified)


def judge(
    spec: BackendSpec,
    gate: CapabilityGate,
    demands: Demands,
    phase: Phase,
    outcome: BackendPlan | list[Reason],
    static: list[Reason],
) -> BackendPlan | list[Reason]:
    """Return what ``planned`` and ``static``, the reasons of ``compare``, say together of a phase."""
    if type(outcome) is BackendPlan:
        if demands.graph and _LEVEL_RANK.get(outcome.cuda_graph, 0) < demands.graph[phase]:
            return [*static, _graphunsupported(outcome, demands.config)]
        if static:
            return static
        if outcome.unverified != () or _said_of_cache(outcome) not in _SOUND:
            problem = _plan_problem(outcome)
            if problem is not None:
                return [_plugin_error(spec, problem)]
        marks = gate.unverified(demands) if gate.doubtful or demands.wanted.unverified else ()
        return replace(outcome, unverified=(*outcome.unverified, *marks)) if marks else outcome
    if not static:
        return outcome
    # Capabilities hold for every device. The plan knows this one, so its answer about the layer is more exact.
    answers = {reason.code: reason for reason in outcome}
    exact = [reason if reason.code in _PLACE else answers.get(reason.code, reason) for reason in static]
    codes = {reason.code for reason in static}
    return exact + [reason for reason in outcome if reason.code not in codes]


def _against_sizes(
    capabilities: Capabilities, sizes: tuple[int, int | None, int | None]
) -> tuple[tuple[Reason, ...], tuple[Reason, ...]]:
    """Return what speaks against a layer's head size, and what against the others of ``Demands.sizes``."""
    (size, width, block), accepted, others = sizes, capabilities.head_sizes.value, []
    head = () if accepted.accepts(size) else (unsupported("head-size", "head size", size, str(accepted)),)
    if block is not None and capabilities.reads_cache:
        kernels = capabilities.block_sizes.value
        if not any([block % kernel == 0 for kernel in kernels]):
            others.append(block_size_reason(block, kernels))
    if width is not None and not capabilities.v_head_size_differs.value:
        others.append(unsupported("v-head-size", "V head size", width, size))
    return head, tuple(others)


def _against_cache_dtype(capabilities: Capabilities, offered: Sequence[str], asked: str, dtype: str) -> Reason | None:
    """Return the reason against storing ``asked`` under a compute dtype; None where it is taken.

    ``offered`` are those of the capabilities' ``kv_cache_dtypes`` that the device reads.

    NVFP4 is refused whatever the backend lists: the runtime has no layout for NVFP4 data with its block scales. A phase
    that does not read the cache refuses nothing else: the layer's tokens are still stored there.
    """
    allocatable, reads = asked != "nvfp4", capabilities.reads_cache
    if not reads:
        offered = [name for name in KV_CACHE_DTYPES if name not in ("auto", "fp8_ds_mla")]  # the latter is sparse MLA's
    listed = capabilities.kv_cache_dtypes.value if reads else KV_CACHE_DTYPES
    mixed = capabilities.mixed_kv_cache_dtype.value or not reads
    if asked == "auto" or (allocatable and asked in listed and (asked == dtype or mixed or is_quantized(asked))):
        return None
    if asked == dtype and dtype not in capabilities.dtypes.value:
        return None  # the compute dtype is a reason of its own
    supported = [d for d in offered if d != "nvfp4" and (mixed or is_quantized(d) or d == dtype)]
    if dtype in listed:
        supported = ["auto", *supported]
    remedy = f"--kv-cache-dtype {supported[0]}" if supported else None
    what = "KV-cache dtype" if allocatable else "attn_select.runtime cannot allocate a KV cache of dtype"
    return unsupported("kv-cache-dtype", what, asked, supported, remedy)


_MLA_ONLY = Reason("mla-only", "serves MLA layers only", "no MLA dims", "MLA")
_MLA_UNSUPPORTED = Reason("mla-unsupported", "serves no MLA layers", "MLA", "MHA, GQA, MQA")
_SPARSE_ONLY = Reason("sparse-only", "serves sparse MLA only", "dense MLA", "sparse MLA (sparse_top_k)")


def _graphunsupported(plan: BackendPlan, config: AttentionConfig) -> Reason:
    message = f"CUDA graphs up to {plan.cuda_graph} with {plan.path} (asked for {config.cuda_graph})"
    remedy = f"--cuda-graph {plan.cuda_graph}"
    return Reason("cuda-graph-level", message, config.cuda_graph, plan.cuda_graph, remedy)


def _plugin_error(spec: BackendSpec, what: str) -> Reason:
    return Reason("plugin-error", f"bug in the plugin that registers {spec.name}: {what}", None, None)
