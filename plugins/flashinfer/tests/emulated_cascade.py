"""FlashInfer's cascade and page entries without a GPU (cascade.py, page.py 0.6.14); see ``emulated``."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_select.testing.oracle import merge_reference

fi: Any = sys.modules["flashinfer_emulated"]
native: Any = sys.modules["flashinfer_emulated_native"]
need = fi.need


class MultiLevelCascadeAttentionWrapper:
    """Levels of keys, each attended to by a prefill wrapper of its own; their results are merged in the library."""

    def __init__(
        self,
        num_levels: Any,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
    ) -> None:
        fi.called("MultiLevelCascadeAttentionWrapper.__init__", locals())
        need(not use_cuda_graph, "emulated for eager attention")
        made = native.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = [made(float_workspace_buffer, kv_layout) for _ in range(num_levels)]
        del fi.world.calls[-num_levels:]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffers: Any) -> None:
        for wrapper, ints in zip(self._wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, ints)

    def plan(
        self,
        qo_indptr_arr: Any,
        paged_kv_indptr_arr: Any,
        paged_kv_indices_arr: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim: Any,
        page_size: Any,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        sm_scale: Any = None,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        fi.called("MultiLevelCascadeAttentionWrapper.plan", locals())
        need(window_left < 0, "a window is applied to each level by itself")
        levels = (self._wrappers, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        totals = {int(each[-1]) for each in qo_indptr_arr}
        need(len(totals) == 1, f"the levels have {sorted(totals)} queries")
        for level, (wrapper, queries, pages, indices, last) in enumerate(zip(*levels, strict=True)):
            wrapper.plan(
                queries, pages, indices, last, num_qo_heads, num_kv_heads, head_dim, page_size,
                causal=causal if level == len(self._wrappers) - 1 else False, pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale, window_left=window_left,
                logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=kv_data_type,
            )  # fmt: skip
            fi.world.calls.pop()

    begin_forward = plan

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        fi.called("MultiLevelCascadeAttentionWrapper.run", locals())
        out, lse = self._wrappers[-1].run(q, paged_kv_cache, return_lse=True)
        fi.world.calls.pop()
        for wrapper in self._wrappers[:-1]:
            part, part_lse = wrapper.run(q, paged_kv_cache, return_lse=True)
            fi.world.calls.pop()
            merge_state_in_place(out, lse, part, part_lse)
            fi.world.calls.pop()
        return out

    forward = run


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> Any:
    fi.called("merge_state", locals())
    _contiguous(v_a, s_a, v_b, s_b)
    merged, lse = torch.empty_like(v_a), torch.empty_like(s_a, dtype=torch.float32)
    fi.launch(partial(_merge, [v_a, v_b], [s_a.float(), s_b.float()], merged, lse))
    return merged, lse


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    fi.called("merge_state_in_place", locals())
    need(mask is None, "masks are not emulated")
    _contiguous(v, s, v_other, s_other)
    need(s.dtype == s_other.dtype == torch.float32, f"s {s.dtype}, s_other {s_other.dtype}")
    fi.launch(partial(_merge, [v, v_other], [s, s_other], v, s))


def merge_states(v: Any, s: Any) -> Any:
    fi.called("merge_states", locals())
    _contiguous(v, s)
    need(v.ndim == 4 and v.shape[:3] == s.shape, f"v {tuple(v.shape)}, s {tuple(s.shape)}", RuntimeError)
    merged, lse = torch.empty_like(v[:, 0]), torch.empty_like(s[:, 0], dtype=torch.float32)
    fi.launch(partial(_merge, list(v.unbind(1)), list(s.float().unbind(1)), merged, lse))
    return merged, lse


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


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: Any = "NHD",
) -> None:
    fi.called("append_paged_kv_cache", locals())
    k, v = fi.unpack(paged_kv_cache, kv_layout)
    fi.check_cache(k, v, every_stride=True)
    need(append_key.dtype == append_value.dtype == k.dtype, f"{append_key.dtype} into {k.dtype}")
    need(append_key.stride(-1) == append_value.stride(-1) == 1, "last dimension contiguous", RuntimeError)
    tokens, requests = len(append_key), len(kv_last_page_len)
    for each, length, name in (
        (batch_indices, tokens, "batch_indices"),
        (positions, tokens, "positions"),
        (kv_indices, len(kv_indices), "kv_indices"),
        (kv_indptr, requests + 1, "kv_indptr"),
        (kv_last_page_len, requests, "kv_last_page_len"),
    ):
        fi.check_list(each, length, name)
    size = k.shape[1 if kv_layout == "NHD" else 2]

    def write() -> None:
        bounds = kv_indptr.tolist()
        for token, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
            if request < 0:
                continue
            at = bounds[request] + position // size
            need(at < bounds[request + 1], f"token {token}: position {position} of request {request} has no page")
            page, offset = int(kv_indices[at]), position % size
            for half, numbers in ((k, append_key), (v, append_value)):
                place = half[page, offset] if kv_layout == "NHD" else half[page, :, offset]
                place.copy_(numbers[token])

    fi.launch(write)
