"""``LayerGroup``: what layers, captured steps and engines ask of a group, whether it runs a step whole or in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.lines import byte_text
from attn_select.decide.selection import Selection
from attn_select.layer.cache_format import CacheFormat
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.runtime import checks
from attn_select.runtime.backend import Progress
from attn_select.runtime.batch_checks import BatchChecks
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.group_cache import GroupCache
from attn_select.runtime.loaded_backend import LoadedBackend
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.scales import Scales
from attn_select.runtime.terms import Terms
from attn_select.runtime.warm_up import WarmUp, warm_up


class LayerGroup(ABC):
    """The layers of one kind: one metadata build per step for all of them.

    Args:
        selection: of the layers.
        device: where the layers run.
        backends: by phase (``load_backends``); where steps run in parts, those that read the cache.
        capacity: bounds of a batch.
        cuda_graphs: whether steps will be captured.
        block_size: tokens per block of the batches' tables; None: the cache has the same.
        cache: the KV cache of the layers; None: the one that the backends share.
        checked: whether batches and tensors are read back and checked; None: as ``ATTN_SELECT_CHECK`` says. A group
            that is a part of another one is not checked: the outer group checks what layers are given.

    Attributes:
        config: the layers.
        kv_layout, block_size: of the cache; the block size is the allocator's. None without a cache.
        kernel_block_size: tokens per block in which the cache is laid out; divides ``block_size``. A kernel of smaller
            blocks gets a view (``kv_cache.in_blocks_of``).
        backends: by phase, the same object in both where one serves both.
        distinct: every backend once.
        unified: whether one backend serves every phase that the layers have: then batches are not split.
        cache: how the layers' caches are laid out.
        interleave: neighbouring positions that one rank keeps; 1 where ranks share no cache.
    """

    interleave = 1

    def __init__(
        self,
        selection: Selection,
        device: torch.device,
        backends: Mapping[Phase, LoadedBackend],
        capacity: Capacity,
        *,
        cuda_graphs: bool,
        block_size: int | None = None,
        cache: GroupCache | None = None,
        checked: bool | None = None,
    ) -> None:
        self.selection, self.config, self.device = selection, selection.config, device
        self.backends, self.capacity, self.cuda_graphs = backends, capacity, cuda_graphs
        self.distinct = tuple({id(backend): backend for backend in backends.values()}.values())
        self.unified = len(self.distinct) == 1 and len(backends) == len(self.config.phases)
        sizes = [own.context.block_size for own in self.distinct if own.context.block_size is not None]
        # Dense MLA prefill reads no cache through a backend, so alone it leaves the kernel's block size open.
        layout, size = selection.kv_layout, selection.block_size
        self.cache = cache or GroupCache(self.config, device, layout, size, max(sizes, default=size))
        self.block_size = block_size or self.cache.block_size
        self.kv_layout, self.kernel_block_size = self.cache.kv_layout, self.cache.kernel_block_size
        on = checks.checks_enabled() if checked is None else checked
        self.checks = BatchChecks(self.config, self.capacity, self.block_size, self.cache, on)

    @property
    def checked(self) -> bool:
        """Whether batches and tensors are read back and checked."""
        return self.checks.checked

    def __deepcopy__(self, memo: object) -> LayerGroup:
        """Return the group itself: copies of a layer belong to the same group and take the same metadata."""
        return self

    @property
    def cache_format(self) -> CacheFormat | None:
        """What another side must share to exchange blocks with the layers' caches; None without a cache."""
        cache = self.cache
        if cache.kv_layout is None or cache.block_size is None or cache.kernel_block_size is None:
            return None
        # The selection's format, with this group's ``interleave``.
        return CacheFormat(self.config, cache.kv_layout, cache.block_size, cache.kernel_block_size, self.interleave)

    @abstractmethod
    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> Any:
        """Build the step's metadata for all layers of the kind. Does not synchronise with the device.

        Args:
            common_attn_metadata: the batch; tables in the allocator's blocks.
            common_prefix_len: tokens that all requests share (``cascade.common_prefix_len``); used where the backend's
                ``use_cascade_attention`` says so.
            fast_build: prefer a quick build over a quick kernel.

        Returns:
            ``AttentionMetadata``, with MLA ``MLAMetadata``.

        Raises:
            BatchError: the batch exceeds the capacity, its tables have another block size than the group, decodes do
                not come first where they must, a phase has no backend here, ``common_prefix_len`` is not a multiple
                of the block size or longer than what a request had cached, or (in checked mode) anything else is
                wrong with the batch.
        """

    @abstractmethod
    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Build what a graph is captured with. All requests are of one phase unless one backend serves both."""

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

    @property
    @abstractmethod
    def reorder_batch_threshold(self) -> int | None:
        """Queries up to this many tokens count as decodes and must come first; None: any order is accepted."""

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Scratch device memory that each backend reserves at most, bytes, as the plans say."""
        found: dict[str, int] = {}
        for own in self.distinct:
            by_kernel = {plan.kernel: plan.workspace_bytes for plan in own.context.plans.values()}
            found[own.spec.name] = sum(by_kernel.values())
        return found

    def layer_in_parts(self, layer: type[Any], terms: Terms) -> Any:
        """Return what computes a layer in parts (ranks, trees of drafts); None where the kernels alone do."""
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
        return self.cache.allocate(num_blocks)

    @property
    def nan_tail_safe(self) -> bool:
        """Whether a NaN that lies behind a request's end in its last block leaves its result alone.

        If not, call ``zero_blocks`` for every block that a request is given: its former owner may have left a NaN.
        """
        return all(plan.nan_tail_safe for own in self.distinct for plan in own.context.plans.values())

    def zero_blocks(self, kv_cache: Tensor, block_ids: Sequence[int] | Tensor) -> None:
        """Fill blocks of one layer's cache with zeros. Does not synchronise with the device.

        Call it for every layer before the first step that uses newly allocated blocks, where ``nan_tail_safe`` is
        False. Later writes and kernels of the same stream see the zeros. Blocks that are shared (``share_prefix``) hold
        tokens that are in use: leave them out.

        Args:
            kv_cache: from ``allocate_kv_cache``.
            block_ids: the allocator's blocks, as ``BlockPool.allocate`` returns them, or an integer tensor of them on
                the cache's device.

        Raises:
            ConfigError: the layers keep no cache.
            BatchError: this is no cache of this group, or an id is no integer or outside the cache. The ids of a tensor
                are not read, so only their dtype is checked.
        """
        self.cache.zero_blocks(kv_cache, block_ids)

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
        self.checks.batch(common)

    def check_contents(
        self,
        scales: Scales,
        tensors: Mapping[str, Tensor | None],
        kv_cache: Tensor | None,
        common: CommonAttentionMetadata,
    ) -> None:
        """Check everything about one layer's call that must be read back or costs time (checked mode). Synchronises."""
        # While a CUDA graph is captured nothing can be read back, and nothing is checked: the runner made that batch.
        self.checks.contents(scales, tensors, kv_cache, common)
