"""Native decode of ``FLASHINFER_MLA``: ``BatchMLAPagedAttentionWrapper`` with its fa3 or fa2 kernels.

The wrapper reads page indices, and a schedule that it plans on the host. Its launch grid depends on the mean query
length alone, so that a graph of equal queries replays with any lengths and pages.

Before 0.7, ``kv_indptr`` says where a request's indices begin and ``kv_len_arr`` how many there are, so block tables
are read as they are, row behind row. Since 0.7 the wrapper plans from ``MLAPlanMetadata`` and wants exactly the pages
that a request has (mla/_batch_mla/_planning.py 0.7.2.post1), so tables are flattened. The plan fixes whether the LSE is
returned, and it is made before a layer asks for one, so it always is. Every plan allocates a schedule of 8 MiB; a
captured wrapper keeps its first one.

The fa3 kernel of 0.6 runs decodes of one token by a schedule of our own where it can (``mla_schedule``).

Under causality the kernels end the loop over keys at ``kv_len - q_len + tile_end // num_heads``, one key too early for
a query that a tile of 64 or 128 rows cuts in two (include/flashinfer/attention/mla.cuh and mla_hopper.cuh v0.6.14;
0.7.2 refuses such plans). There every query becomes a request of its own, which shares its request's pages.
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
from attn_select_flashinfer.runtime.plans import PinnedKeeper, PinnedRing, ScaledPlan, Schedule, SharedScale, Wrapper
from attn_select_flashinfer.runtime.scores import power_for

MAX_WORKS = 16384
"""Pieces of work that a schedule holds; MLAPlan in attention/scheduler.cuh v0.6.14 does not check it."""
SCHEDULE_BYTES = MIB
"""Eleven lists of ``MAX_WORKS`` and five of an entry per SM, int32."""


class Lists(NamedTuple):
    """Host lists of a plan in pinned memory, never written again: int32 ``(B + 1,)``, ``(B + 1,)``, ``(B,)``."""

    queries: Tensor
    pages: Tensor
    keys: Tensor


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
        self._ring = PinnedRing(context.device) if self._metadata is None else PinnedKeeper(context.device)
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
        self._known: dict[int, Tensor] = {}
        self._fixed = plan_arguments(config, self._size)

    def _check_capacity(self) -> int:
        """Return how many tokens a batch may have."""
        context, heads = self._context, self._heads
        drafts = context.config.max_decode_query_len
        tokens = min(context.max_num_batched_tokens, context.max_num_seqs * drafts)
        requests = min(tokens, context.max_num_seqs)
        # A piece per tile, and one more per SM where keys are split. Tiles are half as high where queries are short.
        tiles = max(2 * requests, tokens * heads // TILE.value + requests)
        if self._causal and drafts > 1 and TILE.value % heads:  # every query may become a request (``_by_token``)
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
        # Its page indices are the captured block table, and a plan copies another table there. Since 0.7 they have a
        # place of their own.
        causal = self._causal and common.causal and common.max_query_len > 1
        requests = common.num_actual_tokens if causal and self._by_token(common) else common.num_reqs
        if requests not in self._captured:
            ints: dict[str, Any] = {"dtype": torch.int32, "device": self._context.device}
            sizes = {"qo_indptr": requests + 1, "kv_indptr": requests + 1, "kv_len_arr": requests}
            lists = {name: torch.zeros(size, **ints) for name, size in sizes.items()}
            if self._metadata is not None and self._indices is None:
                context = self._context
                self._indices = torch.zeros(self._most * -(-context.max_model_len // self._size), **ints)
            indices = _rows(common) if self._indices is None else self._indices
            self._captured[requests] = self._wrapper(use_cuda_graph=True, kv_indices=indices, **lists)
        return self.build(common)

    def build(self, common: CommonAttentionMetadata) -> ScaledPlan:
        """Return the decodes of a batch, planned."""
        causal = self._causal and common.causal and common.max_query_len > 1
        lists, single = self._lists(common), common.max_query_len == 1
        apart = causal and self._by_token(common)
        if apart:
            lists, causal, single = self._as_requests(lists), False, True
        requests = len(lists.keys)
        wrapper = self._captured.get(requests, self._eager)
        if self._metadata is None:
            indices = _rows(common)
        else:
            lists, indices = self._flattened(common, lists, wrapper, apart)
        arguments = {**given_lists(*lists, indices), "causal": causal, **self._fixed}
        balanced = None
        if self._balanced is not None and single and self._heads <= self._tile(common.num_actual_tokens, requests):
            balanced = BalancedPlan(self._balanced, *lists, _rows(common))
        return ScaledPlan(common.num_actual_tokens, wrapper, self._ring, arguments, self._scale, balanced)

    def _flattened(
        self, common: CommonAttentionMetadata, lists: Lists, wrapper: Wrapper, apart: bool
    ) -> tuple[Lists, Tensor]:
        """Return the lists with the pages that each request has, no more, one request behind the other."""
        table, requests = common.block_table_tensor, len(lists.keys)
        assert table is not None
        if apart:  # each token is a request of its request's pages
            row = torch.repeat_interleave(common.query_lens_cpu, output_size=requests)
            table = table.index_select(0, to_device(row.int(), self._context.device))
        pages = self._pinned(requests + 1)
        pages[0] = 0
        torch.cumsum((lists.keys + (self._size - 1)) // self._size, 0, dtype=torch.int32, out=pages[1:])
        total = max(1, int(pages[-1]))
        if wrapper.captured:
            assert self._indices is not None
            indices = self._indices[:total]
        else:
            indices = torch.empty(total, dtype=torch.int32, device=table.device)
        ops.flatten_block_table(table, to_device(pages, self._context.device), indices)
        return Lists(lists.queries, pages, lists.keys), indices

    def _lists(self, common: CommonAttentionMetadata) -> Lists:
        requests, longest, table = common.num_reqs, common.max_query_len, common.block_table_tensor
        assert table is not None
        width = table.stride(0)
        if requests * width * max(2, self._size) >= 1 << 32:
            text = f"{requests} rows of {width} pages of {self._size} tokens: the kernels count tokens in 32 bits"
            raise BatchError(f"block_table_tensor of {text}")
        keys = self._pinned(requests)
        keys.copy_(common.seq_lens_cpu)
        if longest * requests == common.num_actual_tokens:
            queries = self._multiples(longest, requests)
        else:
            queries = self._pinned(requests + 1)
            queries.copy_(common.query_start_loc_cpu)
        return Lists(queries, self._multiples(width, requests), keys)

    def _pinned(self, length: int) -> Tensor:
        return staging(length, self._context.device)

    def _multiples(self, factor: int, count: int) -> Tensor:
        """Return 0 to ``count`` times ``factor``."""
        known = self._known.get(factor)
        if known is None or len(known) <= count:
            known = self._pinned(max(self._most, count) + 1)
            known.copy_(torch.arange(len(known)) * factor)
            self._known[factor] = known
        return known[: count + 1]

    def _by_token(self, common: CommonAttentionMetadata) -> bool:
        """Whether a tile of rows would cut a query in two under causality."""
        # Rows are query * heads + head. Tiles end between queries where heads divide them; one tile cuts nothing.
        tile = self._tile(common.num_actual_tokens, common.num_reqs)
        return tile % self._heads != 0 and common.max_query_len * self._heads > tile

    def _tile(self, tokens: int, requests: int) -> int:
        """Return the rows that a cluster works on; where queries are short it is one CTA, not two."""
        return TILE.value // (1 if tokens * self._heads // requests > TILE.value // 2 else 2)

    def _as_requests(self, lists: Lists) -> Lists:
        """Return each query as a request of one, which sees the keys up to its own."""
        tokens = int(lists.queries[-1])
        request = torch.repeat_interleave(lists.queries.diff(), output_size=tokens)
        queries, pages, keys = self._multiples(1, tokens), self._pinned(tokens + 1), self._pinned(tokens)
        pages[:-1] = lists.pages[request]  # where pages begin, not prefix sums: requests may share them
        pages[-1] = lists.pages[-1]
        # The last query of a request sees all of its keys; padding of a graph has queries, but no keys.
        later = lists.queries[1:][request] - 1 - queries[:-1]
        torch.sub(lists.keys[request], later, out=keys).clamp_min_(0)
        return Lists(queries, pages, keys)


def _rows(common: CommonAttentionMetadata) -> Tensor:
    """Return the block table as one row, int32 ``(num_reqs * stride,)`` less what its last row lacks."""
    table = common.block_table_tensor
    assert table is not None
    return table.as_strided(((common.num_reqs - 1) * table.stride(0) + table.shape[1],), (1,))


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
