"""The choice of dense MLA's prefill, which vLLM makes apart from the choice for decodes."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig, get_mla_prefill_backend

from attn_select.decide.selection import Selection
from attn_select_vllm.choice import Choice, Refusals, choose, own_choice, refusals_of
from attn_select_vllm.names import EngineBackend


def choose_prefill(selection: Selection, platform: Any, vllm_config: Any) -> Choice:
    """Choose as ``choose`` does, and set vLLM's ``mla_prefill_backend`` where its own choice does not stay."""
    # An explicit one (``--attention-config.mla_prefill_backend``) is left alone.
    config, capability = selection.config, platform.get_device_capability()
    dims = {name: getattr(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    asked = MLAPrefillSelectorConfig(dtype=vllm_config.model_config.dtype, mla_dimensions=MLADimensions(**dims))

    def refusals(_: str, engine: EngineBackend) -> Refusals:
        return refusals_of(
            engine.name, MLAPrefillBackendEnum, lambda made: made.validate_configuration(capability, asked)
        )

    own = own_choice(MLAPrefillBackendEnum, lambda: _path_of_own_choice(vllm_config))
    choice = choose(selection, refusals, own, "mla_prefill")
    if choice.engine is not None and choice.engine != choice.own:
        vllm_config.attention_config.mla_prefill_backend = MLAPrefillBackendEnum[choice.engine.name]
    return choice


def _path_of_own_choice(vllm_config: Any) -> str:
    chosen = get_mla_prefill_backend(vllm_config)
    return f"{chosen.__module__}.{chosen.__qualname__}"
