"""The runtime of ``TORCH_SDPA``: gathers keys and values piece by piece and lets torch's fused kernels attend.

Query heads that share a KV head become rows of one attention problem, ``tokens * group`` rows for each KV head: the
keys are then read once for all of them, where ``enable_gqa`` reads them once for each (a decode in bfloat16 with 4
query heads per KV head takes 13 times as long with it: AMD EPYC, torch 2.13.0). Sinks are applied to the result by its
log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attn_select.runtime import ops
from attn_select.runtime.backend import AttentionBackend, AttentionImpl, BackendContext
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES
from attn_select_torch.runtime import cudnn_prompts, varlen
from attn_select_torch.runtime.dense_attention import FLASH_CPU, attend
from attn_select_torch.runtime.gather import Buffers, CacheGather
from attn_select_torch.runtime.request_tiles import Tile
from attn_select_torch.runtime.sdpa_builder import (
    Piece,
    SDPABuilder,
    SDPAMetadata,
    compute_dtype,
    functions,
    row_offsets,
)


class SDPAImpl(AttentionImpl[SDPAMetadata]):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = self.config = context.config
        self.on_cpu = context.device.type == "cpu"
        self.dtype = compute_dtype(config, context.device)
        self.kv_heads, self.group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.key_size, self.value_size = config.head_size, config.value_head_size
        self.gather: CacheGather | None = None
        if context.kv_layout is not None and context.block_size is not None:
            self.gather = CacheGather(config, context.kv_layout, context.block_size, self.dtype)
        self.fp8 = self.gather is not None and config.cache_dtype in FP8_DTYPES
        self._scores = replace(terms, alibi_slopes=None, sinks=None)
        self.explicit = "matmul and softmax" in functions(context).values()
        # The CPU's kernel wants K and V equally wide.
        self.width = max(self.key_size, self.value_size) if self.on_cpu and not self.explicit else 0

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: SDPAMetadata,
        outputs: Outputs,
    ) -> Tensor:
        arguments, sinks = (query, key, value, kv_cache), self.terms.sinks
        prefix = attn_metadata.prefix
        if prefix is None:
            self._run(*arguments, attn_metadata, outputs, sinks)
            return outputs.output
        whole = outputs.rows(slice(0, attn_metadata.num_tokens))
        output, lse = whole.output, whole.lse
        if lse is None:
            lse = output.new_empty(output.shape[:2], dtype=torch.float32)
        self._run(*arguments, attn_metadata, Outputs(output, lse), sinks)
        part = Outputs(torch.empty_like(output), part_lse := torch.empty_like(lse))
        self._run(*arguments, prefix, part, None)
        ops.merge_attn_states(output, part.output, part_lse, output, lse, lse)
        return outputs.output

    def _run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: SDPAMetadata,
        outputs: Outputs,
        sinks: Tensor | None,
    ) -> None:
        """Attend to one range of keys; sinks are given to one of them."""
        for start, end in metadata.blind:
            outputs.output[start:end].zero_()
            if outputs.lse is not None:
                outputs.lse[start:end] = -torch.inf if sinks is None else sinks.float()
        scale, scales = self.terms.scale, self.terms.scales
        if self.fp8:
            # Keys and values come without their scales: K's goes to the scores, V's to the output.
            scale *= scales.k_float
            if scales.k.ndim:
                ratio = (scales.k / scales.k_float).repeat_interleave(self.group).unsqueeze(-1)
                query = (query * ratio).to(query.dtype)
        results = _Results(self, outputs, sinks)
        explicit = self.explicit or (results.needs_lse and not self.on_cpu)
        for call in metadata.calls:
            keys, values = self._varlen_keys(call, key, value, kv_cache, metadata.buffers)
            rows = slice(call.start, call.end)
            ran = varlen.run(call, query[rows], keys, values, scale)
            results.write(rows, 0, call.end - call.start, *self._by_token(*ran))
        for prompt in metadata.prompts:
            keys, values = self._cached_keys(prompt.rows, 1, kv_cache, metadata.buffers)
            rows = slice(prompt.start, prompt.end)
            out, lse = cudnn_prompts.run(prompt, query[rows], keys, values, scale, results.needs_lse)
            results.write(rows, 0, prompt.end - prompt.start, *self._by_group(out, lse))
        for piece in metadata.pieces:
            if piece.rows is None:
                keys, values = self._own_keys(piece, key, value)
            else:
                keys, values = self._cached_keys(piece.rows, piece.batch, kv_cache, metadata.buffers)
            queries = self._packed(piece, query)
            for tile, mask in piece.tiles:
                bias = self._bias(piece, tile, mask, explicit)
                part = queries, keys, values
                if len(piece.tiles) > 1:
                    rows = slice(tile.start * self.group, (tile.start + tile.rows) * self.group)
                    columns = slice(tile.low, tile.high)
                    part = queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
                packed, packed_lse = self._attend(*part, bias, scale, explicit, results.needs_lse)
                shape = (piece.batch, self.kv_heads, tile.rows, self.group)
                out = packed[..., : self.value_size].view(*shape, self.value_size).transpose(1, 2)
                lse = None if packed_lse is None else packed_lse.view(shape).transpose(1, 2)
                results.write(piece.tokens, tile.start, tile.rows, out, lse)

    def _packed(self, piece: Piece, query: Tensor) -> Tensor:
        """Return a piece's queries ``(B, num_kv_heads, T * group, head_size)``; row ``t * group + g``."""
        tokens = piece.tokens
        found = query[tokens] if isinstance(tokens, slice) else query.index_select(0, tokens)
        packed = found.view(piece.batch, -1, self.kv_heads, self.group, self.key_size).transpose(1, 2).flatten(2, 3)
        packed = self._aligned(packed.to(self.dtype))
        return pad(packed, (0, self.width - self.key_size)) if self.width > self.key_size else packed

    def _aligned(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose address does not depend on where its request lies in the batch."""
        # Matrix products sum in an order that depends on alignment.
        return tensor.clone() if self.config.batch_invariant else tensor

    def _cached_keys(
        self, rows: Tensor, batch: int, kv_cache: Tensor | None, buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``(B, num_kv_heads, S, size)`` out of the cache."""
        assert self.gather is not None
        assert kv_cache is not None
        keys, values = self.gather.read(kv_cache, rows, batch, buffers)
        if not self.width:
            return keys[..., : self.key_size], values[..., : self.value_size]
        if self.width > self.key_size:
            keys[..., self.key_size :].zero_()  # the query's part is zero as well, but what lies there may be NaN
        return keys, values

    def _own_keys(self, piece: Piece, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the step's own keys and values ``(1, num_kv_heads, S, size)``."""
        assert key is not None
        assert value is not None
        part = slice(piece.first_key, piece.first_key + piece.keys)
        both = [self._aligned(tensor[part].transpose(0, 1)[None].to(self.dtype)) for tensor in (key, value)]
        keys, values = (
            pad(one, (0, self.width - one.shape[-1])) if self.width > one.shape[-1] else one for one in both
        )
        return keys, values

    def _varlen_keys(
        self, call: varlen.Call, key: Tensor | None, value: Tensor | None, kv_cache: Tensor | None, buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``(S, num_kv_heads, size)``."""
        if call.rows is not None:
            keys, values = self._cached_keys(call.rows, 1, kv_cache, buffers)
            return keys[0].transpose(0, 1), values[0].transpose(0, 1)
        assert key is not None
        assert value is not None
        return key[call.start : call.end], value[call.start : call.end]

    def _by_token(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return FlashAttention's output and LSE ``(H, T)`` in the shapes of ``write``; +inf (no keys) becomes -inf."""
        return self._by_group(out, lse.masked_fill(lse == torch.inf, -torch.inf).t())

    def _by_group(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return output ``(T, H, Dv)`` and LSE ``(T, H)`` in the shapes of ``write``."""
        shape = (1, len(out), self.kv_heads, self.group)
        return out.reshape(*shape, self.value_size), None if lse is None else lse.reshape(shape)

    def _bias(self, piece: Piece, tile: Tile, mask: Tensor | None, explicit: bool) -> Tensor | None:
        """Return what is added to the scores; broadcasts to ``(B, num_kv_heads, T * group, S)``."""
        bias = mask
        if mask is not None and mask.dtype == torch.bool:
            bias = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            bias = bias.repeat_interleave(self.group, dim=0)[None, None]
        if self.terms.alibi_slopes is not None:
            assert piece.key_offsets is not None
            last = piece.tiles[-1][0]
            offsets = row_offsets(last.start + last.rows, tile, piece.key_offsets.device)
            distance = (offsets[:, None] - piece.key_offsets[tile.low : tile.high]).abs()
            slopes = self.terms.alibi_slopes.view(self.kv_heads, 1, self.group, 1)
            slope = (-slopes * distance[:, None]).flatten(1, 2)[None]
            bias = slope if bias is None else bias + slope
            if not self.on_cpu and not explicit:
                bias = bias.to(self.dtype)
        if piece.padding is not None:
            bias = piece.padding if bias is None else bias + piece.padding
        # CUDA's kernels want rows of a mask aligned, which slices of the band are not.
        return bias if bias is None or self.on_cpu else bias.contiguous()

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        scale: float,
        explicit: bool,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if explicit:
            # Slopes are in the bias, and sinks are counted when results are written.
            return attend(query, keys, values, replace(self._scores, scale=scale), bias=bias)
        rows = query.shape[2]
        if rows == 1 and self.on_cpu and query.dtype == torch.bfloat16:
            # A single row takes the CPU's bfloat16 kernel six times as long as two (AMD EPYC, torch 2.13.0).
            query = query.expand(-1, -1, 2, -1)
        if not wants_lse and (bias is None or bias.dtype == query.dtype):
            return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)[:, :, :rows], None
        out, lse = FLASH_CPU(query, keys, values, attn_mask=bias, scale=scale)
        return out[:, :, :rows], lse[:, :, :rows]


class _Results:
    """Where results go: the scale of V and the sinks are applied on the way."""

    def __init__(self, impl: SDPAImpl, outputs: Outputs, sinks: Tensor | None) -> None:
        heads = (impl.kv_heads, impl.group)
        self.output, self.output_lse = outputs.output, outputs.lse
        self.sinks = None if sinks is None else sinks.float().view(heads)
        self.needs_lse = outputs.lse is not None or sinks is not None
        self.factor: float | Tensor | None = None
        if impl.fp8:
            scales = impl.terms.scales
            self.factor = scales.v.view(-1, 1, 1) if scales.v.ndim else scales.v_float

    def write(self, tokens: slice | Tensor, start: int, rows: int, out: Tensor, lse: Tensor | None) -> None:
        """Write ``(B, T, num_kv_heads, group, Dv)`` and ``(B, T, num_kv_heads, group)`` to rows of the step."""
        # start, rows: which of the piece's tokens, where it is one request
        factor = self.factor
        if self.sinks is not None:
            assert lse is not None
            weight = torch.sigmoid(lse - self.sinks).unsqueeze(-1)
            factor = weight if factor is None else weight * factor
            lse = torch.logaddexp(lse, self.sinks)
        if factor is not None:
            out = out * factor
        if not isinstance(tokens, slice):
            self.output.index_copy_(0, tokens, out.flatten(2, 3).flatten(0, 1).to(self.output.dtype))
            if self.output_lse is not None and lse is not None:
                self.output_lse.index_copy_(0, tokens, lse.flatten(2, 3).flatten(0, 1))
            return
        end = tokens.stop if out.shape[0] > 1 else tokens.start + start + rows
        part = slice(tokens.start + start, end)
        self.output[part].view(out.shape).copy_(out)
        if self.output_lse is not None and lse is not None:
            self.output_lse[part].view(lse.shape).copy_(lse)


class SDPABackend(AttentionBackend):
    """``TORCH_SDPA``."""

    impl_cls = SDPAImpl
    builder_cls = SDPABuilder
