"""``TimedLayer``: the part of a layer's config that moves a kernel's time."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_select.layer.layer_config import LayerConfig, layer_of
from attn_select.layer.state import StateConfig

CONFIG = re.compile(rb'"config"\s*:\s*(\{[^{}]*\})')
"""The layer in a line of a file of measurements, or of fitted models."""
_WITHOUT_TIME = ("block_size", "cuda_graph")
"""Fields that choose how a kernel is called. A kernel that reads 16 or 64 tokens a block reads the same bytes."""


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """One kind of layer, as far as times are concerned: configs with equal ``TimedLayer`` share measurements.

    Attributes:
        fields: ``(name, value)`` of the config in its field order, those at their default left out.
    """

    fields: tuple[tuple[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a file: ``layer_of(layer.to_dict())`` is ``layer.config``."""
        return dict(self.fields)

    @property
    def config(self) -> LayerConfig:
        """The config with these fields and no others."""
        return layer_of(self.to_dict())


@functools.lru_cache(maxsize=4096)
def timed_layer(config: LayerConfig) -> TimedLayer:
    """Return the layer that ``config`` is.

    Left out are the block size and the wish for CUDA graphs. ``kv_cache_dtype`` equal to ``dtype`` is ``auto``, a
    ``v_head_size`` equal to ``head_size`` is None, and every soft cap is 1.0: its value moves no kernel's time.
    """
    fields = {n: value for n, value in config.model_dump(exclude_defaults=True).items() if n not in _WITHOUT_TIME}
    if isinstance(config, StateConfig):
        return TimedLayer(tuple(fields.items()))
    if config.kv_cache_dtype == config.dtype:
        fields.pop("kv_cache_dtype", None)
    if config.v_head_size == config.head_size:
        fields.pop("v_head_size", None)
    if config.logits_soft_cap is not None:
        fields["logits_soft_cap"] = 1.0
    return TimedLayer(tuple(fields.items()))


def layer_from_dict(fields: Mapping[str, Any]) -> TimedLayer:
    """Return the layer of a file's ``config`` object.

    Raises:
        ConfigError: a field that is unknown or has a value that no config accepts; it names the field.
    """
    return timed_layer(layer_of(fields))


def mentions(layer: TimedLayer) -> Callable[[bytes], bool]:
    """Return what says whether a line of JSON may be of a layer. One without a layer that can be read may be of any."""
    fields = layer.to_dict()
    found: dict[bytes, bool] = {}  # many lines are of few layers

    def of_layer(text: bytes) -> bool:
        try:
            return bool(json.loads(text) == fields)
        except ValueError:
            return True

    def wanted(line: bytes) -> bool:
        written = CONFIG.search(line)
        if written is None:
            return True
        text = written[1]
        if text not in found:
            found[text] = of_layer(text)
        return found[text]

    return wanted
