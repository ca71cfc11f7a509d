"""``TRITON_MLA`` at run time: decodes on the latent cache, prefills on decompressed keys and values.

The decode's kernel is the plan's: ``kernels.mla_decode_hopper`` or ``kernels.mla_decode``. Partial results of requests
in several pieces go through one workspace that the builder reserves and all layers share.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import triton
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.machine.library_imports import import_library
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_triton.facts.planned_kernels import MLADecodeKernel
from attn_select_triton.kernels.launch import Terms as KernelTerms
from attn_select_triton.kernels.launch import capability_of, gpu_of, hopper_prefill_launch, sm_count
from attn_select_triton.kernels.mla_decode import mla_decode, mla_launch, mla_workspace
from attn_select_triton.kernels.pieces import FIELDS, list_pieces
from attn_select_triton.kernels.prefill import prefill_attention
from attn_select_triton.kernels.work_list import list_work
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device
from attn_select_triton.runtime.schedule import (
    Lens,
    fixed_split,
    latent_keys,
    latent_pieces,
    prefill_shares,
    prefill_work,
)
from attn_select_triton.runtime.side_by_side import COMPILING
from attn_select_triton.runtime.triton_attn_metadata import check_gluon, planned_prefill
from attn_select_triton.tuning import way_cost

LEAST_FIXED_SPLIT, TILE = 1024, 64  # Keys of a batch-invariant split, at least; it has whole tiles
_CAUSAL, _WHOLE = KernelTerms(causal=True), KernelTerms(causal=False)


@dataclass(slots=True)
class MLACall:
    """The decodes of one batch, or one call on decompressed keys and values."""

    num_tokens: int  # queries of all requests
    arguments: dict[str, Any]  # of ``mla_decode`` or ``prefill_attention`` that are the same for all layers
    # further arguments of ``prefill_hopper.Prefill``, where the plan has it
    warps: dict[str, Any] = field(default_factory=dict)
    prepared: Any = None  # its launch, once a layer ran by it


class TritonMLAMetadataBuilder(AttentionMetadataBuilder[MLACall]):
    """Builds the metadata of one kind of layers: launch, pieces of the keys and the workspace for their results."""

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
        room = plan.workspace_bytes // 4
        requests, self._fixed_split = context.max_num_seqs, 0
        if planned.fixed_splits:
            self._fixed_split = fixed_split(context.max_model_len, LEAST_FIXED_SPLIT, TILE)
            slots = self._most_pieces(min(context.max_num_batched_tokens, requests), 1)
            room = slots * mla_workspace(longest, config.num_heads, rank)
        self._workspace = torch.empty(room, dtype=torch.float32, device=context.device)
        self._pieces: Tensor | None = None
        if context.cuda_graphs:
            rows = self._most_pieces(requests, 1) + requests
            self._pieces = torch.empty(rows, FIELDS.value, dtype=torch.int32, device=context.device)

    def _most_pieces(self, requests: int, units: int) -> int:
        """Return how many pieces any step of so many requests has at most, of ``units`` programs each."""
        if self._fixed_split:
            return requests * -(-self.context.max_model_len // self._fixed_split)
        return requests + latent_pieces(units, self._sms)

    def _split(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """Return how ``mla_decode`` is to split the keys; BatchError where the results outgrow what was reserved."""
        config, requests = self.context.config, common.num_reqs
        tokens = max(1, common.max_query_len)  # a step may have no tokens at all
        assert self._workspace is not None
        slots = self._workspace.numel() // mla_workspace(tokens, config.num_heads, cast(int, config.kv_lora_rank))
        units = -(-config.num_heads * tokens // self._launch.block_m)
        lens: Lens = common.seq_lens_cpu.numpy().astype(np.int64)
        keys = self._fixed_split or latent_keys(lens, units, slots, self._sms)
        splits = np.maximum(-(-lens // keys), 1)
        cut = splits[splits > 1]
        taken = int(cut.sum())
        if taken > slots:
            raise BatchError(
                f"keys of {requests} requests, up to {int(lens.max())} of one, in pieces of {keys} have {taken} "
                f"partial results of {tokens} query tokens; the workspace holds {slots}. The group's capacity sets it: "
                f"max_model_len = {self.context.max_model_len}, max_num_seqs = {self.context.max_num_seqs}"
            )
        capacity, merges = int(splits.sum()), len(cut)
        if self._pieces is not None:  # the same at capture and replay
            # A request in several pieces takes two slots at least.
            capacity, merges = self._most_pieces(requests, units), min(requests, slots // 2)
        elif not merges and not self._fixed_split:
            return {}
        pieces = list_pieces(
            common.query_start_loc,
            common.seq_lens,
            capacity=capacity,
            split_tokens=keys,
            most_splits=slots,
            merges=merges,
            pieces=None if self._pieces is None else self._pieces[: capacity + merges],
        )
        return {"pieces": pieces, "merges": merges}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACall:
        """As ``AttentionMetadataBuilder.build``: all tensors but workspace and pieces are the batch's own."""
        common = common_attn_metadata
        arguments = {
            "query_start_loc": common.query_start_loc,
            "seq_lens": common.seq_lens,
            "block_table": common.block_table_tensor,
            "max_query_len": common.max_query_len,
            "launch": self._launch,
            "workspace": self._workspace,
            "causal": self._causal and common.causal,
            **self._split(common),
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
        return MLACall(int(varlen.query_start_loc_cpu[-1]), arguments, self._warps(varlen))

    def _warps(self, varlen: VarlenMetadata) -> dict[str, Any]:
        """Return further arguments of ``prefill_hopper.Prefill``; none where it is not of the plan."""
        config, device = self.context.config, self.context.device
        value_size, qk_size = (
            cast(int, config.v_head_dim),
            (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0),
        )
        if self._counter is None:
            return {}
        lens, keys = (bounds.diff().numpy() for bounds in (varlen.query_start_loc_cpu, varlen.key_start_loc_cpu))
        heads, gpu = (config.num_heads, config.num_heads), gpu_of(device)
        room = 0 if self._workspace is None or config.batch_invariant else self._workspace.numel() // (value_size + 1)
        step = prefill_work(lens, keys, heads=heads, causal=varlen.causal, window=0)
        shares = prefill_shares(way_cost("warps"), step, gpu, room).counts
        tile = hopper_prefill_launch(qk_size, value_size)
        assert tile is not None
        order = np.argsort(keys / -shares, kind="stable")
        work = list_work(lens, shares, heads=heads, tile_rows=tile.block_m, device=device, longest_first=order)
        return {"counter": self._counter, "work": work, "workspace": self._workspace if work.partials else None}


class TritonMLAImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
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
        query: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        attn_metadata: MLACall,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; an FP8 cache is read with ``terms.scales.k_float``, and a query
        that a kernel rounds with ``terms.scales.q_float``."""
        tokens, terms = attn_metadata.num_tokens, self.terms
        part = outputs.first(tokens)
        if isinstance(query, tuple):
            query = query[0][:tokens], query[1][:tokens]
        elif query.shape[0] != tokens:
            query = query[:tokens]
        scales = (terms.scales.k_float, terms.scales.q_float) if self._fp8 else (1.0, 1.0)
        dense = part.lse if part.lse is None or part.lse.is_contiguous() else part.lse.contiguous()
        self._decode(
            query,
            kv_cache,
            part.output,
            scale=terms.scale,
            output_lse=dense,
            kv_scale=scales[0],
            q_scale=scales[1],
            **attn_metadata.arguments,
        )
        if part.lse is not None and dense is not None and dense is not part.lse:
            part.lse.copy_(dense)
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
        dense = part.lse if part.lse is None or part.lse.is_contiguous() else part.lse.contiguous()
        self._prefill(attn_metadata, query[:tokens], key, value, part.output, dense)
        if part.lse is not None and dense is not None and dense is not part.lse:
            part.lse.copy_(dense)
        return outputs.output

    def _run_prefill(
        self, call: MLACall, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None
    ) -> None:
        if self._warps is None or not self._warps.readable(key, value):
            prefill_attention(query, key, value, output, scale=self.terms.scale, output_lse=lse, **call.arguments)
            return
        if call.prepared is None:
            of_step = {name: given for name, given in call.arguments.items() if name != "terms"}
            call.prepared = self._warps.Prefill(**of_step, **call.warps)
        if lse is None:  # written all the same, so that one kernel serves prompts with and without a cached context
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        call.prepared(query, key, value, output, scale=self.terms.scale, terms=call.arguments["terms"], output_lse=lse)


class TritonMLABackend(AttentionBackend):
    """``TRITON_MLA``."""

    impl_cls = TritonMLAImpl
    builder_cls = TritonMLAMetadataBuilder
    compiling = COMPILING

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
