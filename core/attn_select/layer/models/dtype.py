"""The compute dtype: what flags say, else what the config says as far as the device has it.

The rule is vLLM's ``--dtype auto`` (0.33.0: ``_get_and_verify_dtype`` and ``_resolve_auto_dtype`` in config/model.py,
``supported_dtypes`` in platforms/cuda.py and cpu.py), except that the weights' files are not there to look into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_select.errors import shorten, show
from attn_select.layer.dtypes import DTYPES, canonical, spelled
from attn_select.machine.device import Device

_FLOAT16_UNSTABLE = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""``_FLOAT16_NOT_SUPPORTED_MODELS`` of vLLM 0.33.0 config/model.py: numerically unstable in float16."""


def _supported(device: Device | None, model_type: str) -> list[str]:
    """Return the dtypes that a device computes in, preferred first."""
    capability = device.compute_capability if device else None
    if capability is None or capability >= (8, 0):  # CPU; nothing is known to be missing without a device
        names = list(DTYPES)
    else:
        names = ["float16", "float32"] if capability >= (6, 0) else ["float32"]
    return [name for name in names if name != "float16" or model_type not in _FLOAT16_UNSTABLE]


def preferred(device: Device | None) -> str:
    """Return the dtype to compute in on ``device`` where nothing else says it."""
    return _supported(device, "")[0]


def _stated(raw: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Return what the config says, in vLLM's order (``get_torch_dtype``, model_arch_config_convertor.py)."""
    for part in (raw, text, raw.get("vision_config"), raw.get("encoder_config")):
        if isinstance(part, Mapping) and (found := part.get("dtype") or part.get("torch_dtype")):
            return spelled(found)
    return None


def resolve(
    raw: Mapping[str, Any], text: Mapping[str, Any], override: Any, device: Device | None, pooling: bool
) -> tuple[Any, list[str]]:
    """Return the dtype and what should be said about it.

    ``pooling`` models (encoders) with float32 weights run in float16 where the device has it, as in vLLM.
    """
    model_type = next((t for part in (raw, text) if (t := part.get("model_type")) in _FLOAT16_UNSTABLE), "")
    override = spelled(override)
    if override is not None:
        if model_type and isinstance(override, str) and canonical(override) == "float16":
            return override, [
                f"{model_type} is numerically unstable in float16, vLLM refuses it: --dtype bfloat16 or float32"
            ]
        return override, []
    supported = _supported(device, model_type)
    default = "float16" if pooling and "float16" in supported else supported[0]
    stated = _stated(raw, text)
    name = canonical(stated) if isinstance(stated, str) else None
    if stated is None:
        return default, [f"the config states no dtype: {default} is assumed (--dtype says otherwise)"]
    if name not in DTYPES:
        return default, [f"the config's dtype {show(stated)} is no compute dtype: {default} is assumed"]
    if name == "float32":
        if default == "float32":
            return default, []
        return default, [f"float32 weights are computed in {default}, as engines do (--dtype float32 keeps them)"]
    if name in supported:
        return name, []
    where = f"{device.name} ({device.capability_text})" if device else "any device"
    reason = f"{where} has no {name}" if name == "bfloat16" else f"{model_type} is unstable in {name}"
    return default, [f"{shorten(reason)}: {default} instead of the model's {name}"]
