"""``FLASH_ATTN`` at run time: FlashAttention 2, 3 or 4 over the paged cache, or without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
)
from attn_select.runtime.cascade import split_for_cascade
from attn_select.runtime.kv_cache import CacheView, key_value_unchecked
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_flash_attn.facts.builds import FlashAttnKernel
from attn_select_flash_attn.runtime.adapters import Arguments, Shape, Step, adapter_for
from attn_select_flash_attn.runtime.lse import by_token, row_positions
from attn_select_flash_attn.runtime.requests_without_keys import KeylessRequests
from attn_select_flash_attn.runtime.schedule import MAX_SPLITS, Scheduler, is_uneven, window_of

_NOTHING: Arguments = {}
E4M3 = torch.float8_e4m3fn
LEAST_SAVED = {"torch": 512 << 20, "fused": 128 << 20}
"""A cascade is worthwhile from so many bytes of keys and values that are not read again, by the kernel that merges its
two parts. On an H100 (bfloat16, 32 query and 8 KV heads of 128, FA3, 8 to 128 decodes) it broke even at 56 to 140 MiB
with Triton's ``merge_attn_states``, and at about 500 MiB with torch's, which is many small kernels."""


@dataclass(slots=True)
class FlashAttnMetadata:
    """One step for all layers of a kind."""

    num_actual_tokens: int  # num_actual_tokens, num_reqs: T and B
    num_reqs: int
    arguments: Arguments  # what the kernel is called with; with a shared prefix, for the keys behind it
    query_start_loc: Tensor  # int32 ``(B + 1,)``
    seq_lens: Tensor  # int32 ``(B,)`` keys
    position_bias: bool = False  # whether the kernel's LSE has ALiBi's ``slope * position`` in it
    # what the kernel is called with for a prefix that all requests share, which are then one request
    prefix: Arguments | None = None
    # bool ``(T,)`` rows of requests without keys, whose output becomes 0; None where the kernel is right
    keyless: Tensor | None = None
    # ``arguments`` and ``keyless`` of calls that want the LSE, where they differ
    for_lse: tuple[Arguments, Tensor] | None = None


# Both phases have one plan: `plan` does not look at the phase.
def _is_fp8(context: BackendContext) -> bool:
    return next(iter(context.plans.values())).query_dtype == "fp8_e4m3"


class FlashAttnMetadataBuilder(AttentionMetadataBuilder[FlashAttnMetadata]):
    """Builds the metadata of one kind of layers."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config = context.config
        self._shape = shape = Shape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            value_size=config.value_head_size,
            dtype=E4M3 if _is_fp8(context) else PLAIN_DTYPES[config.dtype],
            softcap=config.logits_soft_cap or 0.0,
            page_size=context.block_size,
        )
        on_gpu = context.device.type == "cuda"
        self._sms = torch.cuda.get_device_properties(context.device).multi_processor_count if on_gpu else 1
        kernel = context.kernel(FlashAttnKernel)
        adapter = adapter_for(kernel)
        self._scheduler = Scheduler(context, adapter, shape, splits_keys=kernel.splits_keys)
        self._keyless: KeylessRequests | None = None
        if adapter.build.version == 2 and adapter.paged:
            self._keyless, self._guarded = KeylessRequests(context), Scheduler(context, adapter, shape)
        self._causal = config.attn_type == "decoder" and not config.non_causal
        merged_by = ops.implementation("merge_attn_states", context.device)[1]
        self.least_cascade_bytes = LEAST_SAVED["torch" if merged_by == "torch" else "fused"]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttnMetadata:
        common, prefix = common_attn_metadata, None
        if common_prefix_len:
            assert self.context.block_size is not None
            split = split_for_cascade(common, common_prefix_len, self.context.block_size)
            prefix = self._scheduler.arguments(self._step(split.prefix), fast_build=fast_build)
            common = split.suffix
        step = self._step(common)
        left, _ = step.window
        metadata = FlashAttnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            arguments=self._scheduler.arguments(step, fast_build=fast_build),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            # Unless a window reaches over all keys, FA2 masks by it, and its bias is slope * distance.
            position_bias=self.context.config.alibi and step.causal and (left < 0 or left >= step.max_key_len),
            prefix=prefix,
        )
        if self._keyless is not None and (safe := self._keyless.guarded(common)) is not None:
            arguments, rows = self._guarded.arguments(self._step(safe[0])), safe[1]
            # Captured batches are uniform: outputs are right there and writes in bounds, and only the LSE is wrong.
            if self.context.cuda_graphs:
                metadata.for_lse = arguments, rows
            else:
                metadata.arguments, metadata.keyless = arguments, rows
        return metadata

    def _step(self, common: CommonAttentionMetadata) -> Step:
        causal = self._causal and common.causal
        paged = self.context.kv_layout is not None
        window = window_of(self.context.config, causal)
        mixed = paged and common.num_actual_tokens < common.num_reqs * common.max_query_len
        return Step(
            query_start_loc=common.query_start_loc,
            num_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_key_len=common.max_seq_len if paged else common.max_query_len,
            causal=causal,
            window=window,
            num_splits=MAX_SPLITS if mixed and is_uneven(common, self._shape, window, self._sms) else 0,
            seq_lens=common.seq_lens if paged else None,
            block_table=common.block_table_tensor if paged else None,
            key_start_loc=None if paged else common.query_start_loc,
        )


class FlashAttnImpl(AttentionImpl[FlashAttnMetadata]):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config, layout = context.config, context.kv_layout or ""
        self._adapter = adapter_for(context.kernel(FlashAttnKernel))
        self._run, self._function = self._adapter.run, self._adapter.function
        self._fp8 = _is_fp8(context)
        # With FP8 the kernel writes bfloat16 whatever the layer computes in.
        self._direct = self._adapter.build.out.value and not (self._fp8 and config.dtype != "bfloat16")
        self._plain = self._direct and not self._fp8
        self._layer = self._adapter.layer_arguments(terms)
        self._layer_without_sinks = self._adapter.layer_arguments(terms.without_sinks())
        # As the kernel rounds them.
        self._sinks = None if terms.sinks is None else terms.sinks.to(self._adapter.sinks_dtype).float()
        self._views = CacheView(lambda kv_cache: key_value_unchecked(kv_cache, layout, config))
        self._descales: dict[int, Arguments] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: FlashAttnMetadata,
        outputs: Outputs,
    ) -> Tensor:
        metadata, tokens = attn_metadata, attn_metadata.num_actual_tokens
        if not tokens:
            return outputs.output
        if query.shape[0] != tokens:
            query = query[:tokens]
        part = outputs.first(tokens)
        output = part.output
        if kv_cache is None:
            assert key is not None
            assert value is not None
            key, value = key[:tokens], value[:tokens]
        else:
            key, value = self._views(kv_cache)
        if self._plain and part.lse is None and metadata.prefix is None and metadata.keyless is None:
            self._function(query, key, value, out=output, **self._layer, **metadata.arguments)
            return outputs.output
        extra = _NOTHING
        if self._fp8:
            query = ops.quantize_fp8(query, self.terms.scales.q, E4M3)
            extra = self._descaled(metadata.num_reqs)
        if metadata.prefix is not None:
            self._cascade(query, key, value, metadata, part)
            return outputs.output
        arguments, keyless = metadata.arguments, metadata.keyless
        if part.lse is not None and metadata.for_lse is not None:
            arguments, keyless = metadata.for_lse
        own, wanted = output if self._direct else None, part.lse is not None
        out, lse = self._run(query, key, value, own, wanted, {**self._layer, **arguments, **extra})
        if not self._direct:
            output.copy_(out)
        if keyless is not None:
            output.masked_fill_(keyless.view(-1, 1, 1), 0.0)
        if part.lse is not None and lse is not None:
            found = self._by_token(lse, metadata)
            part.lse.copy_(found if keyless is None else found.masked_fill(keyless.unsqueeze(1), -torch.inf))
        return outputs.output

    def _cascade(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: FlashAttnMetadata, outputs: Outputs
    ) -> None:
        """Attend to the shared prefix with all queries as one request, to each request's rest, and merge."""
        of_prefix = self._descaled(1) if self._fp8 else _NOTHING
        of_rest = self._descaled(metadata.num_reqs) if self._fp8 else _NOTHING
        assert metadata.prefix is not None
        tensors = (query, key, value)
        shared = {**self._layer_without_sinks, **metadata.prefix, **of_prefix}
        prefix, prefix_lse = self._run(*tensors, None, True, shared)
        own = outputs.output if self._direct else None
        rest, rest_lse = self._run(*tensors, own, True, {**self._layer, **metadata.arguments, **of_rest})
        assert prefix_lse is not None
        assert rest_lse is not None
        found = self._by_token(rest_lse, metadata)
        ops.merge_attn_states(outputs.output, prefix, prefix_lse.T, rest, found, outputs.lse)

    def _by_token(self, lse: Tensor, metadata: FlashAttnMetadata) -> Tensor:
        """Return the kernel's LSE in the runtime's convention, ``(T, num_heads)``."""
        found = by_token(lse, self._adapter.build.version, self._sinks)
        if metadata.position_bias and self.terms.alibi_slopes is not None:
            positions = row_positions(metadata.query_start_loc, metadata.seq_lens, len(found))
            found = found - positions.unsqueeze(1) * self.terms.alibi_slopes
        return found

    def _descaled(self, num_reqs: int) -> Arguments:
        """Return the scales as the kernel reads them, views of ``(num_reqs, num_kv_heads)``."""
        if num_reqs not in self._descales:
            shape, scales = (num_reqs, self.context.config.num_kv_heads), self.terms.scales
            named = {"q_descale": scales.q, "k_descale": scales.k, "v_descale": scales.v}
            # Where the shape is (1, 1), a stride of 1 is what FA4 wants.
            self._descales[num_reqs] = {name: scale.reshape(1, -1).expand(shape) for name, scale in named.items()}
        return self._descales[num_reqs]


class FlashAttnBackend(AttentionBackend):
    """``FLASH_ATTN``."""

    impl_cls = FlashAttnImpl
    builder_cls = FlashAttnMetadataBuilder
