"""FlashInfer's merge of two partial results without a GPU (cascade.py 0.6.14); see ``emulated``."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_select.testing.oracle import merge_reference

fi: Any = sys.modules["flashinfer_emulated"]
need = fi.need


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    fi.called("merge_state_in_place", locals())
    need(mask is None, "masks are not emulated")
    _contiguous(v, s, v_other, s_other)
    need(s.dtype == s_other.dtype == torch.float32, f"s {s.dtype}, s_other {s_other.dtype}")
    fi.launch(partial(_merge, [v, v_other], [s, s_other], v, s))


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
