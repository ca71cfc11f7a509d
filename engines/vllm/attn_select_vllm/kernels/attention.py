"""Backends of vLLM that run attn-select's kernels for attention with keys and values per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from attn_select.runtime import CacheView
from attn_select.runtime.torch_dtypes import storage_dtype
from attn_select_vllm.kernels.backend import Own, OwnSteps
from attn_select_vllm.kernels.batch import common_of
from attn_select_vllm.kernels.binding import Groups, Layer
from attn_select_vllm.kernels.cache_views import LAYOUT, own_shape, own_view
from attn_select_vllm.kernels.limits import attention_types, standard_caches
from attn_select_vllm.layers import config_of, scales_per_head
from attn_select_vllm.names import kernels_of


@dataclass
class Metadata:
    """A step."""

    # What the group of each ``Layer.kind`` built.
    built: list[Any]
    # What vLLM sets in cross-attention: the slots of the encoder's tokens.
    slot_mapping: Tensor | None = None


class OwnBuilder(OwnSteps, AttentionMetadataBuilder[Metadata]):
    """Builds a step's metadata for the layers of one group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        own = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl.attn_select
        self.block_size: int | None = kv_cache_spec.block_size if own.config.has_cache else None
        self.groups = Groups(layer_names, self.block_size, vllm_config, torch.device(device))
        self.reorder_batch_threshold = self.groups.reorder_batch_threshold

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Return the metadata of a step; what requests share is read once by no kernel here."""
        common = common_of(common_attn_metadata, self.block_size, self.reorder_batch_threshold)
        return Metadata(self.groups.build(common, fast_build, self._capturing))


class OwnImpl(AttentionImpl[Metadata]):
    """Runs one layer; ``backend`` is as of ``Own``."""

    backend: ClassVar[str]
    supports_dcp = True
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window, self.logits_soft_cap, self.sinks = sliding_window, logits_soft_cap, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        vllm_config, kind = get_current_vllm_config(), str(getattr(attn_type, "value", attn_type))
        config = config_of(
            vllm_config,
            torch.get_default_dtype(),
            envs.VLLM_BATCH_INVARIANT,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=head_size,
            kv_cache_dtype=kv_cache_dtype,
            per_head_quant_scales=kv_cache_dtype.startswith("fp8") and scales_per_head(vllm_config),
            attn_type=kind,
            mm_prefix=kind == "decoder" and bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False)),
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
        )
        kernels = kernels_of(self.backend)
        if kind == "encoder_decoder":
            kernels = kernels[-1:]  # the keys of a step are the encoder's, and cannot be split with its queries
        self.attn_select = Layer(
            {phase: kernels[0 if phase == "prefill" else -1] for phase in config.phases},
            LAYOUT,
            config,
            scale=self.scale,
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            sinks=sinks,
        )
        self.storage_dtype = storage_dtype(config.cache_dtype)
        self._caches = CacheView(self._own_view)  # one tensor in all steps: backends keep what they make of it

    def _own_view(self, kv_cache: Tensor) -> Tensor:
        if kv_cache.dtype != self.storage_dtype:  # vLLM keeps FP8 as bytes
            kv_cache = kv_cache.view(self.storage_dtype)
        return own_view(kv_cache, self.head_size)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys and values into the cache."""
        own = self.attn_select
        if not own.impls or not own.config.has_cache:
            return  # a run before the cache was laid out, or an encoder
        own.impls["decode"].do_kv_cache_update(key, value, self._caches(kv_cache), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; the step's keys and values are in the cache."""
        if output is None:
            output = query.new_empty(query.shape)
        own = self.attn_select
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        cache = self._caches(kv_cache) if own.config.has_cache else None
        own.attend(query, key, value, cache, attn_metadata.built[own.kind], output)
        return output


class OwnBackend(Own, AttentionBackend):
    """A backend for such layers."""

    of_layers, of_steps = OwnImpl, OwnBuilder
    accept_output_buffer = True
    forward_includes_kv_cache_update = False

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache; releases until 0.26 ask for it."""
        return own_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return str(getattr(attn_type, "value", attn_type)) in attention_types()

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return standard_caches()

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True


class TorchSdpaBackend(OwnBackend):
    """``TORCH_SDPA``."""

    backend = "TORCH_SDPA"
    block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]
    best_block_size = 16


class TritonAttnBackend(OwnBackend):
    """``TRITON_ATTN``."""

    backend = "TRITON_ATTN"
    block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(16)]


class FlashInferBackend(OwnBackend):
    """``FLASHINFER``, on Hopper with an FP8 cache: XQA decodes."""

    backend = "FLASHINFER"
    block_sizes: ClassVar[list[int | MultipleOf]] = [16, 32, 64, 128]


class FlashAttnTritonAttnBackend(TritonAttnBackend):
    """Prefills by ``FLASH_ATTN``, decodes by ``TRITON_ATTN``."""

    backend = "FLASH_ATTN_TRITON_ATTN"


class FlashInferTritonAttnBackend(FlashInferBackend):
    """Prefills by ``FLASHINFER``, decodes by ``TRITON_ATTN``."""

    backend = "FLASHINFER_TRITON_ATTN"
