"""Blocks that are cleared when they are handed out: which bytes change, and that a former owner's NaN goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import select
from attn_select.errors import ConfigError
from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BatchError,
    BlockPool,
    BlockTable,
    attention_group,
    prepare_batch,
)
from attn_select.runtime.kv_cache import allocate_kv_cache, zero_blocks
from attn_select.testing import attention_reference, mla_layer, relative_error

FLASH, NHD, HND, MLA, DS, CLASSIC = layouts.LAYOUTS
HEADED = (FLASH, NHD, HND, CLASSIC)
Make = Callable[..., Any]


def headed(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32", **fields})


def filled(cache: Tensor) -> Tensor:
    """Set every byte of a cache to 1."""
    cache.view(torch.uint8).fill_(1)
    return cache


def zeroed(cache: Tensor, blocks: int) -> list[int]:
    """Return the blocks whose bytes are all zero; every other byte must be as it was."""
    per_block = cache.view(torch.uint8).movedim(cache.shape.index(blocks), 0).flatten(1)
    clean = [block for block in range(blocks) if not per_block[block].any()]
    assert all(bool((per_block[block] == 1).all()) for block in range(blocks) if block not in clean)
    return clean


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        *((layout, headed(kv_cache_dtype=dtype)) for layout in HEADED for dtype in ("float32", "fp8_e4m3")),
        (NHD, headed(v_head_size=16)),
        (MLA, mla_layer()),
        (MLA, mla_layer(kv_cache_dtype="fp8_e5m2")),
        (DS, mla_layer(sparse_top_k=4, kv_cache_dtype="fp8_ds_mla")),
    ],
    ids=str,
)
def test_whole_blocks_of_every_layout_become_zero_and_no_others(layout: str, config: AttentionConfig) -> None:
    cache = filled(allocate_kv_cache(layout, config, 11, 64, "cpu"))
    zero_blocks(cache, layout, config, torch.tensor([3, 10, 3]))
    assert zeroed(cache, 11) == [3, 10]


def test_what_is_no_block_is_refused(make_group: Make) -> None:
    group: AttentionGroup = make_group(headed(block_size=32))
    cache = group.allocate_kv_cache(5)
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"block_ids holds {wrong}: accepted are .* 0 to 4"):
            group.zero_blocks(cache, [0, wrong])
    with pytest.raises(BatchError, match="float16"):
        group.zero_blocks(cache.half(), [0])
    with pytest.raises(ConfigError, match="no KV cache"):
        make_group(headed(attn_type="encoder_only")).zero_blocks(cache, [0])


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("layout", HEADED)
@pytest.mark.parametrize("block_size", [16, 32])
def test_the_nan_of_a_blocks_former_owner(
    make_group: Make, make_toy: Make, safe: bool, zero: bool, layout: str, block_size: int
) -> None:
    """A kernel that reads a whole block shows it to the next owner, unless the block was zeroed in between."""
    toy = make_toy(layouts=(layout,), kernel_block_sizes=(16,), nan_tail_safe=safe)
    group: AttentionGroup = make_group(headed(block_size=block_size), toy)
    assert group.nan_tail_safe is safe
    layer, cache = Attention(group), group.allocate_kv_cache(4)
    pool, table = BlockPool(4, block_size), BlockTable(1, 4, block_size, "cpu")

    def run(request: str, tokens: int, value: float | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        added = pool.allocate(request, tokens)
        table.append_row(0, added)
        if zero:
            group.zero_blocks(cache, added)
        query, key, values = (torch.randn(tokens, heads, 32) for heads in (4, 2, 2))
        if value is not None:
            values.fill_(value)
        output = layer(query, key, values, cache, group.build(prepare_batch([tokens], [tokens], table)))
        return query, key, values, output

    run("the first", block_size + 13, torch.nan)
    held = pool.blocks("the first")
    pool.free("the first")
    table.clear_row(0)
    query, key, values, output = run("the second", 13)
    assert set(pool.blocks("the second")) <= set(held)
    if zero or safe:
        expected, _ = attention_reference(query, key, values, scale=32**-0.5)
        assert relative_error(output, expected).row < 1e-5
    else:
        assert output.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("ids", [[1, 3], []], ids=str)
def test_zeroing_waits_for_no_gpu(ids: list[int]) -> None:
    """Not even while the GPU is busy: the blocks are zero once it gets there."""
    group = attention_group(select(headed(dtype="bfloat16", block_size=64)))
    cache = filled(group.allocate_kv_cache(5))
    group.zero_blocks(cache, ids)  # pinned memory is taken before the test
    filled(cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        group.zero_blocks(cache, ids)
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = 64 // (group.kernel_block_size or 64)
    wanted = [block * parts + part for block in (1, 3) for part in range(parts)] if len(ids) else []
    assert zeroed(cache.cpu(), 5 * parts) == wanted
