"""What attn-select's kernels do not do inside vLLM, whatever they do outside: what the adapter does not pass on."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend

from attn_select.backends.registry import load_plugins
from attn_select_vllm.names import kernels_of

GUESSED = ("ngram", "suffix")
"""vLLM's methods of speculation without layers of their own."""
MODELLED = ("draft_model", "eagle", "eagle3", "mtp")
"""The methods with such layers that were run in vLLM 0.32: uniform drafts, one behind the other or all at once."""

JUDGED = {
    *("use_mla", "use_sparse", "has_sink", "has_sliding_window", "use_batch_invariant"),  # attn-select's own gate
    *("use_mm_prefix", "use_non_causal", "use_per_head_quant_scales", "use_kv_connector"),  # ``limits``
    *("use_pcp", "use_dcp", "use_rswa", "use_adaptive_verification"),
}
"""The flags of a selector's question that are judged. A later release may ask for more."""


def standard_caches() -> bool:
    """Whether caches of all backends have one shape, which connectors read (v1/kv_cache_layout.py, from 0.32 on)."""
    return hasattr(AttentionBackend, "supported_kv_cache_layouts")


def packs_caches() -> bool:
    """Whether vLLM's own backends pack keys and latents by the processor's instructions, as no other one reads them."""
    # CPU_ATTN and CPU_MLA of vllm/v1/attention/backends/cpu_attn.py and mla/cpu_mla.py 0.32.
    return bool(current_platform.is_cpu())


def attention_types() -> tuple[str, ...]:
    """Return the types of layers that were run."""
    return ("decoder", "encoder_only", "encoder_decoder") if standard_caches() else ("decoder",)


def limits(attn_config: Any, vllm_config: Any) -> list[str]:
    """Return why attn-select's kernels do not run the layers that a selector asks about; empty if they do."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    clamped = attn_config.use_mm_prefix and _clamps(model)
    sharing = parallel.decode_context_parallel_size > 1
    halved = getattr(parallel, "use_ubatching", False)  # each half would have a group of its own
    plain = attn_config.attn_type == "decoder" and vllm_config.speculative_config is None and not halved
    found = {
        f"the adapter serves {', '.join(attention_types())} layers alone": attn_config.attn_type
        not in attention_types(),
        "the adapter passes no image ranges in this release": attn_config.use_mm_prefix and not standard_caches(),
        "the windows of this model end its images too, and the kernels' windows do not": clamped,
        # A model of text diffusion says per request whether a step is causal (diffusion_gemma.py of vLLM's models).
        "the adapter passes no non-causal batches": attn_config.use_non_causal or getattr(model, "is_diffusion", False),
        "the adapter passes no scales per head with MLA": attn_config.use_per_head_quant_scales and attn_config.use_mla,
        "the adapter serves no KV connector in this release": attn_config.use_kv_connector and not standard_caches(),
        # An engine without attn-select may write what one with it reads, and the other way round.
        "a connector's store does not say who wrote it, and vLLM's own backends for CPUs pack what they write": (
            attn_config.use_kv_connector and packs_caches()
        ),
        "the adapter serves no prefill context parallelism": attn_config.use_pcp,
        "the adapter serves no decode context parallelism in this release": sharing and not standard_caches(),
        "the adapter serves decode context parallelism with MLA, or of decoders without drafts and halved batches": (
            sharing and not attn_config.use_mla and not plain
        ),
        "the adapter passes no windows beside references": getattr(attn_config, "use_rswa", False),
        # Drafts are trimmed on the device, so that the host's query lengths are others than the device's.
        "the adapter plans from query lengths on the host": getattr(attn_config, "use_adaptive_verification", False),
        "the adapter reads scales once, and calculate_kv_scales changes them": getattr(
            vllm_config.cache_config, "calculate_kv_scales", False
        ),
    }
    flags = [name for name in attn_config._fields if name.startswith(("use_", "has_")) and name not in JUDGED]
    found |= {f"the adapter does not know {name}": getattr(attn_config, name) for name in flags}
    return [reason for reason, holds in found.items() if holds]


def _clamps(model: Any) -> bool:
    """Whether a model's windows end its images too (vLLM's ``mm_prefix_clamp_sliding_window``, Gemma 4)."""
    text = model.hf_text_config
    return getattr(text, "mm_prefix_clamp_sliding_window", False) or text.model_type.startswith("gemma4")


def speculation_limits(vllm_config: Any, backend: str) -> list[str]:
    """Return why a backend of attn-select does not run where vLLM speculates; empty if it does, or vLLM does not."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return []
    known = (*GUESSED, *MODELLED) if standard_caches() else GUESSED
    if speculative.method not in known:
        return [f"the adapter was run with drafts by {', '.join(known)} alone, not by {speculative.method}"]
    # Ahead of a GPU the host knows the lengths with every draft accepted, which are bounds above.
    if current_platform.is_cpu():
        return []
    specs = load_plugins().specs
    return [
        f"speculation leaves the host with bounds of the lengths, and {name} plans from exact ones"
        for name in kernels_of(backend)
        if not specs[name].get_class().builder_cls.takes_length_bounds
    ]
