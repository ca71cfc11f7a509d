"""What attn-select's kernels do not do inside vLLM, whatever they do outside: what the adapter does not pass on."""

from __future__ import annotations

from typing import Any


def limits(asked: Any, vllm_config: Any) -> list[str]:
    """Return why attn-select's kernels do not run the layers that a selector asks about; empty if they do.

    Args:
        asked: vLLM's ``AttentionSelectorConfig``.
        vllm_config: vLLM's ``VllmConfig``.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    found = {
        "the adapter serves decoder layers alone": asked.attn_type != "decoder",
        "the adapter passes no image ranges": asked.use_mm_prefix,
        # A model of text diffusion says per request whether a step is causal (diffusion_gemma.py of vLLM's models).
        "the adapter passes no non-causal batches": asked.use_non_causal or getattr(model, "is_diffusion", False),
        "the adapter passes no scales per head": asked.use_per_head_quant_scales,
        "the adapter serves no KV connector": asked.use_kv_connector,
        "the adapter serves no context parallelism": asked.use_pcp or parallel.decode_context_parallel_size > 1,
        "the adapter passes no windows beside references": getattr(asked, "use_rswa", False),
        # Speculation leaves the host with upper bounds of the lengths, where the builders read exact ones.
        "the adapter serves no speculative decoding": vllm_config.speculative_config is not None,
        "the adapter reads scales once, and calculate_kv_scales changes them": getattr(
            vllm_config.cache_config, "calculate_kv_scales", False
        ),
    }
    return [reason for reason, holds in found.items() if holds]
