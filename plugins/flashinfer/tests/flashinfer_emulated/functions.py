"""FlashInfer's merge of two partial results, CUTLASS prefill and the record of FP4 outputs without a GPU.

Rules by source: cascade.py, prefill.py and utils.py 0.6.14.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from attn_select.reference.oracle import merge_reference
from flashinfer_emulated import need


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
