"""Native decode of ``FLASHINFER_MLA``: ``BatchMLAPagedAttentionWrapper`` with its fa3 or fa2 kernels.

The wrapper reads page indices, and a schedule that it plans on the host. Its launch grid depends on the mean query
length alone, so that a graph of equal queries replays with any lengths and pages.

Block tables are flattened: since 0.7 the wrapper wants exactly the pages that a request has, one request behind the
other (mla/_batch_mla/_planning.py 0.7.2.post1), and plans from ``MLAPlanMetadata``. Its plan fixes whether
the LSE is returned, and it is made before a layer asks for one, so it always is. Every plan allocates a schedule of
8 MiB; a captured wrapper keeps its first one.

The fa3 kernel of 0.6 runs decodes of one token by a schedule of our own where it can (``mla_schedule``).

Under causality the kernels end the loop over keys at ``kv_len - q_len + tile_end // num_heads``, one key too early for
a query that a tile of 64 or 128 rows cuts in two (include/flashinfer/attention/mla.cuh and mla_hopper.cuh v0.6.14;
0.7.2 refuses such plans). There every query becomes a request of its own, with its request's pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import ops
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import staging, to_device
from attn_select.runtime.kv_cache import CacheView
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES, storage_dtype
from attn_select_flashinfer.facts.libraries import INT_WORKSPACE, MIB
from attn_select_flashinfer.facts.mla_kernels import TILE
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.mla_schedule import MOST_SMS, BalancedPlan, MLALists
from attn_select_flashinfer.runtime.plans import PinnedRing, ScaledPlan, Schedule, SharedScale, Wrapper
from attn_select_flashinfer.runtime.scores import power_for

MAX_WORKS = 16384
"""Pieces of work that a schedule holds; MLAPlan in attention/scheduler.cuh v0.6.14 does not check it."""
SCHEDULE_BYTES = MIB
"""Eleven lists of ``MAX_WORKS`` and five of an entry per SM, int32."""


class Lists(NamedTuple):
    """Host lists of a plan in pinned memory, never written again: int32."""

    queries: Tensor  # queries, pages: ``(B + 1,)``, prefix sums of their numbers
    pages: Tensor
    keys: Tensor  # ``(B,)``, numbers of keys


def plan_arguments(config: AttentionConfig, page_size: int) -> dict[str, Any]:
    """Return what every plan of the wrapper gets of a kind of layers."""
    layouts = {"query_layout": "split", "kv_cache_layout": "split", "lse_mode": "basee"}
    return {
        "num_heads": config.num_heads,
        "head_dim_ckv": config.kv_lora_rank,
        "head_dim_kpe": config.qk_rope_head_dim,
        "page_size": page_size,
        "q_data_type": PLAIN_DTYPES[config.dtype],
        "kv_data_type": storage_dtype(config.cache_dtype),
        **({} if library.flashinfer().MLAPlanMetadata is None else layouts),
    }


def given_lists(queries: Tensor, pages: Tensor, keys: Tensor, indices: Tensor) -> dict[str, Any]:
    """Return a plan's lists as the release takes them."""
    lists = {"qo_indptr": queries, "kv_indptr": pages, "kv_indices": indices, "kv_len_arr": keys}
    metadata = library.flashinfer().MLAPlanMetadata
    return lists if metadata is None else {"metadata": metadata.csr(**lists)}


class NativeDecode:
    """Plans the decodes of one kind of layers."""

    def __init__(self, context: BackendContext, kernel: str, scale: SharedScale) -> None:
        # kernel: ``fa3`` or ``fa2``
        config, self._context, self._scale = context.config, context, scale
        self._size, self._heads = cast(int, context.block_size), config.num_heads
        self._causal = not config.non_causal
        self._backend, self._metadata = kernel, library.flashinfer().MLAPlanMetadata
        self._ring = PinnedRing(context.device, own=self._metadata is not None)
        self._most = self._check_capacity()
        memory: dict[str, Any] = {"dtype": torch.uint8, "device": context.device}
        self._workspace = torch.empty(context.plans["decode"].workspace_bytes - INT_WORKSPACE, **memory)
        # One for all wrappers. ``Plan.ready`` makes sure that a step finds its own plan there.
        self._schedule, self._balanced = Schedule(), None
        if self._metadata is None:
            own = kernel == "fa3" and self._heads <= TILE.value
            size = SCHEDULE_BYTES + (MLALists.num_bytes(self._most) if own else 0)
            self._schedule.memory = torch.empty(size, **memory)
            if own:
                self._balanced = MLALists(self._schedule.memory, SCHEDULE_BYTES, self._most, self._heads)
        self._indices: Tensor | None = None
        self._eager = self._wrapper()
        self._captured: dict[int, Wrapper] = {}
        self._fixed = plan_arguments(config, self._size)

    def _check_capacity(self) -> int:
        """Return how many tokens a batch may have."""
        context, heads = self._context, self._heads
        drafts = context.config.max_decode_query_len
        tokens = min(context.max_num_batched_tokens, context.max_num_seqs * drafts)
        requests = min(tokens, context.max_num_seqs)
        # A piece per tile, and one more per SM where keys are split. Tiles are half as high where queries are short.
        tiles = max(2 * requests, tokens * heads // TILE.value + requests)
        if self._causal and drafts > 1 and TILE.value % heads:  # every query may become a request (``_apart``)
            tiles = max(tiles, tokens * -(-heads // TILE.value))
        if tiles + MOST_SMS > MAX_WORKS:
            text = (
                f"max_num_seqs = {context.max_num_seqs} and max_num_batched_tokens = {context.max_num_batched_tokens}: "
                f"{tokens} decode tokens of {heads} heads may need {tiles + MOST_SMS} pieces of work; {MAX_WORKS} fit"
            )
            raise ConfigError(text, fields=["max_num_seqs", "max_num_batched_tokens"])
        return tokens

    def _wrapper(self, **buffers: Any) -> Wrapper:
        made = library.flashinfer().BatchMLAPagedAttentionWrapper(self._workspace, backend=self._backend, **buffers)
        if self._schedule.memory is not None:
            made._int_workspace_buffer = self._schedule.memory  # instead of 8 MiB of its own
        return Wrapper(made, self._schedule, captured="use_cuda_graph" in buffers)

    def capture(self, common: CommonAttentionMetadata) -> ScaledPlan:
        """Return the call to capture. From then on its wrapper serves all batches of this size."""
        requests = common.num_actual_tokens if self._apart(common) else common.num_reqs
        if requests not in self._captured:
            ints: dict[str, Any] = {"dtype": torch.int32, "device": self._context.device}
            if self._indices is None:
                self._indices = torch.zeros(self._most * -(-self._context.max_model_len // self._size), **ints)
            sizes = {"qo_indptr": requests + 1, "kv_indptr": requests + 1, "kv_len_arr": requests}
            lists = {name: torch.zeros(size, **ints) for name, size in sizes.items()}
            self._captured[requests] = self._wrapper(use_cuda_graph=True, kv_indices=self._indices, **lists)
        return self.build(common)

    def build(self, common: CommonAttentionMetadata) -> ScaledPlan:
        """Return the decodes of a batch, planned."""
        apart, tokens = self._apart(common), common.num_actual_tokens
        lists = self._lists(common, apart)
        wrapper = self._captured.get(len(lists.keys), self._eager)
        indices = self._flattened(common, lists, apart, self._indices if wrapper.captured else None)
        causal = self._causal and common.causal and common.max_query_len > 1 and not apart
        arguments = {**given_lists(*lists, indices), "causal": causal, **self._fixed}
        single, balanced = apart or common.max_query_len == 1, None
        if self._balanced is not None and single and self._heads <= self._tile(tokens, len(lists.keys)):
            balanced = BalancedPlan(self._balanced, *lists, indices)
        return ScaledPlan(tokens, wrapper, self._ring, arguments, self._scale, balanced)

    def _lists(self, common: CommonAttentionMetadata, apart: bool) -> Lists:
        """Return a batch's lists; ``apart``: of each query as a request of one, which sees the keys up to its own."""
        bounds, keys = common.query_start_loc_cpu, common.seq_lens_cpu
        if apart:
            tokens = int(bounds[-1])  # padding behind the requests belongs to none
            request = torch.repeat_interleave(common.query_lens_cpu, output_size=tokens)
            counted = torch.arange(tokens + 1, dtype=torch.int32)
            # The last query of a request sees all of its keys; padding of a graph has queries, but no keys.
            later = bounds[1:][request] - 1 - counted[:-1]
            bounds, keys = counted, (keys[request] - later).clamp_min_(0)
        if (total := int(keys.sum())) >= 1 << 31:
            raise BatchError(f"seq_lens of {total} keys in all: the kernels count them in 32 bits")
        pages = self._pinned(len(keys) + 1)
        pages[0] = 0
        torch.cumsum((keys + (self._size - 1)) // self._size, 0, dtype=torch.int32, out=pages[1:])
        return Lists(self._pinned(len(bounds)).copy_(bounds), pages, self._pinned(len(keys)).copy_(keys))

    def _flattened(self, common: CommonAttentionMetadata, lists: Lists, apart: bool, memory: Tensor | None) -> Tensor:
        """Return the page indices on the device, at the front of ``memory`` where a graph reads them there."""
        table, device, total = common.block_table_tensor, self._context.device, max(1, int(lists.pages[-1]))
        assert table is not None
        if apart:
            request = torch.repeat_interleave(common.query_lens_cpu, output_size=len(lists.keys))
            table = table.index_select(0, to_device(request.int(), device))
        indices = torch.empty(total, dtype=torch.int32, device=device) if memory is None else memory[:total]
        ops.flatten_block_table(table, to_device(lists.pages, device), indices)
        return indices

    def _pinned(self, length: int) -> Tensor:
        return staging(length, self._context.device)

    def _apart(self, common: CommonAttentionMetadata) -> bool:
        """Whether every query becomes a request: a tile of rows would cut one in two under causality."""
        if not (self._causal and common.causal and common.max_query_len > 1):
            return False
        # Rows are query * heads + head. Tiles end between queries where heads divide them; one tile cuts nothing.
        tile = self._tile(common.num_actual_tokens, common.num_reqs)
        return tile % self._heads != 0 and common.max_query_len * self._heads > tile

    def _tile(self, tokens: int, requests: int) -> int:
        """Return the rows that a cluster works on; where queries are short it is one CTA, not two."""
        return TILE.value // (1 if tokens * self._heads // requests > TILE.value // 2 else 2)


class ReadyCall(Protocol):
    """A call of FlashInfer's wrapper, planned."""

    def ready_for(self, scale: float) -> Any:
        """Return the wrapper with this plan in it, for a scale of the softmax."""


class NativeLayer:
    """Runs the decodes of one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        config, self._terms = context.config, terms
        self._sizes = [cast(int, config.kv_lora_rank), cast(int, config.qk_rope_head_dim)]
        self._parts = CacheView(lambda kv_cache: kv_cache.split_with_sizes(self._sizes, dim=-1))
        # FP8 latents are multiplied by their scale before the product (mla_hopper.cuh v0.6.14), so the scale of the
        # scores does not contain it.
        self._fp8, self._power = config.cache_dtype == "fp8_e4m3", power_for(terms.scale)
        self._scale = terms.scale * self._power
        self._declared = library.flashinfer().MLAPlanMetadata is not None

    def run(
        self,
        query: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        call: ReadyCall,
        outputs: Outputs,
    ) -> None:
        """Attend; ``query (T, H, R + Pr)``, or its two parts, and ``outputs (T, H, R)`` have the call's tokens."""
        run = call.ready_for(self._scale).run
        parts = query if isinstance(query, tuple) else query.split_with_sizes(self._sizes, dim=-1)
        if self._power != 1.0:
            parts = tuple(part / self._power for part in parts)
        latents = self._parts(kv_cache)
        output_lse = outputs.lse
        options: dict[str, Any] = {"out": outputs.output}
        if self._fp8:
            options["ckv_scale"] = options["kpe_scale"] = self._terms.scales.k_float
        lse = None if output_lse is None else output_lse.contiguous()
        if lse is not None or self._declared:
            options |= {"lse": lse, "return_lse": True, "return_lse_base_on_e": True}
        if self._declared:
            run(query=tuple(parts), kv_cache=tuple(latents), **options)
        else:
            run(*parts, *latents, **options)
        if output_lse is not None and lse is not None and lse is not output_lse:
            output_lse.copy_(lse)
