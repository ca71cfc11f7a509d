"""Attention as an opaque operator, so that ``torch.compile`` neither traces into it nor splits the graph at it.

A compiled graph cannot carry the step's metadata as an argument: it comes from ``forward_context``, and the layer by
its name. The operators are made with ``torch.library.Library.define`` (1.3 us a call; ``custom_op`` takes 18).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch

from attn_select.errors import ConfigError
from attn_select.runtime.metadata import BatchError

_layers: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()
_context: ContextVar[Mapping[Any, Any] | None] = ContextVar("attn_select_forward_context", default=None)


@contextmanager
def forward_context(attn_metadata: Mapping[Any, Any]) -> Iterator[None]:
    """Give the layers of each ``AttentionGroup`` the step's metadata while a (compiled) model runs.

    Args:
        attn_metadata: what ``group.build`` returned, by group.
    """
    token = _context.set(attn_metadata)
    try:
        yield
    finally:
        _context.reset(token)


def current_metadata(group: Any, layer_name: str) -> Any:
    """Return the forward context's metadata for a group; BatchError where there is none."""
    metadata = (_context.get() or {}).get(group)
    if metadata is None:
        raise BatchError(
            f"layer {layer_name!r}: no attn_metadata was given and the forward context has none for its group",
            hint="pass attn_metadata, or run inside `with forward_context({group: group.build(common)})`",
        )
    return metadata


def register_layer(layer: Any, name: str) -> str:
    """Make a layer known to the operators under ``name``, or under a new one if empty; return the name."""
    if not name:
        name = next(made for number in _numbers if (made := f"attention.{number}") not in _layers)
    elif name in _layers:
        text = f"layer_name = {name!r}: a layer of that name exists"
        raise ConfigError(text, fields=["layer_name"], hint="give each layer a name of its own, or none")
    _layers[name] = layer
    return name


def layer_of(group: Any) -> Any:
    """Return a living layer of this group; None where there is none."""
    return next((layer for layer in list(_layers.values()) if getattr(layer, "group", None) is group), None)


def _run(*arguments: Any) -> None:
    *tensors, kv_cache, output, layer_name = arguments
    layer = _layers.get(layer_name)
    if layer is None:
        raise BatchError(f"layer_name = {layer_name!r}: the layer that a compiled graph calls no longer exists")
    layer.forward(*tensors[:3], kv_cache, None, output, *tensors[3:])


def _fake(*_: Any) -> None:
    """Nothing is returned: the operators write into their arguments."""


_library: Any = torch.library.Library("attn_select", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor query, Tensor? key, Tensor? value, Tensor(a!)? kv_cache, Tensor(b!) output, str layer_name) -> ()"
)
_library.define(
    "mla_attention(Tensor query, Tensor? kv_c_normed, Tensor? k_pe, Tensor? topk_indices, Tensor(a!)? kv_cache, "
    "Tensor(b!) output, str layer_name) -> ()"
)
for _name in ("attention", "mla_attention"):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _run, _key)
    torch.library.register_fake(f"attn_select::{_name}", _fake, lib=_library)
