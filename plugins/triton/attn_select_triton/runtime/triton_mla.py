"""``TRITON_MLA`` at run time: decodes on the latent cache, prefills on decompressed keys and values.

The decode's kernel is the plan's: ``kernels.mla_decode_hopper`` or ``kernels.mla_decode``. Partial results of split
keys go through one workspace that the builder reserves and all layers share.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import triton
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.machine.library_imports import import_library
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_triton.facts.planned_kernels import MLADecodeKernel
from attn_select_triton.kernels.launch import Terms, capability_of, sm_count
from attn_select_triton.kernels.merge import MERGE_CHUNK
from attn_select_triton.kernels.mla_decode import mla_decode, mla_launch, mla_num_splits
from attn_select_triton.kernels.pieces import FIELDS, list_pieces
from attn_select_triton.kernels.prefill import prefill_attention
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device
from attn_select_triton.runtime.schedule import fixed_split, latent_pieces, latent_splits
from attn_select_triton.runtime.side_by_side import COMPILING
from attn_select_triton.runtime.triton_attn_metadata import check_gluon, planned_prefill

LEAST_FIXED_SPLIT, TILE = 1024, 64
"""Keys of a batch-invariant split, at least; it has whole tiles."""
_CAUSAL, _WHOLE = Terms(causal=True), Terms(causal=False)


@dataclass(slots=True)
class MLACall:
    """The decodes of one batch, or one call on decompressed keys and values.

    Attributes:
        num_tokens: queries of all requests.
        arguments: of ``mla_decode`` or ``prefill_attention`` that are the same for all layers.
        counter: of ``prefill_hopper``, where the plan has it; prepared: its launch, once a layer ran by it.
    """

    num_tokens: int
    arguments: dict[str, Any]
    counter: Tensor | None = None
    prepared: Any = None


class TritonMLAMetadataBuilder(AttentionMetadataBuilder[MLACall]):
    """Builds the metadata of one kind of layers: launch, number of splits and the workspace for their results.

    Raises:
        KernelMismatchError: the plan's kernel is not one for this device and this Triton.
    """

    takes_length_bounds = True

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, plan = context.config, context.plans.get("decode")
        self._causal = not config.non_causal
        self._workspace: Tensor | None = None
        self._counter: Tensor | None = None
        if planned_prefill(context).warp_specialised and context.device.type == "cuda":
            check_gluon(context.device)
            self._counter = torch.zeros(2, dtype=torch.int32, device=context.device)
        if plan is None:
            return
        planned = plan.kernel
        assert isinstance(planned, MLADecodeKernel)
        rank, rope = cast(int, config.kv_lora_rank), cast(int, config.qk_rope_head_dim)
        longest = config.max_decode_query_len
        self._launch = mla_launch(
            capability_of(context.device),
            config.num_heads * longest,
            rank,
            rope,
            cast(int, context.block_size),
            PLAIN_DTYPES[config.dtype],
            storage_dtype(config.cache_dtype),
            gluon=planned.gluon,
        )
        if self._launch.hopper != planned.gluon:
            raise KernelMismatchError(
                f"the plan's decode kernel, written in Gluon for Hopper, does not run on {context.device} with Triton "
                f"{triton.__version__}",
                hint="select on the machine that runs the layers",
            )
        if self._launch.hopper:
            import_library("attn_select_triton.kernels.mla_decode_hopper")  # with Gluon, now and not in the first step
        self._sms = sm_count(context.device)
        self._per_token = config.num_heads * (rank + 1)
        room = plan.workspace_bytes // 4
        self._fixed_split = 0
        self._pieces: Tensor | None = None
        if planned.fixed_splits:
            self._fixed_split = fixed_split(context.max_model_len, LEAST_FIXED_SPLIT, TILE)
            tokens = min(context.max_num_batched_tokens, context.max_num_seqs * longest)
            room = tokens * self._per_token * self._fixed_splits(context.max_model_len)
        elif context.cuda_graphs:
            most = context.max_num_seqs + latent_pieces(1, self._sms)
            self._pieces = torch.empty(most, FIELDS.value, dtype=torch.int32, device=context.device)
        self._workspace = torch.empty(room, dtype=torch.float32, device=context.device)

    def _fixed_splits(self, max_seq_len: int) -> int:
        # Never one: its LSE would skip the merge, and differ in the last bit from a batch with longer requests.
        return max(2, -(-max_seq_len // self._fixed_split))

    def _splits(self, common: CommonAttentionMetadata, room: int) -> dict[str, Any]:
        """Return how ``mla_decode`` is to split the keys.

        Args:
            room: partial results that the workspace holds.
        """
        if self._fixed_split:
            return {"num_splits": self._fixed_splits(common.max_seq_len), "split_tokens": self._fixed_split}
        rows = self.context.config.num_heads * max(1, common.max_query_len)  # a step may have no tokens at all
        units = -(-rows // self._launch.block_m)
        most = max(1, room // max(1, common.num_actual_tokens))
        if self._pieces is not None:  # the same at capture and replay: the bound follows from padded sizes
            most = min(most, mla_num_splits(common.num_reqs * units, self.context.max_model_len, self._sms))
        lens = common.seq_lens_cpu.numpy().astype(np.int64)
        splits, tokens = latent_splits(lens, units, most, self._sms)
        captured, capacity = None, min(common.num_reqs * splits, common.num_reqs + int(lens.sum()) // tokens)
        if self._pieces is not None:
            splits, capacity = most, common.num_reqs + latent_pieces(units, self._sms)
            captured = self._pieces[:capacity]
        if splits == 1:
            return {"num_splits": 1, "split_tokens": tokens}
        pieces = list_pieces(
            common.query_start_loc,
            common.seq_lens,
            capacity=capacity,
            split_tokens=tokens,
            most_splits=splits,
            pieces=captured,
        )
        # Few are merged faster in a small chunk.
        chunk = min(MERGE_CHUNK, 1 << max(1, splits - 1).bit_length())
        return {"num_splits": splits, "pieces": pieces, "merge_chunk": chunk}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACall:
        """As ``AttentionMetadataBuilder.build``: launches nothing, and every tensor in it is the batch's own.

        Raises:
            BatchError: partial results would take more than what was reserved.
        """
        common, workspace = common_attn_metadata, self._workspace
        assert workspace is not None
        reserved = workspace.numel() // self._per_token
        split = self._splits(common, reserved)
        splits = split["num_splits"]
        if splits > 1 and common.num_actual_tokens * splits > reserved:
            raise BatchError(
                f"{common.num_actual_tokens} decode tokens in {splits} splits for max_seq_len = {common.max_seq_len} "
                f"need {common.num_actual_tokens * splits} partial results; the workspace holds {reserved}. The "
                f"capacity of the group sets it: max_model_len = {self.context.max_model_len}, "
                f"max_num_seqs = {self.context.max_num_seqs}"
            )
        arguments = {
            "query_start_loc": common.query_start_loc,
            "seq_lens": common.seq_lens,
            "block_table": common.block_table_tensor,
            "max_query_len": common.max_query_len,
            "launch": self._launch,
            "workspace": workspace,
            "causal": self._causal and common.causal,
            **split,
        }
        return MLACall(common.num_actual_tokens, arguments)

    def build_prefill(self, varlen: VarlenMetadata) -> MLACall:
        """Return the metadata of one ``forward_mha`` call."""
        starts = varlen.key_start_loc
        # The kernel chooses its tiles by the longest request, which batch invariance must not see.
        longest = self.context.max_model_len if self.context.config.batch_invariant else varlen.max_key_len
        arguments = {
            "query_start_loc": varlen.query_start_loc,
            "key_start_loc": starts[:-1],
            "seq_lens": starts[1:] - starts[:-1],
            "max_seq_len": longest,
            "terms": _CAUSAL if varlen.causal else _WHOLE,
        }
        return MLACall(int(varlen.query_start_loc_cpu[-1]), arguments, self._counter)


class TritonMLAImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(
        self, context: BackendContext, *, scale: float, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None
    ) -> None:
        super().__init__(context, scale=scale, sinks=sinks, alibi_slopes=alibi_slopes)
        self._fp8 = context.config.cache_dtype in FP8_DTYPES
        self.takes_query_parts = bool(context.config.qk_rope_head_dim)
        self._decode = on_device(context.device, mla_decode)
        self._prefill = on_device(context.device, self._run_prefill)
        self._warps: Any = None
        if planned_prefill(context).warp_specialised and context.device.type == "cuda":
            check_gluon(context.device)
            # Gluon is experimental: other releases of Triton may not have what this module imports.
            self._warps = import_library("attn_select_triton.kernels.prefill_hopper")

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        attn_metadata: MLACall,
        output: Tensor,
        output_lse: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; an FP8 cache is read with ``layer.scales.k_float``, and a query
        that a kernel rounds with ``layer.scales.q_float``."""
        tokens, part = attn_metadata.num_tokens, output
        if output.shape[0] != tokens:
            part = output[:tokens]
        if isinstance(query, tuple):
            query = query[0][:tokens], query[1][:tokens]
        elif query.shape[0] != tokens:
            query = query[:tokens]
        scales = (layer.scales.k_float, layer.scales.q_float) if self._fp8 else (1.0, 1.0)
        lse = output_lse if output_lse is None or output_lse.shape[0] == tokens else output_lse[:tokens]
        dense = lse if lse is None or lse.is_contiguous() else lse.contiguous()
        self._decode(
            query,
            kv_cache,
            part,
            scale=self.scale,
            output_lse=dense,
            kv_scale=scales[0],
            q_scale=scales[1],
            **attn_metadata.arguments,
        )
        if lse is not None and dense is not None and dense is not lse:
            lse.copy_(dense)
        return output

    def forward_mha(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: MLACall,
        output: Tensor,
        output_lse: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mha``."""
        tokens = attn_metadata.num_tokens
        part, lse = output[:tokens], None if output_lse is None else output_lse[:tokens]
        if not tokens or not key.shape[0]:
            part.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return output
        dense = lse if lse is None or lse.is_contiguous() else lse.contiguous()
        self._prefill(attn_metadata, query[:tokens], key, value, part, dense)
        if lse is not None and dense is not None and dense is not lse:
            lse.copy_(dense)
        return output

    def _run_prefill(
        self, call: MLACall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None
    ) -> None:
        if self._warps is None or not self._warps.readable(key, value):
            prefill_attention(query, key, value, output, scale=self.scale, output_lse=lse, **call.arguments)
            return
        if call.prepared is None:
            of_step = {name: given for name, given in call.arguments.items() if name != "terms"}
            call.prepared = self._warps.Prefill(num_tokens=call.num_tokens, counter=call.counter, **of_step)
        if lse is None:  # written all the same, so that one kernel serves prompts with and without a cached context
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        call.prepared(query, key, value, output, scale=self.scale, terms=call.arguments["terms"], output_lse=lse)


class TritonMLABackend(AttentionBackend):
    """``TRITON_MLA``."""

    impl_cls = TritonMLAImpl
    builder_cls = TritonMLAMetadataBuilder
    compiling = COMPILING

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
