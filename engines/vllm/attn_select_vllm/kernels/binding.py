"""The layers of one vLLM builder, on groups of attn-select.

vLLM makes a layer before the block size is known, and groups layers by backend and cache alone: layers of one group may
differ in windows or soft caps. So a layer keeps what it was asked for (``Layer``). The builder, which vLLM makes when
the cache is laid out, makes a group of attn-select for every distinct config and gives each layer its impls.

One backend serves a whole step, or a pair does: prefills by one and decodes by the other, on the same cache. Ranks may
share the contexts of requests (vLLM's decode context parallelism). The group's ranks are then vLLM's process group, and
its share of positions is vLLM's (``cp_kv_cache_interleave_size``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_dcp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from attn_select import select
from attn_select.decide.outcome import Candidate
from attn_select.decide.selection import NoBackendError, Selection
from attn_select.decide.selector import rules_in_an_engine
from attn_select.layer.config import CUDA_GRAPH_LEVELS, AttentionConfig, CudaGraphLevel, Phase
from attn_select.runtime import (
    Attention,
    Capacity,
    CommonAttentionMetadata,
    ContextParallel,
    LayerGroup,
    Outputs,
    Scales,
    Terms,
    attention_group,
)
from attn_select.runtime.compile_ahead import compile_in_an_engine

logger = init_logger("vllm.attn_select")


def selected(backends: Mapping[Phase, str], config: AttentionConfig, layout: str) -> Selection:
    """Return the selection of backends that were decided on before, in vLLM's layout of the cache."""
    # Raises NoBackendError where one cannot run the layers, or does not read the layout.
    device = "cpu" if current_platform.is_cpu() else None
    wanted = [f"{phase}={backend}" for phase, backend in backends.items()]
    selection = select(config, device, rules_in_an_engine(), backend=wanted)
    # Of MLA the prefills are vLLM's own, whatever attn-select has for them.
    served = {phase: selection.backends[phase] for phase in backends}
    if None in served.values():
        selection.require()
    selection = replace(selection, backends=served, kv_layout=layout if config.has_cache else None)
    for phase, plan in selection.plans.items():
        if config.has_cache and layout not in plan.kv_layouts:
            raise NoBackendError(f"{backends[phase]} does not read {layout}, the layout of vLLM's cache", selection)
    if config.block_size is None:
        return selection
    return replace(selection, candidates=tuple(_in_blocks(each, config.block_size) for each in selection.candidates))


def _in_blocks(candidate: Candidate, size: int) -> Candidate:
    """Return a candidate whose kernels read blocks of this size whole: vLLM lays its cache out in them."""
    phases = {
        phase: replace(verdict, plan=replace(verdict.plan, kernel_block_sizes=(size,)))
        if verdict.plan is not None and verdict.plan.kv_layouts
        else verdict
        for phase, verdict in candidate.phases.items()
    }
    return replace(candidate, phases=phases)


class Layer:
    """One layer: what it asks for, and what runs it once vLLM has laid out the cache."""

    # The config's block size is open, and the terms are without scales, which vLLM loads later. Raises NoBackendError
    # where a backend cannot run the layer.

    def __init__(self, backends: Mapping[Phase, str], layout: str, config: AttentionConfig, **terms: Any) -> None:
        self.backends, self.layout, self.config, self.terms = dict(backends), layout, config, terms
        plans = selected(backends, config, layout).plans
        # What captured steps need: of a pair the decodes' level alone.
        captured: Sequence[Phase] = ["decode"] if len(set(backends.values())) > 1 else [*backends]
        self.level: CudaGraphLevel = min((plans[p].cuda_graph for p in captured), key=CUDA_GRAPH_LEVELS.index)
        # Empty until a builder was made, which also says which of a step's metadata is the layer's.
        self.impls: dict[Phase, Any] = {}
        self.kind = 0
        self._across_ranks: Attention | None = None

    def bind(self, group: LayerGroup, layer: Any) -> None:
        """Make what runs the layer; ``layer`` is vLLM's, whose weights are loaded."""
        scales = self._scales_of(layer)
        terms = Terms.of(group.config, group.device, scales=scales, **self.terms)
        if group.config.decode_context_parallel_size > 1:
            self._across_ranks = Attention(group, scales=scales, caller_writes=True, **self.terms)
            terms = self._across_ranks.terms.under(group.distinct[0].context.config)
        for served in group.distinct:
            self.impls |= dict.fromkeys(served.context.plans, served.impl(terms))

    def _scales_of(self, layer: Any) -> Scales:
        """Return the scales of vLLM's layer: device tensors and, read when its weights were loaded, host floats."""
        per_head = self.config.per_head_quant_scales
        shape = (self.config.num_kv_heads,) if per_head else ()
        return Scales(
            q=layer._q_scale.max() if per_head else layer._q_scale.reshape(()),  # kernels take one for all queries
            k=layer._k_scale.reshape(shape),
            v=layer._v_scale.reshape(shape),
            q_float=layer._q_scale_float,
            k_float=layer._k_scale_float,
            v_float=layer._v_scale_float,
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor | None, metadata: Any, output: Tensor
    ) -> None:
        """Attend, as ``AttentionImpl.forward`` documents it; keys and values are in the cache."""
        if self._across_ranks is not None:
            self._across_ranks(query, key, value, cache, metadata, output)
            return
        for part in metadata.parts:
            own, written = query, output
            # As ``Attention`` does: keys and values are read by layers without a cache alone, whose steps are one part.
            if part.rows.start:
                own, written = query[part.rows], output[part.rows]
            self.impls[part.phase].forward(own, key, value, cache, part.metadata, Outputs(written))


def graph_support(vllm_config: VllmConfig) -> AttentionCGSupport:
    """Return what all layers on attn-select's kernels can capture: uniform batches at most, nothing without layers."""
    # vLLM captures a mixed batch as one of equal queries, from which a builder cannot tell what its replays bring.
    context = vllm_config.compilation_config.static_forward_context
    layers = [getattr(getattr(layer, "impl", None), "attn_select", None) for layer in context.values()]
    levels = [AttentionCGSupport[layer.level] for layer in layers if layer is not None]
    most = AttentionCGSupport.UNIFORM_BATCH if levels else AttentionCGSupport.NEVER
    return min([*levels, most], key=lambda support: support.value)


class Groups:
    """attn-select's groups of the layers, all of the same backends, that one vLLM builder serves."""

    # ``block_size`` is that of the cache as the layers see it; None without a cache.

    def __init__(
        self, layer_names: Sequence[str], block_size: int | None, vllm_config: VllmConfig, device: torch.device
    ) -> None:
        by_config: dict[AttentionConfig, LayerGroup] = {}
        for name in layer_names:
            layer = vllm_config.compilation_config.static_forward_context[name]
            own: Layer = layer.impl.attn_select
            if own.config not in by_config:
                by_config[own.config] = _group(own, block_size, vllm_config, device)
            own.kind = [*by_config].index(own.config)
            if not own.impls:  # vLLM may make several builders, one for each batch of a step that it halves
                own.bind(by_config[own.config], layer)
        self._groups = [*by_config.values()]
        # The groups across ranks write nothing: vLLM did, with the slots of this rank.
        tokens = self._groups[0].capacity.max_num_batched_tokens
        self._no_slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            compile_in_an_engine(
                [group.selection for group in self._groups],
                device,
                self._groups[0].capacity,
                cuda_graphs=self._groups[0].cuda_graphs,
                phases=tuple(self._groups[0].backends),
                logger=logger,
            )

    @property
    def reorder_batch_threshold(self) -> int | None:
        """Queries up to this many tokens must come first; None: any order."""
        wanted = (group.reorder_batch_threshold for group in self._groups)
        return min((threshold for threshold in wanted if threshold is not None), default=None)

    def build(self, common: CommonAttentionMetadata, fast_build: bool = False, capture: bool = False) -> list[Any]:
        """Return the metadata of a step by ``Layer.kind``."""
        built = []
        for group in self._groups:
            batch = common
            if group.config.decode_context_parallel_size > 1:
                slots = self._no_slots[: common.num_actual_tokens]
                batch = replace(common, slot_mapping=slots, block_size=group.block_size)
            built.append(group.build_for_cudagraph_capture(batch) if capture else group.build(batch, 0, fast_build))
        return built


def _group(layer: Layer, block_size: int | None, vllm_config: VllmConfig, device: torch.device) -> LayerGroup:
    """Return the group of the layers of one config; every rank makes the same groups in the same order."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    # Drafts with slots of their own lengthen every request of a step.
    drafts = getattr(vllm_config.speculative_config, "max_num_new_slots_for_drafting", 0)
    tokens = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * drafts
    mode = vllm_config.compilation_config.cudagraph_mode
    ranks = None
    if layer.config.decode_context_parallel_size > 1:
        across, interleave = get_dcp_group().device_group, parallel.cp_kv_cache_interleave_size
        ranks = ContextParallel(across, interleave=interleave, merge="a2a")
    return attention_group(
        selected(layer.backends, layer.config.model_copy(update={"block_size": block_size}), layer.layout),
        device,
        Capacity(scheduler.max_num_seqs, tokens, vllm_config.model_config.max_model_len),
        context_parallel=ranks,
        cuda_graphs=device.type == "cuda" and mode is not None and bool(mode.has_full_cudagraphs()),
    )
