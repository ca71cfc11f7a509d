"""The gate: everything that speaks against one backend for one config on one device.

It returns every reason, never only the first. What it accepts and cannot run is a bug, and so is
what it rejects and could run. Unsupported is data; an exception here is a bug of ours or of a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attn_select.config import CUDA_GRAPH_LEVELS, AttentionConfig, Phase
from attn_select.device import Device
from attn_select.dtypes import is_quantized
from attn_select.environment import BROKEN, WRONG_VERSION, Environment
from attn_select.errors import shorten
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Library, Reason

DENIED = "denied-by-rule"
_LEVEL_RANK = {level: rank for rank, level in enumerate(CUDA_GRAPH_LEVELS)}


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
    static = capability_reasons(capabilities, config, device) + library_reasons(spec, environment)
    return judge(spec, config, device, environment, options, phase, static)


def library_reasons(spec: BackendSpec, environment: Environment) -> list[Reason]:
    """Return one reason per group of alternative libraries of which none can be used."""
    return [
        _library_reason(group, environment)
        for group in spec.libraries
        if not any(environment.has(library) for library in group)
    ]


def judge(
    spec: BackendSpec,
    config: AttentionConfig,
    device: Device,
    environment: Environment,
    options: BackendOptions,
    phase: Phase,
    static: list[Reason],
) -> BackendPlan | list[Reason]:
    """Add what ``spec.plan`` says to the ``static`` reasons of a phase that the spec serves."""
    if static and static[0].code in _KIND_CODES:
        return static
    try:
        outcome = spec.plan(config, device, environment, options, phase)
    except Exception as error:  # a plugin's bug must not take the other candidates down; it is shown, not hidden
        return [*static, _plugin_error(spec, f"plan() raised {type(error).__name__}: {error}")]
    if type(outcome) is BackendPlan:
        if _LEVEL_RANK[outcome.cuda_graph] < _LEVEL_RANK[config.cuda_graph]:
            return [*static, _graph_reason(outcome, config)]
        return static or outcome
    if type(outcome) is not list or not outcome or not all(type(r) is Reason for r in outcome):
        return [
            *static,
            _plugin_error(spec, f"plan() returned {shorten(repr(outcome))} instead of a BackendPlan or reasons"),
        ]
    if not static:
        return outcome
    codes = {reason.code for reason in static}
    return static + [reason for reason in outcome if reason.code not in codes]


_KIND_CODES = frozenset(("mla-only", "mla-unsupported", "sparse-only", "sparse-unsupported"))


def capability_reasons(c: Capabilities, config: AttentionConfig, device: Device) -> list[Reason]:
    """Return what plain capabilities say against a config.

    The same for every phase that shares them. Kind reasons come first.
    """
    reasons: list[Reason] = []
    add = reasons.append
    mla, sparse = config.kv_lora_rank is not None, config.sparse_top_k is not None
    if mla != c.mla:
        if mla:
            add(Reason("mla-unsupported", "serves no MLA layers", "MLA", "MHA, GQA, MQA"))
        else:
            add(Reason("mla-only", "serves MLA layers only", "no MLA dims", "MLA"))
    elif sparse != c.sparse:
        if sparse:
            add(Reason("sparse-unsupported", "serves no sparse MLA", f"top-k {config.sparse_top_k}", "dense MLA"))
        else:
            add(Reason("sparse-only", "serves sparse MLA only", "dense MLA", "sparse MLA (sparse_top_k)"))
    elif not c.head_sizes.value.accepts(config.head_size):
        add(_reason("head-size", "head size", config.head_size, str(c.head_sizes.value)))
    if not c.compute_capabilities.value.accepts(device.compute_capability):
        what = "device" if device.compute_capability is None else "compute capability"
        add(_reason("compute-capability", what, device.capability_text, str(c.compute_capabilities.value)))
    if config.dtype not in c.dtypes.value:
        add(_reason("dtype", "dtype", config.dtype, list(c.dtypes.value), f"--dtype {c.dtypes.value[0]}"))
    if config.attn_type not in c.attn_types.value:
        add(_reason("attn-type", "attention type", config.attn_type, list(c.attn_types.value)))
    if config.has_cache and c.reads_cache:
        _cache_reasons(c, config, add)
    if config.v_head_size is not None and config.v_head_size != config.head_size and not c.v_head_size_differs.value:
        add(_reason("v-head-size", "V head size", config.v_head_size, config.head_size))
    if config.sliding_window is not None and not c.sliding_window.value:
        add(_no("sliding-window", "sliding window", config.sliding_window))
    if config.logits_soft_cap is not None and not c.logits_soft_cap.value:
        add(_no("logits-soft-cap", "logits soft cap", config.logits_soft_cap))
    if config.alibi and not c.alibi.value:
        add(_no("alibi", "ALiBi slopes", True))
    if config.sinks and not c.sinks.value:
        add(_no("sinks", "attention sinks", True))
    if config.mm_prefix and not c.mm_prefix.value:
        add(_no("mm-prefix", "bidirectional multimodal prefix", True))
    if config.non_causal and not c.non_causal.value:
        add(_no("non-causal", "non-causal attention over the paged cache", True))
    if config.batch_invariant and not c.batch_invariant.value:
        add(_no("batch-invariant", "batch invariance", True))
    if config.per_head_quant_scales and not c.per_head_quant_scales.value:
        add(_no("per-head-quant-scales", "per-head quantisation scales", True))
    if config.output_quantization != "none" and config.output_quantization not in c.output_quantizations.value:
        supported = ["none", *c.output_quantizations.value]
        add(
            _reason(
                "output-quantization",
                "output quantisation",
                config.output_quantization,
                supported,
                "--output-quantization none",
            )
        )
    if config.decode_context_parallel_size > 1 and not c.decode_context_parallel.value:
        add(
            _reason(
                "decode-context-parallel",
                "decode context parallel size",
                config.decode_context_parallel_size,
                1,
                "--dcp 1",
            )
        )
    if config.num_speculative_tokens > c.speculative_tokens.value:
        most = c.speculative_tokens.value
        add(
            _reason(
                "speculative-tokens",
                "speculative tokens",
                config.num_speculative_tokens,
                f"at most {most}",
                f"--speculative-tokens {most}",
            )
        )
    return reasons


def _cache_reasons(c: Capabilities, config: AttentionConfig, add: Callable[[Reason], None]) -> None:
    cache_dtype = config.kv_cache_dtype
    if cache_dtype != "auto" and cache_dtype != config.dtype:
        accepted = cache_dtype in c.kv_cache_dtypes.value
        if accepted and not is_quantized(cache_dtype) and not c.mixed_kv_cache_dtype.value:
            accepted = False
        if not accepted:
            supported = ["auto", *(d for d in c.kv_cache_dtypes.value if is_quantized(d) or d == config.dtype)]
            add(_reason("kv-cache-dtype", "KV-cache dtype", cache_dtype, supported, "--kv-cache-dtype auto"))
    elif config.dtype in c.dtypes.value and config.dtype not in c.kv_cache_dtypes.value:
        supported = list(c.kv_cache_dtypes.value)
        remedy = f"--kv-cache-dtype {supported[0]}" if supported else None
        add(_reason("kv-cache-dtype", "KV-cache dtype", config.dtype, supported, remedy))
    size = config.block_size
    if size is not None and not any(size % kernel == 0 for kernel in c.block_sizes.value):
        add(block_size_reason(size, c.block_sizes.value))


def block_size_reason(size: int, kernel_sizes: Sequence[int]) -> Reason:
    """Return the reason against a block size of which no kernel block size (tokens) is a divisor."""
    least = min(-(-size // kernel) * kernel for kernel in kernel_sizes)
    supported = "multiples of " + " or ".join(str(k) for k in kernel_sizes)
    return _reason("block-size", "block size", size, supported, f"--block-size {least}")


def _reason(code: str, what: str, observed: Any, supported: Any, remedy: str | None = None) -> Reason:
    accepted = ", ".join(map(str, supported)) if isinstance(supported, list) else supported
    return Reason(code, f"{what} {observed} (supported: {accepted or 'none'})", observed, supported, remedy)


def _no(code: str, what: str, observed: Any) -> Reason:
    text = f"no {what}" if observed is True else f"no {what} (asked for {observed})"
    return Reason(code, text, observed, False)


def phase_not_served(spec: BackendSpec, phase: Phase) -> Reason:
    """Return the reason against a phase that the spec has no capabilities for."""
    served = list(spec.capabilities)
    return Reason("phase-not-served", f"serves {', '.join(served)} only", phase, served)


def _graph_reason(plan: BackendPlan, config: AttentionConfig) -> Reason:
    message = f"CUDA graphs up to {plan.cuda_graph} with {plan.path} (asked for {config.cuda_graph})"
    return Reason("cuda-graph-level", message, config.cuda_graph, plan.cuda_graph, f"--cuda-graph {plan.cuda_graph}")


def _library_reason(group: Sequence[Library], environment: Environment) -> Reason:
    states = {library.distribution: environment.state(library) for library in group}
    code = "library-missing"
    parts = []
    for library in group:
        state = states[library.distribution]
        if state == WRONG_VERSION:
            code = "library-version"
            version = environment.version(library.distribution) or "of unknown version"
            parts.append(f"{library.distribution} {version} (needs {library.version})")
        elif state == BROKEN:
            parts.append(f"{library.distribution} is installed but has no module {library.module}")
        else:
            parts.append(f"{library.distribution} is not installed")
    wanted = [library.distribution + library.version for library in group]
    return Reason(code, "; ".join(parts), states, wanted, group[0].install)


def _plugin_error(spec: BackendSpec, what: str) -> Reason:
    return Reason("plugin-error", f"bug in the plugin that registers {spec.name}: {what}", None, None)
