"""Continuous batching: what has to be changed in transformers so that it runs on our kernels, and nothing else.

The engine accepts names of its own alone and may replace any other by flash attention. So the name is set for the time
of the batching behind its check (``names.PAGED``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from attn_select.engines.wrap import wrap
from attn_select_transformers import captured
from attn_select_transformers.names import DENSE, PAGED
from attn_select_transformers.paged import Cache, note_lens
from attn_select_transformers.paged_caches import AllocatorLayer, GroupedLayer

logger = logging.getLogger("attn_select_transformers")
TABLE_PAGES = 16
"""Tokens: pages of a multiple are read by block tables, since the kernels' blocks are no smaller."""


def install() -> None:
    """Change the engine's functions, once."""
    # Raises ImportError or AttributeError where the engine has other functions than the releases that are listed.
    from transformers.generation.continuous_batching import continuous_api, initialization, input_outputs, model_runner

    changes = (
        (continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switch),
        (continuous_api, "resolve_continuous_batching_config", _resolve),
        (initialization, "ensure_decode_fast_path_is_available", _fast_path),
        (input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", _prepare),
        (model_runner.ModelRunner, "maybe_pad_inputs", _pad),
        (model_runner.ModelRunner, "compute_batch", _compute),
        (model_runner.ModelRunner, "_capture_graph", _capture),
    )
    for owner, name, _ in changes:
        getattr(owner, name)  # all of them are there before the first is changed
    for owner, name, around in changes:
        wrap(owner, name, around)


def layer_of(cache: Any, layer_idx: int) -> Cache:
    """Return one layer of the engine's cache."""
    layers: dict[int, Cache] = cache.__dict__.setdefault("_attn_select_layers", {})
    if layer_idx not in layers:
        made = AllocatorLayer if hasattr(cache, "layer_to_allocator") else GroupedLayer
        layers[layer_idx] = made(cache, layer_idx)
    return layers[layer_idx]


def _switch(original: Callable[..., Any], manager: Any, model: Any, *arguments: Any, **options: Any) -> Any:
    """Keep our attention where the engine would refuse it or switch to flash attention."""
    if model.config._attn_implementation == DENSE:
        model.config._attn_implementation = PAGED
        manager._original_attn_impl = DENSE
    if model.config._attn_implementation == PAGED:
        return None
    return original(manager, model, *arguments, **options)


def _resolve(original: Callable[..., Any], config: Any, cb_config: Any, *arguments: Any, **options: Any) -> Any:
    """Let decodes by block tables be captured; other steps bring lengths that no graph can hold."""
    if config._attn_implementation == PAGED:
        cb_config = deepcopy(cb_config)
        wanted = cb_config.use_cuda_graph
        mixed, decodes = wanted if isinstance(wanted, tuple | list) else (wanted, wanted)
        able = torch.cuda.is_available() and not _has_windows(config)
        if mixed or (decodes and not able):
            which = "steps with prompts run" if able else "continuous batching runs"
            logger.warning("attn-select: %s without CUDA graphs: use_cuda_graph = %s", which, wanted)
        cb_config.use_cuda_graph = (False, able and decodes is not False)
    return original(config, cb_config, *arguments, **options)


def _has_windows(config: Any) -> bool:
    types = getattr(config, "layer_types", None) or ()
    return "sliding_attention" in types or (not types and getattr(config, "sliding_window", None) is not None)


def _fast_path(original: Callable[..., Any], config: Any, cb_config: Any, *arguments: Any, **options: Any) -> Any:
    """Let decodes come with block tables, which the engine gives to flash attention on GPUs alone."""
    if config._attn_implementation != PAGED:
        return original(config, cb_config, *arguments, **options)
    page = cb_config.page_size if hasattr(cb_config, "page_size") else cb_config.block_size
    if _has_windows(config) or page % TABLE_PAGES:  # rings of windows have no tables, other pages hold no whole blocks
        cb_config.max_blocks_per_request = 0
    return None


def _prepare(original: Callable[..., Any], io: Any, requests_in_batch: Any, *arguments: Any, **options: Any) -> Any:
    """Put decodes first, as kernels want them, and note the lengths, which reading back would stop the device for."""
    if io.cache.config._attn_implementation == PAGED:
        requests_in_batch = sorted(requests_in_batch, key=lambda request: request.query_length > 1)
        note_lens(
            io.cache,
            [request.query_length for request in requests_in_batch],
            [request.state.position_offset for request in requests_in_batch],
        )
    return original(io, requests_in_batch, *arguments, **options)


def _pad(
    original: Callable[..., Any], runner: Any, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool
) -> Any:
    """Leave steps as they are that are not captured."""
    if runner.cache.config._attn_implementation == PAGED and not use_decode_fast_path:
        return num_q_tokens, max_kv_read
    return original(runner, num_q_tokens, max_kv_read, use_decode_fast_path)


def _compute(original: Callable[..., Any], runner: Any, model: Any, batch_data: dict[str, Any]) -> Any:
    """Bring a step of decodes to where its graph reads it."""
    if runner.cache.config._attn_implementation == PAGED:
        captured.load(runner, batch_data)
    return original(runner, model, batch_data)


def _capture(original: Callable[..., Any], runner: Any, forward: Callable[..., Any], *arguments: Any) -> Any:
    """Capture a step of decodes with batches of fixed addresses."""
    if runner.cache.config._attn_implementation == PAGED:
        return captured.capture(runner, forward, *arguments)
    return original(runner, forward, *arguments)
