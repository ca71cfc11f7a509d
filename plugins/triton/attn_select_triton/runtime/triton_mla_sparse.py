"""``TRITON_MLA_SPARSE`` at run time: every token is a request of one query, its chosen slots are blocks of one token.

The kernels read as many entries of a row as there are slots, so slots are moved in front of what is -1.
So ``TRITON_MLA``'s decode kernels run over a cache of such blocks. Shapes follow from the number of tokens
and ``sparse_top_k`` alone, so that a batch can be captured in a CUDA graph.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.machine.library_imports import import_library
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_triton.facts.planned_kernels import MLASparseKernel
from attn_select_triton.kernels.chosen_slots import slots_in_front
from attn_select_triton.kernels.launch import capability_of, sm_count
from attn_select_triton.kernels.mla_decode import (
    MLALaunch,
    gathered_launch,
    mla_decode,
    mla_launch,
    mla_num_splits,
)
from attn_select_triton.limits import GLUON_CAPABILITY
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device
from attn_select_triton.runtime.side_by_side import COMPILING


@dataclass(slots=True)
class SparseCall:
    """One batch."""

    num_tokens: int  # T
    query_start_loc: Tensor  # int32 ``(T + 1,)``, 0 to T
    num_splits: int  # parts of a token's keys
    workspace: Tensor  # float32, for their results


def _kernel(context: BackendContext) -> MLASparseKernel:
    kernel = next(iter(context.plans.values())).kernel
    assert isinstance(kernel, MLASparseKernel)
    return kernel


class TritonMLASparseMetadataBuilder(AttentionMetadataBuilder[SparseCall]):
    """Builds without a kernel launch."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, plan = context.config, next(iter(context.plans.values()))
        self._bounds = torch.arange(context.max_num_batched_tokens + 1, dtype=torch.int32, device=context.device)
        self._workspace = torch.empty(plan.workspace_bytes // 4, dtype=torch.float32, device=context.device)
        self._per_token = config.num_heads * (cast(int, config.kv_lora_rank) + 1)
        self._units = -(-config.num_heads // launch_of(context).block_m)
        self._sms = sm_count(context.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCall:
        """As ``AttentionMetadataBuilder.build``."""
        tokens = common_attn_metadata.num_actual_tokens
        splits = 1
        if tokens and not self.context.config.batch_invariant:
            best = mla_num_splits(tokens * self._units, cast(int, self.context.config.sparse_top_k), self._sms)
            splits = max(1, min(best, self._workspace.numel() // (tokens * self._per_token)))
        return SparseCall(tokens, self._bounds[: tokens + 1], splits, self._workspace)


def launch_of(context: BackendContext) -> MLALaunch:
    """Return how the plan's kernel is launched; KernelMismatchError where it is not one for this device."""
    config, planned = context.config, _kernel(context)
    if not planned.gluon:
        return mla_launch(
            capability_of(context.device),
            config.num_heads,
            cast(int, config.kv_lora_rank),
            cast(int, config.qk_rope_head_dim),
            1,
            PLAIN_DTYPES[config.dtype],
            storage_dtype(config.cache_dtype),
            gluon=False,
        )
    if capability_of(context.device) != GLUON_CAPABILITY:
        raise KernelMismatchError(
            f"the plan's kernel, written in Gluon for Hopper, does not run on {context.device}",
            hint="select on the machine that runs the layers",
        )
    return gathered_launch(config.num_heads)


class TritonMLASparseImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        self._fp8 = context.config.cache_dtype in FP8_DTYPES
        self._launch = launch_of(context)
        if self._launch.gathered:
            # With Gluon, now and not in the first step.
            import_library("attn_select_triton.kernels.mla_decode_gathered")
        self._run = on_device(context.device, self._attend)

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseCall,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; an FP8 cache is read with ``terms.scales.k_float``."""
        assert topk_indices is not None
        tokens = attn_metadata.num_tokens
        if not tokens:
            return outputs.output
        part = outputs.first(tokens)
        dense = part.lse if part.lse is None or part.lse.is_contiguous() else part.lse.contiguous()
        scale = self.terms.scales.k_float if self._fp8 else 1.0
        self._run(query[:tokens], kv_cache, attn_metadata, part.output, dense, topk_indices[:tokens], scale)
        if part.lse is not None and dense is not None and dense is not part.lse:
            part.lse.copy_(dense)
        return outputs.output

    def _attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        call: SparseCall,
        output: Tensor,
        output_lse: Tensor | None,
        slots: Tensor,
        kv_scale: float,
    ) -> None:
        front, counts = slots_in_front(slots)
        mla_decode(
            query,
            kv_cache.view(-1, 1, kv_cache.shape[2]),
            output,
            query_start_loc=call.query_start_loc,
            seq_lens=counts,
            block_table=front,
            max_query_len=1,
            scale=self.terms.scale,
            launch=self._launch,
            num_splits=call.num_splits,
            workspace=call.workspace,
            causal=False,
            kv_scale=kv_scale,
            output_lse=output_lse,
        )


class TritonMLASparseBackend(AttentionBackend):
    """``TRITON_MLA_SPARSE``."""

    impl_cls = TritonMLASparseImpl
    builder_cls = TritonMLASparseMetadataBuilder
    compiling = COMPILING

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
