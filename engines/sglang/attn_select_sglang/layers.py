"""What SGLang's arguments and model say of the layers, as attention configs per rank."""

from __future__ import annotations

from typing import Any

from attn_select.errors import ConfigError
from attn_select.layer.models import LayerKinds, configs_from_model
from attn_select.machine.device import Device

_KV_CACHE_DTYPES = {"bf16": "bfloat16"}
"""SGLang's names of KV-cache dtypes that differ."""


def layer_kinds(view: Any, model_config: Any, device: Device) -> LayerKinds:
    """Return the kinds of a model's layers, from SGLang's ``ModelConfig`` and arguments as far as they are resolved."""
    # Raises ConfigError for what attn-select does not judge in SGLang or does not know, ModelError where the model's
    # config does not describe attention layers.
    if view.speculative_algorithm is not None:
        raise ConfigError("speculative decoding is not judged", fields=["num_speculative_tokens"])
    overrides: dict[str, Any] = {"dtype": model_config.dtype}
    if view.kv_cache_dtype != "auto":
        overrides["kv_cache_dtype"] = _KV_CACHE_DTYPES.get(view.kv_cache_dtype, view.kv_cache_dtype)
    if (view.page_size or 1) > 1:
        overrides["block_size"] = view.page_size
    ranks = view.tp_size // (view.dp_size if view.enable_dp_attention else 1) // view.attn_cp_size
    return configs_from_model(model_config.hf_config, tensor_parallel=ranks, device=device, overrides=overrides)
