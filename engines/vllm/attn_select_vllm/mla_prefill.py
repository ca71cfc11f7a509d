"""The choice of dense MLA's prefill, which vLLM makes apart from the choice for decodes."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

from attn_select.decide.selection import Selection
from attn_select_vllm.choice import Refusals, prefill_order, refusals_of


def choose_prefill(selection: Selection, platform: Any, vllm_config: Any) -> tuple[str | None, dict[str, Refusals]]:
    """Set vLLM's ``mla_prefill_backend`` to the first of attn-select's order that vLLM accepts."""
    # An explicit one (``--attention-config.mla_prefill_backend``) is left alone. Returned are vLLM's name of what was
    # chosen, None where vLLM accepts none, and what it refused before, with its reasons.
    config, refused = selection.config, dict[str, Refusals]()
    dims = {name: getattr(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    dtype, capability = vllm_config.model_config.dtype, platform.get_device_capability()
    asked = MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=MLADimensions(**dims))
    for name in prefill_order(selection):
        reasons = refusals_of(name, MLAPrefillBackendEnum, lambda made: made.validate_configuration(capability, asked))
        if not reasons:
            vllm_config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum[name]
            return name, refused
        refused[name] = reasons
    return None, refused
