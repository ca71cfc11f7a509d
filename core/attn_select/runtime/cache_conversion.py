"""``convert_kv_cache``: blocks of one side's cache as the other side's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.layer import layouts
from attn_select.layer.cache_format import CacheFormat
from attn_select.runtime import torch_ops
from attn_select.runtime.kv_cache import (
    allocate_kv_cache,
    cache_dtype,
    check_cache_shape,
)
from attn_select.runtime.scales import Scales
from attn_select.runtime.torch_dtypes import FP8_DTYPES


def convert_kv_cache(
    blocks: Tensor,
    source: CacheFormat,
    target: CacheFormat,
    *,
    num_tokens: int | None = None,
    source_scales: Scales | None = None,
    target_scales: Scales | None = None,
) -> Tensor:
    """Return the tokens of ``blocks`` in blocks of the target's format, on the same device.

    Numbers that both sides store alike are copied bit by bit. Others are read in float32 and rounded once, as the
    target's cache rounds new tokens. Not for captured steps: it may wait for the device.

    Args:
        blocks: one layer's blocks of one request in order, in the source's layout and kernel blocks: ``kv_cache_shape``
            of as many blocks.
        source: of ``blocks``: ``selection.cache_format`` of the side that wrote them.
        target: of the result.
        num_tokens: tokens that the blocks hold; None: every slot holds one. Slots behind them are not read.
        source_scales: what the source's FP8 numbers are multiplied by; None: 1.
        target_scales: the same of the target.

    Returns:
        As many of the target's blocks as the tokens fill, the slots behind the last token zero.

    Raises:
        ConfigError: the sides differ in more than dtype, scales, block sizes and layout; ``blocks`` are not of the
            source's format; ``num_tokens`` is less than 1 or more than they hold.
    """
    _require_same_layer(source, target)
    slots = _require_blocks(blocks, source)
    tokens = slots if num_tokens is None else num_tokens
    if not 1 <= tokens <= slots:
        text = f"num_tokens = {num_tokens}: accepted are 1 to {slots}, the slots of the blocks"
        raise ConfigError(text, fields=["num_tokens"])
    before = source_scales or Scales.make(blocks.device)
    after = target_scales or Scales.make(blocks.device)
    num_blocks = -(-tokens // target.block_size) * (target.block_size // target.kernel_block_size)
    made = allocate_kv_cache(target.layout, target.config, num_blocks, target.kernel_block_size, blocks.device)
    views = torch_ops.stored_views(blocks, source.layout, source.config)
    # K and V ``(tokens, num_kv_heads, size)``, or ``(tokens, width)`` of latents, as stored; FP8 as bytes.
    rows = [view.flatten(0, 1)[:tokens] for view in views]
    rows = [row.flatten(2) if row.ndim > 3 else row for row in rows]  # the classic layout splits K's heads
    if _stored_alike(source, target, before, after):
        plain = made.view(torch.uint8) if made.dtype in FP8_DTYPES.values() else made
        _write(rows, plain, target, after)
    else:
        _write(_numbers(rows, source, before), made, target, after)
    return made


def _require_same_layer(source: CacheFormat, target: CacheFormat) -> None:
    """Refuse two formats that are not of the same heads on the same ranks."""
    differ = {name: pair for name, pair in source.differences(target).items() if name not in source.converted}
    if source.config.mla != target.config.mla:
        differ["mla"] = source.config.mla, target.config.mla
    if differ:
        each = ", ".join(f"{name} = {here} and {there}" for name, (here, there) in differ.items())
        text = f"source and target store other heads: {each}. Converted are {', '.join(source.converted)}"
        raise ConfigError(text, fields=[*differ], hint="`attn-select cache --help` names options that help")


def _require_blocks(blocks: Tensor, source: CacheFormat) -> int:
    """Return the slots of ``blocks``; refuse what is not of the source's format."""
    num_blocks, block_size = check_cache_shape(blocks, source.layout, source.config)
    if block_size != source.kernel_block_size and source.layout not in layouts.SPLIT_IN_PLACE:
        text = f"blocks of {block_size} tokens: the source's kernel_block_size is {source.kernel_block_size}"
        raise ConfigError(text, fields=["blocks"])
    wanted = cache_dtype(source.layout, source.config)
    if blocks.dtype != wanted:
        raise ConfigError(f"blocks of {blocks.dtype}: the source stores {wanted}", fields=["blocks"])
    return num_blocks * block_size


def _stored_alike(source: CacheFormat, target: CacheFormat, before: Scales, after: Scales) -> bool:
    """Whether the same bits are the same number on both sides."""
    here, there = source.facts(), target.facts()
    if here["dtype"] != there["dtype"]:
        return False
    if here["scales"] not in ("per_tensor", "per_head"):
        return True
    scales = ((before.k, after.k), (before.v, after.v))
    return all(bool((old == new).all()) for old, new in scales)


def _numbers(rows: list[Tensor], source: CacheFormat, scales: Scales) -> list[Tensor]:
    """Return what the rows mean, in float32."""
    if source.layout == layouts.FP8_DS_MLA:
        return [torch_ops.unpacked_ds_mla(rows[0])]
    dtype = cache_dtype(source.layout, source.config)
    if dtype not in FP8_DTYPES.values():
        return [stored.float() for stored in rows]
    each = (scales.k, scales.v)
    per_head = [scale.reshape(-1, 1) if scale.ndim else scale for scale in each]
    return [stored.view(dtype).float() * scale for stored, scale in zip(rows, per_head, strict=False)]


def _write(rows: list[Tensor], made: Tensor, target: CacheFormat, scales: Scales) -> None:
    """Write the rows into the first slots of ``made``, rounding where it stores another dtype."""
    slots = torch.arange(len(rows[0]), device=made.device)
    config = target.config
    if len(rows) == 2:
        torch_ops.reshape_and_cache(rows[0], rows[1], made, slots, target.layout, config, scales)
    elif rows[0].shape[1] == made.shape[2] and rows[0].dtype == made.dtype:
        torch_ops.scatter_rows(made, rows[0], slots)
    else:
        assert config.kv_lora_rank is not None
        latent, rope = rows[0].tensor_split([config.kv_lora_rank], dim=1)
        torch_ops.concat_and_cache_mla(latent, rope, made, slots, target.layout, config, scales)
