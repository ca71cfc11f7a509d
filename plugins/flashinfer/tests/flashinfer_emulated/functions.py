"""FlashInfer's merge of two partial results, CUTLASS prefill and FP4 outputs without a GPU.

Rules by source: cascade.py, prefill.py and utils.py 0.6.14. An ``FP4Tensor`` is what trtllm-gen writes. Two e2m1
numbers share a byte, the first in the low half. Sixteen share an e4m3 scale, ``amax / 6 * o_sf_scale``, so that a
number stands for ``e2m1 * scale / o_sf_scale``. Scales lie in tiles of 128 tokens by 4, as tensor cores read them
(``recover_swizzled_scales`` in tests/attention/test_trtllm_gen_attention_decode.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from attn_select.reference.oracle import merge_reference
from flashinfer_emulated import need

VECTOR = 16
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


class FP4Tensor:
    @fi.entry("utils.FP4Tensor.__init__")
    def __init__(self, a: Any) -> None:
        need(a.data.dtype == torch.uint8, f"data must be uint8 tensor, got {a.data.dtype}", ValueError)
        need(a.scale.dtype == fi.E4M3, f"scale must be float8_e4m3fn tensor, got {a.scale.dtype}", ValueError)
        rows = a.scale.shape[0]
        need(rows % 128 == 0, f"scale.shape[0] must be a multiple of 128, got {rows}", ValueError)
        inside = 0 <= a.scale_start_index < rows and a.scale_start_index + a.data.shape[0] <= rows
        need(inside, f"scale_start_index={a.scale_start_index}, {a.data.shape[0]} of {rows} rows", ValueError)
        if a.original_shape is not None:
            shape = (*a.original_shape[:-1], -(-a.original_shape[-1] // 2))
            need(
                tuple(a.data.shape) == shape,
                f"data {tuple(a.data.shape)}, original {tuple(a.original_shape)}",
                ValueError,
            )
        self.data, self.scale, self.scale_start_index = a.data, a.scale, a.scale_start_index
        self.original_shape, self.dtype = a.original_shape, "nvfp4"


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


@fi.entry("cascade.merge_state_in_place")
def merge_state_in_place(a: Any) -> None:
    need(a.mask is None, "masks are not emulated")
    _contiguous(a.v, a.s, a.v_other, a.s_other)
    need(a.s.dtype == a.s_other.dtype == torch.float32, f"s {a.s.dtype}, s_other {a.s_other.dtype}")
    fi.launch(partial(_merge, [a.v, a.v_other], [a.s, a.s_other], a.v, a.s))


def _contiguous(*tensors: Tensor) -> None:
    need(all(tensor.is_contiguous() for tensor in tensors), "must be contiguous", RuntimeError)


def _merge(parts: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
    """Merge in base 2; a part without keys has the finite ``NEGATIVE`` there, and output 0."""
    first = parts[0]
    for part, part_lse in zip(parts, lses, strict=True):
        need(part.dtype == first.dtype and part.dtype in fi.HALVES, f"merging {part.dtype}", RuntimeError)
        need(part.shape == first.shape and part.shape[:2] == part_lse.shape, f"{tuple(part.shape)}", RuntimeError)
    merged, merged_lse = merge_reference(parts, [each.double() / fi.LOG2E for each in lses])
    out.copy_(merged)
    lse.copy_(merged_lse * fi.LOG2E)


@fi.entry("prefill.fmha_varlen")
def fmha_varlen(a: Any) -> Any:
    need(fi.world.capability in ((10, 0), (10, 3), (11, 0)), "CUTLASS FMHA requires SM100a or SM110a.", ValueError)
    if a.max_qo_len is None:
        fi.world.syncs.append("fmha_varlen.qo_segment_offsets")
    dims = (a.k.shape[2], a.v.shape[2])
    need(dims in ((192, 128), (128, 128), (64, 64)), f"Unsupported head dimensions: {dims}", RuntimeError)
    need(
        a.q.dtype == a.k.dtype == a.v.dtype == a.out.dtype and a.q.dtype in fi.HALVES,
        f"{a.q.dtype}, {a.k.dtype}, {a.v.dtype}",
    )
    need(a.q.stride(-1) == a.k.stride(-1) == a.v.stride(-1) == 1 and a.out.is_contiguous(), "strides")
    fi.check_tensor(a.out, (*a.q.shape[:2], dims[1]), a.q.dtype, "out")
    if a.lse is not None:
        fi.check_tensor(a.lse, a.q.shape[:2], torch.float32, "lse")
        need(a.lse.is_contiguous(), f"lse has strides {a.lse.stride()}")

    def attend() -> None:
        bounds, key_bounds = (fi.check_indptr(each, "offsets") for each in (a.qo_segment_offsets, a.kv_segment_offsets))
        need((bounds[-1], key_bounds[-1]) == (len(a.q), len(a.k)), f"{len(a.q)} queries and {len(a.k)} keys")
        for request in range(len(bounds) - 1):
            rows, keys = slice(*bounds[request : request + 2]), slice(*key_bounds[request : request + 2])
            need(keys.stop > keys.start, f"request {request} has no keys: its rows are not written")
            need(rows.stop - rows.start <= a.max_qo_len, f"request {request} is longer than {a.max_qo_len}")
            found, its_lse = fi.attend(a.q[rows], a.k[keys], a.v[keys], a.sm_scale, causal=a.causal)
            a.out[rows] = found.to(a.out.dtype)
            if a.lse is not None:
                a.lse[rows] = its_lse.float()

    fi.launch(attend)
    return a.out, a.lse
