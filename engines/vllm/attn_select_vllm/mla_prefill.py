"""The choice of dense MLA's prefill, which vLLM makes apart from the choice for decodes."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig, get_mla_prefill_backend

from attn_select.decide.selection import Selection
from attn_select_vllm.choice import Refusals, prefill_order, refusals_of, why_own_prefill_stays


def choose_prefill(selection: Selection, platform: Any, vllm_config: Any) -> tuple[str | None, dict[str, Refusals]]:
    """Set vLLM's ``mla_prefill_backend`` to the first of attn-select's order that vLLM accepts; its own choice stays
    unless times or a user speak for another one."""
    # An explicit one (``--attention-config.mla_prefill_backend``) is left alone. Returned are vLLM's name of what was
    # chosen, None where vLLM accepts none, and what it refused before, with its reasons.
    config, refused = selection.config, dict[str, Refusals]()
    dims = {name: getattr(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    dtype, capability = vllm_config.model_config.dtype, platform.get_device_capability()
    asked = MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=MLADimensions(**dims))
    own = _own_choice(vllm_config)
    for backend, name in prefill_order(selection):
        if name == own:
            return name, refused
        reasons = refusals_of(name, MLAPrefillBackendEnum, lambda made: made.validate_configuration(capability, asked))
        if not reasons and own is not None and (stays := why_own_prefill_stays(selection, backend, own)):
            reasons = [stays]
        if not reasons:
            vllm_config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum[name]
            return name, refused
        refused[name] = reasons
    return own, refused


def _own_choice(vllm_config: Any) -> str | None:
    """Return what vLLM chooses by itself; None where it has nothing for such layers."""
    try:
        chosen = get_mla_prefill_backend(vllm_config)
    except ValueError:
        return None
    path = f"{chosen.__module__}.{chosen.__qualname__}"
    return next((name for name, each in MLAPrefillBackendEnum.__members__.items() if each.value == path), path)
