"""Conditions that a layer or its device does not meet, as the gate's reasons: for facts that stand in rows of TOML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_select.backends.reasons import MLA_ONLY, MLA_UNSUPPORTED, SPARSE_ONLY, refusal, unsupported
from attn_select.backends.spec import Reason
from attn_select.layer.features import FEATURES
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.rules.conditions import NAMES, UNSET, Condition
from attn_select.rules.ranking import holds_for

_FEATURES = {feature.field: feature for feature in FEATURES}
_WORDS = {"kv_cache_dtype": "KV-cache dtype", "attn_type": "attention type", "v_head_size": "V head size"}
"""What fields are called where it is not their name with blanks."""
_DENSE_ONLY = Reason("sparse-unsupported", "serves no sparse MLA", "sparse MLA", "dense MLA")


def reasons_against(when: Iterable[Condition], config: LayerConfig, device: Device) -> list[Reason]:
    """Return the reason for each condition that a layer on a device does not meet, one per code."""
    found = [_reason(each, config, device) for each in when if not holds_for(each, config, device)]
    return list({reason.code: reason for reason in found}.values())


def _reason(condition: Condition, config: LayerConfig, device: Device) -> Reason:
    field, written = condition.field, condition.written
    if condition.scope == "device":
        what = "device" if device.is_cpu else "arch" if device.arch else "compute capability"
        return unsupported("compute-capability", what, device.capability_text, list(written))
    if field == "sparse" and config.sort in ("mla", "sparse_mla"):
        return SPARSE_ONLY if config.sort == "mla" else _DENSE_ONLY
    if field in ("mla", "sparse"):
        return MLA_UNSUPPORTED if config.sort in ("mla", "sparse_mla") else MLA_ONLY
    value = getattr(config, "cache_dtype" if field == "kv_cache_dtype" else field, None)
    if field in _FEATURES:
        feature = _FEATURES[field]
        declared = False if written in ((feature.off,), (UNSET,)) else tuple(w for w in written if w != UNSET)
        return refusal(feature, value, declared)
    return unsupported(field.replace("_", "-"), _WORDS.get(field, field.replace("_", " ")), value, _values(condition))


def _values(condition: Condition) -> list[Any]:
    """Return the values that a condition accepts, patterns of names written out."""
    if condition.field not in NAMES:
        return list(condition.written)
    return [name for name in NAMES[condition.field] if condition.matches((name,))]
