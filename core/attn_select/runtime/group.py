"""The layers of one kind: the loaded backends of a selection, and one metadata build per step for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selection import Selection
from attn_select.decide.text import byte_text
from attn_select.errors import ConfigError, show
from attn_select.layer.config import AttentionConfig, CudaGraphLevel, Phase
from attn_select.runtime import checks
from attn_select.runtime import kv_cache as caches
from attn_select.runtime.backend import AttentionBackend, BackendContext, Progress
from attn_select.runtime.batch import to_device
from attn_select.runtime.dispatch import Dispatch, check_dispatch, make_dispatch
from attn_select.runtime.kernel_blocks import KernelTables, kernel_block_sizes, shared_block_sizes, width_multiple
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, Split, split_decodes_and_prefills
from attn_select.runtime.scales import Scales
from attn_select.runtime.virtual_batches import VirtualBatches, most_requests
from attn_select.runtime.warm_up import WarmUp, warm_up
from attn_select.runtime.ways import Served, Way, Ways


@dataclass(slots=True)
class Capacity:
    """The most that a batch may hold; persistent buffers and workspaces are sized by it.

    Attributes:
        max_num_seqs: requests.
        max_num_batched_tokens: tokens of one step, all requests together.
        max_model_len: tokens of one request.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: accepted are integers from 1", fields=[name])


@dataclass(slots=True)
class Part:
    """The requests of a batch that one backend computes.

    Attributes:
        phase: decodes or prefills; of a batch that is not split, the first that the group serves.
        backend: the name of the backend that computes them.
        start, end: the tokens, ``start .. end - 1``.
        metadata: what its builder built.
    """

    phase: Phase
    backend: str
    start: int
    end: int
    metadata: Any


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch as the layers of a group want it.

    Attributes:
        group: the group that built it; layers of another one refuse it.
        common: the batch, tables in the allocator's blocks.
        num_actual_tokens: tokens; what lies behind is padding.
        slot_mapping: int64 slots of the step's keys and values; None without a cache.
        parts: one, or decodes and prefills apart where different backends serve them.
    """

    group: AttentionGroup
    common: CommonAttentionMetadata
    num_actual_tokens: int
    slot_mapping: Tensor | None
    parts: tuple[Part, ...]


class AttentionGroup:
    """Loads the backends of a ``Selection`` and builds their metadata, once per step for all layers of the kind.

    The layers share its workspaces: one step runs after the other. Steps side by side take a group each.

    Args:
        selection: from ``select``; every phase must have a backend.
        device: where the layers run; None: the CPU or the current CUDA device, whichever the selection was made for.
        capacity: bounds of a batch.
        cuda_graphs: whether steps will be captured (``CudaGraphRunner``).
        phases: the phases whose backends are loaded; None: all that the layers have. A batch that needs another phase
            is refused.
        dispatch: None: the selection's backends run every step. ``measured``: of all candidates that read the same
            cache and whose times compare, the one that is predicted to be fastest runs the step; needs a selection with
            a workload.

    Attributes:
        config: the layers.
        kv_layout, block_size: of the cache; the block size is the allocator's. None without a cache.
        kernel_block_size: tokens per block in which the cache is laid out; divides ``block_size``. A kernel of smaller
            blocks gets a view (``kv_cache.in_blocks_of``).
        served: the selection's backends per phase; the same object in both where one serves both.
        backends: every backend once, those that take turns with the selection's included.

    Raises:
        NoBackendError: a phase has no backend.
        RuntimeMissingError, ImportError: a backend cannot be loaded.
        ConfigError: the selection was made for a device that is not here, the phases' kernels share no block size
            within this layout, or ``dispatch`` is not possible for these layers or with what is known of their times.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        dispatch: str | None = None,
    ) -> None:
        self.selection = selection
        self.config: AttentionConfig = selection.config
        self.capacity = capacity or Capacity()
        self.device = _device(selection, device)
        self.cuda_graphs = cuda_graphs
        self.checked = checks.checks_enabled()
        selection.require()
        if self.config.draft_tree and any(plan.trees_in_two_parts for plan in selection.plans.values()):
            text = "draft_tree: the selected kernel takes no mask, so trees are computed in two parts"
            raise ConfigError(text, fields=["draft_tree"], hint="make the group with attention_group(selection)")
        self.kv_layout, self.block_size = selection.kv_layout, selection.block_size
        check_dispatch(dispatch, self.config)
        plans = self._plans(selection, phases)
        names = {phase: name for name, own in plans.items() for phase in own}
        specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
        self.dispatch: Dispatch | None = None
        if dispatch is not None:
            self.dispatch = make_dispatch(
                selection, plans, lambda more: shared_block_sizes(more, self.block_size, self.kv_layout) is not None
            )
            plans, specs = self.dispatch.plans, self.dispatch.specs
        sizes = kernel_block_sizes(plans, self.block_size, self.kv_layout)
        self.kernel_block_size = max(sizes.values(), default=None)
        self._by_name = {name: self._serve(specs[name], own, sizes.get(name)) for name, own in plans.items()}
        self.backends = tuple(self._by_name.values())
        self._ways = Ways(self.config, self._by_name, names, self.dispatch, selection.workload)
        self._way = self._ways.usual
        self.served, self.unified = self._way.served, self._way.unified
        if self.dispatch is not None:
            self._ways.check_threshold(self.reorder_batch_threshold)
            most = self.capacity.max_num_seqs, self.capacity.max_num_batched_tokens, self.capacity.max_model_len
            self.dispatch.choice.prepare(*most)
        self._tables = KernelTables(self.block_size, self.capacity.max_num_seqs, self.capacity.max_model_len)

    _last_batch: CommonAttentionMetadata | None = None
    """In checked mode the batch that was built last."""

    def __deepcopy__(self, memo: object) -> AttentionGroup:
        """Return the group itself: copies of a layer belong to the same group and take the same metadata."""
        return self

    @staticmethod
    def _plans(selection: Selection, phases: Sequence[Phase] | None) -> dict[str, dict[Phase, BackendPlan]]:
        """Return per backend the plans of the phases that it was chosen for."""
        plans: dict[str, dict[Phase, BackendPlan]] = {}
        for phase, name in selection.selected.items():
            if name is not None and (phases is None or phase in phases):
                plans.setdefault(name, {})[phase] = selection.plans[phase]
        return plans

    def _serve(self, spec: BackendSpec, plans: Mapping[Phase, BackendPlan], block_size: int | None) -> Served:
        backend: type[AttentionBackend] = spec.get_class()
        capacity, chunk = self.capacity, self.config.attention_chunk_size
        requests, longest = capacity.max_num_seqs, capacity.max_model_len
        if all(plan.masks_chunks for plan in plans.values()):
            chunk = None
        if chunk is not None:
            requests, longest = most_requests(requests, capacity.max_num_batched_tokens, chunk), min(longest, chunk)
        context = BackendContext(
            config=self.config,
            plans=plans,
            device=self.device,
            options=self.selection.options[spec.name],
            kv_layout=None if block_size is None else self.kv_layout,
            block_size=block_size,
            max_num_seqs=requests,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=longest,
            cuda_graphs=self.cuda_graphs,
        )
        chunks = None if chunk is None else VirtualBatches(chunk, context, width_multiple(context))
        return Served(spec, backend, context, backend.builder_cls(context), chunks)

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Scratch device memory that each backend reserves at most, bytes, as the plans say."""
        found: dict[str, int] = {}
        for name, served in self._by_name.items():
            by_kernel = {plan.kernel: plan.workspace_bytes for plan in served.context.plans.values()}
            found[name] = sum(by_kernel.values())
        return found

    def layer_in_parts(self, layer: type[Any], **options: Any) -> Any:
        """Return what computes a layer in parts (ranks, trees of drafts); None where the kernels alone do."""
        return None

    def explain(self) -> str:
        """Return as text which backends run the steps, why others do not, and what memory they reserve."""
        candidates = {phase: [served.spec.name] for phase, served in self.served.items()}
        if self.dispatch is not None:
            candidates = self.dispatch.candidates
        lines = []
        for phase, names in candidates.items():
            which = f"the fastest of {', '.join(names)}" if len(names) > 1 else names[0]
            lines.append(f"{phase:<10} {which}")
            if self.dispatch is not None:
                lines += [f"{'':<10} without {why}" for why in self.dispatch.left_out[phase]]
        reserved = self.workspace_bytes
        each = ", ".join(f"{name} {byte_text(size)}" for name, size in reserved.items())
        lines.append(f"{'workspace':<10} {byte_text(sum(reserved.values()))} ({each})")
        return "\n".join(lines) + "\n"

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured; mixed batches only where one backend serves both phases."""
        level = (self.served.get("decode") or self.backends[0]).builder.cudagraph_support
        return level if level != "ALWAYS" or self.unified else "UNIFORM_BATCH"

    @property
    def reorder_batch_threshold(self) -> int | None:
        """Queries up to this many tokens count as decodes and must come first; None: any order is accepted."""
        wanted = [served.builder.reorder_batch_threshold for served in self.backends]
        if len(self.backends) > 1:
            wanted.append(1 + self.config.num_speculative_tokens)
        return min((threshold for threshold in wanted if threshold is not None), default=None)

    def allocate_kv_cache(self, num_blocks: int) -> Tensor:
        """Return one layer's cache for ``num_blocks`` of the allocator's blocks, zeroed.

        Raises:
            ConfigError: the layers keep no cache, ``num_blocks`` is below 1, or they do not fit in memory.
        """
        layout, kernel_block_size, ratio = self._cache_blocks()
        if not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"num_blocks = {show(num_blocks)}: accepted are integers from 1", fields=["num_blocks"])
        return caches.allocate_kv_cache(layout, self.config, num_blocks * ratio, kernel_block_size, self.device)

    def _cache_blocks(self) -> tuple[str, int, int]:
        """Return the cache's layout, its tokens per block, and how many of these make one of the allocator's blocks."""
        if self.kv_layout is None or self.block_size is None or self.kernel_block_size is None:
            raise ConfigError(
                f"attn_type = {self.config.attn_type!r}: its layers keep no KV cache", fields=["attn_type"]
            )
        return self.kv_layout, self.kernel_block_size, self.block_size // self.kernel_block_size

    @property
    def nan_tail_safe(self) -> bool:
        """Whether a NaN that lies behind a request's end in its last block leaves its result alone.

        If not, call ``zero_blocks`` for every block that a request is given: its former owner may have left a NaN.
        """
        return all(plan.nan_tail_safe for served in self.backends for plan in served.context.plans.values())

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
            ConfigError, BatchError: the layers keep no cache, or this is no cache of this group.
            ValueError: an id is outside the cache. The ids of a tensor are not read, so they are not checked.
        """
        layout, kernel_block_size, ratio = self._cache_blocks()
        held = checks.check_cache(kv_cache, layout, self.config, self.device, kernel_block_size) // ratio
        if isinstance(block_ids, Tensor):
            ids = block_ids.to(torch.int64)
        else:
            if wrong := [block for block in block_ids if not 0 <= block < held]:
                raise ValueError(f"block_ids holds {wrong[0]}: accepted are the cache's blocks, 0 to {held - 1}")
            ids = to_device(torch.tensor(block_ids, dtype=torch.int64), self.device)
        if ratio > 1:
            ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).flatten()
        caches.zero_blocks(kv_cache, layout, self.config, ids)

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
        self.check_batch(common_attn_metadata)
        if common_prefix_len:
            self._check_prefix(common_attn_metadata, common_prefix_len)
        way = self._ways.of_step(common_attn_metadata)
        if way.unified:
            part = self._whole(way, common_attn_metadata, common_prefix_len, fast_build)
            return self._metadata(common_attn_metadata, [part])
        parts = []
        longest = 1 + self.config.num_speculative_tokens if "decode" in way.served else 1
        split = split_decodes_and_prefills(common_attn_metadata, self.reorder_batch_threshold or longest)
        for phase, first, last in _by_phase(split):
            served = self._server(way, phase)
            start = 0 if phase == "decode" else split.num_decode_tokens
            decodes = last - first if phase == "decode" else 0
            common = self._for_kernel(served, common_attn_metadata.requests(first, last), decodes)
            metadata = served.builder.build(self._prefix(served, common_prefix_len, common), common, fast_build)
            parts.append(Part(phase, served.spec.name, start, start + common.num_actual_tokens, metadata))
        return self._metadata(common_attn_metadata, parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Build what a graph is captured with. All requests are of one phase unless one backend serves both.

        With ``dispatch`` the backend that is chosen here runs every later batch of the same numbers of requests and
        tokens.
        """
        self.check_batch(common_attn_metadata)
        way = self._ways.to_capture(common_attn_metadata, self.cudagraph_support)
        phase = self._only_phase(way, common_attn_metadata)
        served = self._server(way, phase)
        common = self._for_kernel(served, common_attn_metadata, self._decodes(served, common_attn_metadata))
        metadata = served.builder.build_for_cudagraph_capture(common)
        part = Part(phase, served.spec.name, 0, common.num_actual_tokens, metadata)
        return self._metadata(common_attn_metadata, [part])

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

    def _only_phase(self, way: Way, common: CommonAttentionMetadata) -> Phase:
        if way.unified:
            return next(iter(way.served))
        return "decode" if common.max_query_len <= 1 + self.config.num_speculative_tokens else "prefill"

    def _whole(self, way: Way, common: CommonAttentionMetadata, prefix: int, fast: bool) -> Part:
        phase, served = next(iter(way.served.items()))
        common = self._for_kernel(served, common, self._decodes(served, common))
        metadata = served.builder.build(self._prefix(served, prefix, common), common, fast)
        return Part(phase, served.spec.name, 0, common.num_actual_tokens, metadata)

    def _metadata(self, common: CommonAttentionMetadata, parts: Sequence[Part]) -> AttentionMetadata:
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, tuple(parts))

    def _server(self, way: Way, phase: Phase) -> Served:
        if phase not in way.served:
            here = " and ".join(way.served)
            text = f"the batch has requests in {phase}, but this group was made for {here} only"
            raise BatchError(text, hint=f"make the group without phases, or with {phase} among them")
        return way.served[phase]

    def _prefix(self, served: Served, prefix: int, common: CommonAttentionMetadata) -> int:
        able = prefix and self.config.attention_chunk_size is None
        return prefix if able and served.builder.use_cascade_attention(prefix, common) else 0

    def check_batch(self, common: CommonAttentionMetadata) -> None:
        """Compare a step's batch with what the group was made for; in checked mode also its contents.

        Raises:
            BatchError: names what was seen and what is accepted.
        """
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
        if common.mm_prefix_ranges is not None and not self.config.mm_prefix:
            text = "mm_prefix_ranges given, but the layers were selected with mm_prefix = False"
            raise BatchError(text, hint="select with mm_prefix = True")
        if common.tree_mask is not None:
            checks.check_tree_mask(common, self.config)
        if not common.causal and self.config.attention_chunk_size is not None:
            raise BatchError("causal = False, but the layers attend inside chunks, up to each query (accepted: True)")
        checks.check_shapes(common, self.config, self.block_size)
        if self.checked:
            self._last_batch = common
            checks.check_common(common, self.config, self.device, self.block_size, capacity.max_model_len)

    def _check_prefix(self, common: CommonAttentionMetadata, prefix: int) -> None:
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
        """Check everything about one layer's call that must be read back or costs time (checked mode). Synchronises.

        While a CUDA graph is captured nothing can be read back, and nothing is checked: the runner made that batch.

        Raises:
            BatchError, ConfigError: names the argument, what was seen and what is accepted.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if common is not self._last_batch:
            raise BatchError(
                "attn_metadata is of an earlier step: group.build has since built another one in the same memory",
                hint="give the layers what the last group.build(common) returned",
            )
        for name, tensor in tensors.items():
            if tensor is not None:
                checks.check_strides(name, tensor, self.device)
                if name in _CONTENTS:
                    of_requests = name == "query" or self.config.attn_type != "encoder_decoder"
                    checks.check_finite(name, tensor, common, of_requests)
        checks.check_scales(scales)
        if self.kv_layout is None or self.block_size is None or self.kernel_block_size is None:
            return
        size = self.kernel_block_size
        num_blocks = checks.check_cache(kv_cache, self.kv_layout, self.config, self.device, size)
        assert kv_cache is not None
        checks.check_strides("kv_cache", kv_cache, self.device)
        held = num_blocks // self._cache_blocks()[2]
        checks.check_blocks(common, self.config, kv_cache, self.kv_layout, held, self.block_size)

    @staticmethod
    def _decodes(served: Served, common: CommonAttentionMetadata) -> int | None:
        """Return how many requests are decodes, where the batch is cut in chunks and the builder wants them first."""
        if served.chunks is None or (threshold := served.builder.reorder_batch_threshold) is None:
            return None
        return split_decodes_and_prefills(common, threshold).num_decodes

    def _for_kernel(
        self, served: Served, common: CommonAttentionMetadata, num_decodes: int | None
    ) -> CommonAttentionMetadata:
        """Return the batch as the kernel wants it: its blocks, the width of its tables, a request for each chunk."""
        common = self._tables.in_kernel_blocks(served.context, common)
        return common if served.chunks is None else served.chunks.cut(common, num_decodes)


_CONTENTS = ("query", "key", "value", "kv_c_normed", "k_pe")
"""What a layer is given that must hold finite numbers; outputs are poisoned in tests."""


def _device(selection: Selection, device: torch.device | str | None) -> torch.device:
    """Return where the layers run, a CUDA device with its index.

    Raises:
        ConfigError: the selection is for a GPU and the layers shall run elsewhere, this machine has none that torch can
            use, or one of another compute capability.
    """
    chosen = selection.device
    found = torch.device(device if device is not None else ("cpu" if chosen.is_cpu else "cuda"))
    if found.type != "cuda":
        if not (chosen.is_cpu or selection.runs_anywhere):
            raise ConfigError(
                f"the selection was made for {chosen.name}, but device = {str(found)!r}",
                fields=["device"],
                hint=f"select(config, {found.type!r}) chooses for that device",
            )
        return found
    if not torch.cuda.is_available():
        raise ConfigError(
            f"the selection was made for {chosen.name}, but torch sees no CUDA device on this machine",
            fields=["device"],
            hint="select(config) chooses for the device of this machine",
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    here = torch.cuda.get_device_capability(index)
    if chosen.compute_capability not in (None, here):
        raise ConfigError(
            f"the selection was made for {chosen.name} (compute capability {chosen.capability_text}), but cuda:{index} "
            f"is a {torch.cuda.get_device_name(index)} ({here[0]}.{here[1]})",
            fields=["device"],
            hint="select(config) chooses for the device of this machine",
        )
    return torch.device("cuda", index)


def _by_phase(split: Split) -> list[tuple[Phase, int, int]]:
    """Return phase, first and end request of each part that is not empty."""
    decodes, total = split.num_decodes, split.num_decodes + split.num_prefills
    parts: list[tuple[Phase, int, int]] = [("decode", 0, decodes), ("prefill", decodes, total)]
    return [part for part in parts if part[1] < part[2]]
