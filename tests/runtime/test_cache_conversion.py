"""Blocks of one side's cache in the other side's format, against the oracle, on poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_select import AttentionConfig, ConfigError
from attn_select.layer import layouts
from attn_select.layer.cache_format import CacheFormat
from attn_select.reference.oracle_quant import decode, encode, pack_fp8_ds_mla, unpack_fp8_ds_mla
from attn_select.runtime import Scales, convert_kv_cache
from attn_select.runtime.kv_cache import allocate_kv_cache
from attn_select.testing import gather_reference, same_bits, write_reference

HEADED = (layouts.FLASH_ATTN_NHD, layouts.FLASHINFER_NHD, layouts.FLASHINFER_HND, layouts.PAGED_ATTENTION)
ODD = float(torch.tensor(0.37))
"""A scale of many digits, as a layer holds it: in float32. The oracle's float64 takes every digit that it is given."""
PLAIN, FP8 = ("float32", "bfloat16", "float16"), ("fp8_e4m3", "fp8_e5m2")


@dataclass
class Side:
    """A format, and the scales that go with it."""

    format: CacheFormat
    k: float | Tensor = 1.0
    v: float | Tensor = 1.0

    @property
    def scales(self) -> Scales:
        config = self.format.config
        return Scales.make("cpu", k=self.k, v=self.v, num_kv_heads=config.num_kv_heads * config.per_head_quant_scales)

    @property
    def oracle_scales(self) -> dict[str, float | Tensor]:
        if self.format.facts()["scales"] not in ("per_tensor", "per_head"):
            return {}
        return {"k_scale": self.k} if self.format.config.mla else {"k_scale": self.k, "v_scale": self.v}


@st.composite
def sides(draw: st.DrawFn, mla: bool, sizes: tuple[int, ...]) -> Side:
    dtype = draw(st.sampled_from([*PLAIN, *FP8, *(["fp8_ds_mla"] if mla else [])]))
    kernel = draw(st.sampled_from([2, 4, 8]))
    block_size = kernel * draw(st.integers(1, 3))
    scale = st.sampled_from([0.25, ODD, 1.0, 3.0])
    if mla:
        packed = dtype == "fp8_ds_mla"
        dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8}
        config = AttentionConfig(num_heads=2, **dims, kv_cache_dtype=dtype, sparse_top_k=4 if packed else None)
        layout = layouts.FP8_DS_MLA if packed else layouts.MLA
        return Side(CacheFormat(config, layout, block_size, kernel), k=draw(scale))
    heads, size, value_size = sizes
    per_head = dtype in FP8 and draw(st.booleans())
    config = AttentionConfig(
        num_heads=heads,
        head_size=size,
        v_head_size=value_size,
        kv_cache_dtype=dtype,
        per_head_quant_scales=per_head,
    )
    k, v = (torch.tensor([draw(scale) for _ in range(heads)]) if per_head else draw(scale) for _ in "kv")
    # The classic layout is of heads with keys and values of one size.
    able = HEADED if size == value_size else HEADED[:-1]
    return Side(CacheFormat(config, draw(st.sampled_from(able)), block_size, kernel), k, v)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Side, Side]:
    mla = draw(st.booleans())
    sizes = draw(st.tuples(st.integers(1, 3), st.sampled_from([16, 32]), st.sampled_from([16, 32, 48])))
    return draw(sides(mla, sizes)), draw(sides(mla, sizes))


def filled(side: Side, tokens: int, spare: int, seed: int) -> Tensor:
    """Return blocks of random tokens; every byte behind them is 0xFF, which is NaN in each of these dtypes."""
    form, generator = side.format, torch.Generator().manual_seed(seed)
    ratio = form.block_size // form.kernel_block_size
    num_blocks = (-(-tokens // form.block_size) + spare) * ratio
    cache = allocate_kv_cache(form.layout, form.config, num_blocks, form.kernel_block_size, "cpu")
    cache.view(torch.uint8).fill_(0xFF)
    config = form.config
    rows = [(tokens, config.num_kv_heads, config.head_size), (tokens, config.num_kv_heads, config.value_head_size)]
    if config.mla:
        rows = [(tokens, 512), (tokens, 64)]
    key, value = (torch.randn(shape, generator=generator) for shape in rows)
    write_reference(cache, key, value, torch.arange(tokens), form.layout, config, **side.oracle_scales)
    return cache


def expected(numbers: Tensor, side: Side, scale: float | Tensor | None) -> Tensor:
    """Return what the side's cache holds of these float64 numbers."""
    config = side.format.config
    if side.format.layout == layouts.FP8_DS_MLA:
        flat = numbers.flatten(1).float()
        return unpack_fp8_ds_mla(pack_fp8_ds_mla(flat[:, :512], flat[:, 512:]))[:, None]
    return decode(encode(numbers.float(), config.cache_dtype, scale), config.cache_dtype, scale)


@given(pair=pairs(), tokens=st.integers(1, 40), spare=st.integers(0, 2), seed=st.integers(0, 9999))
def test_every_format_becomes_every_other(pair: tuple[Side, Side], tokens: int, spare: int, seed: int) -> None:
    source, target = pair
    blocks = filled(source, tokens, spare, seed)
    scales = {"source_scales": source.scales, "target_scales": target.scales}
    made = convert_kv_cache(blocks, source.format, target.format, num_tokens=tokens, **scales)

    form, slots = target.format, torch.arange(tokens)
    held = -(-tokens // form.block_size) * form.block_size
    there = gather_reference(made, form.layout, torch.arange(held), form.config, **target.oracle_scales)
    here = gather_reference(blocks, source.format.layout, slots, source.format.config, **source.oracle_scales)
    wanted = [expected(here[0], target, target.oracle_scales.get("k_scale"))]
    wanted.append(
        wanted[0][..., :512] if form.config.mla else expected(here[1], target, target.oracle_scales.get("v_scale"))
    )
    for got, right in zip(there, wanted, strict=True):
        assert torch.equal(got[:tokens], right)
        assert not got[tokens:].any()


@pytest.mark.parametrize("dtype", [*PLAIN, *FP8])
@pytest.mark.parametrize("layout", HEADED)
def test_numbers_that_both_sides_store_alike_are_copied_bit_by_bit(layout: str, dtype: str) -> None:
    config = AttentionConfig(num_heads=2, head_size=32, kv_cache_dtype=dtype)
    form = CacheFormat(config, layout, 16, 4)
    other = replace(form, layout=layouts.FLASHINFER_HND, block_size=8, kernel_block_size=8)
    cache = allocate_kv_cache(layout, config, 8, 4, "cpu")
    cache.view(torch.uint8).random_(generator=torch.Generator().manual_seed(3))  # NaN and infinities among them
    assert same_bits(convert_kv_cache(convert_kv_cache(cache, form, other), other, form), cache)


FORM = CacheFormat(AttentionConfig(num_heads=2, head_size=32, dtype="float32"), layouts.FLASHINFER_NHD, 16, 16)


@pytest.mark.parametrize(
    ("target", "shape", "dtype", "tokens", "message"),
    [
        (
            replace(FORM, config=AttentionConfig(num_heads=4, head_size=32)),
            (2, 2, 16, 2, 32),
            torch.float32,
            None,
            "source and target store other heads: num_kv_heads = 2 and 4. Converted are dtype, scales, block_size, ",
        ),
        (FORM, (2, 2, 16, 2, 32), torch.float32, 33, "num_tokens = 33: accepted are 1 to 32, the slots of the blocks"),
        (FORM, (2, 2, 8, 2, 32), torch.float32, None, "blocks of 8 tokens: the source's kernel_block_size is 16"),
        (FORM, (2, 2, 16, 2, 32), torch.float16, None, "blocks of torch.float16: the source stores torch.float32"),
        (FORM, (2, 16, 2, 32), torch.float32, None, "kv_cache of shape (2, 16, 2, 32): layout FLASHINFER_NHD is "),
    ],
)
def test_wrong_input_is_named(
    target: CacheFormat, shape: tuple[int, ...], dtype: torch.dtype, tokens: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_kv_cache(torch.zeros(shape, dtype=dtype), FORM, target, num_tokens=tokens)
    assert caught.value.message.startswith(message)
    assert caught.value.fields


def test_latents_are_no_keys_and_values_of_one_head() -> None:
    dims = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8}
    latent = CacheFormat(AttentionConfig(num_heads=2, dtype="float32", **dims), layouts.MLA, 16, 16)
    headed = AttentionConfig(num_heads=1, head_size=48, v_head_size=32, dtype="float32")
    with pytest.raises(ConfigError, match="store other heads: mla = True and False") as caught:
        convert_kv_cache(torch.zeros(2, 16, 48), latent, CacheFormat(headed, layouts.FLASHINFER_NHD, 16, 16))
    assert caught.value.hint == "`attn-select cache --help` names options that help"
