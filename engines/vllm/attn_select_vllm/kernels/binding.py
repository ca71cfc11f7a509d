"""The layers of one vLLM builder with attn-select's builders and impls behind them.

vLLM makes a layer before the block size is known, and groups layers by backend and cache alone: layers of one group may
differ in windows or soft caps. So a layer keeps what it was asked for (``Layer``). The builder, which vLLM makes when
the cache is laid out, makes builders of attn-select for every distinct config and gives each layer its impls.

One backend serves a whole step, or a pair does: prefills by one and decodes by the other, on the same cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from attn_select import select
from attn_select.decide.selection import NoBackendError, Selection
from attn_select.decide.selector import rules_in_an_engine
from attn_select.layer.config import CUDA_GRAPH_LEVELS, AttentionConfig, CudaGraphLevel, Phase
from attn_select.runtime import (
    BackendContext,
    Capacity,
    Scales,
    Terms,
    split_decodes_and_prefills,
)
from attn_select.runtime import CommonAttentionMetadata as Common
from attn_select.runtime.compile_ahead import compile_in_an_engine
from attn_select_vllm.kernels.ranks import RankBuilder, RankImpl

logger = init_logger("vllm.attn_select")


def selected(backends: Mapping[Phase, str], config: AttentionConfig) -> Selection:
    """Return the selection of backends that were decided on before; NoBackendError where one cannot run the layers."""
    wanted = [f"{phase}={backend}" for phase, backend in backends.items()]
    device = "cpu" if current_platform.is_cpu() else None
    selection = select(config, device, rules_in_an_engine(), backend=wanted)
    missing = [phase for phase in backends if selection.backends[phase] is None]
    if missing:
        names = " and ".join(dict.fromkeys(backends[phase] for phase in missing))
        raise NoBackendError(f"{names} cannot run {' and '.join(missing)}\n{selection.explain()}", selection)
    return selection


class Part(NamedTuple):
    """The tokens of a step that one backend computes."""

    # The backend is the one of this phase; of a step that is not split, of any.
    phase: Phase
    # The tokens; None: all.
    rows: slice | None
    metadata: Any


class Layer:
    """One layer: what it asks for, and what runs it once vLLM has laid out the cache."""

    # The config's block size is open, and the terms are without scales, which vLLM loads later. Raises NoBackendError
    # where a backend cannot run the layer.

    def __init__(self, backends: Mapping[Phase, str], layout: str, config: AttentionConfig, **terms: Any) -> None:
        self.backends, self.layout, self.config, self.terms = dict(backends), layout, config, terms
        plans = selected(backends, config).plans
        captured: Sequence[Phase] = ["decode"] if self.is_pair else [*backends]
        # What captured steps need: of a pair the decodes' level alone.
        self.level: CudaGraphLevel = min((plans[p].cuda_graph for p in captured), key=CUDA_GRAPH_LEVELS.index)
        # Empty until a builder was made, which also says which of a step's metadata is the layer's.
        self.impls: dict[Phase, Any] = {}
        self.kind = 0
        self._scales: Scales | None = None

    @property
    def is_pair(self) -> bool:
        """Whether prefills and decodes have a backend each."""
        return len(set(self.backends.values())) > 1

    def scales_of(self, layer: Any) -> Scales:
        """Return the scales of vLLM's layer: device tensors and, read when its weights were loaded, host floats."""
        if self._scales is None:
            per_head = self.config.per_head_quant_scales
            shape = (self.config.num_kv_heads,) if per_head else ()
            self._scales = Scales(
                q=layer._q_scale.max() if per_head else layer._q_scale.reshape(()),  # kernels take one for all queries
                k=layer._k_scale.reshape(shape),
                v=layer._v_scale.reshape(shape),
                q_float=layer._q_scale_float,
                k_float=layer._k_scale_float,
                v_float=layer._v_scale_float,
            )
        return self._scales

    @property
    def scales(self) -> Scales:
        """The scales, once ``scales_of`` has seen vLLM's layer."""
        assert self._scales is not None
        return self._scales


def layers_of(vllm_config: VllmConfig, names: Sequence[str]) -> list[Layer]:
    """Return the layers of these names, in order. Their weights are loaded, and so their scales are read."""
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in names]
    for layer in layers:
        layer.impl.attn_select.scales_of(layer)
    return [layer.impl.attn_select for layer in layers]


def graph_support(vllm_config: VllmConfig) -> AttentionCGSupport:
    """Return what all layers on attn-select's kernels can capture: uniform batches at most, nothing without layers."""
    # vLLM captures a mixed batch as one of equal queries, from which a builder cannot tell what its replays bring.
    context = vllm_config.compilation_config.static_forward_context
    layers = [getattr(getattr(layer, "impl", None), "attn_select", None) for layer in context.values()]
    levels = [AttentionCGSupport[layer.level] for layer in layers if layer is not None]
    most = AttentionCGSupport.UNIFORM_BATCH if levels else AttentionCGSupport.NEVER
    return min([*levels, most], key=lambda support: support.value)


class Builders:
    """attn-select's builders of the layers, all of the same backends, that one vLLM builder serves."""

    # ``block_size`` is that of the cache as the layers see it; None without a cache.

    def __init__(
        self, layers: Sequence[Layer], block_size: int | None, vllm_config: VllmConfig, device: torch.device
    ) -> None:
        self._by_config: list[Mapping[Phase, Any]] = []
        self._splits = layers[0].is_pair
        self._longest_decode = layers[0].config.max_decode_query_len
        configs: list[AttentionConfig] = []
        selections: list[Selection] = []
        for layer in layers:
            selection = selected(layer.backends, layer.config.model_copy(update={"block_size": block_size}))
            if layer.config not in configs:
                configs.append(layer.config)
                selections.append(selection)
                self._by_config.append(_builders(layer, selection, vllm_config, device))
            layer.kind = configs.index(layer.config)
            if not layer.impls:  # vLLM may make several builders, one for each batch of a step that it halves
                layer.impls = _impls(layer, selection, self._by_config[layer.kind])
        if device.type == "cuda":
            compile_in_an_engine(
                selections,
                device,
                capacity_of(vllm_config),
                cuda_graphs=captures(vllm_config, device),
                phases=tuple(layers[0].backends),
                say=lambda text: logger.info("attn-select: %s", text),
                warn=lambda text: logger.warning("attn-select: %s", text),
            )

    @property
    def reorder_batch_threshold(self) -> int | None:
        """Queries up to this many tokens must come first; None: any order."""
        builders = [builder for by_phase in self._by_config for builder in by_phase.values()]
        wanted = [b.reorder_batch_threshold for b in builders if b.reorder_batch_threshold is not None]
        return min([*wanted, self._longest_decode] if self._splits else wanted, default=None)

    def build(self, common: Common, fast_build: bool = False, capture: bool = False) -> list[list[Part]]:
        """Return the metadata of a step by ``Layer.kind``: a part, or decodes and prefills apart."""
        parts = self._parts(common)
        return [
            [Part(phase, rows, _built(by_phase[phase], batch, fast_build, capture)) for phase, rows, batch in parts]
            for by_phase in self._by_config
        ]

    def _parts(self, common: Common) -> list[tuple[Phase, slice | None, Common]]:
        if not self._splits:
            return [(next(iter(self._by_config[0])), None, common)]
        split = split_decodes_and_prefills(common, self.reorder_batch_threshold or self._longest_decode)
        if not split.num_prefills:
            return [("decode", None, common)]
        if not split.num_decodes:
            return [("prefill", None, common)]
        first, last = split.num_decode_tokens, common.num_actual_tokens
        return [
            ("decode", slice(0, first), common.requests(0, split.num_decodes)),
            ("prefill", slice(first, last), common.requests(split.num_decodes, common.num_reqs)),
        ]


def capacity_of(vllm_config: VllmConfig) -> Capacity:
    """Return the most that a step of vLLM's may hold."""
    scheduler = vllm_config.scheduler_config
    return Capacity(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len)


def captures(vllm_config: VllmConfig, device: torch.device) -> bool:
    """Whether vLLM is to capture whole steps as CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return device.type == "cuda" and mode is not None and bool(mode.has_full_cudagraphs())


def _built(builder: Any, common: Common, fast_build: bool, capture: bool) -> Any:
    if capture:
        return builder.build_for_cudagraph_capture(common)
    return builder.build(0, common, fast_build)


def _builders(layer: Layer, selection: Selection, vllm_config: VllmConfig, device: torch.device) -> dict[Phase, Any]:
    """Return the builder of each phase, one for both where one backend serves both, or ranks share the contexts."""
    capacity = capacity_of(vllm_config)
    found: dict[Phase, Any] = {}
    for name, plans in selection.plans_by_backend(tuple(layer.backends)).items():
        if layer.config.has_cache and not all(layer.layout in plan.kv_layouts for plan in plans.values()):
            raise NoBackendError(f"{name} does not read {layer.layout}, the layout of vLLM's cache", selection)
    if selection.config.decode_context_parallel_size > 1:
        graphs = captures(vllm_config, device)
        across = RankBuilder(selection, layer.layout, device, capacity, vllm_config, cuda_graphs=graphs)
        return dict.fromkeys(layer.backends, across)
    for name, plans in selection.plans_by_backend(tuple(layer.backends)).items():
        context = BackendContext(
            config=selection.config,
            plans=plans,
            device=device,
            options=selection.options[name],
            kv_layout=layer.layout if layer.config.has_cache else None,
            block_size=selection.config.block_size,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
            cuda_graphs=captures(vllm_config, device),
        )
        made = _class_of(selection, plans).builder_cls(context)
        found.update(dict.fromkeys(plans, made))
    return found


def _impls(layer: Layer, selection: Selection, builders: Mapping[Phase, Any]) -> dict[Phase, Any]:
    """Return the impl of each phase, one for both where one builder serves both."""
    found: dict[Phase, Any] = {}
    builder = next(iter(builders.values()))
    if isinstance(builder, RankBuilder):
        return dict.fromkeys(builders, RankImpl(builder, scales=layer.scales, **layer.terms))
    for plans in selection.plans_by_backend(tuple(layer.backends)).values():
        context = builders[next(iter(plans))].context
        terms = Terms.of(context.config, context.device, scales=layer.scales, **layer.terms)
        found.update(dict.fromkeys(plans, _class_of(selection, plans).impl_cls(context, terms)))
    return found


def _class_of(selection: Selection, phases: Iterable[Phase]) -> Any:
    spec = selection.backends[next(iter(phases))]
    assert spec is not None
    return spec.get_class()


def on_device(values: Sequence[float] | Tensor | None, device: torch.device) -> Tensor | None:
    """Return a layer's slopes or sinks on the device where it runs."""
    if values is None or isinstance(values, Tensor):
        return values
    return torch.tensor(values, dtype=torch.float32, device=device)
