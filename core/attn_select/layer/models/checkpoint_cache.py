"""The dtype in which a checkpoint says that its KV cache is stored: the default of ``--kv-cache-dtype``, as in vLLM.

Read as vLLM 0.33.0 does: ``get_kv_cache_quant_algo_string`` of utils/torch_utils.py for ModelOpt's checkpoints, and
``Attention`` of model_executor/layers/attention/attention.py with ``validate_kv_cache_scheme`` of
layers/quantization/compressed_tensors/compressed_tensors.py for llm-compressor's. No other method decides it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_select.errors import ModelError, show
from attn_select.layer.config import AttentionConfig

_OF_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


class CheckpointCache(NamedTuple):
    """What a checkpoint says of its KV cache."""

    dtype: str = "auto"  # as ``AttentionConfig.kv_cache_dtype``; ``auto`` where it says nothing that vLLM stores
    field: str = ""  # where it says it, for messages; empty where it says nothing
    per_head: bool = False  # whether every KV head has a scale of its own
    # whether it holds for MLA layers too: vLLM reads llm-compressor's scheme for keys and values per head
    of_mla: bool = True
    refused: str = ""  # why vLLM does not load the checkpoint; empty where it does
    note: str = ""  # what should be said about it; empty where there is nothing to say

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``AttentionConfig`` that it sets for a layer, given as the fields so far."""
        cached = config.get("attn_type", "decoder") in ("decoder", "encoder_decoder")
        if not cached or self.dtype == "auto" or ("kv_lora_rank" in config and not self.of_mla):
            return {}
        return {"kv_cache_dtype": self.dtype, **({"per_head_quant_scales": True} if self.per_head else {})}

    def check(self, where: str) -> None:
        """Raise where vLLM loads no KV cache that is stored so."""
        if self.refused:
            hint = "--kv-cache-dtype bfloat16 (or fp8) asks what would serve it with another cache"
            raise ModelError(f"{where}: {self.field}: {self.refused}", hint=hint, code="kv-cache-scheme")

    def notes_for(self, configs: list[AttentionConfig]) -> list[str]:
        """Return what should be said of the layers that were made with it."""
        stored = dict.fromkeys(config.kv_cache_dtype for config in configs if config.has_cache)
        notes = [self.note] if self.note else []
        if self.dtype == "auto" or not stored:
            return notes
        if self.dtype in stored and not self.refused:
            return [*notes, f"{self.field}: the KV cache is stored in {self.dtype} (--kv-cache-dtype says otherwise)"]
        named = ", ".join(stored)
        if self.refused:
            return [*notes, f"{self.field}: {self.refused}; asked for is {named}"]
        if not self.of_mla and all(config.mla for config in configs) and named == "auto":
            return [*notes, f"{self.field}: vLLM 0.33.0 reads it for layers with keys and values per head, not for MLA"]
        return [*notes, f"{self.field}: the checkpoint's KV cache is {self.dtype}, asked for is {named}"]


def checkpoint_cache(raw: Mapping[str, Any], text: Mapping[str, Any]) -> CheckpointCache:
    """Return what a config (its whole, and its text part) says of the KV cache."""
    found = raw.get("quantization_config") or raw.get("compression_config") or text.get("quantization_config")
    if not isinstance(found, dict):
        return CheckpointCache()
    inner = found.get("quantization") if isinstance(found.get("quantization"), dict) else found
    method = str(found.get("quant_method") or "").lower().replace("_", "-")
    producer = found.get("producer")
    if not method and isinstance(producer, dict) and producer.get("name") == "modelopt":
        method = "modelopt"
    name, value = next(
        ((key, part[key]) for key in _KEYS for part in (inner, found) if isinstance(part, dict) and part.get(key)),
        ("", None),
    )
    field = f"quantization_config.{name} = {show(value, 60)}"
    if method.startswith("modelopt"):
        return _of_modelopt(field, value, inner if isinstance(inner, dict) else found)
    if value is None:
        return CheckpointCache(note=_of_quark(found) if method == "quark" else "")
    if method == "compressed-tensors" and name == "kv_cache_scheme":
        return _of_compressed_tensors(field, value)
    read = "vLLM 0.33.0 reads it of checkpoints by ModelOpt and llm-compressor alone"
    return CheckpointCache(note=f"{field} beside quant_method {show(method)}: {read}, and stores the compute dtype")


def _of_modelopt(field: str, value: Any, inner: Mapping[str, Any]) -> CheckpointCache:
    note = ""
    listed = inner.get("quantized_layers")
    entries = listed.values() if isinstance(listed, dict) else ()
    own = [entry for entry in entries if isinstance(entry, dict) and any(entry.get(key) for key in _KEYS)]
    if own:
        wants = ", ".join(dict.fromkeys(show(next(entry[k] for k in _KEYS if entry.get(k)), 60) for entry in own))
        note = f"{len(own)} layers of quantization_config.quantized_layers name a KV cache of their own ({wants}): "
        note += "vLLM 0.33.0 stores all layers alike, as the checkpoint as a whole says"
    if value is None:
        return CheckpointCache(note=note)
    dtype = "auto"
    if isinstance(value, dict):
        kind = value.get("num_bits"), value.get("type")
        if kind == (8, "float") and value.get("dynamic") is False:
            dtype = "fp8_e4m3"
        elif kind == (4, "float"):
            dtype = "nvfp4"
    elif isinstance(value, str):
        dtype = _OF_MODELOPT.get(value.lower(), "auto")
    if dtype == "auto":
        unknown = (
            f"{field}: vLLM 0.33.0 knows FP8 and NVFP4 of ModelOpt's KV caches, and stores the compute dtype instead"
        )
        note = f"{note}; {unknown}" if note else unknown
    return CheckpointCache(dtype, field, note=note)


def _of_compressed_tensors(field: str, value: Any) -> CheckpointCache:
    scheme = value if isinstance(value, dict) else {}
    kind, strategy = (scheme.get("num_bits"), scheme.get("type")), scheme.get("strategy")
    refused = ""
    if kind != (8, "float"):
        name = (
            "an INT8 KV cache" if kind == (8, "int") else f"a KV cache of {show(kind[0])} bits of type {show(kind[1])}"
        )
        refused = (
            f"{name}, which vLLM 0.33.0 does not load and no backend here reads (accepted: 8 bits of type 'float')"
        )
    elif strategy not in ("tensor", "attn_head"):
        refused = f"strategy {show(strategy)}, which vLLM 0.33.0 does not load (accepted: 'tensor' and 'attn_head')"
    elif not scheme.get("symmetric"):
        refused = "scales with a zero point, which vLLM 0.33.0 does not load (accepted: symmetric = true)"
    return CheckpointCache("fp8_e4m3", field, strategy == "attn_head", of_mla=False, refused=refused)


def _of_quark(found: Mapping[str, Any]) -> str:
    """Quark's checkpoints hold scales of the cache, and vLLM stores the compute dtype unless it is told."""
    export = found.get("export")
    if not isinstance(export, dict) or not export.get("kv_cache_group"):
        return ""
    return (
        "quantization_config.export.kv_cache_group: the checkpoint has scales of an FP8 KV cache, which vLLM 0.33.0 "
        "uses with --kv-cache-dtype fp8 alone"
    )
