"""The layers of one vLLM builder with attn-select's builders and impls behind them.

vLLM makes a layer before the block size is known, and groups layers by backend and cache alone: layers of one group may
differ in windows or soft caps. So a layer keeps what it was asked for (``Layer``). The builder, which vLLM makes when
the cache is laid out, makes a builder of attn-select for every distinct config and gives each layer its impl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from attn_select import select
from attn_select.decide.selection import NoBackendError, Selection
from attn_select.decide.selector import rules_in_an_engine
from attn_select.layer.config import CUDA_GRAPH_LEVELS, AttentionConfig, CudaGraphLevel, Phase
from attn_select.runtime import AttentionMetadataBuilder, BackendContext, Scales
from attn_select.runtime import CommonAttentionMetadata as Common


def selected(backend: str, config: AttentionConfig, phases: Sequence[Phase]) -> Selection:
    """Return the selection of a backend that was decided on before.

    Raises:
        NoBackendError: it cannot run these layers; the reasons are in the message.
    """
    wanted = [f"{phase}={backend}" for phase in phases]
    device = "cpu" if current_platform.is_cpu() else None
    selection = select(config, device, rules_in_an_engine(), backend=wanted)
    if missing := [phase for phase in phases if selection.backends[phase] is None]:
        raise NoBackendError(f"{backend} cannot run {' and '.join(missing)}\n{selection.explain()}", selection)
    return selection


class Layer:
    """One layer: what it asks for, and what runs it once vLLM has laid out the cache.

    Args:
        backend: attn-select's name.
        phases: those that the backend serves here.
        layout: of the cache.
        config: the layer, its block size open.
        options: further arguments of the backend's impl.

    Attributes:
        level: the CUDA-graph level of the plans.
        impl: attn-select's impl; None until a builder was made.
        part: which part of a step's metadata is the layer's.

    Raises:
        NoBackendError: the backend cannot run the layer.
    """

    def __init__(
        self, backend: str, phases: tuple[Phase, ...], layout: str, config: AttentionConfig, **options: Any
    ) -> None:
        self.backend, self.phases, self.layout, self.config, self.options = backend, phases, layout, config, options
        plans = selected(backend, config, phases).plans
        self.level: CudaGraphLevel = min((plans[p].cuda_graph for p in phases), key=CUDA_GRAPH_LEVELS.index)
        self.impl: Any = None
        self.part = 0
        self.layer_name = ""
        self._scales: Scales | None = None

    def scales_of(self, layer: Any) -> Scales:
        """Return the scales of vLLM's layer: device tensors and, read when its weights were loaded, host floats."""
        if self._scales is None:
            self._scales = Scales(
                q=layer._q_scale.reshape(()),
                k=layer._k_scale.reshape(()),
                v=layer._v_scale.reshape(()),
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
    """Return the layers of these names, in order."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name].impl.attn_select for name in names]


def graph_support(vllm_config: VllmConfig) -> AttentionCGSupport:
    """Return what all layers on attn-select's kernels can capture: uniform batches at most, and nothing without layers.

    vLLM captures a mixed batch as one of equal queries, from which a builder cannot tell what its replays bring.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers = [getattr(getattr(layer, "impl", None), "attn_select", None) for layer in context.values()]
    levels = [AttentionCGSupport[layer.level] for layer in layers if layer is not None]
    most = AttentionCGSupport.UNIFORM_BATCH if levels else AttentionCGSupport.NEVER
    return min([*levels, most], key=lambda support: support.value)


class Builders:
    """attn-select's builders of the layers that one vLLM builder serves.

    Args:
        layers: all of one backend.
        block_size: tokens per block of the cache as the layers see it; None without a cache.

    Attributes:
        builders: one for each distinct config, in order of appearance.
    """

    def __init__(
        self, layers: Sequence[Layer], block_size: int | None, vllm_config: VllmConfig, device: torch.device
    ) -> None:
        self.builders: list[AttentionMetadataBuilder[Any]] = []
        configs: list[AttentionConfig] = []
        for layer in layers:
            if layer.config not in configs:
                configs.append(layer.config)
                self.builders.append(_builder(layer, block_size, vllm_config, device))
            layer.part = configs.index(layer.config)
            if layer.impl is None:  # vLLM may make several builders, one for each batch of a step that it halves
                backend = _spec(layer, block_size).get_class()
                layer.impl = backend.impl_cls(self.builders[layer.part].context, **layer.options)

    @property
    def reorder_batch_threshold(self) -> int | None:
        """Queries up to this many tokens must come first; None: any order."""
        wanted = [builder.reorder_batch_threshold for builder in self.builders]
        return min((threshold for threshold in wanted if threshold is not None), default=None)

    def build(self, common: Common, fast_build: bool = False, capture: bool = False) -> Sequence[Any]:
        """Return the metadata of a step, a part for each config."""
        if capture:
            return [builder.build_for_cudagraph_capture(common) for builder in self.builders]
        return [builder.build(0, common, fast_build) for builder in self.builders]


def _with_blocks(layer: Layer, block_size: int | None) -> Selection:
    return selected(layer.backend, layer.config.model_copy(update={"block_size": block_size}), layer.phases)


def _spec(layer: Layer, block_size: int | None) -> Any:
    return _with_blocks(layer, block_size).backends[layer.phases[0]]


def _builder(
    layer: Layer, block_size: int | None, vllm_config: VllmConfig, device: torch.device
) -> AttentionMetadataBuilder[Any]:
    selection, scheduler = _with_blocks(layer, block_size), vllm_config.scheduler_config
    mode = vllm_config.compilation_config.cudagraph_mode
    context = BackendContext(
        config=selection.config,
        plans={phase: selection.plans[phase] for phase in layer.phases},
        device=device,
        options=selection.options[layer.backend],
        kv_layout=layer.layout if layer.config.has_cache else None,
        block_size=block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        cuda_graphs=device.type == "cuda" and mode is not None and mode.has_full_cudagraphs(),
    )
    made: AttentionMetadataBuilder[Any] = _spec(layer, block_size).get_class().builder_cls(context)
    return made


def on_device(values: Sequence[float] | Tensor | None, device: torch.device) -> Tensor | None:
    """Return a layer's slopes or sinks on the device where it runs."""
    if values is None or isinstance(values, Tensor):
        return values
    return torch.tensor(values, dtype=torch.float32, device=device)
