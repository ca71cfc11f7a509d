"""What a backend brings to run: ``AttentionBackend``, ``AttentionMetadataBuilder``, ``AttentionImpl``, the MLA pair.

``BackendSpec.load`` names a subclass of ``AttentionBackend``. Per layer kind the runtime makes one builder, per
layer one impl; per step it calls ``builder.build`` once, and per layer ``impl.do_kv_cache_update`` and
``impl.forward``. Terms are vLLM's (v1/attention/backend.py, 0.33). Conventions that all backends keep:

- *LSE* is the natural logarithm of the softmax's denominator, float32 ``(num_tokens, num_heads)``, sinks included. A
  row without keys has output 0 and LSE -inf (or its sink).
- *Outputs* are written into the caller's tensor; rows behind ``num_actual_tokens`` are left alone.
- *Block tables* speak of blocks of ``context.block_size`` tokens, a size of the plan's ``kernel_block_sizes``, and
  their width is a multiple of the plan's ``block_table_width_multiple``.
- *Terms* (``attn_select.runtime.terms``) are what a layer is beyond its inputs. Its scales are there as device tensors
  and host floats: a path whose plan has an FP8 ``query_dtype`` quantises the query itself, with ``terms.scales.q``.
- *No synchronisation*: ``build`` reads ``_cpu`` tensors, never a device tensor. A host buffer that is copied from
  asynchronously is not written again before the copy has finished. ``batch.to_device`` takes fresh pinned memory from
  torch, which waits for the copy before it reuses that memory.
- *Persistence*: with CUDA graphs (``context.cuda_graphs``) every tensor that a kernel reads keeps its address from
  build to build.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from attn_select.backends.spec import BackendOptions, BackendPlan
from attn_select.errors import PluginError
from attn_select.layer.config import AttentionConfig, CudaGraphLevel, Phase
from attn_select.layer.dtypes import BITS
from attn_select.runtime import ops
from attn_select.runtime.cascade import MIN_PREFIX, MIN_REQUESTS
from attn_select.runtime.metadata import CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.terms import Outputs, Terms

K = TypeVar("K")
M = TypeVar("M")
Progress = Callable[[str, int, int], None]
"""Called with what was done, a kernel's name or a step, how many are done, and how many are known so far."""


@dataclass(slots=True, eq=False, kw_only=True)
class BackendContext:
    """What one backend is made for: one kind of layers on one device.

    Attributes:
        config: the layers.
        plans: the plan of each phase that this backend serves here.
        device: where tensors live.
        options: the backend's ``[backends.NAME]`` table.
        kv_layout: name from ``attn_select.layer.layouts``; None where no cache is read.
        block_size: tokens per block of the tables and cache views that this backend sees; None without a cache.
        max_num_seqs: most requests in a batch.
        max_num_batched_tokens: most tokens in a batch.
        max_model_len: most tokens of a request.
        cuda_graphs: whether steps will be captured: tensors that kernels read must then stay where they are.
    """

    config: AttentionConfig
    plans: Mapping[Phase, BackendPlan]
    device: torch.device
    options: BackendOptions
    kv_layout: str | None
    block_size: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    cuda_graphs: bool = False

    def kernel(self, kind: type[K], phase: Phase | None = None) -> K:
        """Return the kernel that a phase's plan names, of the plugin's class ``kind``; None: all plans name one."""
        plan = next(iter(self.plans.values())) if phase is None else self.plans[phase]
        assert isinstance(plan.kernel, kind)
        return plan.kernel

    def __deepcopy__(self, memo: object) -> BackendContext:
        """Return the context itself: it describes the group, which a copied layer stays in."""
        return self


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns a step's batch into what this backend's kernels want; one per kind of layers.

    Attributes:
        reorder_batch_threshold: queries up to this many tokens count as decodes and must come first in the batch; None:
            any order.
        takes_length_bounds: whether ``seq_lens_cpu`` of decodes may be upper bounds, as in an engine that speculates
            ahead of its GPU: the launch is made from the bounds, and the kernel reads the lengths on the device.
        least_cascade_bytes: bytes of keys and values that a cascade must save from being read again.
    """

    reorder_batch_threshold: int | None = None
    takes_length_bounds: ClassVar[bool] = False
    least_cascade_bytes: int = 0

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured: by default the decode plan's level, ALWAYS only if it is every plan's."""
        plans = self.context.plans
        level = (plans.get("decode") or plans["prefill"]).cuda_graph
        everywhere = all(plan.cuda_graph == "ALWAYS" for plan in plans.values())
        return level if level != "ALWAYS" or everywhere else "UNIFORM_BATCH"

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Return the metadata for one batch. Called once a step; must not synchronise with the device.

        Args:
            common_prefix_len: tokens at the start of every request that lie in the same blocks, where
                ``use_cascade_attention`` said yes, else 0.
            common_attn_metadata: the batch.
            fast_build: the metadata serves few layers (a draft model's): prefer a quick build over a quick kernel.
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Return the metadata to capture with; by default ``build`` without a common prefix."""
        return self.build(0, common_attn_metadata)

    def use_cascade_attention(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether to attend to a common prefix apart. Backends whose ``build`` ignores ``common_prefix_len`` say False.

        By default: a prefix of at least ``MIN_PREFIX`` tokens, at least ``MIN_REQUESTS`` requests, and a layer whose
        mask is the same for every query on the prefix: a causal decoder without window, ALiBi and image ranges, and
        not MLA. All plans must return the LSE, a request's result may depend on the rest of the batch, and the steps
        are not captured, since the split changes from step to step. The cascade must save ``least_cascade_bytes``.
        """
        context, config = self.context, self.context.config
        return (
            common_prefix_len >= MIN_PREFIX
            and common_attn_metadata.num_reqs >= MIN_REQUESTS
            and not config.mla
            and common_attn_metadata.causal
            and all(plan.returns_lse for plan in context.plans.values())
            and not context.cuda_graphs
            and config.attn_type == "decoder"
            and config.sliding_window is None
            and not config.alibi
            and not config.mm_prefix
            and not config.non_causal
            and not config.batch_invariant
            and self._cascade_bytes(common_prefix_len, common_attn_metadata.num_reqs) >= self.least_cascade_bytes
        )

    def _cascade_bytes(self, prefix_len: int, num_reqs: int) -> int:
        """Return the bytes of keys and values that are read once instead of by every request."""
        config = self.context.config
        elements = config.num_kv_heads * (config.head_size + config.value_head_size)
        return (num_reqs - 1) * prefix_len * elements * BITS[config.cache_dtype] // 8

    def build_prefill(self, varlen: VarlenMetadata) -> Any:
        """Return the metadata of one ``forward_mha`` call (MLA prefill only); by default ``varlen`` itself."""
        return varlen


class AttentionImpl(ABC, Generic[M]):
    """Runs one layer. Made once per layer.

    Args:
        context: what the layers of its kind are.
        terms: what this layer is beyond its inputs.
    """

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        self.context, self.terms = context, terms

    def do_kv_cache_update(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the step's keys and values into the cache, by default through ``ops.reshape_and_cache``.

        Args:
            key: ``(N, num_kv_heads, head_size)`` in the compute dtype, N at least ``len(slot_mapping)``.
            value: ``(N, num_kv_heads, value_head_size)``.
            kv_cache: one layer's cache in ``context.kv_layout``.
            slot_mapping: int64 slots of the first tokens; -1 is skipped.
        """
        assert self.context.kv_layout is not None
        tokens = slot_mapping.shape[0]
        # Only where there is padding, which few batches have: a view costs a microsecond.
        if key.shape[0] != tokens or value.shape[0] != tokens:
            key, value = key[:tokens], value[:tokens]
        ops.reshape_and_cache(
            key,
            value,
            kv_cache,
            slot_mapping,
            self.context.kv_layout,
            self.context.config,
            self.terms.scales,
        )

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: M,
        outputs: Outputs,
    ) -> Tensor:
        """Attend, write the result and return ``outputs.output``. The cache already holds this step's tokens.

        Args:
            query: ``(T', num_heads, head_size)`` in the compute dtype, T' at least ``num_actual_tokens``.
            key: ``(T', num_kv_heads, head_size)``; read only by layers without a cache. With a cache, its rows
                may belong to other tokens than the query's. None where nothing is new.
            value: ``(T', num_kv_heads, value_head_size)``, likewise.
            kv_cache: one layer's cache in ``context.kv_layout``, blocks of ``context.block_size``; None without.
            attn_metadata: what the builder built.
            outputs: what is written.
        """


class MLAAttentionImpl:
    """Runs one MLA layer (arXiv 2405.04434) by one or both of its computation paths.

    ``forward_mqa`` works on the latent cache with absorbed weights (decode, and all of sparse MLA), ``forward_mha`` on
    decompressed keys and values (prefill). A backend implements the paths of the phases that it serves.

    Raises:
        PluginError: a phase that the backend serves here has no path.
    """

    takes_query_parts: bool = False
    """Whether ``forward_mqa`` also takes the query as a pair, ``(T, num_heads, kv_lora_rank)`` and ``(T, num_heads,
    qk_rope_head_dim)`` of any strides but in the last dimension, so that who has them apart need not join them."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        for phase in context.plans:
            path = "forward_mqa" if phase == "decode" or context.config.sparse else "forward_mha"
            if getattr(type(self), path) is getattr(MLAAttentionImpl, path):
                raise PluginError(f"{type(self).__name__} has no {path}, but its backend's spec serves {phase}")
        self.context, self.terms = context, terms

    def do_kv_cache_update(self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the step's latents into the cache, by default through ``ops.concat_and_cache_mla``.

        Args:
            kv_c_normed: ``(N, kv_lora_rank)``, N at least ``len(slot_mapping)``.
            k_pe: ``(N, qk_rope_head_dim)``, rope applied.
            kv_cache: one layer's cache in layout ``MLA`` or ``FP8_DS_MLA``.
            slot_mapping: int64 slots of the first tokens; -1 is skipped.
        """
        assert self.context.kv_layout is not None
        tokens = slot_mapping.shape[0]
        if kv_c_normed.shape[0] != tokens or k_pe.shape[0] != tokens:
            kv_c_normed, k_pe = kv_c_normed[:tokens], k_pe[:tokens]
        ops.concat_and_cache_mla(
            kv_c_normed,
            k_pe,
            kv_cache,
            slot_mapping,
            self.context.kv_layout,
            self.context.config,
            self.terms.scales,
        )

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """Attend over latents with the absorbed query; write the latent output and return it.

        A kernel that takes no tensor to write to may return its own instead, of ``outputs.output``'s shape and dtype.
        That saves a copy, and callers go on with what is returned.

        Args:
            query: ``(T, num_heads, kv_lora_rank + qk_rope_head_dim)`` in the compute dtype; with ``takes_query_parts``
                also a pair.
            kv_cache: one layer's cache.
            attn_metadata: what ``build`` built for these requests.
            outputs: ``(T, num_heads, kv_lora_rank)`` in the compute dtype, and the LSE.
            topk_indices: int32 ``(T, sparse_top_k)``, with sparse MLA: physical slots, -1 behind or between them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward_mqa: its backend serves no decodes")

    def forward_mha(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any, outputs: Outputs) -> Tensor:
        """Attend to decompressed keys and values; write the output and return it.

        Args:
            query: ``(T, num_heads, qk_nope_head_dim + qk_rope_head_dim)``.
            key: ``(S, num_heads, qk_nope_head_dim + qk_rope_head_dim)``; a view, only the last dimension contiguous.
            value: ``(S, num_heads, v_head_dim)``; likewise.
            attn_metadata: what ``build_prefill`` built.
            outputs: ``(T, num_heads, v_head_dim)``, and the LSE.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward_mha: its backend serves no prefills")


class AttentionBackend:
    """Ties a backend's parts together; never instantiated. A subclass sets ``impl_cls`` and ``builder_cls``."""

    impl_cls: ClassVar[type[AttentionImpl[Any]] | type[MLAAttentionImpl]]
    """The class that runs a layer."""
    builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]
    """The class that builds its metadata."""
    forward_includes_kv_cache_update: ClassVar[bool] = False
    """Whether ``forward`` writes the cache itself; ``do_kv_cache_update`` is not called then."""
    compiling: ClassVar[Callable[[Progress], AbstractContextManager[Any]] | None] = None
    """A context in which the kernels that a launch lacks are compiled side by side, and not run; it ends when all are
    compiled, and tells its progress. ``compile_ahead`` runs steps in it, and ``LayerGroup.warm_up`` before it runs them
    in earnest. None: the first run of a step compiles what it lacks."""

    @classmethod
    def prepare(cls) -> None:
        """Check the kernel library, and begin what its first call would wait for. Called when the backend is loaded.

        Raises:
            ImportError, KernelMismatchError: the library is not there, or not one that the plugin was written for.
        """
