"""``LoadedBackends``: the backends of a selection, loaded, with their builders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.lines import byte_text
from attn_select.decide.selection import Selection
from attn_select.decide.shared_cache import kernel_block_sizes
from attn_select.errors import ConfigError
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.backend_faults import blame, load_backend
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.group_cache import GroupCache
from attn_select.runtime.kernel_blocks import KernelTables, width_multiple
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.served import Served
from attn_select.runtime.virtual_batches import VirtualBatches, most_requests


class LoadedBackends:
    """Loads the backends of a ``Selection`` and makes a builder of each.

    Args:
        selection, device, capacity, cuda_graphs, phases: as for ``AttentionGroup``.

    Attributes:
        selection: the selection.
        device: where the layers run.
        capacity: bounds of a batch.
        cuda_graphs: whether steps will be captured.
        by_name: every backend once.
        served: the backends per phase; the same object in both where one serves both.
        unified: whether one backend serves every phase that the layers have: then batches are not split.
        tables: makes tables in the kernels' blocks.
        cache: of the layers.

    Raises:
        NoBackendError: a phase has no backend.
        RuntimeMissingError, ImportError: a backend cannot be loaded.
        PluginError, BackendError: its classes are not what the runtime calls, or raise something.
        ConfigError: as ``AttentionGroup`` documents it.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None,
        capacity: Capacity | None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
    ) -> None:
        self.selection, config = selection, selection.config
        self.capacity, self.cuda_graphs = capacity or Capacity(), cuda_graphs
        self.device = device_of(selection, device)
        selection.require()
        check_tree(selection)
        plans = selection.plans_by_backend(phases)
        specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
        layout, block_size = selection.kv_layout, selection.block_size
        sizes = kernel_block_sizes(plans, block_size, layout)
        self.cache = GroupCache(config, self.device, layout, block_size, max(sizes.values(), default=None))
        self.by_name = {name: self._serve(specs[name], own, sizes.get(name)) for name, own in plans.items()}
        self.served = {phase: self.by_name[name] for name, own in plans.items() for phase in own}
        self.unified = len(self.by_name) == 1 and len(self.served) == len(config.phases)
        self.tables = KernelTables(block_size, self.capacity.max_num_seqs, self.capacity.max_model_len)

    def _serve(self, spec: BackendSpec, plans: Mapping[Phase, BackendPlan], block_size: int | None) -> Served:
        impls = (MLAAttentionImpl,) if self.selection.config.mla else (AttentionImpl,)
        backend: type[AttentionBackend] = load_backend(
            spec, AttentionBackend, impl_cls=impls, builder_cls=(AttentionMetadataBuilder,)
        )
        config, capacity, chunk = self.selection.config, self.capacity, self.selection.config.attention_chunk_size
        requests, longest = capacity.max_num_seqs, capacity.max_model_len
        if all(plan.masks_chunks for plan in plans.values()):
            chunk = None
        if chunk is not None:
            requests, longest = most_requests(requests, capacity.max_num_batched_tokens, chunk), min(longest, chunk)
        context = BackendContext(
            config=config,
            plans=plans,
            device=self.device,
            options=self.selection.options[spec.name],
            kv_layout=None if block_size is None else self.selection.kv_layout,
            block_size=block_size,
            max_num_seqs=requests,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=longest,
            cuda_graphs=self.cuda_graphs,
        )
        chunks = None if chunk is None else VirtualBatches(chunk, context, width_multiple(context))
        try:
            builder = backend.builder_cls(context)
        except Exception as error:
            blame(spec, "its builder", error)
            raise
        return Served(spec, backend, context, builder, chunks)

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured; mixed batches only where one backend serves both phases."""
        first = self.served.get("decode") or next(iter(self.by_name.values()))
        level = first.builder.cudagraph_support
        return level if level != "ALWAYS" or self.unified else "UNIFORM_BATCH"

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Scratch device memory that each backend reserves at most, bytes, as the plans say."""
        found: dict[str, int] = {}
        for name, served in self.by_name.items():
            by_kernel = {plan.kernel: plan.workspace_bytes for plan in served.context.plans.values()}
            found[name] = sum(by_kernel.values())
        return found

    def server(self, phase: Phase) -> Served:
        """Return the backend of a phase.

        Raises:
            BatchError: the backends of this phase were not loaded.
        """
        if phase not in self.served:
            here = " and ".join(self.served)
            text = f"the batch has requests in {phase}, but this group was made for {here} only"
            raise BatchError(text, hint=f"make the group without phases, or with {phase} among them")
        return self.served[phase]


def check_tree(selection: Selection) -> None:
    """Make sure that the selected kernels take the mask of trees of drafts, where the layers have trees.

    Raises:
        ConfigError: a kernel takes no mask.
    """
    if selection.config.draft_tree and any(plan.trees_in_two_parts for plan in selection.plans.values()):
        text = "draft_tree: the selected kernel takes no mask, so trees are computed in two parts"
        raise ConfigError(text, fields=["draft_tree"], hint="make the group with attention_group(selection)")


def workspace_line(reserved: Mapping[str, int]) -> str:
    """Return a line that says what memory is reserved, by whom."""
    each = ", ".join(f"{name} {byte_text(size)}" for name, size in reserved.items())
    return f"{'workspace':<10} {byte_text(sum(reserved.values()))} ({each})"


def device_of(selection: Selection[Any], device: torch.device | str | None) -> torch.device:
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
