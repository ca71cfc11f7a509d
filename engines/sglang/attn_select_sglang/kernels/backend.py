"""An attention backend of SGLang that runs attn-select's kernels, for all layers of a model: what MHA and MLA share."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from attn_select import select
from attn_select.decide.selector import rules_in_an_engine
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig, CudaGraphLevel
from attn_select.runtime import (
    BatchError,
    Capacity,
    CommonAttentionMetadata,
    LayerGroup,
    attention_group,
    decodes_first,
)
from attn_select.runtime.compile_ahead import compile_in_an_engine
from attn_select.runtime.cuda_graph import StaticBatch, check_level
from attn_select_sglang.kernels.batch import VERIFY, common_of, reordered, requests_with_slots
from attn_select_sglang.kernels.limits import captures, drafts_of, limits

logger = logging.getLogger("sglang.attn_select")


@dataclass(slots=True)
class Built:
    """One step for one group."""

    metadata: Any
    # The token of SGLang's batch behind each token of the group's; None: they are in one order.
    tokens: Tensor | None = None


class OwnAttnBackend(AttentionBackend):
    """Runs every attention layer of a model by one backend of attn-select, named as attn-select names it."""

    # SGLang's ``ModelRunner`` has loaded its model and made its pools. Raises ConfigError, with every reason, where
    # the adapter does not serve such a model, NoBackendError where the backend cannot run a layer.

    layout: str
    """attn-select's name for the layout of SGLang's pool."""
    forward_metadata: Any
    """What was built for the step that runs, by group; SGLang's name."""

    def __init__(self, model_runner: Any, backend: str) -> None:
        super().__init__()
        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        if refused := limits(model_runner, layers):
            raise ConfigError(
                f"attn-select's {backend} does not run this model in SGLang: {'; '.join(refused)}",
                fields=["attention_backend"],
                hint="leave --attention-backend out, and attn-select chooses among SGLang's own backends",
            )
        self.backend = backend
        self.device = torch.device(model_runner.device)
        self.page_size: int = model_runner.page_size
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._req_to_token: Tensor = self.req_to_token_pool.req_to_token
        self._drafts = drafts_of(model_runner)
        self._groups: dict[tuple[AttentionConfig, bool], LayerGroup] = {}
        """By what layers ask for, and whether they are in SGLang's pool of layers with windows."""
        self._static: dict[bool, StaticBatch] = {}
        """What captured decodes read, by whether it is in slots of the pool of layers with windows."""
        self._captured: dict[int, dict[LayerGroup, Built]] = {}
        self._bind(layers, model_runner)
        groups = [*self._groups.values()]
        if self.device.type == "cuda" and groups:
            compile_in_an_engine(
                [group.selection for group in groups],
                groups[0].device,
                groups[0].capacity,
                cuda_graphs=captures(model_runner),
                logger=logger,
            )

    @abstractmethod
    def _bind(self, layers: Sequence[Any], model_runner: Any) -> None:
        """Make what runs each of SGLang's ``RadixAttention`` layers."""

    def _group_of(self, model_runner: Any, *, in_window_pool: bool = False, **layer_fields: Any) -> LayerGroup:
        """Return the group of layers that ask for this, beside what is the same for all layers of the model."""
        config = AttentionConfig(
            dtype=model_runner.dtype,
            kv_cache_dtype=self.token_to_kv_pool.dtype,
            block_size=self.page_size,
            cuda_graph=_wanted_graphs(model_runner),
            num_speculative_tokens=self._drafts,
            draft_tree=self._drafts > 0,
            **layer_fields,
        )
        key = config, in_window_pool
        if key not in self._groups:
            self._groups[key] = self._group(config, model_runner)
        return self._groups[key]

    def _group(self, config: AttentionConfig, model_runner: Any) -> LayerGroup:
        device = "cpu" if self.device.type == "cpu" else None
        selection = select(config, device, rules_in_an_engine(), backend=self.backend)
        selection.require()
        if selection.kv_layout != self.layout:
            text = f"attn-select's {self.backend} reads {selection.kv_layout}, and SGLang keeps {self.layout}"
            raise ConfigError(text, fields=["attention_backend"])
        arguments, context = model_runner.server_args, model_runner.model_config.context_len
        chunk = arguments.chunked_prefill_size or 0
        requests = model_runner.req_to_token_pool.size
        # Without chunks the last prompt of a step may go beyond the limit.
        tokens = chunk if chunk > 0 else arguments.max_prefill_tokens + context
        return attention_group(
            selection,
            self.device if self.device.type == "cpu" else None,
            Capacity(requests, tokens + requests * config.max_decode_query_len, self._req_to_token.shape[1]),
            cuda_graphs=captures(model_runner),
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build the step for every group."""
        if forward_batch.forward_mode.is_idle():
            return
        batches = self._batches(forward_batch)
        self.forward_metadata = {group: _built(group, common) for group, common in batches}

    def _batches(
        self, forward_batch: Any, captured: int | None = None
    ) -> Iterator[tuple[LayerGroup, CommonAttentionMetadata]]:
        """Return every group with the step, in the slots of the pool that the group's layers are in."""
        # captured: the size of the graph that replays it, at whose addresses it then is; None: it runs eagerly.
        known: dict[bool, CommonAttentionMetadata] = {}
        requests = forward_batch.batch_size if captured is None else requests_with_slots(forward_batch)
        for (_, in_window_pool), group in self._groups.items():
            if in_window_pool not in known:
                translate = self.token_to_kv_pool.translate_loc_from_full_to_swa if in_window_pool else None
                given = forward_batch, requests, self._req_to_token, self.page_size, translate
                if captured is None:
                    known[in_window_pool] = common_of(*given)
                else:
                    static = self._static[in_window_pool]
                    known[in_window_pool] = static.load(common_of(*given, static), captured)
            yield group, known[in_window_pool]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserve the tensors that captured decodes read; ConfigError where a group's kernels cannot be captured."""
        for (config, in_window_pool), group in self._groups.items():
            check_level(group, config.max_decode_query_len)
            if in_window_pool not in self._static:
                self._static[in_window_pool] = StaticBatch(group, config.max_decode_query_len)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that only fill a captured batch."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Build a decode at the addresses that a graph of its size was captured with; BatchError without one."""
        wanted, mode = (VERIFY if self._drafts else "DECODE"), forward_batch.forward_mode.name
        if mode != wanted:
            raise BatchError(f"{mode}: captured steps are decodes (accepted: {wanted})")
        size = forward_batch.batch_size
        if in_capture:
            dummies = {in_window_pool: static.dummy(size) for in_window_pool, static in self._static.items()}
            self._captured[size] = {
                group: Built(group.build_for_cudagraph_capture(dummies[in_window_pool]))
                for (_, in_window_pool), group in self._groups.items()
            }
        elif size not in self._captured:
            sizes = ", ".join(map(str, sorted(self._captured))) or "none"
            raise BatchError(f"batch_size = {size}: no decode of this size was captured (captured: {sizes})")
        else:
            for group, common in self._batches(forward_batch, size):
                group.build(common)
        self.forward_metadata = self._captured[size]

    def _step_of(self, group: LayerGroup, extra: Mapping[str, Any]) -> Any:
        """Return what was built for a group; BatchError for an argument that the adapter does not take."""
        if given := [name for name, value in extra.items() if value is not None]:
            raise BatchError(f"{', '.join(given)} given: attn-select's kernels in SGLang take none (accepted: None)")
        return self.forward_metadata[group]

    def support_triton(self) -> bool:
        """Whether SGLang may run Triton kernels of its own on the device."""
        return self.device.type == "cuda"


def _wanted_graphs(model_runner: Any) -> CudaGraphLevel:
    """Return the level that captures decodes, where SGLang is to capture them."""
    if not captures(model_runner):
        return "NEVER"
    return "UNIFORM_BATCH" if drafts_of(model_runner) else "UNIFORM_SINGLE_TOKEN_DECODE"


def _built(group: LayerGroup, common: CommonAttentionMetadata) -> Built:
    """Return a step for a group, decodes first where its builders want that."""
    threshold = group.reorder_batch_threshold
    if threshold is not None:
        order = decodes_first(common.query_lens_cpu.tolist(), threshold)
        if order != sorted(order):
            changed, tokens = reordered(common, order)
            return Built(group.build(changed), tokens)
    return Built(group.build(common))
