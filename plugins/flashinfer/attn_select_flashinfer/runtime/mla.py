"""``FLASHINFER_MLA`` at run time: decodes on the latent cache, prefills on full keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_select.runtime.backend import (
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.metadata import CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashinfer.facts.mla_kernels import MLAKernel, RaggedKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.mla_native import NativeDecode, NativeLayer
from attn_select_flashinfer.runtime.mla_ragged import DirectRagged, PlannedRagged, RaggedCall
from attn_select_flashinfer.runtime.mla_trtllm import TrtllmCall, TrtllmDecode, TrtllmLayer
from attn_select_flashinfer.runtime.plans import ScaledPlan, SharedScale
from attn_select_flashinfer.runtime.scores import float_sinks

NATIVE = ("fa2", "fa3")


Query = Tensor | tuple[Tensor, Tensor]


def first_rows(tokens: int, query: Query) -> Query:
    """Return the first rows of a query; padding lies behind them, and without any nothing is cut."""
    if isinstance(query, tuple):
        return query[0][:tokens], query[1][:tokens]
    return query if query.shape[0] == tokens else query[:tokens]


class FlashInferMLAMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Builds the metadata of one kind of layers, and keeps their workspaces and wrappers."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        plans, scale = context.plans, SharedScale(context.config)
        self._decode: NativeDecode | TrtllmDecode | None = None
        if "decode" in plans:
            kernel = context.kernel(MLAKernel, "decode")
            native = kernel.name in NATIVE
            self._decode = NativeDecode(context, kernel.name, scale) if native else TrtllmDecode(context, kernel)
        self._prefill: PlannedRagged | DirectRagged | None = None
        if "prefill" in plans:
            ragged = context.kernel(RaggedKernel, "prefill")
            native = ragged.name in NATIVE
            self._prefill = PlannedRagged(context, ragged.name, scale) if native else DirectRagged(context, ragged.name)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ScaledPlan | TrtllmCall:
        """As ``AttentionMetadataBuilder.build``; without CUDA graphs several may be built before the first one runs."""
        assert self._decode is not None
        return self._decode.build(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> ScaledPlan | TrtllmCall:
        """As ``AttentionMetadataBuilder.build_for_cudagraph_capture``."""
        if isinstance(self._decode, NativeDecode):
            return self._decode.capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)

    def build_prefill(self, varlen: VarlenMetadata) -> RaggedCall:
        """Return the metadata of one ``forward_mha`` call."""
        assert self._prefill is not None
        return self._prefill.build(varlen)


class FlashInferMLAImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, float_sinks(terms))
        self._layer: NativeLayer | TrtllmLayer | None = None
        if "decode" in context.plans:
            kernel = context.kernel(MLAKernel, "decode")
            self.takes_query_parts = native = kernel.name in NATIVE
            self._layer = NativeLayer(context, terms) if native else TrtllmLayer(context, kernel, terms)

    def forward_mqa(
        self,
        query: Query,
        kv_cache: Tensor,
        attn_metadata: ScaledPlan | TrtllmCall,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; ``kv_cache (blocks, size, R + Pr)``."""
        tokens, run = attn_metadata.num_tokens, self._layer
        assert run is not None
        if tokens:
            own: Any = attn_metadata
            run.run(first_rows(tokens, query), kv_cache, own, outputs.first(tokens))  # type: ignore[arg-type]
        return outputs.output

    def forward_mha(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: RaggedCall,
        outputs: Outputs,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mha``."""
        tokens = attn_metadata.num_tokens
        if tokens:
            attn_metadata.run(self.terms, (query[:tokens], key, value), outputs.first(tokens))
        return outputs.output


class FlashInferMLABackend(library.FlashInferLibraryBackend):
    """``FLASHINFER_MLA``."""

    impl_cls = FlashInferMLAImpl
    builder_cls = FlashInferMLAMetadataBuilder
