"""Operations that backends share: writing and gathering a paged cache, merging partial results, quantising.

Each has an implementation in torch, and a plugin may bring a faster one for its devices: an entry point in group
``attn_select.ops``, named like the operation, that loads a function ``(device: torch.device) -> callable or None``. The
callable has the torch implementation's signature (``attn_select.runtime.torch_ops``); None says that it does not serve
that device. It is asked once per operation and device; one that fails to load is left out with a warning.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig
from attn_select.runtime import torch_ops
from attn_select.runtime.scales import Scales

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
    return getattr(torch_ops, name), "torch"


def clear_cache() -> None:
    """Ask the plugins again at the next call."""
    _chosen.clear()


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Write keys ``(T, num_kv_heads, head_size)`` and values ``(T, num_kv_heads, value_head_size)`` into a paged cache.

    Args:
        kv_cache: one layer's cache in ``layout``.
        slot_mapping: int64 ``(T,)``; tokens with slot -1 are skipped.
        scales: an FP8 cache stores ``x / scale``, saturated and rounded to nearest even; others ignore them.
    """
    implementation("reshape_and_cache", kv_cache.device)[0](key, value, kv_cache, slot_mapping, layout, config, scales)


def concat_and_cache_mla(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Write latents ``(T, kv_lora_rank)`` and rope parts ``(T, qk_rope_head_dim)`` into a latent cache.

    Args:
        layout: ``MLA``, where an FP8 cache stores ``x / scales.k``, or ``FP8_DS_MLA``, which has scales of its own.
        slot_mapping: int64 ``(T,)``; tokens with slot -1 are skipped.
    """
    function = implementation("concat_and_cache_mla", kv_cache.device)[0]
    function(kv_c_normed, k_pe, kv_cache, slot_mapping, layout, config, scales)


def gather_cache_mla(
    kv_cache: Tensor,
    output: Tensor,
    block_table: Tensor,
    starts: Tensor,
    start_loc: Tensor,
    num_tokens: int,
    block_size: int,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Copy a range of each request's cached latents into a contiguous workspace, back in the compute dtype.

    Args:
        kv_cache: one layer's cache in layout ``MLA``.
        output: ``(at least num_tokens, head_size)`` in the compute dtype.
        block_table: int32 ``(B, W)``.
        starts: int32 ``(B,)`` on the device, first position to copy of each request.
        start_loc: int32 ``(B + 1,)`` on the device, prefix sums of the lengths to copy.
        num_tokens: their sum, known to the host.
        block_size: tokens per block of the table and the cache.
    """
    function = implementation("gather_cache_mla", kv_cache.device)[0]
    function(kv_cache, output, block_table, starts, start_loc, num_tokens, block_size, config, scales)


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merge attention over two disjoint sets of keys into attention over both.

    ``lse = log(exp(a) + exp(b))`` and ``out = exp(a - lse) * out_a + exp(b - lse) * out_b``, in float32 (online
    softmax, arXiv 1805.02867). A partial whose LSE is -inf is not read; where both are, the result is 0 and -inf.

    Args:
        output: ``(T, H, Dv)``, written; may be one of the partial outputs.
        prefix_output, suffix_output: ``(T, H, Dv)``.
        prefix_lse, suffix_lse: float32 ``(T, H)``, natural logarithm.
        output_lse: float32 ``(T, H)``, written where given; may be one of the partial LSEs.
    """
    function = implementation("merge_attn_states", output.device)[0]
    function(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)


def quantize_fp8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``numbers / scale`` saturated to an FP8 ``dtype``, rounded to nearest even; ``scale`` float32 ``()``."""
    quantized: Tensor = implementation("quantize_fp8", numbers.device)[0](numbers, scale, dtype)
    return quantized
