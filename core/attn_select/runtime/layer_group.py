"""``LayerGroup``: what layers, captured steps and engines ask of a group, whether it runs a step whole or in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.lines import byte_text
from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, show
from attn_select.layer.cache_format import CacheFormat
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.runtime import checks
from attn_select.runtime import kv_cache as caches
from attn_select.runtime.backend import Progress
from attn_select.runtime.batch import to_device
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.integers import integers, size
from attn_select.runtime.loaded_backend import LoadedBackend, load_backends
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, split_by_phase
from attn_select.runtime.overlaps import check_no_self_overlap, check_overlaps
from attn_select.runtime.scales import Scales
from attn_select.runtime.terms import Terms
from attn_select.runtime.warm_up import WarmUp, warm_up

_CONTENTS = ("query", "key", "value", "kv_c_normed", "k_pe")
"""What a layer is given that must hold finite numbers; outputs are poisoned in tests."""
_WRITTEN = ("output", "output_lse", "output_block_scale")
"""What a layer is given to write, beside its cache."""
_OF_BATCHES = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")


class LayerGroup(ABC):
    """The layers of one kind: one metadata build per step for all of them.

    The layers share its workspaces: one step runs after the other. Steps side by side take a group each.

    Args:
        selection: from ``select``; every phase must have a backend.
        device: where the layers run; None: the CPU or the current CUDA device, whichever the selection was made for.
        capacity: bounds of a batch.
        cuda_graphs: whether steps will be captured (``CudaGraphRunner``).
        phases: the phases whose backends are loaded; None: all that the layers have. A batch that needs another phase
            is refused.
        checked: whether batches and tensors are read back and checked; None: as ``ATTN_SELECT_CHECK`` says. A group
            that is a part of another one is not checked: the outer group checks what layers are given.
        parts: groups that run the steps, where this one runs none by itself; the first that has a phase lends its
            backend.
        block_size: tokens per block of the batches' tables; None: the selection's.

    Attributes:
        config: the layers.
        kv_layout, block_size: of the cache; the block size is the allocator's. None without a cache.
        kernel_block_size: tokens per block in which the cache is laid out; divides ``block_size``. A kernel of smaller
            blocks gets a view (``kv_cache.in_blocks_of``).
        backends: by phase, the same object in both where one serves both.
        distinct: every backend once.
        unified: whether one backend serves every phase that the layers have.
        whole: the phase that all of a batch is computed in; None: batches are split in decodes and prefills.
        checked: as the argument.
        interleave: neighbouring positions that one rank keeps; 1 where ranks share no cache.

    Raises:
        NoBackendError: a phase has no backend.
        RuntimeMissingError, ImportError: a backend cannot be loaded.
        ConfigError: the selection was made for a device that is not here, or the phases' kernels share no block size
            within this layout.
    """

    interleave = 1

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        checked: bool | None = None,
        parts: Sequence[LayerGroup] = (),
        block_size: int | None = None,
    ) -> None:
        self.selection, self.config, self.cuda_graphs = selection, selection.config, cuda_graphs
        self.capacity, self.parts = capacity or Capacity(), tuple(parts)
        self.device: torch.device
        self.backends: dict[Phase, LoadedBackend] = {}
        if not parts:
            self.device, self.backends = load_backends(
                selection, device, self.capacity, cuda_graphs=cuda_graphs, phases=phases
            )
        for part in parts:
            self.device, self.backends = part.device, {**part.backends, **self.backends}
        backends, self.distinct = self.backends, tuple(dict.fromkeys(self.backends.values()))
        self.unified = len(self.distinct) == 1 and len(backends) == len(self.config.phases)
        self.whole = next(iter(backends)) if self.unified else None
        sizes = [own.context.block_size for own in self.distinct if own.context.block_size is not None]
        self.kv_layout, self.block_size = selection.kv_layout, block_size or selection.block_size
        # Dense MLA prefill reads no cache through a backend, so alone it leaves the kernel's block size open.
        self.kernel_block_size = max(sizes, default=selection.block_size)
        self.checked = checks.checks_enabled() if checked is None else checked
        self._last_batch: CommonAttentionMetadata | None = None

    def __deepcopy__(self, memo: object) -> LayerGroup:
        """Return the group itself: copies of a layer belong to the same group and take the same metadata."""
        return self

    @property
    def cache_format(self) -> CacheFormat | None:
        """What another side must share to exchange blocks with the layers' caches; None without a cache."""
        layout, size = self.kv_layout, self.selection.block_size
        if layout is None or size is None or self.kernel_block_size is None:
            return None
        # The selection's format, with this group's ``interleave``.
        return CacheFormat(self.config, layout, size, self.kernel_block_size, self.interleave)

    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> Any:
        """Build the step's metadata for all layers of the kind. Does not synchronise with the device.

        Args:
            common_attn_metadata: the batch; tables in the allocator's blocks.
            common_prefix_len: tokens that all requests share (``cascade.common_prefix_len``); used where the backend's
                ``use_cascade_attention`` says so, never with MLA, trees of drafts or ranks.
            fast_build: prefer a quick build over a quick kernel.

        Returns:
            ``AttentionMetadata``.

        Raises:
            BatchError: the batch exceeds the capacity, its tables have another block size than the group, decodes do
                not come first where they must, a phase has no backend here, ``common_prefix_len`` is not a multiple
                of the block size or longer than what a request had cached, or (in checked mode) anything else is
                wrong with the batch.
        """
        self.check_batch(common_attn_metadata)
        return self.build_step(common_attn_metadata, common_prefix_len, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Build what a graph is captured with. All requests are of one phase unless one backend serves both.

        Raises:
            BatchError: as ``build``; with MLA also for queries longer than a decode's: replayed steps would be
                prefills.
        """
        self.check_batch(common_attn_metadata)
        return self.build_step(common_attn_metadata, captured=True)

    @abstractmethod
    def build_step(
        self, common: CommonAttentionMetadata, prefix: int = 0, fast: bool = False, captured: bool = False
    ) -> Any:
        """Build the metadata of a batch that was checked, as ``build`` does or ``build_for_cudagraph_capture``."""

    def phases_of(self, common: CommonAttentionMetadata) -> list[tuple[Phase, slice, CommonAttentionMetadata]]:
        """Return each phase that has tokens in a batch, with its tokens and its requests; decodes come first."""
        tokens = common.num_actual_tokens
        if not tokens:  # kernels need not know of such steps
            return []
        if self.whole is not None:
            return [(self.whole, slice(0, tokens), common)]
        longest = self.config.max_decode_query_len if "decode" in self.backends else 1
        return split_by_phase(common, self.reorder_batch_threshold or longest)

    def backend_for(self, phase: Phase) -> LoadedBackend:
        """Return the backend of a phase; BatchError where the backends of this phase were not loaded."""
        if phase not in self.backends:
            text = f"the batch has requests in {phase}, but this group was made for {' and '.join(self.backends)} only"
            raise BatchError(text, hint=f"make the group without phases, or with {phase} among them")
        return self.backends[phase]

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured; mixed batches only where one backend serves both phases."""
        level = (self.backends.get("decode") or self.distinct[0]).builder.cudagraph_support
        return level if level != "ALWAYS" or self.unified else "UNIFORM_BATCH"

    @cached_property
    def reorder_batch_threshold(self) -> int | None:
        """Queries up to this many tokens count as decodes and must come first; None: any order is accepted."""
        wanted = [own.builder.reorder_batch_threshold for own in self.distinct]
        if len(self.distinct) > 1:
            wanted.append(self.config.max_decode_query_len)
        return min((threshold for threshold in wanted if threshold is not None), default=None)

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Scratch device memory that each backend reserves at most, bytes, as the plans say."""
        found: Counter[str] = Counter()
        for part in self.parts:  # each has builders, and so buffers, of its own
            found.update(part.workspace_bytes)
        for own in () if self.parts else self.distinct:
            by_kernel = {plan.kernel: plan.workspace_bytes for plan in own.context.plans.values()}
            found[own.spec.name] = sum(by_kernel.values())
        return dict(found)

    def layer_in_parts(self, layer: type[Any], terms: Terms) -> Any:
        """Return what computes a layer in parts (ranks, trees of drafts), ``merged``; None where kernels alone do."""
        return None

    def explain(self) -> str:
        """Return as text which backends run the steps, and what memory they reserve."""
        lines = [f"{phase:<10} {own.spec.name}\n" for phase, own in self.backends.items()]
        reserved = self.workspace_bytes
        each = ", ".join(f"{name} {byte_text(size)}" for name, size in reserved.items())
        return "".join(lines) + f"{'workspace':<10} {byte_text(sum(reserved.values()))} ({each})\n"

    def allocate_kv_cache(self, num_blocks: int) -> Tensor:
        """Return one layer's cache for ``num_blocks`` of the allocator's blocks, zeroed. Across ranks: a rank's share.

        Raises:
            ConfigError: the layers keep no cache, ``num_blocks`` is below 1, or they do not fit in memory.
        """
        layout, kernel_block_size, ratio = self._blocks()
        blocks = size("num_blocks", num_blocks)
        return caches.allocate_kv_cache(layout, self.config, blocks * ratio, kernel_block_size, self.device)

    def _blocks(self) -> tuple[str, int, int]:
        """Return the cache's layout, its tokens per block, and how many of these make one of the allocator's blocks."""
        own = self.selection.block_size  # across ranks ``block_size`` counts the positions of all of them
        if self.kv_layout is None or own is None or self.kernel_block_size is None:
            text = f"attn_type = {self.config.attn_type!r}: its layers keep no KV cache"
            raise ConfigError(text, fields=["attn_type"])
        return self.kv_layout, self.kernel_block_size, own // self.kernel_block_size

    def num_blocks_of(self, kv_cache: Tensor | None) -> int:
        """Return how many of the allocator's blocks a layer's cache holds. Raises as ``check_cache`` does."""
        layout, kernel_block_size, ratio = self._blocks()
        return checks.check_cache(kv_cache, layout, self.config, self.device, kernel_block_size) // ratio

    @property
    def nan_tail_safe(self) -> bool:
        """Whether a NaN that lies behind a request's end in its last block leaves its result alone.

        If not, call ``zero_blocks`` for every block that a request is given: its former owner may have left a NaN.
        """
        return all(plan.nan_tail_safe for own in self.distinct for plan in own.context.plans.values())

    def zero_blocks(self, kv_cache: Tensor, block_ids: Sequence[int]) -> None:
        """Fill blocks of one layer's cache with zeros. Does not synchronise with the device.

        Call it for every layer before the first step that uses newly allocated blocks, where ``nan_tail_safe`` is
        False. Later writes and kernels of the same stream see the zeros. Blocks that are shared (``share_prefix``) hold
        tokens that are in use: leave them out.

        Args:
            kv_cache: from ``allocate_kv_cache``.
            block_ids: the allocator's blocks, as ``BlockPool.allocate`` returns them.

        Raises:
            ConfigError: the layers keep no cache.
            BatchError: this is no cache of this group, or an id is no integer or outside the cache.
        """
        layout, _, ratio = self._blocks()
        in_cache = self.num_blocks_of(kv_cache)
        blocks = integers(block_ids)
        if blocks is None:
            raise BatchError(f"block_ids = {show(block_ids)}: accepted is a sequence of integers on the host")
        if wrong := [block for block in blocks if not 0 <= block < in_cache]:
            raise BatchError(f"block_ids holds {wrong[0]}: accepted are the cache's blocks, 0 to {in_cache - 1}")
        ids = to_device(torch.tensor(blocks, dtype=torch.int64), self.device)
        if ratio > 1:
            # A block of ``ratio`` kernel blocks: they lie in a row in the cache.
            ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).flatten()
        caches.zero_blocks(kv_cache, layout, self.config, ids)

    def warm_up(self, progress: Progress | None = None) -> WarmUp:
        """Run steps of the kinds that serving has through a layer of this group, so that later ones compile nothing.

        Kernels that a backend can compile side by side are compiled first. The steps then run on a cache of one block,
        which is freed again, and write nothing. Call it after the layers are made and before graphs are captured.

        Args:
            progress: called after each kernel and each step with its name, how many are done, and how many are known.

        Returns:
            What was done.

        Raises:
            ConfigError: the group has no layer yet.
        """
        return warm_up(self, progress)

    def check_batch(self, common: CommonAttentionMetadata) -> None:
        """Raise BatchError for a batch that the group was not made for; in checked mode also for its contents."""
        if not isinstance(common, CommonAttentionMetadata):
            what = "None" if common is None else f"a {type(common).__name__}"
            raise BatchError(f"common_attn_metadata is {what}: accepted is what prepare_batch returns")
        capacity = self.capacity
        if common.num_reqs > capacity.max_num_seqs or common.num_actual_tokens > capacity.max_num_batched_tokens:
            raise BatchError(
                f"a batch of {common.num_reqs} requests and {common.num_actual_tokens} tokens: this group was made for "
                f"max_num_seqs = {capacity.max_num_seqs} and max_num_batched_tokens = "
                f"{capacity.max_num_batched_tokens}",
                hint="make it with a larger Capacity, or split the batch",
            )
        if self.config.has_cache and (common.block_table_tensor is None or common.slot_mapping is None):
            missing = "block_table_tensor" if common.block_table_tensor is None else "slot_mapping"
            raise BatchError(f"{missing} is None: layers with a KV cache need it")
        if common.block_size is not None and self.block_size not in (None, common.block_size):
            raise BatchError(
                f"block_size = {common.block_size}: the batch's block table counts in blocks of that many tokens, but "
                f"this group's cache has blocks of {self.block_size}",
                hint="make the BlockTable with group.block_size; groups of other block sizes need tables of their own",
            )
        if common.mm_prefix_ranges is not None:
            checks.check_ranges(common, self.config)
        if common.tree_mask is not None:
            checks.check_tree_mask(common, self.config)
        if not common.causal and self.config.attention_chunk_size is not None:
            raise BatchError("causal = False, but the layers attend inside chunks, up to each query (accepted: True)")
        checks.check_shapes(common, self.config, self.block_size)
        if self.checked:
            self._last_batch = common
            checks.check_common(common, self.config, self.device, capacity.max_model_len)

    def check_prefix(self, common: CommonAttentionMetadata, prefix: int) -> None:
        """Compare a common prefix with the blocks and with what every request had cached."""
        if self.block_size is None:
            raise BatchError(f"common_prefix_len = {prefix}: layers without a KV cache share no prefix; pass 0")
        assert common.block_table_tensor is not None
        if prefix < 0 or prefix % self.block_size:
            raise BatchError(f"common_prefix_len = {prefix}: accepted are multiples of block_size = {self.block_size}")
        computed = common.num_computed_tokens_cpu
        if prefix > int(computed.min()):
            request = int(computed.argmin())
            raise BatchError(
                f"common_prefix_len = {prefix}: request {request} had {int(computed[request])} tokens cached before "
                "this step, and accepted is at most that"
            )
        if self.checked:
            checks.check_common_prefix(common.block_table_tensor, prefix, self.block_size)

    def check_contents(
        self,
        scales: Scales,
        tensors: Mapping[str, Tensor | None],
        kv_cache: Tensor | None,
        common: CommonAttentionMetadata,
    ) -> None:
        """Check everything about one layer's call that must be read back or costs time (checked mode). Synchronises."""
        # While a CUDA graph is captured nothing can be read back, and nothing is checked: the runner made that batch.
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        # The builders' buffers persist, so metadata of an earlier step now holds numbers of the later one.
        if common is not self._last_batch:
            raise BatchError(
                "attn_metadata is of an earlier step: group.build has since built another one in the same memory",
                hint="give the layers what the last group.build(common) returned",
            )
        written = {name: tensor for name, tensor in tensors.items() if name in _WRITTEN}
        read = {name: tensor for name, tensor in tensors.items() if name not in _WRITTEN}
        read |= {"q_scale": scales.q, "k_scale": scales.k, "v_scale": scales.v}
        read |= {name: getattr(common, name) for name in _OF_BATCHES}
        for name, tensor in written.items():
            check_no_self_overlap(name, tensor)
        check_overlaps({**written, "kv_cache": kv_cache}, read)
        for name, tensor in tensors.items():
            if tensor is not None:
                checks.check_strides(name, tensor, self.device)
                if name in _CONTENTS:
                    of_requests = name == "query" or self.config.attn_type != "encoder_decoder"
                    checks.check_finite(name, tensor, common, of_requests)
        checks.check_scales(scales)
        if self.kv_layout is None or self.block_size is None:
            return
        cache_blocks = self.num_blocks_of(kv_cache)
        assert kv_cache is not None
        checks.check_strides("kv_cache", kv_cache, self.device)
        checks.check_blocks(common, self.config, kv_cache, self.kv_layout, cache_blocks, self.block_size)
        if (indices := tensors.get("topk_indices")) is not None:
            checks.check_indices(indices, common, cache_blocks * self.block_size, self.block_size)
