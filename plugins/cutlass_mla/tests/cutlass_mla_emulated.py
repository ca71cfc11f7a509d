"""The functions of all three providers, computed by the oracle on any device.

Signatures, accepted shapes and dtypes, what is read whatever its strides, and what is left unwritten are the providers'
own; contract tests compare the signatures with what is installed. Sources: vllm-project/vllm csrc/attention/mla 0f5257e
and vllm/_custom_ops.py 0.33.0, sgl-kernel 0.3.21 sgl_kernel/attention.py, flashinfer-ai/flashinfer csrc/cutlass_mla.cu
v0.6.14.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_select.testing import attention_reference

E4M3 = torch.float8_e4m3fn
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
SMS = 148
calls: list[dict[str, Any]] = []
"""The calls of decode functions: name, splits, scale, and what was written where."""


def _check(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> None:
    assert tensor.dtype in dtypes, f"{name} is {tensor.dtype}, accepted are {dtypes}"
    fits = tensor.ndim == len(shape) and all(w in (None, s) for s, w in zip(tensor.shape, shape, strict=True))
    assert fits, f"{name} is {tuple(tensor.shape)}, accepted is {shape}"


def _packed(tensor: Tensor) -> Tensor:
    """Return what a kernel reads that takes strides from the shape."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def kernel(
    out: Tensor,
    lse: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    workspace: Tensor,
    scale: float,
    needed: int,
    fp8: bool = False,
) -> None:
    """Write output and LSE of the requests that have keys."""
    batch = len(q_nope)
    kinds = (*SIXTEEN_BITS, E4M3) if fp8 else SIXTEEN_BITS
    # 128 heads are read and written, whatever the shape says.
    _check(q_nope, "q_nope", kinds, batch, 128, 512)
    _check(q_pe, "q_pe", (q_nope.dtype,), batch, 128, 64)
    _check(cache, "cache", (q_nope.dtype,), None, 128, 576)
    _check(seq_lens, "seq_lens", (torch.int32,), batch)
    _check(table, "page_table", (torch.int32,), batch, None)
    _check(out, "out", (torch.bfloat16 if q_nope.dtype == E4M3 else q_nope.dtype,), batch, 128, 512)
    assert table.shape[1] > 0
    assert q_nope.stride(-1) == q_pe.stride(-1) == 1
    assert out.is_contiguous()
    if lse.numel():
        _check(lse, "lse", (torch.float32,), batch, 128)
        assert lse.is_contiguous()
    assert workspace.dtype == torch.uint8
    assert workspace.numel() >= needed, f"workspace of {workspace.numel()} bytes, {needed} are written"
    cache, table, seq_lens = _packed(cache), _packed(table), _packed(seq_lens)
    for unwritten in (out, lse):
        unwritten.fill_(torch.nan)
    stored = cache.view(torch.uint8) if q_nope.dtype == E4M3 else cache
    for request, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        pages = stored[table[request, : -(-length // 128)].long()].view(cache.dtype).double().reshape(-1, 1, 576)
        keys, tail = pages[:length], pages[length:, 0, :512]
        query = torch.cat([q_nope[request], q_pe[request]], dim=-1).double()[None]
        found, found_lse = attention_reference(query, keys, keys[..., :512], scale=scale, causal=False)
        # Whole pages are multiplied: weight 0 makes nothing of a finite number.
        out[request] = found[0] + (0 * tail).sum(0)
        if lse.numel():
            lse[request] = found_lse[0]


def workspace_size(max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int, hangs: bool) -> int:
    """Return the bytes of partial results; ``hangs``: batches of several requests are not split by default."""
    assert max_seq_len > 0
    assert num_batches > 0
    if num_kv_splits < 1:
        pages = -(-max_seq_len // 128)
        most = min(16, pages) if hangs else pages
        most = 1 if hangs and num_batches > 1 else most
        split = min(most, max(1, (sm_count or SMS) // num_batches))
        num_kv_splits = -(-most // -(-most // split))
    return (512 + 1) * 4 * 128 * num_kv_splits * num_batches


# --- vLLM -------------------------------------------------------------------------------------


def sm100_cutlass_mla_decode(
    out: Any,
    lse: Any,
    q_nope: Any,
    q_pe: Any,
    kv_c_and_k_pe_cache: Any,
    seq_lens: Any,
    page_table: Any,
    workspace: Any,
    scale: Any,
    num_kv_splits: Any,
) -> Any:
    name = "sm100_cutlass_mla_decode"
    calls.append({"function": name, "splits": num_kv_splits, "scale": scale, "out": out, "lse": lse.numel() > 0})
    sizes = (128 * page_table.shape[1], len(q_nope), SMS, num_kv_splits)
    needed = sm100_cutlass_mla_get_workspace_size(*sizes)
    tensors = (out, lse, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace)
    kernel(*tensors, scale, needed, fp8=True)
    return out


def sm100_cutlass_mla_get_workspace_size(max_seq_len: Any, num_batches: Any, sm_count: Any, num_kv_splits: Any) -> Any:
    return workspace_size(max_seq_len, num_batches, sm_count, num_kv_splits, hangs=True)


# --- sgl-kernel -------------------------------------------------------------------------------


def cutlass_mla_decode(
    q_nope: Any,
    q_pe: Any,
    kv_c_and_k_pe_cache: Any,
    seq_lens: Any,
    page_table: Any,
    workspace: Any,
    sm_scale: Any,
    num_kv_splits: Any = 1,
) -> Any:
    calls.append({"function": "cutlass_mla_decode", "splits": num_kv_splits, "scale": sm_scale})
    heads = q_nope.shape[1]
    if heads < 128:
        q_nope, q_pe = (torch.nn.functional.pad(part, (0, 0, 0, 128 - heads)) for part in (q_nope, q_pe))
    out = q_nope.new_empty(len(q_nope), 128, 512)
    needed = workspace_size(128 * page_table.shape[1], len(q_nope), SMS, num_kv_splits, hangs=False)
    nothing = torch.empty(0)
    tensors = (out, nothing, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace)
    kernel(*tensors, sm_scale, needed)
    return out[:, :heads].contiguous()


def cutlass_mla_get_workspace_size(
    max_seq_len: Any, num_batches: Any, sm_count: Any = 0, num_kv_splits: Any = 1
) -> Any:
    return workspace_size(max_seq_len, num_batches, sm_count, num_kv_splits, hangs=False)


# --- FlashInfer -------------------------------------------------------------------------------


def cutlass_mla_paged_attention(
    workspace: Any, out: Any, lse: Any, q_nope_pe: Any, ckv_kpe_cache: Any, kv_len: Any, page_table: Any, o_scale: Any
) -> None:
    calls.append({"function": "cutlass_mla_paged_attention", "splits": -1, "out": out})
    assert o_scale == 1.0
    query = _packed(q_nope_pe)
    sizes = (128 * page_table.shape[1], len(query), SMS, -1)
    nothing = torch.empty(0)  # its pointer is not passed on
    tensors = (out, nothing, query[..., :512], query[..., 512:], ckv_kpe_cache, kv_len, page_table, workspace)
    kernel(*tensors, 192**-0.5, workspace_size(*sizes, hangs=False))


def get_mla_module() -> Any:
    return SimpleNamespace(cutlass_mla_paged_attention=cutlass_mla_paged_attention)


MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (
        "vllm._custom_ops",
        {
            "sm100_cutlass_mla_decode": sm100_cutlass_mla_decode,
            "sm100_cutlass_mla_get_workspace_size": sm100_cutlass_mla_get_workspace_size,
        },
    ),
    "sgl-kernel": (
        "sgl_kernel",
        {
            "cutlass_mla_decode": cutlass_mla_decode,
            "cutlass_mla_get_workspace_size": cutlass_mla_get_workspace_size,
        },
    ),
    "flashinfer-python": ("flashinfer.mla", {"get_mla_module": get_mla_module}),
}
"""By distribution its module and functions."""
