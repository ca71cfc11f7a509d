"""Operations that backends share: writing and gathering a paged cache and its tables, merging, quantising, convolving.

Each has an implementation in torch, and a plugin may bring a faster one for its devices: an entry point in group
``attn_select.ops``, named like the operation, that loads a function ``(device: torch.device) -> callable or None``. The
callable has the torch implementation's signature (``attn_select.runtime.torch_ops``, ``torch_indexer``); None says that
it does not serve that device. It is asked once per operation and device; one that fails to load is left out with a
warning.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import torch

from attn_select.machine.library_imports import warnings_logged
from attn_select.runtime import torch_indexer, torch_ops

ENTRY_POINT_GROUP = "attn_select.ops"
_chosen: dict[tuple[str, torch.device], tuple[Callable[..., Any], str]] = {}


def implementation(name: str, device: torch.device) -> tuple[Callable[..., Any], str]:
    """Return the callable that serves operation ``name`` on ``device``, and who brings it (``torch`` by default)."""
    key = (name, device)
    if key not in _chosen:
        _chosen[key] = _look_up(name, device)
    return _chosen[key]


def _look_up(name: str, device: torch.device) -> tuple[Callable[..., Any], str]:
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name), key=lambda e: e.value):
        try:
            with warnings_logged(entry.value):
                found = entry.load()(device)
        except Exception as error:
            warnings.warn(
                f"operation {name}: {entry.value} failed to load ({type(error).__name__}: {error}); "
                "another implementation serves it",
                RuntimeWarning,
                stacklevel=3,
            )
            continue
        if found is not None:
            return found, entry.value
    home = torch_indexer if hasattr(torch_indexer, name) else torch_ops
    return getattr(home, name), "torch"


def clear_cache() -> None:
    """Ask the plugins again at the next call."""
    _chosen.clear()


class SharedOperation:
    """One operation; call it as its torch form documents it, without keywords."""

    def __init__(self, name: str, device_of: int) -> None:
        # Of the arguments, the one whose device decides on the implementation.
        self.name, self.device_of = name, device_of

    def __call__(self, *arguments: Any) -> Any:
        return implementation(self.name, arguments[self.device_of].device)[0](*arguments)


reshape_and_cache = SharedOperation("reshape_and_cache", 2)
concat_and_cache_mla = SharedOperation("concat_and_cache_mla", 2)
gather_cache_mla = SharedOperation("gather_cache_mla", 0)
flatten_block_table = SharedOperation("flatten_block_table", 0)
merge_attn_states = SharedOperation("merge_attn_states", 0)
pack_attn_states = SharedOperation("pack_attn_states", 0)
merge_rank_states = SharedOperation("merge_rank_states", 0)
gather_rank_heads = SharedOperation("gather_rank_heads", 0)
merge_rank_memory = SharedOperation("merge_rank_memory", 0)
quantize_fp8 = SharedOperation("quantize_fp8", 0)
concat_and_quantize_mla_q = SharedOperation("concat_and_quantize_mla_q", 0)
indexer_k_quant_and_cache = SharedOperation("indexer_k_quant_and_cache", 1)
indexer_topk = SharedOperation("indexer_topk", 2)
slots_in_front = SharedOperation("slots_in_front", 0)
causal_conv = SharedOperation("causal_conv", 0)
