"""``FLASH_ATTN_MLA`` at run time: decodes by FA3 on the latent cache, prefills by FA2 or FA3 on packed keys and values.

In decode the rope parts are Q and K, and the latent is V as well as the second part of K, scored with a query of its
own (``q_v``): it is read once for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_select.layer.config import Phase
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.kv_cache import CacheView
from attn_select.runtime.metadata import CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_flash_attn.facts.builds import FlashAttnKernel
from attn_select_flash_attn.runtime.adapters import Arguments, Shape, Step, adapter_for
from attn_select_flash_attn.runtime.latent import cache_parts, query_parts, rope_width
from attn_select_flash_attn.runtime.schedule import Scheduler

_NO_WINDOW = (-1, -1)


@dataclass(slots=True)
class MLACall:
    """Decodes, or one call of a prefill."""

    num_tokens: int  # queries
    arguments: Arguments  # of the call


class FlashAttnMLAMetadataBuilder(AttentionMetadataBuilder[MLACall]):
    """Builds the metadata of one kind of layers."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config = context.config
        self._causal = not config.non_causal
        dtype, heads = PLAIN_DTYPES[config.dtype], config.num_heads
        rank, rope = cast(int, config.kv_lora_rank), cast(int, config.qk_rope_head_dim)
        size, value_size = cast(int, config.qk_nope_head_dim) + rope, cast(int, config.v_head_dim)
        shapes: dict[Phase, Shape] = {
            "decode": Shape(heads, 1, rope_width(config), rank, dtype, 0.0, context.block_size),
            "prefill": Shape(heads, heads, size, value_size, dtype, 0.0, None),
        }
        self._schedulers: dict[Phase, Scheduler] = {}
        for phase in context.plans:
            kernel = context.kernel(FlashAttnKernel, phase)
            made = Scheduler(context, adapter_for(kernel), shapes[phase], splits_keys=kernel.splits_keys)
            self._schedulers[phase] = made

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACall:
        common = common_attn_metadata
        step = Step(
            query_start_loc=common.query_start_loc,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_key_len=common.max_seq_len,
            causal=self._causal and common.causal,
            window=_NO_WINDOW,
            num_splits=0,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
        )
        return MLACall(common.num_actual_tokens, self._schedulers["decode"].arguments(step, fast_build=fast_build))

    def build_prefill(self, varlen: VarlenMetadata) -> MLACall:
        """Return the metadata of one ``forward_mha`` call."""
        num_tokens = int(varlen.query_start_loc_cpu[-1])
        step = Step(
            query_start_loc=varlen.query_start_loc,
            num_tokens=num_tokens,
            max_query_len=varlen.max_query_len,
            max_key_len=varlen.max_key_len,
            causal=varlen.causal,
            window=_NO_WINDOW,
            num_splits=0,
            key_start_loc=varlen.key_start_loc,
        )
        return MLACall(num_tokens, self._schedulers["prefill"].arguments(step))


class FlashAttnMLAImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = context.config
        self._parts = CacheView(lambda kv_cache: cache_parts(kv_cache.unsqueeze(2), config))
        kernels = {phase: context.kernel(FlashAttnKernel, phase) for phase in context.plans}
        self._adapters = {phase: adapter_for(kernel) for phase, kernel in kernels.items()}
        self._layer = {phase: adapter.layer_arguments(terms) for phase, adapter in self._adapters.items()}
        # Without a rope part the kernel is given some of the latent in its place (``cache_parts``).
        self.takes_query_parts = "decode" in kernels and bool(config.qk_rope_head_dim)
        self._padding = kernels["prefill"].value_padding if "prefill" in kernels else 0

    def forward_mqa(
        self,
        query: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        attn_metadata: MLACall,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``."""
        tokens = attn_metadata.num_tokens
        if not tokens:
            return outputs.output
        latent_query, rope_query = query if isinstance(query, tuple) else query_parts(query, self.context.config)
        if rope_query.shape[0] != tokens:
            latent_query, rope_query = latent_query[:tokens], rope_query[:tokens]
        latent, rope = self._parts(kv_cache)
        adapter = self._adapters["decode"]
        arguments = {**self._layer["decode"], **attn_metadata.arguments, adapter.latent_query: latent_query}
        adapter.write(rope_query, rope, latent, outputs.first(tokens), arguments, None)
        return outputs.output

    def forward_mha(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: MLACall,
        outputs: Outputs,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mha``."""
        tokens = attn_metadata.num_tokens
        part = outputs.first(tokens)
        if not tokens or not key.shape[0]:
            part.output.zero_()
            if part.lse is not None:
                part.lse.fill_(-torch.inf)
            return outputs.output
        columns = None
        if self._padding:
            columns, value = value.shape[-1], pad(value, (0, self._padding))
        arguments = {**self._layer["prefill"], **attn_metadata.arguments}
        self._adapters["prefill"].write(query[:tokens], key, value, part, arguments, columns)
        return outputs.output


class FlashAttnMLABackend(AttentionBackend):
    """``FLASH_ATTN_MLA``."""

    impl_cls = FlashAttnMLAImpl
    builder_cls = FlashAttnMLAMetadataBuilder
