"""Backends of vLLM that run attn-select's kernels for the decodes of dense MLA; vLLM's own do the prefills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from attn_select.layer.layouts import MLA
from attn_select.runtime import CommonAttentionMetadata, Outputs
from attn_select.runtime.torch_dtypes import storage_dtype
from attn_select_vllm.kernels.backend import Own, OwnSteps
from attn_select_vllm.kernels.batch import common_of
from attn_select_vllm.kernels.binding import Groups, Layer
from attn_select_vllm.layers import config_of

FUSED_SIZES = (512, 64)
FUSED_DTYPES = (torch.float16, torch.bfloat16)
"""What ``concat_mla_q`` of vLLM joins (csrc/concat_mla_q.cuh)."""


@dataclass
class OwnMLAMetadata(MLACommonMetadata[Any]):
    """vLLM's metadata with attn-select's for the decodes, by ``Layer.kind``; None where there are none."""

    attn_select: Any = None


class OwnMLABuilder(OwnSteps, MLACommonMetadataBuilder[OwnMLAMetadata]):
    """Builds vLLM's metadata, and attn-select's for the decodes in it."""

    # Drafts are verified as decodes, of any lengths up to theirs. Otherwise vLLM would read them as prefills, which
    # decompress all that came before, and could capture no step that verifies.
    query_len_support = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, OwnMLAMetadata)
        self.block_size: int = kv_cache_spec.block_size
        self.groups = Groups(layer_names, self.block_size, vllm_config, torch.device(device))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return what ``OwnSteps`` does; where ranks share contexts, vLLM reads drafts as prefills all the same."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if vllm_config.parallel_config.decode_context_parallel_size == 1 or vllm_config.speculative_config is None:
            return support
        return min(support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda level: level.value)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> OwnMLAMetadata:
        """Return the metadata of a step."""
        metadata: OwnMLAMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.num_decodes:
            common = common_of(common_attn_metadata, self.block_size)
            if self.dcp_world_size > 1:
                common = self._share_of(common, common_attn_metadata.dcp_local_seq_lens)
            if metadata.num_prefills:
                common = common.requests(0, metadata.num_decodes)
            metadata.attn_select = self.groups.build(common, fast_build, self._capturing)
        return metadata

    def _share_of(self, common: CommonAttentionMetadata, seq_lens: Tensor) -> CommonAttentionMetadata:
        """Return the batch with the keys that this rank keeps of each request; ``seq_lens``: their number."""
        step = self.dcp_local_block_size
        rank = get_dcp_group().rank_in_group
        return replace(
            common,
            seq_lens=seq_lens[: common.num_reqs],
            seq_lens_cpu=get_dcp_local_seq_lens(common.seq_lens_cpu, self.dcp_world_size, rank, step),
            max_seq_len=-(-common.max_seq_len // self.dcp_virtual_block_size) * step,
        )


class OwnMLAImpl(MLACommonImpl[OwnMLAMetadata]):
    """Runs one layer; ``backend`` is as of ``Own``."""

    backend: ClassVar[str]
    can_return_lse_for_decode = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.supports_quant_query_input = False  # kernels that want an FP8 query quantise it themselves
        config = config_of(
            get_current_vllm_config(),
            torch.get_default_dtype(),
            envs.VLLM_BATCH_INVARIANT,
            num_heads=self.num_heads,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        if self.dcp_world_size > 1:  # vLLM gathers the queries of all ranks, and merges what each computes of its keys
            gathered = {"num_heads": self.num_heads * self.dcp_world_size, "decode_context_parallel_size": 1}
            config = config.model_copy(update=gathered)
        self.attn_select = Layer({"decode": self.backend}, MLA, config, scale=float(self.scale))
        self.storage_dtype = storage_dtype(config.cache_dtype)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: OwnMLAMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over latents with the absorbed query, given whole or as its latent and its rope part."""
        # Returned is the output, and where ranks share contexts its LSE, float32 ``(T, num_heads)`` to base e.
        own, latent = self.attn_select, q[0] if isinstance(q, tuple) else q
        impl = own.impls["decode"]
        query = joined(*q) if isinstance(q, tuple) and not impl.takes_query_parts else q
        if kv_c_and_k_pe_cache.dtype != self.storage_dtype:
            kv_c_and_k_pe_cache = kv_c_and_k_pe_cache.view(self.storage_dtype)
        output = latent.new_empty(*latent.shape[:-1], self.kv_lora_rank)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = latent.new_empty(latent.shape[:-1], dtype=torch.float32)
        (part,) = attn_metadata.attn_select[own.kind].parts
        return impl.forward_mqa(query, kv_c_and_k_pe_cache, part.metadata, Outputs(output, lse)), lse


def joined(latent: Tensor, rope: Tensor) -> Tensor:
    """Return a query's latent ``(T, H, R)`` and its rope part ``(T, H, P)`` side by side, ``(T, H, R + P)``."""
    # By vLLM's kernel for the usual sizes: ``torch.cat`` took 4 to 5 % of the kernels' time of a step (NVIDIA H200, 16
    # heads, 128 and 256 requests), since the latent is not contiguous.
    sizes = latent.shape[-1], rope.shape[-1]
    if latent.is_cuda and sizes == FUSED_SIZES and latent.dtype in FUSED_DTYPES:
        query = latent.new_empty(*latent.shape[:-1], sum(sizes))
        ops.concat_mla_q(latent, rope, query)
        return query
    return torch.cat((latent, rope), dim=-1)


class OwnMLABackend(Own, MLACommonBackend):
    """A backend for such layers."""

    of_layers, of_steps = OwnMLAImpl, OwnMLABuilder


class TritonMlaBackend(OwnMLABackend):
    """``TRITON_MLA``."""

    backend = "TRITON_MLA"
    block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(16)]


class FlashInferMlaBackend(OwnMLABackend):
    """``FLASHINFER_MLA``, on Hopper: its native wrapper takes pages of any size."""

    backend = "FLASHINFER_MLA"
    block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]
