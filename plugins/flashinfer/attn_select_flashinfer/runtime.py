"""``FLASHINFER`` at run time: its layers."""

from __future__ import annotations

from torch import Tensor

from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    BackendContext,
)
from attn_select.runtime.metadata import BatchError
from attn_select_flashinfer.build import FlashInferMetadataBuilder
from attn_select_flashinfer.metadata import FlashInferMetadata
from attn_select_flashinfer.terms import LayerTerms


class FlashInferImpl(AttentionImpl[FlashInferMetadata]):
    """Runs one layer. Layers of a kind may have scales of their own: no plan holds one."""

    def __init__(
        self,
        context: BackendContext,
        *,
        scale: float,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(context, scale=scale, alibi_slopes=alibi_slopes, sinks=sinks)
        self._sinks = None if sinks is None else sinks.float().contiguous()
        self._quantized = context.config.cache_dtype.startswith("fp8")
        self._plain = context.config.output_quantization == "none"
        self._terms: LayerTerms | None = None
        self._output_scale: tuple[Tensor, float] | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: FlashInferMetadata,
        output: Tensor,
        output_lse: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As ``AttentionImpl.forward``.

        Raises:
            BatchError: the metadata was planned for another kind of layers.
        """
        if attn_metadata.context is not self.context:
            self._check_kind(attn_metadata.context)
        assert kv_cache is not None
        terms = self._terms
        if terms is None or terms.scales is not layer.scales or not self._plain:
            terms = self._new_terms(layer, output_scale, output_block_scale)
        parts = attn_metadata.parts
        for part in parts:
            start, end = part.start, part.end
            whole = start == 0 and end == query.shape[0] == output.shape[0]
            rows = output if whole else output[start:end]
            lse = output_lse if output_lse is None or whole else output_lse[start:end]
            part.attend(terms, query if whole else query[start:end], kv_cache, rows, lse)
        return output

    def _new_terms(self, layer: AttentionLayer, output_scale: Tensor | None, block_scale: Tensor | None) -> LayerTerms:
        self._terms = LayerTerms(
            self.scale,
            layer.scales,
            quantized=self._quantized,
            sinks=self._sinks,
            output_scale=None if output_scale is None else self._on_host(output_scale),
            block_scale=block_scale,
        )
        return self._terms

    def _on_host(self, output_scale: Tensor) -> float:
        """Return a quantised output's scale, which kernels take as a number; read back once, in a warm-up step."""
        if self._output_scale is None or self._output_scale[0] is not output_scale:
            self._output_scale = output_scale, float(output_scale)
        return self._output_scale[1]

    def _check_kind(self, planned: BackendContext) -> None:
        """Compare the kind that a step was planned for with this layer's.

        Raises:
            BatchError: they differ, so that the layer would be run with another window, head size or cache.
        """
        own = self.context
        pairs = {
            "kv_layout": (planned.kv_layout, own.kv_layout),
            "block_size": (planned.block_size, own.block_size),
            **{
                name: (getattr(planned.config, name), getattr(own.config, name))
                for name in type(own.config).model_fields
            },
        }
        for name, (seen, wanted) in pairs.items():
            if seen != wanted:
                raise BatchError(
                    f"the metadata was planned for layers with {name} = {seen}, this layer has {wanted}",
                    hint="build the metadata of each kind of layers with its own group",
                )


class FlashInferBackend(AttentionBackend):
    """``FLASHINFER``."""

    impl_cls = FlashInferImpl
    builder_cls = FlashInferMetadataBuilder
