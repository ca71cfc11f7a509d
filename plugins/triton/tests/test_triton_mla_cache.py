"""The operations on a cache of latents: bit by bit what torch's give, for any strides."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton_mla_layers import DEVICE, DTYPE, FP8, ON_GPU  # noqa: E402

from attn_select import AttentionConfig  # noqa: E402
from attn_select.layer.layouts import MLA  # noqa: E402
from attn_select.runtime import Scales, torch_ops  # noqa: E402
from attn_select_triton.kernels import mla_cache  # noqa: E402


def plain_config(rank: int, rope: int, dtype: str, cache: str) -> AttentionConfig:
    return AttentionConfig(
        num_heads=2, kv_lora_rank=rank, qk_nope_head_dim=8, qk_rope_head_dim=rope, v_head_dim=8, dtype=dtype,
        kv_cache_dtype=cache,
    )  # fmt: skip


def rounded(numbers: Any, cache_dtype: str) -> Any:
    """Return numbers that any rounding to FP8 leaves alone: the interpreter's loses carries into the exponent."""
    if cache_dtype not in FP8 or ON_GPU:
        return numbers
    return numbers.to(FP8[cache_dtype]).float()


@pytest.mark.parametrize("cache_dtype", ["auto", "float16", "float32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (48, 16), (3, 2)])
def test_writes_and_gathers_what_torch_writes_and_gathers(rank: int, rope: int, cache_dtype: str) -> None:
    config = plain_config(rank, rope, "bfloat16", cache_dtype)
    width, size = rank + rope, 16
    draw = torch.Generator().manual_seed(rank)
    stored = FP8.get(config.cache_dtype) or getattr(torch, config.cache_dtype)
    # Every other block, and of it every token but the last: strides of a cache that others share.
    wide = torch.zeros(12, size + 1, width + 3).to(stored).to(DEVICE)
    cache = wide[::2, :size, :width]
    ours, theirs = cache.clone(), cache.clone()
    strided = wide.clone()[::2, :size, :width]
    scales = Scales.make(DEVICE, k=0.5)
    source = rounded(torch.randn(width + 5, 30, generator=draw), config.cache_dtype).mul(0.5)
    source[0, 0], source[rank, 1] = 6e4, -6e4
    by_column = source.bfloat16().to(DEVICE)
    slots = torch.randperm(6 * size, generator=draw)[:30].to(DEVICE)
    slots[[3, 17]] = -1
    for tokens in (30, 1, 0):
        parts = by_column.t()[:tokens, :rank], by_column.t()[:tokens, rank:width], slots[:tokens]
        for target in (ours, strided):
            mla_cache.concat_and_cache_mla(parts[0], parts[1], target, parts[2], scales.k)
        torch_ops.concat_and_cache_mla(*parts[:2], theirs, parts[2], MLA, config, scales)
        mla_cache.concat_and_cache_mla(parts[0].contiguous(), parts[1].contiguous(), ours, parts[2], scales.k)
    for written in (ours, strided.contiguous()):
        assert torch.equal(written.view(torch.uint8), theirs.view(torch.uint8))

    table = torch.randperm(6, generator=draw).int().view(3, 2).repeat(1, 3).to(DEVICE)[:, :5]
    lengths = torch.tensor([37, 0, 5], dtype=torch.int32)
    start_loc = torch.tensor([9, 0, *lengths]).cumsum(0).int().to(DEVICE)[1:] - 9  # not at 16 bytes
    starts = torch.tensor([9, 11, 3, 60], dtype=torch.int32, device=DEVICE)[1:]
    outputs = [torch.full((50, width), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    where = (table, starts, start_loc, int(lengths.sum()), size)
    mla_cache.gather_cache_mla(strided, outputs[0], *where, scales.k)
    torch_ops.gather_cache_mla(theirs, outputs[1], *where, config, scales)
    assert outputs[0][42:].isnan().all()
    assert torch.equal(outputs[0][:42], outputs[1][:42])
    by_column = torch.full((width, 50), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    mla_cache.gather_cache_mla(theirs, by_column.t(), *where, scales.k)
    assert torch.equal(by_column.t()[:42], outputs[1][:42])
    mla_cache.gather_cache_mla(theirs, outputs[0], *where[:3], 0, size, scales.k)


def test_gathers_for_many_requests() -> None:
    config = plain_config(16, 16, DTYPE, "auto")
    draw = torch.Generator().manual_seed(0)
    cache = torch.randn(40, 16, 32, generator=draw).to(getattr(torch, DTYPE)).to(DEVICE)
    table = torch.randint(0, 40, (37, 4), generator=draw).int().to(DEVICE)
    lengths = torch.randint(0, 9, (37,), generator=draw).int()
    start_loc = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    starts = torch.randint(0, 50, (37,), generator=draw).int().to(DEVICE)
    found = [torch.empty(int(lengths.sum()), 32, dtype=cache.dtype, device=DEVICE) for _ in range(2)]
    where = (table, starts, start_loc, len(found[0]), 16)
    scales = Scales.make(DEVICE)
    mla_cache.gather_cache_mla(cache, found[0], *where, scales.k)
    torch_ops.gather_cache_mla(cache, found[1], *where, config, scales)
    assert torch.equal(found[0], found[1])
