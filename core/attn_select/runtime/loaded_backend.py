"""``LoadedBackend``: a backend of a selection, which makes the impls of layers, and its builder of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selection import Selection
from attn_select.decide.shared_cache import kernel_block_sizes
from attn_select.errors import ConfigError, PluginError
from attn_select.layer.config import Phase
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.backend_faults import call, load_backend
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.kernel_blocks import KernelTables, width_multiple
from attn_select.runtime.metadata import CommonAttentionMetadata, VarlenMetadata, split_decodes_and_prefills
from attn_select.runtime.virtual_batches import VirtualBatches, most_requests

B = TypeVar("B")
C = TypeVar("C")


@dataclass(slots=True, eq=False)
class Loaded(Generic[B, C]):
    """A backend that runs one or more phases of a group: what was chosen, loaded, and what it was made for."""

    spec: BackendSpec
    backend: type[B]
    context: C

    def impl(self, *terms: Any) -> Any:
        """Return the impl of one layer; BackendError or PluginError where it raised, or lacks a phase's path."""
        backend: Any = self.backend
        try:
            return call(self.spec, "its impl", "", backend.impl_cls, self.context, *terms)
        except PluginError as error:
            raise PluginError(self.spec.bug(error.message)) from None


@dataclass(slots=True, eq=False)
class LoadedBackend(Loaded[AttentionBackend, BackendContext]):
    """A backend of a group, and the builder that all layers share."""

    builder: AttentionMetadataBuilder[Any]
    # None where the backend reads no cache.
    tables: KernelTables | None = None
    # Cuts batches where the layers attend inside chunks and the kernel does not mask them.
    chunks: VirtualBatches | None = None

    def build(self, common: CommonAttentionMetadata, prefix: int, fast: bool, captured: bool) -> Any:
        """Return what the builder builds for a step; BackendError or PluginError where it raised or returned None."""
        if captured:
            return self._built("build_for_cudagraph_capture()", self.builder.build_for_cudagraph_capture, common)
        return self._built("build()", self.builder.build, prefix, common, fast)

    def build_prefill(self, varlen: VarlenMetadata) -> Any:
        """Return what the builder builds for a call of ``forward_mha``. Raises as ``build`` does."""
        return self._built("build_prefill()", self.builder.build_prefill, varlen)

    def _built(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        return call(self.spec, name, "the metadata that forward takes", method, *arguments)

    def batch(self, common: CommonAttentionMetadata, num_decodes: int | None = None) -> CommonAttentionMetadata:
        """Return a batch as the kernel wants it: its blocks, the width of its tables, a request for each chunk."""
        # ``num_decodes`` of its first requests are decodes; None: as many as the builder wants first.
        if self.tables is not None:
            common = self.tables.in_kernel_blocks(common)
        if self.chunks is None:
            return common
        if num_decodes is None and (threshold := self.builder.reorder_batch_threshold) is not None:
            num_decodes = split_decodes_and_prefills(common, threshold).num_decodes
        return self.chunks.cut(common, num_decodes)


def load_backends(
    selection: Selection,
    device: torch.device | str | None,
    capacity: Capacity,
    *,
    cuda_graphs: bool = False,
    phases: Sequence[Phase] | None = None,
) -> tuple[torch.device, dict[Phase, LoadedBackend]]:
    """Return where the layers run, and the backend of each phase, the same object in both where one serves both."""
    # Arguments and errors are ``LayerGroup``'s, which documents them; PluginError and BackendError besides, where
    # a backend's classes are not what the runtime calls, or raise something.
    here = device_of(selection, device)
    selection.require()
    if selection.config.draft_tree and any(plan.trees_in_two_parts for plan in selection.plans.values()):
        text = "draft_tree: the selected kernel takes no mask, so trees are computed in two parts"
        raise ConfigError(text, fields=["draft_tree"], hint="make the group with attention_group(selection)")
    plans = selection.plans_by_backend(phases)
    sizes = kernel_block_sizes(plans, selection.block_size, selection.kv_layout)
    specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
    found: dict[Phase, LoadedBackend] = {}
    for name, own in plans.items():
        made = _load(specs[name], own, selection, here, capacity, sizes.get(name), cuda_graphs)
        found |= dict.fromkeys(own, made)
    return here, found


def _load(
    spec: BackendSpec,
    plans: Mapping[Phase, BackendPlan],
    selection: Selection,
    device: torch.device,
    capacity: Capacity,
    block_size: int | None,
    cuda_graphs: bool,
) -> LoadedBackend:
    config, chunk = selection.config, selection.config.attention_chunk_size
    impls = (MLAAttentionImpl,) if config.mla else (AttentionImpl,)
    backend: type[AttentionBackend] = load_backend(
        spec, AttentionBackend, impl_cls=impls, builder_cls=(AttentionMetadataBuilder,)
    )
    requests, longest = capacity.max_num_seqs, capacity.max_model_len
    if all(plan.masks_chunks for plan in plans.values()):
        chunk = None
    if chunk is not None:
        # The kernel sees each chunk as a request: there are more of them, and none is longer than a chunk.
        requests, longest = most_requests(requests, capacity.max_num_batched_tokens, chunk), min(longest, chunk)
    context = BackendContext(
        config=config,
        plans=plans,
        device=device,
        options=selection.options[spec.name],
        kv_layout=None if block_size is None else selection.kv_layout,
        block_size=block_size,
        max_num_seqs=requests,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=longest,
        cuda_graphs=cuda_graphs,
    )
    allocated = selection.block_size
    tables = None if block_size is None or allocated is None else KernelTables(context, allocated, capacity)
    chunks = None if chunk is None else VirtualBatches(chunk, context, width_multiple(context))
    builder = call(spec, "its builder", "", backend.builder_cls, context)
    return LoadedBackend(spec, backend, context, builder, tables, chunks)


def device_of(selection: Selection[Any], device: torch.device | str | None) -> torch.device:
    """Return where the layers run, a CUDA device with its index; ConfigError where the selection is for another."""
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
    if torch.version.hip:
        here = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    else:
        here = "{}.{}".format(*torch.cuda.get_device_capability(index))
    if not chosen.is_cpu and chosen.capability_text != here:
        raise ConfigError(
            f"the selection was made for {chosen.name} ({chosen.capability_text}), but cuda:{index} "
            f"is a {torch.cuda.get_device_name(index)} ({here})",
            fields=["device"],
            hint="select(config) chooses for the device of this machine",
        )
    return torch.device("cuda", index)
