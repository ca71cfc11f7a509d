"""Attention of continuous batching: our kernels on transformers' own pages.

Layers that attend to everything read and write the engine's cache as it lies there, as a strided view in the layout
that the kernel wants. Layers with a window keep a ring of tokens there, whose order no kernel can count out: their keys
are gathered by the cache itself, and attended to as dense ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attn_select.errors import ConfigError
from attn_select.layer import layouts
from attn_select.runtime import AttentionMetadata, CommonAttentionMetadata, prepare_batch
from attn_select_transformers.dense import attend_runs
from attn_select_transformers.kinds import Kernels, choices_of, kind_of
from attn_select_transformers.runs import Run, Runs

_LENS = "_attn_select_lens"
_VIEWS = "_attn_select_views"


@dataclass(slots=True, eq=False)
class Lens:
    """A step's requests as the host knows them; compared by identity."""

    # Tokens of each request in this step, and before it.
    queries: list[int]
    past: list[int]
    # What was made for the step, by a route's own key.
    built: dict[Any, Any]


class Cache(Protocol):
    """What the adapter of a family of releases says of one layer of the engine's cache."""

    # Of the layer's group among the step's tables and indices.
    index: int
    # Tokens that a query sees, itself included; None is all.
    window: int | None
    page: int

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as ``(rows, num_kv_heads, head_size)`` of one storage, a row per slot."""

    def gathered(self, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values; return all that is attended to, ``(1, heads, tokens, size)``."""


def note_lens(cache: Any, queries: list[int], past: list[int]) -> None:
    """Remember a step's lengths with the engine's cache, before the step runs."""
    setattr(cache, _LENS, Lens(queries, past, {}))


def lens_of(cache: Any) -> Lens:
    """Return the lengths of the step that the engine prepared last."""
    lens: Lens = getattr(cache, _LENS)
    return lens


def attend(
    layer: Cache,
    cache: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    options: dict[str, Any],
    graphs: Any = None,
) -> Tensor:
    """Write the step's keys and values into the engine's cache and attend."""
    # Returned is ``(1, T, num_heads, value_head_size)``. The query is ``(1, num_heads, T, head_size)``, the tokens of
    # all requests; key and value likewise. Of the options these are read: ``cu_seq_lens_q``, ``read_index``,
    # ``write_index``, ``block_table``, ``softcap`` and ``s_aux``. ``graphs`` are the ``captured.Graphs`` of a step that
    # is captured. Raises ConfigError where the step comes by block tables, and the kernel's blocks do not fill the
    # engine's pages.
    lens = lens_of(cache)
    kind = kind_of(query, key, value, "decoder", layer.window, options)
    choices_of(module).kinds[kind] = None
    kernels = kind.kernels()
    view = None if layer.window is not None else _view(kernels, cache, module, layer)
    if view is None:
        if options.get("block_table") is not None:
            raise ConfigError(
                f"pages of {layer.page} tokens: {kernels.group.block_size} or a multiple are read by block tables",
                hint="max_blocks_per_request=0 in ContinuousBatchingConfig turns the tables off",
            )
        keys, values = layer.gathered(key, value, options)
        runs = _runs(lens, layer.window, query.shape[2], keys.shape[2])
        return attend_runs(kind, runs, module, query, keys, values, scaling, options.get("s_aux"))
    if graphs is None or options.get("block_table") is None:
        own, metadata = kernels, _metadata(kernels, lens, layer, query.device, options)
    else:
        own, metadata = graphs.fixed(kind, lens, layer, query.shape[2], options)
    tokens = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    output: Tensor = own.layer(module, scaling, options.get("s_aux"))(*tokens, view, metadata)
    return output.unsqueeze(0)


def _runs(lens: Lens, window: int | None, rows: int, keys: int) -> Runs:
    """Return the step as runs over gathered keys: each request's lie side by side, its new ones last."""
    if (found := lens.built.get(window)) is None:
        runs, row, first = [], 0, 0
        for queries, past in zip(lens.queries, lens.past, strict=True):
            num_keys = queries + (past if window is None else min(past, window - 1))
            runs.append(Run(0, row, row + queries, first, first + num_keys, full=False))
            row, first = row + queries, first + num_keys
        widest = max(run.last_key - run.first_key for run in runs)
        found = lens.built[window] = Runs(tuple(runs), window, widest, 1, rows, keys, bidirectional=False)
    assert isinstance(found, Runs)
    return found


def _view(kernels: Kernels, cache: Any, module: nn.Module, layer: Cache) -> Tensor | None:
    """Return the layer's pages in the kernel's layout, made once; None where they cannot be seen in it."""
    views: dict[Any, Tensor | None] = cache.__dict__.setdefault(_VIEWS, {})
    key = (module, kernels.group)
    if key not in views:
        views[key] = _strided(kernels, layer)
    return views[key]


def _strided(kernels: Kernels, layer: Cache) -> Tensor | None:
    group, config = kernels.group, kernels.config
    size = group.block_size
    if size is None or size != group.kernel_block_size or layer.page % size:
        return None
    keys, values = layer.rows()
    if keys.shape[1:] != (config.num_kv_heads, config.head_size) or config.v_head_size is not None:
        return None
    row, head, one = keys.stride()
    apart = values.storage_offset() - keys.storage_offset()
    blocks, heads, width = min(len(keys), len(values)) // size, config.num_kv_heads, config.head_size
    shapes = {
        layouts.FLASH_ATTN_NHD: ((2, blocks, size, heads, width), (apart, size * row, row, head, one)),
        layouts.FLASHINFER_NHD: ((blocks, 2, size, heads, width), (size * row, apart, row, head, one)),
        layouts.FLASHINFER_HND: ((blocks, 2, heads, size, width), (size * row, apart, head, row, one)),
    }
    if group.kv_layout not in shapes:
        return None
    shape, strides = shapes[group.kv_layout]
    return torch.as_strided(keys, shape, strides, keys.storage_offset())


def _metadata(
    kernels: Kernels, lens: Lens, layer: Cache, device: torch.device, options: dict[str, Any]
) -> AttentionMetadata:
    """Return the step's metadata for the layers of a kind in one group of the cache, built once."""
    key = (kernels, layer.index)
    if key not in lens.built:
        longest = max(past + queries for past, queries in zip(lens.past, lens.queries, strict=True))
        kernels.reserve(len(lens.queries), sum(lens.queries), longest)
        lens.built[key] = kernels.group.build(common_of(kernels, lens, layer, device, options))
    metadata: AttentionMetadata = lens.built[key]
    return metadata


def common_of(
    kernels: Kernels, lens: Lens, layer: Cache, device: torch.device, options: dict[str, Any]
) -> CommonAttentionMetadata:
    """Return the step's batch in one group of the engine's cache, in blocks of the kernels' group."""
    size = kernels.group.block_size
    assert size is not None
    seq_lens = [past + queries for past, queries in zip(lens.past, lens.queries, strict=True)]
    common = prepare_batch(lens.queries, seq_lens, device=device)
    num_keys, longest = common.seq_lens, common.max_seq_len
    width = -(-longest // size)
    if options.get("block_table") is not None:
        pages = options["block_table"][layer.index][: common.num_reqs].clamp(min=0)
        # A page holds ``split`` blocks of the kernel, one behind the other; -1 behind a request's pages was made 0.
        split = layer.page // size
        table = (pages[:, : -(-longest // layer.page), None] * split + torch.arange(split, device=device)).flatten(1)
        last = num_keys.long() - 1
        slots = table.gather(1, (last // size)[:, None])[:, 0].long() * size + last % size
    else:
        slots = options["write_index"][layer.index]
        read = options["read_index"][layer.index]
        if not len(read):  # nothing was cached before: the keys are the step's own
            read = slots
        # The keys of all requests lie one behind the other in ``read``: here is where each block of each request
        # begins.
        firsts = (num_keys.cumsum(0) - num_keys)[:, None] + torch.arange(width, device=device) * size
        table = read[firsts.clamp(max=len(read) - 1)] // size
    table = table[:, :width].to(torch.int32).contiguous()
    return replace(common, block_table_tensor=table, slot_mapping=slots, block_size=size)
