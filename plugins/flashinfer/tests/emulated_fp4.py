"""FlashInfer's FP4 output without a GPU: ``FP4Tensor`` (utils.py 0.6.14) and what trtllm-gen writes into it.

Two e2m1 numbers share a byte, the first in the low half. Sixteen share an e4m3 scale, ``amax / 6 * o_sf_scale``,
so that a number stands for ``e2m1 * scale / o_sf_scale``. Scales lie in tiles of 128 tokens by 4, as tensor cores read
them (``recover_swizzled_scales`` in tests/attention/test_trtllm_gen_attention_decode.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

fi: Any = sys.modules["flashinfer_emulated"]
need = fi.need

VECTOR = 16
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


class FP4Tensor:
    def __init__(self, data: Any, scale: Any, scale_start_index: Any = 0, original_shape: Any = None) -> None:
        need(data.dtype == torch.uint8, f"data must be uint8 tensor, got {data.dtype}", ValueError)
        need(scale.dtype == fi.E4M3, f"scale must be float8_e4m3fn tensor, got {scale.dtype}", ValueError)
        rows = scale.shape[0]
        need(rows % 128 == 0, f"scale.shape[0] must be a multiple of 128, got {rows}", ValueError)
        inside = 0 <= scale_start_index < rows and scale_start_index + data.shape[0] <= rows
        need(inside, f"scale_start_index={scale_start_index}, {data.shape[0]} of {rows} rows", ValueError)
        if original_shape is not None:
            shape = (*original_shape[:-1], -(-original_shape[-1] // 2))
            need(tuple(data.shape) == shape, f"data {tuple(data.shape)}, original {tuple(original_shape)}", ValueError)
        self.data, self.scale, self.scale_start_index = data, scale, scale_start_index
        self.original_shape, self.dtype = original_shape, "nvfp4"


def check_output(query: Tensor, out: Any, o_sf_scale: Any, o_sf_vec_size: Any) -> FP4Tensor:
    """Check what both entries check of an FP4 output, or make one."""
    need(query.dtype == fi.E4M3, "query must be fp8 when out_dtype is nvfp4.", AssertionError)
    need(o_sf_scale is not None, "o_sf_scale", AssertionError)
    need(o_sf_vec_size in (None, VECTOR), "only o_sf_vec_size = 16 is supported", AssertionError)
    tokens, heads, size = query.shape
    width = -(-heads * size // VECTOR // 4) * 4
    if out is None:
        scale = torch.empty(-(-tokens // 128) * 128, width, dtype=fi.E4M3)
        out = FP4Tensor(torch.empty(tokens, heads, -(-size // 2), dtype=torch.uint8), scale)
    need(isinstance(out, FP4Tensor), f"Invalid out: {out}", ValueError)
    fi.check_tensor(out.data, (tokens, heads, -(-size // 2)), torch.uint8, "out")
    fi.check_tensor(out.scale, (out.scale.shape[0], width), fi.E4M3, "out_scale_factor")
    need(out.data.is_contiguous() and out.scale.is_contiguous(), "FP4 data and scales are written as contiguous")
    return FP4Tensor(out.data, out.scale, out.scale_start_index, query.shape)


def write(out: FP4Tensor, rows: slice, numbers: Tensor, o_sf_scale: float) -> None:
    """Quantise float64 ``(T, H, D)`` into rows of an output."""
    blocks = numbers.reshape(len(numbers), -1, VECTOR)
    scales = (blocks.abs().amax(-1) / 6.0 * o_sf_scale).clamp(max=448.0).to(fi.E4M3)
    factor = torch.where(scales.double() == 0, 0.0, o_sf_scale / scales.double())
    scaled = (blocks * factor[..., None]).clamp(-6.0, 6.0)
    codes = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.reshape(*numbers.shape[:2], -1, 2)
    out.data[rows] = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    tokens = torch.arange(rows.start, rows.stop) + out.scale_start_index
    out.scale.view(torch.uint8).view(-1)[places(tokens, scales.shape[1], out.scale.shape[1])] = scales.view(torch.uint8)


def places(tokens: Tensor, blocks: int, width: int) -> Tensor:
    """Return where the scales of tokens' blocks lie, ``(tokens, blocks)``."""
    row, column = tokens[:, None], torch.arange(blocks)[None]
    tile = row // 128 * (width // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def read(out: FP4Tensor, o_sf_scale: float) -> Tensor:
    """Return what an output stands for, float64 ``(T, H, D)``."""
    tokens, heads, half = out.data.shape
    codes = torch.stack([out.data & 15, out.data >> 4], -1).flatten(-2).long()
    numbers = LEVELS[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    blocks = heads * half * 2 // VECTOR
    at = places(torch.arange(tokens) + out.scale_start_index, blocks, out.scale.shape[1])
    scales = out.scale.view(torch.uint8).view(-1)[at].view(fi.E4M3).double() / o_sf_scale
    return (numbers.view(tokens, blocks, VECTOR) * scales[..., None]).view(tokens, heads, 2 * half)
