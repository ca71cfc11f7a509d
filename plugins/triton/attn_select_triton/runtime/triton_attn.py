"""``TRITON_ATTN`` at run time: decodes with split keys, prefills over pages or over what was gathered from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    BackendContext,
)
from attn_select.runtime.kv_cache import CacheView, key_value_unchecked
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES
from attn_select_triton.facts.triton_support import E4M3_FROM
from attn_select_triton.kernels.cache import CacheUpdate, gather_pages
from attn_select_triton.kernels.launch import Terms as KernelTerms
from attn_select_triton.kernels.launch import capability_of
from attn_select_triton.kernels.prefill import Prefill
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device
from attn_select_triton.runtime.side_by_side import COMPILING
from attn_select_triton.runtime.triton_attn_metadata import (
    Part,
    TritonAttnBuilder,
    TritonAttnMetadata,
    planned_prefill,
)


@dataclass(slots=True)
class _Call:
    """One layer's tensors."""

    query: Tensor  # rows of the step
    # key, value: views of the cache, or without one the step's own
    key: Tensor
    value: Tensor
    boxes: bool  # ``prefill_hopper`` can read them
    # arguments of the kernels: ``scale``; ``k_scale`` and ``v_scale`` of an FP8 cache, else 1; ``output_scale`` of an
    # output in e4m3, on the device
    scales: dict[str, Any]


class TritonAttnImpl(AttentionImpl[TritonAttnMetadata]):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config, layout = context.config, context.kv_layout
        self._fp8 = layout is not None and config.cache_dtype in FP8_DTYPES
        self._kv_heads = config.num_kv_heads if config.per_head_quant_scales else 0
        window, cap = terms.sliding_window or 0, terms.logits_soft_cap or 0.0
        own = KernelTerms(True, window, cap, terms.alibi_slopes, terms.sinks)
        self._terms = {True: own, False: replace(own, causal=False)}
        self._prefix_terms = replace(own, causal=False, sinks=None)
        self._views = CacheView(self._read)
        self._update = on_device(context.device, CacheUpdate.__call__)
        self._writes = _writes(context)
        self._attend = on_device(context.device, self._forward)
        self._warps: Any = None
        prefill = planned_prefill(context)
        if (prefill.warp_specialised or prefill.gathered_warps) and context.device.type == "cuda":
            # Gluon is experimental: other releases of Triton may not have what this module imports.
            from attn_select_triton.kernels import prefill_hopper

            self._warps = prefill_hopper

    def _read(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, bool, CacheUpdate]:
        """Return K and V of a cache, whether ``prefill_hopper`` can read them, and what writes them."""
        views = key_value_unchecked(kv_cache, self.context.kv_layout or "", self.context.config)
        boxes = self._warps is not None and self._warps.readable(*views)
        return *views, boxes, CacheUpdate(*views, self.terms.scales.k, self.terms.scales.v)

    def do_kv_cache_update(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """As ``AttentionImpl.do_kv_cache_update``; this plugin's kernel writes the views that ``forward`` reads."""
        if not self._writes or key.stride(-1) != 1 or value.stride(-1) != 1:
            super().do_kv_cache_update(key, value, kv_cache, slot_mapping)
            return
        *_, update = self._views(kv_cache)
        self._update(update, key, value, slot_mapping)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: TritonAttnMetadata,
        outputs: Outputs,
    ) -> Tensor:
        boxes = False
        if kv_cache is not None:
            key, value, boxes, _ = self._views(kv_cache)
        assert key is not None
        assert value is not None
        own = self.terms.scales
        k_scale, v_scale = (own.k_float, own.v_float) if self._fp8 else (1.0, 1.0)
        if self._kv_heads:
            query = self._scaled(query, own.k, k_scale)
        scales = {"scale": self.terms.scale, "k_scale": k_scale, "v_scale": v_scale, "output_scale": outputs.scale}
        call, output, lse = _Call(query, key, value, boxes, scales), outputs.output, outputs.lse
        if lse is None or lse.is_contiguous():
            self._attend(call, attn_metadata, output, lse)
        else:  # the kernels write rows that lie one behind the other
            rows = lse[: attn_metadata.num_actual_tokens]
            lse = rows.contiguous()
            self._attend(call, attn_metadata, output, lse)
            rows.copy_(lse)
        if self._kv_heads:
            written = output[: attn_metadata.num_actual_tokens]
            written.copy_(self._scaled(written, own.v, v_scale))
        return output

    def _scaled(self, rows: Tensor, scales: Tensor, largest: float) -> Tensor:
        """Return queries or outputs, ``(T, H, D)``, times their KV head's scale over the largest scale."""
        # The kernel multiplies by the largest one, so that no number leaves the range of its dtype here.
        by_head = (scales / largest).repeat_interleave(rows.shape[1] // self._kv_heads)
        return (rows * by_head[:, None]).to(rows.dtype)

    def _forward(self, call: _Call, metadata: TritonAttnMetadata, output: Tensor, lse: Tensor | None) -> None:
        if metadata.beside is not None:
            decodes, *others = metadata.parts
            metadata.beside.fork()
            # ``alone=False``: programs that end leave places in which the decodes' start.
            for part in others:
                self._run(part, self._terms[part.causal], call, output, lse, alone=False)
            with metadata.beside:
                self._run(decodes, self._terms[decodes.causal], call, output, lse)
            return
        if metadata.prefix is None:
            for part in metadata.parts:
                self._run(part, self._terms[part.causal], call, output, lse)
            return
        # The rest's result goes where the whole is to be, or is quantised from; the prefix's is merged into it.
        tokens, scale = metadata.num_actual_tokens, call.scales["output_scale"]
        quantised, call.scales["output_scale"] = output[:tokens], None
        whole = quantised if scale is None else quantised.new_empty(quantised.shape, dtype=call.query.dtype)
        lse = whole.new_empty(whole.shape[:2], dtype=torch.float32) if lse is None else lse[:tokens]
        prefix, prefix_lse = torch.empty_like(whole), torch.empty_like(lse)
        for part in metadata.prefix:
            self._run(part, self._prefix_terms, call, prefix, prefix_lse)
        for part in metadata.parts:
            self._run(part, self._terms[part.causal], call, whole, lse)
        ops.merge_attn_states(whole, prefix, prefix_lse, whole, lse, lse)
        if scale is not None:
            quantised.copy_(ops.quantize_fp8(whole, scale, quantised.dtype))

    def _run(
        self, part: Part, terms: KernelTerms, call: _Call, output: Tensor, lse: Tensor | None, *, alone: bool = True
    ) -> None:
        """Launch a part; ``alone``: no other kernel is to run beside it."""
        if part.ranges is not None:
            terms = replace(terms, ranges=part.ranges)
        if part.decode is not None:
            part.decode(call.query, call.key, call.value, output, terms=terms, output_lse=lse, **call.scales)
            return
        if part.gather is None:
            self._prefill(part, terms, call, call.query, (call.key, call.value), call.boxes, output, lse, alone)
            return
        # A few KV heads at a time, where the copies of all heads would take more memory than was reserved.
        heads, kv_heads = part.gather.heads, call.key.shape[-2]
        for first in range(0, kv_heads, heads):
            key, value, query, result, own, own_lse = call.key, call.value, call.query, output, terms, lse
            if heads < kv_heads:
                some, group = slice(first, first + heads), query.shape[1] // kv_heads
                rows = slice(first * group, (first + heads) * group)
                key, value, query, result = key[..., some, :], value[..., some, :], query[:, rows], output[:, rows]
                own = terms.of_heads(rows)
                own_lse = None if lse is None else lse[:, rows].contiguous()
            gather_pages(key, value, *part.gather.whole, **part.gather.arguments)
            copies = part.gather.whole if part.warps else part.gather.rows
            boxes = part.prepared is not None or (part.warps and self._warps.readable(*copies))
            self._prefill(part, own, call, query, copies, boxes, result, own_lse, alone)
            if lse is not None and own_lse is not None and own_lse is not lse:
                lse[:, rows] = own_lse

    def _prefill(
        self,
        part: Part,
        terms: KernelTerms,
        call: _Call,
        query: Tensor,
        keys_and_values: tuple[Tensor, Tensor],
        boxes: bool,
        output: Tensor,
        lse: Tensor | None,
        alone: bool,
    ) -> None:
        """Launch a prefill, of all heads or of some."""
        key, value = keys_and_values
        if part.warps and boxes and (terms.causal or not terms.window):
            if part.prepared is None:
                of_step = {name: given for name, given in part.prefill.items() if name != "num_tokens"}
                part.prepared = self._warps.Prefill(**of_step, **part.own)
            part.prepared(query, key, value, output, terms=terms, output_lse=lse, alone=alone, **call.scales)
            return
        if part.plain is None:
            part.plain = Prefill(clean=part.gather is not None, **part.prefill)
        part.plain(query, key, value, output, terms=terms, output_lse=lse, **call.scales)


def _writes(context: BackendContext) -> bool:
    """Whether the shared operation that writes a cache is this plugin's kernel, which casts to e4m3 from 8.9 on."""
    device, e4m3 = context.device, context.config.cache_dtype == "fp8_e4m3"
    if context.kv_layout is None or device.type != "cuda" or (e4m3 and capability_of(device) < E4M3_FROM):
        return False
    return ops.implementation("reshape_and_cache", device)[1].startswith("attn_select_triton.")


class TritonAttnBackend(AttentionBackend):
    """``TRITON_ATTN``."""

    impl_cls = TritonAttnImpl
    builder_cls = TritonAttnBuilder
    compiling = COMPILING

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
