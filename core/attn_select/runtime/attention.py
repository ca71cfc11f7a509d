"""``Attention``: one layer with keys and values per head (MHA, GQA, MQA), as an engine calls it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from attn_select.config import Phase
from attn_select.errors import ConfigError
from attn_select.runtime import checks
from attn_select.runtime.backend import AttentionImpl
from attn_select.runtime.custom_op import current_metadata, register_layer
from attn_select.runtime.group import AttentionGroup, AttentionMetadata
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.scales import Scales
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class Attention(nn.Module):
    """One attention layer of a group.

    Args:
        group: its kind.
        scale: factor on ``q . k``; None: ``head_size ** -0.5``.
        alibi_slopes: ``(num_heads,)``, with ``config.alibi`` and only then.
        sinks: ``(num_heads,)`` logits, with ``config.sinks`` and only then.
        scales: of an FP8 cache or query; None: all 1.
        layer_name: unique; None gives one.

    Raises:
        ConfigError: the group is of MLA layers, or slopes, sinks or scales are missing, unwanted or of the wrong shape.
    """

    def __init__(
        self,
        group: AttentionGroup,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: Scales | None = None,
        layer_name: str = "",
    ) -> None:
        super().__init__()
        config = group.config
        if config.mla:
            raise ConfigError("this group's layers are MLA: MLAAttention is their layer", fields=["kv_lora_rank"])
        self.group = group
        self.scale = config.head_size**-0.5 if scale is None else scale
        self.scales = layer_scales(group, scales)
        slopes = per_head("alibi_slopes", alibi_slopes, config.alibi, group, torch.float32)
        logits = per_head("sinks", sinks, config.sinks, group, None)
        made: dict[int, AttentionImpl[Any]] = {}
        for served in group.backends:
            impl = cast(type[AttentionImpl[Any]], served.backend.get_impl_cls())
            made[id(served)] = impl(served.context, scale=self.scale, alibi_slopes=slopes, sinks=logits)
        self.impls: dict[Phase, AttentionImpl[Any]] = {p: made[id(served)] for p, served in group.served.items()}
        self._first: AttentionImpl[Any] = next(iter(self.impls.values()))
        self._updates = config.has_cache and not group.backends[0].backend.forward_includes_kv_cache_update
        self._dtype = PLAIN_DTYPES[config.dtype]
        self._query_shape = (config.num_heads, config.head_size)
        self._key_shape = (config.num_kv_heads, config.head_size)
        self._value_shape = (config.num_kv_heads, config.value_head_size)
        self._output_shape = (config.num_heads, config.value_head_size)
        self.layer_name = register_layer(self, layer_name)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None = None,
        attn_metadata: AttentionMetadata | None = None,
        output: Tensor | None = None,
        output_lse: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys and values into the cache, attend, and return the output.

        Args:
            query: ``(T', num_heads, head_size)`` in the layer's dtype; T' at least ``num_actual_tokens``.
            key: ``(T', num_kv_heads, head_size)``; None where nothing is to be written (a layer that shares another's
                cache, cross-attention after its first step).
            value: ``(T', num_kv_heads, value_head_size)``, None with ``key``.
            kv_cache: one layer's cache (``group.allocate_kv_cache``); None for encoders.
            attn_metadata: what ``group.build`` returned; None takes the forward context's. Under ``torch.compile`` it
                must be the forward context's.
            output: ``(T', num_heads, value_head_size)``, written; None makes one. Rows behind ``num_actual_tokens`` are
                left alone.
            output_lse: float32 ``(T', num_heads)``, written where given; for plans that return the LSE.
            output_scale, output_block_scale: scales of an output that the kernel quantises.

        Raises:
            BatchError: an argument's shape or dtype (in checked mode also device, strides, block ids, scales) does not
                fit; named with what is accepted, before a kernel starts.
        """
        if output is None:
            output = query.new_empty(query.shape[0], *self._output_shape)
        if torch.compiler.is_compiling():
            if attn_metadata is not None or output_lse is not None or output_scale is not None:
                raise BatchError("under torch.compile the metadata comes from forward_context, and no LSE is returned")
            torch.ops.attn_select.attention(query, key, value, kv_cache, output, self.layer_name)
            return output
        if attn_metadata is None:
            attn_metadata = current_metadata(self.group, self.layer_name)
        self._check(query, key, value, kv_cache, attn_metadata, output, output_lse)
        if self._updates and key is not None and value is not None:
            assert kv_cache is not None
            assert attn_metadata.slot_mapping is not None
            self._first.do_kv_cache_update(self, key, value, kv_cache, attn_metadata.slot_mapping)
        parts = attn_metadata.parts
        if len(parts) == 1 and parts[0].start == 0:
            return self.impls[parts[0].phase].forward(
                self,
                query,
                key,
                value,
                kv_cache,
                parts[0].metadata,
                output,
                output_lse,
                output_scale,
                output_block_scale,
            )
        for part in parts:
            rows = slice(part.start, part.end)
            self.impls[part.phase].forward(
                self,
                query[rows],
                None if key is None else key[rows],
                None if value is None else value[rows],
                kv_cache,
                part.metadata,
                output[rows],
                None if output_lse is None else output_lse[rows],
                output_scale,
                output_block_scale,
            )
        return output

    def run(self, arguments: tuple[Tensor | None, ...], kv_cache: Tensor | None, output: Tensor) -> None:
        """Compute the layer for ``torch.ops.attn_select.attention``."""
        query, key, value = arguments
        assert query is not None
        self.forward(query, key, value, kv_cache, None, output)

    def _check(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: AttentionMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        tokens, group = metadata.num_actual_tokens, self.group
        if query.shape[1:] != self._query_shape or query.dtype != self._dtype or query.shape[0] < tokens:
            checks.check_rows("query", query, self._query_shape, self._dtype, tokens)
        if output.shape[1:] != self._output_shape or output.shape[0] < tokens:
            checks.check_rows("output", output, self._output_shape, None, tokens)
        if key is not None and value is not None:
            written = tokens if metadata.slot_mapping is None else len(metadata.slot_mapping)
            if key.shape[1:] != self._key_shape or key.dtype != self._dtype or key.shape[0] < written:
                checks.check_rows("key", key, self._key_shape, self._dtype, written)
            if value.shape[1:] != self._value_shape or value.dtype != self._dtype or value.shape[0] < written:
                checks.check_rows("value", value, self._value_shape, self._dtype, written)
        elif key is not None or value is not None or group.kv_layout is None:
            missing = "value" if key is not None else "key"
            raise BatchError(f"{missing} is None: key and value come together, and layers without a cache need both")
        if group.kv_layout is not None and kv_cache is None:
            checks.check_cache(kv_cache, group.kv_layout, group.config, group.device)
        if group.checked:
            named = {"query": query, "key": key, "value": value, "output": output}
            checks.check_contents(group, self.scales, named, kv_cache, metadata.common)


def layer_scales(group: AttentionGroup, scales: Scales | None) -> Scales:
    """Return the layer's scales, 1 where none are given, and compare them with the config."""
    heads = group.config.num_kv_heads if group.config.per_head_quant_scales else 0
    if scales is None:
        return Scales.make(group.device, num_kv_heads=heads)
    for name, tensor, shapes in (
        ("q_scale", scales.q, [()]),
        ("k_scale", scales.k, [(heads,)] if heads else [()]),
        ("v_scale", scales.v, [(heads,)] if heads else [()]),
    ):
        if tuple(tensor.shape) not in shapes or tensor.dtype != torch.float32 or tensor.device != group.device:
            text = (
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: accepted is float32 {shapes[0]} "
                f"on {group.device}"
            )
            raise ConfigError(text, fields=[name], hint="make them with Scales.make")
    return scales


def per_head(
    name: str, tensor: Tensor | None, wanted: bool, group: AttentionGroup, dtype: torch.dtype | None
) -> Tensor | None:
    """Return a ``(num_heads,)`` tensor on the group's device, and compare its presence with the config."""
    if wanted != (tensor is not None):
        seen = "missing" if tensor is None else "given"
        raise ConfigError(f"{name} {seen}, but the config says {wanted}", fields=[name])
    if tensor is None:
        return None
    if tuple(tensor.shape) != (group.config.num_heads,):
        text = f"{name} of shape {tuple(tensor.shape)}: accepted is ({group.config.num_heads},), one per query head"
        raise ConfigError(text, fields=[name])
    return tensor.to(group.device, dtype or tensor.dtype).contiguous()
