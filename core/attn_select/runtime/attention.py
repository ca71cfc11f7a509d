"""``Attention``: one layer with keys and values per head (MHA, GQA, MQA), as an engine calls it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from attn_select.errors import ConfigError, show
from attn_select.layer.config import Phase
from attn_select.runtime import checks, ops
from attn_select.runtime.backend_faults import blame, returned_nothing
from attn_select.runtime.custom_op import current_metadata, register_layer
from attn_select.runtime.kv_cache import in_blocks_of
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.step_metadata import AttentionMetadata
from attn_select.runtime.terms import GivenTerms, Inputs, Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES

OUTPUT_DTYPES = {"fp8": torch.float8_e4m3fn, "fp4": torch.uint8}
"""The output's dtype per ``output_quantization``; one byte holds two FP4 numbers."""
WRITTEN = "the output that it wrote"


class GroupLayer(nn.Module):
    """What layers of all kinds have of their group: the impls of its backends, and the views of a cache for them."""

    group: LayerGroup
    layer_name: str

    def __init__(self, group: LayerGroup, terms: Terms) -> None:
        super().__init__()
        self.group, self.terms = group, terms
        self.impls: dict[Phase, Any] = {}
        # Only where a phase's kernel reads other blocks than the cache is laid out in: elsewhere no view is made per
        # call.
        self._block_sizes = {
            phase: own.context.block_size
            for phase, own in group.backends.items()
            if own.context.block_size not in (None, group.kernel_block_size)
        }
        self._silent = [s.spec.name for s in group.distinct if not all(p.returns_lse for p in s.context.plans.values())]
        self._cache_seen: tuple[torch.Size, torch.dtype] | None = None

    def _make_impls(self) -> None:
        for own in self.group.distinct:
            # What is merged across ranks counts its sinks there.
            impl = own.impl(self.terms.under(own.context.config))
            self.impls |= dict.fromkeys(own.context.plans, impl)

    def _cache_for(self, phase: Phase, kv_cache: Any) -> Any:
        """Return the cache in the blocks of a phase's kernel."""
        if phase not in self._block_sizes or kv_cache is None:
            return kv_cache
        layout = cast(str, self.group.kv_layout)
        return in_blocks_of(self._block_sizes[phase], kv_cache, layout, self.group.config)

    def _check_cache(self, kv_cache: Tensor | None) -> None:
        self.group.num_blocks_of(kv_cache)  # raises
        assert kv_cache is not None
        self._cache_seen = kv_cache.shape, kv_cache.dtype  # engines bring the same one every time

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy of a layer: it gets a name of its own, by which compiled graphs find it."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.layer_name = register_layer(self, "")


class Attention(GroupLayer):
    """One attention layer of a group, for inference: no gradient flows through it.

    Args:
        group: the group of layers that it belongs to.
        kv_sharing_target: the layer whose cache this one reads (Gemma 3n and 4). It then writes nothing: its keys and
            values are None, and its cache is the target's.
        caller_writes: the caller writes the step's keys and values itself (``write``), so they may be None.
        layer_name: unique among the layers that exist; empty: a new name is made.
        scale: factor on ``q . k``; None: ``head_size ** -0.5``.
        alibi_slopes: ``(num_heads,)``; required with ``config.alibi``, refused without.
        sinks: ``(num_heads,)`` logits; required with ``config.sinks``, refused without.
        scales: scales of an FP8 cache or of FP8 queries; None: all are 1.

    Raises:
        ConfigError: the group is of MLA layers; the target's cache is not one that this layer reads; or what
            ``Terms.of`` raises it for.
    """

    def __init__(
        self,
        group: LayerGroup,
        *,
        kv_sharing_target: Attention | None = None,
        caller_writes: bool = False,
        layer_name: str = "",
        **terms: Unpack[GivenTerms],
    ) -> None:
        config = group.config
        if config.mla:
            raise ConfigError("the group's layers are MLA: make them with MLAAttention", fields=["kv_lora_rank"])
        super().__init__(group, Terms.of(config, group.device, checked=group.checked, **terms))
        self.kv_sharing_target: str | None = None
        if kv_sharing_target is not None:
            _check_shared(self, kv_sharing_target)
            self.kv_sharing_target = kv_sharing_target.layer_name
        self._in_parts = group.layer_in_parts(Attention, self.terms)
        elsewhere = caller_writes or kv_sharing_target is not None or config.attn_type == "encoder_decoder"
        self._may_write_nothing = config.has_cache and elsewhere
        if self._in_parts is None:  # else the impls are made inside the parts
            self._make_impls()
        # Where one of two backends writes the cache in its forward, the other's tokens still have to be written.
        separate = [phase for phase, s in group.backends.items() if not s.backend.forward_includes_kv_cache_update]
        self._writer: Phase | None = separate[0] if separate and config.has_cache else None
        self._dtype = PLAIN_DTYPES[config.dtype]
        self._quantizes = config.output_quantization != "none"
        self._output_dtype = OUTPUT_DTYPES.get(config.output_quantization, self._dtype)
        self._query_shape = (config.num_heads, config.head_size)
        self._key_shape = (config.num_kv_heads, config.head_size)
        self._value_shape = (config.num_kv_heads, config.value_head_size)
        packed = 2 if config.output_quantization == "fp4" else 1
        self._output_shape = (config.num_heads, config.value_head_size // packed)
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
                cache, cross-attention after its first step, a caller that writes itself).
            value: ``(T', num_kv_heads, value_head_size)``, None with ``key``.
            kv_cache: one layer's cache (``group.allocate_kv_cache``); None for encoders.
            attn_metadata: what ``group.build`` returned; None: the metadata of the forward context. Must be None under
                ``torch.compile``.
            output: ``(T', num_heads, value_head_size)`` in the layer's dtype, written; None makes one. With
                ``output_quantization`` float8_e4m3fn, or uint8 of half the size. Rows behind ``num_actual_tokens`` are
                left alone.
            output_lse: float32 ``(T', num_heads)``, written if given; only for plans that return the LSE.
            output_scale: float32 ``()`` on the device; required with ``output_quantization``, refused without.
            output_block_scale: where the kernel writes the scales of FP4 blocks; required with fp4, refused without.

        Raises:
            BatchError: before a kernel starts: another group built the metadata, or an argument has a shape or dtype
                (in checked mode also device, strides, block ids, scales) that is not accepted.
        """
        if not isinstance(query, Tensor):
            raise BatchError(f"query is a {type(query).__name__}: accepted is a tensor")
        if output is None:
            output = query.new_empty((query.shape[0], *self._output_shape), dtype=self._output_dtype)
        if torch.compiler.is_compiling():
            if attn_metadata is not None or output_lse is not None or self._quantizes:
                raise BatchError(
                    "under torch.compile attn_metadata and output_lse must be None and output_quantization 'none'",
                    hint="run the compiled model inside `with forward_context({group: group.build(common)})`",
                )
            torch.ops.attn_select.attention(query, key, value, kv_cache, output, self.layer_name)
            return output
        if torch.is_grad_enabled():
            # With gradients, a write to the cache would link every later step to the graph of the first one.
            with torch.no_grad():
                extras = (output_lse, output_scale, output_block_scale)
                return self.forward(query, key, value, kv_cache, attn_metadata, output, *extras)
        if attn_metadata is None:
            attn_metadata = current_metadata(self.group, self.layer_name)
        self._check(query, key, value, kv_cache, attn_metadata, output)
        outputs = Outputs(output, output_lse, output_scale, output_block_scale)
        if self._quantizes or not (output_lse is output_scale is output_block_scale is None):
            self._check_extras(attn_metadata, outputs)
        if self.group.checked:
            named = {"query": query, "key": key, "value": value, "output": output, "output_lse": output_lse}
            named |= {"output_scale": output_scale, "output_block_scale": output_block_scale}
            self.group.check_contents(self.terms.scales, named, kv_cache, attn_metadata.common)
        if self._in_parts is not None:
            self._merged((query, key, value, kv_cache), attn_metadata, outputs)
            return output
        if key is not None and value is not None and self._writer is not None:
            self.write(key, value, kv_cache, attn_metadata.slot_mapping)
        for part in attn_metadata.parts:
            q, own = query, outputs
            # A view takes a microsecond. Without one, a part's rows are followed by others, as if by padding; keys and
            # values are read by layers without a cache alone, whose steps are one part.
            if part.rows.start:
                q, own = query[part.rows], outputs.rows(part.rows)
            cache = self._cache_for(part.phase, kv_cache) if self._block_sizes else kv_cache
            try:  # inline, as in ``write``: this runs for every layer of every step
                found = self.impls[part.phase].forward(q, key, value, cache, part.metadata, own)
            except Exception as error:
                blame(self.group.backends[part.phase].spec, "forward()", error)
                raise
            if found is None:
                returned_nothing(self.group.backends[part.phase].spec, "forward()", WRITTEN)
        return output

    def _merged(self, inputs: Inputs, metadata: AttentionMetadata, outputs: Outputs) -> None:
        """Compute the layer in parts, whose outputs are quantised after they are merged."""
        if outputs.scale is None:
            self._in_parts.merged(inputs, metadata, outputs)
            return
        tokens, output = metadata.num_actual_tokens, outputs.output
        unscaled = output.new_empty(tokens, *output.shape[1:], dtype=inputs[0].dtype)
        self._in_parts.merged(inputs, metadata, Outputs(unscaled, outputs.lse))
        stored = ops.quantize_fp8(unscaled, outputs.scale, output.dtype)
        output[:tokens].view(torch.uint8).copy_(stored.view(torch.uint8))

    def write(self, key: Tensor, value: Tensor, kv_cache: Tensor | None, slot_mapping: Tensor | None) -> None:
        """Write the step's keys and values into the cache; where the backend's forward does that, it does nothing."""
        if (writer := self._writer) is not None:
            cache = self._cache_for(writer, kv_cache) if self._block_sizes else kv_cache
            assert cache is not None
            assert slot_mapping is not None
            try:
                self.impls[writer].do_kv_cache_update(key, value, cache, slot_mapping)
            except Exception as error:
                blame(self.group.backends[writer].spec, "do_kv_cache_update()", error)
                raise

    def dummy_inputs(self, tokens: int) -> dict[str, Tensor | None]:
        """Return what ``forward`` is called with in a step of so many tokens, zeros, for ``LayerGroup.warm_up``."""
        shapes = {"query": self._query_shape, "key": self._key_shape, "value": self._value_shape}
        device, cross = self.group.device, self.group.config.attn_type == "encoder_decoder"
        given: dict[str, Tensor | None] = {
            name: None if cross and name != "query" else torch.zeros(tokens, *shape, dtype=self._dtype, device=device)
            for name, shape in shapes.items()
        }
        if self._quantizes:
            given["output_scale"] = torch.ones((), device=device)
        if self.group.config.output_quantization == "fp4":
            heads, half = self._output_shape
            given["output_block_scale"] = torch.zeros(
                tokens, heads * half // 8, dtype=torch.float8_e4m3fn, device=device
            )
        return given

    def _check(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: AttentionMetadata,
        output: Tensor,
    ) -> None:
        # Inline, and each shape asked for once: this runs for every layer of every step.
        tokens, group, dtype = metadata.num_actual_tokens, self.group, self._dtype
        if getattr(metadata, "group", None) is not group:
            raise foreign_metadata(f"layer {self.layer_name!r}: attn_metadata", metadata)
        shape = query.shape
        if shape[1:] != self._query_shape or shape[0] < tokens or query.dtype is not dtype:
            checks.check_rows("query", query, self._query_shape, dtype, tokens)
        shape = output.shape
        if shape[1:] != self._output_shape or shape[0] < tokens or output.dtype is not self._output_dtype:
            checks.check_rows("output", output, self._output_shape, self._output_dtype, tokens)
        if key is not None and value is not None:
            written = tokens if metadata.slot_mapping is None else metadata.slot_mapping.shape[0]
            shape = key.shape
            if shape[1:] != self._key_shape or shape[0] < written or key.dtype is not dtype:
                checks.check_rows("key", key, self._key_shape, dtype, written)
            shape = value.shape
            if shape[1:] != self._value_shape or shape[0] < written or value.dtype is not dtype:
                checks.check_rows("value", value, self._value_shape, dtype, written)
            if self.kv_sharing_target is not None:
                text = f"layer {self.layer_name!r} reads the cache of {self.kv_sharing_target!r} and writes nothing"
                raise BatchError(f"key and value given, but {text} (accepted: None for both)")
        elif key is not None or value is not None or not self._may_write_nothing:
            missing = "value" if key is not None else "key"
            hint = "a layer that reads what others write is made with kv_sharing_target or caller_writes = True"
            raise BatchError(
                f"{missing} is None: layer {self.layer_name!r} needs the key and the value of the step's tokens",
                hint=hint if group.kv_layout is not None else None,
            )
        if group.kv_layout is not None and (kv_cache is None or (kv_cache.shape, kv_cache.dtype) != self._cache_seen):
            self._check_cache(kv_cache)

    def _check_extras(self, metadata: AttentionMetadata, outputs: Outputs) -> None:
        """Check what few calls have: the LSE and the scales of quantised outputs."""
        quantization = self.group.config.output_quantization
        if outputs.lse is not None:
            heads = self._output_shape[:1]
            checks.check_rows("output_lse", outputs.lse, heads, torch.float32, metadata.num_actual_tokens)
            if self._silent:
                raise BatchError(f"output_lse given, but {' and '.join(self._silent)} returns no LSE")
        for name, tensor, kinds in (
            ("output_scale", outputs.scale, ("fp8", "fp4")),
            ("output_block_scale", outputs.block_scale, ("fp4",)),
        ):
            if (tensor is None) == (quantization in kinds):
                seen = "missing" if tensor is None else "given"
                raise BatchError(f"{name} {seen}, but output_quantization = {quantization!r}")
        if outputs.block_scale is not None and len(metadata.parts) > 1:
            raise BatchError(
                "output_block_scale given, but two backends share the batch: its rows cannot be split between them"
            )


_OF_A_CACHE = attrgetter(
    *("kv_layout", "kernel_block_size", "config.num_kv_heads", "config.head_size", "config.value_head_size"),
    "config.cache_dtype",
)
"""What two groups have in common whose layers can read one cache."""


def _check_shared(layer: Attention, target: Attention) -> None:
    """Raise ConfigError if the target keeps no cache of its own, or the layers differ in what a cache is."""
    if not isinstance(target, Attention):
        text = f"kv_sharing_target = {show(target)}: accepted is the Attention layer whose cache is read"
        raise ConfigError(text, fields=["kv_sharing_target"])
    where = f"kv_sharing_target = {target.layer_name!r}"
    if target.group.kv_layout is None or target.kv_sharing_target is not None:
        text = f"{where}: that layer keeps no cache of its own (accepted: one that does)"
        raise ConfigError(text, fields=["kv_sharing_target"])
    scales = [(each.terms.scales.k.tolist(), each.terms.scales.v.tolist()) for each in (layer, target)]
    seen = [(*_OF_A_CACHE(each.group), *own) for each, own in zip((layer, target), scales, strict=True)]
    if seen[0] != seen[1]:
        names = "layout, block size, KV heads, head sizes, dtype, k and v scales"
        text = f"{where}: its cache has {names} {seen[1]}, and this layer reads {seen[0]} (accepted: the same)"
        raise ConfigError(text, fields=["kv_sharing_target"])


def foreign_metadata(argument: str, metadata: object) -> BatchError:
    """Return the error of a layer whose argument is another thing than its own group's metadata."""
    what = "was built by another group than the layer's"
    if isinstance(metadata, CommonAttentionMetadata):
        what = "is the step's CommonAttentionMetadata, which group.build makes the layers' metadata of"
    elif not hasattr(metadata, "group"):
        what = f"is a {type(metadata).__name__}"
    return BatchError(
        f"{argument} {what}",
        hint="build the step's metadata once per group, and give each layer what its layer.group.build returned",
    )
