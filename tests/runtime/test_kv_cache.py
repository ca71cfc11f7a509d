"""Paged caches: where every layout puts a token, views without copies, and blocks split for a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import key_value_views, num_blocks_for
from attn_select.runtime.kv_cache import (
    allocate_kv_cache,
    cache_dtype,
    check_cache_shape,
    in_blocks_of,
    kernel_block_table,
    paged_attention_views,
)
from attn_select.testing import gather_reference, same_bits, slot_mapping_reference, write_reference

FLASH, NHD, HND, MLA, DS, CLASSIC = layouts.LAYOUTS
HEADED = (FLASH, NHD, HND, CLASSIC)


def headed(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32", **fields})


def latent(**fields: Any) -> AttentionConfig:
    dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8}
    return AttentionConfig(**{"num_heads": 4, **dims, **fields})


SPARSE = latent(sparse_top_k=4, kv_cache_dtype="fp8_ds_mla")
SHAPES = {
    FLASH: (2, 7, 16, 2, 32),
    NHD: (7, 2, 16, 2, 32),
    HND: (7, 2, 2, 16, 32),
    CLASSIC: (2, 7, 2, 16 * 32),
    MLA: (7, 16, 576),
    DS: (7, 16, 656),
}


def config_for(layout: str, **fields: Any) -> AttentionConfig:
    if layout == DS:
        return SPARSE
    return latent(**fields) if layout == MLA else headed(**fields)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_shape_of_every_layout(layout: str) -> None:
    config = config_for(layout)
    cache = allocate_kv_cache(layout, config, 7, 16, "cpu")
    assert tuple(cache.shape) == SHAPES[layout]
    assert check_cache_shape(cache, layout, config) == (7, 16)
    assert not cache.view(torch.uint8).any()


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_a_budget_is_filled_to_the_last_block(layout: str) -> None:
    config = config_for(layout)
    per_token = layouts.bytes_per_token(layout, config)
    layers, budget = 3, 3 * per_token * 16 * 11
    assert num_blocks_for(budget, [per_token] * layers, 16) == 11
    assert num_blocks_for(budget - 1, [per_token] * layers, 16) == 10
    taken = sum(allocate_kv_cache(layout, config, 11, 16, "cpu").nbytes for _ in range(layers))
    assert taken == budget


def numbered(layout: str, config: AttentionConfig, blocks: int = 5, block_size: int = 8) -> Tensor:
    """A cache whose every byte differs from its neighbours', finite in every dtype."""
    cache = allocate_kv_cache(layout, config, blocks, block_size, "cpu")
    flat = cache.view(torch.uint8).flatten()
    generator = torch.Generator().manual_seed(5)
    cache.view(torch.uint8).copy_(
        torch.randint(0, 60, flat.shape, generator=generator).view(cache.view(torch.uint8).shape)
    )
    return cache


@pytest.mark.parametrize(
    "fields", [{}, {"v_head_size": 16}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "float16"}]
)
@pytest.mark.parametrize("layout", HEADED)
def test_views_hold_what_the_oracle_reads_and_share_memory(layout: str, fields: dict[str, Any]) -> None:
    config = headed(**fields)
    cache = numbered(layout, config)
    slots = torch.randperm(40)
    keys, values = gather_reference(cache, layout, slots, config)
    if layout == CLASSIC:
        k, v = paged_attention_views(cache, config)
        x = 16 // cache.element_size()
        assert k.shape == (5, 2, 32 // x, 8, x)
        assert v.shape == (5, 2, config.value_head_size, 8)
        k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 3, 1, 2)
    else:
        k, v = key_value_views(cache, layout, config)
        assert k.shape == (5, 8, 2, 32)
        assert v.shape == (5, 8, 2, config.value_head_size)
    for view, expected in ((k, keys), (v, values)):
        raw = view.view(torch.uint8) if config.cache_dtype.startswith("fp8") else view
        found = raw[slots // 8, slots % 8].flatten(2)
        if config.cache_dtype.startswith("fp8"):
            found = found.view(cache.dtype)
        assert torch.equal(found.double(), expected)
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("layout", "shape", "accepted"),
    [
        (FLASH, (3, 2, 16, 2, 32), r"\(2, num_blocks, block_size, 2, 32\)"),
        (FLASH, (2, 3, 16, 2, 31), r"\(2, num_blocks, block_size, 2, 32\)"),
        (FLASH, (2, 3, 0, 2, 32), r"\(2, num_blocks, block_size, 2, 32\)"),
        (NHD, (2, 3, 16, 2, 32), r"\(num_blocks, 2, block_size, 2, 32\)"),
        (HND, (3, 2, 16, 2, 32), r"\(num_blocks, 2, 2, block_size, 32\)"),
        (CLASSIC, (2, 3, 2, 100), r"\(2, num_blocks, 2, block_size \* 32\)"),
        (MLA, (3, 16, 512), r"\(num_blocks, block_size, 576\)"),
        (MLA, (3, 16, 1, 576), r"\(num_blocks, block_size, 576\)"),
        (DS, (3, 64, 576), r"\(num_blocks, block_size, 656\)"),
    ],
)
def test_a_wrong_shape_is_shown_beside_the_right_one(layout: str, shape: tuple[int, ...], accepted: str) -> None:
    cache = torch.zeros(shape, dtype=cache_dtype(layout, config_for(layout)))
    seen = ", ".join(map(str, shape))
    with pytest.raises(ConfigError, match=rf"kv_cache of shape \({seen}\): layout {layout} is {accepted}"):
        check_cache_shape(cache, layout, config_for(layout))


@pytest.mark.parametrize("layout", [*HEADED, MLA, DS])
def test_large_blocks_on_a_cache_of_small_ones(layout: str) -> None:
    """An allocator of 24-token blocks over a kernel of 8: the same slots, found through converted tables."""
    config, size, kernel = config_for(layout), 24, 8
    cache = allocate_kv_cache(layout, config, 4 * size // kernel, kernel, "cpu")
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    written = []
    for row in table:
        if layout in (MLA, DS):
            key = torch.randn(48, 512, generator=generator).bfloat16()
            value = torch.randn(48, 64, generator=generator).bfloat16()
        else:
            key, value = torch.randn(2, 48, 2, 32, generator=generator)
        slots = slot_mapping_reference(row, torch.arange(48), size)
        write_reference(cache, key, value, slots, layout, config)
        written.append(gather_reference(cache, layout, slots, config))
    converted = kernel_block_table(table, size // kernel)
    assert converted.tolist() == [[9, 10, 11, 0, 1, 2], [3, 4, 5, 6, 7, 8]]
    for row, (keys, values) in zip(converted, written, strict=True):
        slots = slot_mapping_reference(row, torch.arange(48), kernel)
        found = gather_reference(cache, layout, slots, config)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        assert keys.abs().sum() > 0


@pytest.mark.parametrize("layout", layouts.SPLIT_IN_PLACE)
def test_a_cache_in_other_blocks_is_a_view_with_the_same_slots(layout: str) -> None:
    config = config_for(layout)
    cache = numbered(layout, config, blocks=6, block_size=8)
    for size, blocks in ((4, 12), (8, 6), (16, 3), (12, 4)):
        view = in_blocks_of(size, cache, layout, config)
        assert check_cache_shape(view, layout, config) == (blocks, size)
        assert view.data_ptr() == cache.data_ptr()
        slots = torch.arange(48)
        for here, there in zip(
            gather_reference(view, layout, slots, config), gather_reference(cache, layout, slots, config), strict=True
        ):
            assert same_bits(here, there)


@pytest.mark.parametrize(
    ("ratio", "multiple", "width"), [(1, 1, 3), (2, 1, 6), (1, 4, 4), (2, 4, 8), (3, 2, 10), (4, 128, 128)]
)
def test_width_of_converted_tables(ratio: int, multiple: int, width: int) -> None:
    table = torch.tensor([[5, 1, 9], [2, 0, 7]], dtype=torch.int32)
    made = kernel_block_table(table, ratio, multiple)
    assert made.dtype == torch.int32
    assert made.shape == (2, width)
    expected = [[block * ratio + part for block in row for part in range(ratio)] for row in table.tolist()]
    assert made[:, : 3 * ratio].tolist() == expected
    assert not made[:, 3 * ratio :].any()

    out = torch.full((4, 200), -7, dtype=torch.int32)
    inside = kernel_block_table(table, ratio, multiple, out)
    assert inside.data_ptr() == out.data_ptr()
    assert torch.equal(inside, made)
    assert (out[2:] == -7).all()
    assert (out[:, width:] == -7).all()
