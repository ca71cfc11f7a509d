"""``PAGED_ATTENTION`` at run time: decodes by version 1 or 2, prefills by the kernel of ``TRITON_ATTN``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
)
from attn_select.runtime.batch import to_device
from attn_select.runtime.kv_cache import CacheView, paged_attention_views
from attn_select.runtime.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_triton.facts.paged_attention import partial_bytes
from attn_select_triton.facts.planned_kernels import ClassicDecodeKernel, PrefillKernel, Version
from attn_select_triton.kernels.launch import Terms as KernelTerms
from attn_select_triton.kernels.launch import capability_of
from attn_select_triton.kernels.paged_attention import (
    Partials,
    classic_prefill_launch,
    gather_classic,
    paged_attention_v1,
    paged_attention_v2,
)
from attn_select_triton.kernels.prefill import prefill_attention
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device
from attn_select_triton.runtime.schedule import Chunk, gathered_chunks
from attn_select_triton.runtime.side_by_side import COMPILING
from attn_select_triton.runtime.triton_attn_metadata import room_for_copies

# Query rows of a KV head's group that must attend to each key, on average, for its copy out of the cache to pay.
COPY_ROWS = 256


def copy_pays(query_lens: Sequence[int], seq_lens: Sequence[int], group: int) -> bool:
    """Whether prefills read keys and values so often that these are copied into rows first (``COPY_ROWS``)."""
    # Query token i of n sees seq_len - n + 1 + i keys: seq_len - n / 2 in the mean.
    pairs = sum(query_len * (seq_len - query_len / 2) for query_len, seq_len in zip(query_lens, seq_lens, strict=True))
    return pairs * group >= COPY_ROWS * sum(seq_lens)


@dataclass(slots=True)
class Prefill:
    """Requests of one launch."""

    arguments: dict[str, Any]  # of ``prefill_attention``
    # of ``gather_classic``, which comes before; None: keys and values are read where they lie
    gather: dict[str, Any] | None = None


@dataclass(slots=True)
class PagedAttentionMetadata:
    """One step for all layers of a kind."""

    # what runs the decodes, which come first; None: there are none. A captured graph keeps it.
    version: Version | None = None
    decode: dict[str, Any] = field(default_factory=dict)  # arguments of the version's kernel
    prefills: list[Prefill] = field(default_factory=list)  # launches for the other requests
    # arguments of ``prefill_attention`` for all of these requests over the step's own keys; None where some have
    # earlier keys in the cache, or the cache has another dtype
    prompts: dict[str, Any] | None = None
    causal: bool = True  # of the prefills


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Builds the metadata of one kind of layers; reserves the workspaces of its plans."""

    # partials: room for version 2's partial results; None where it never runs.
    # gathered: K and V ``(rows, num_kv_heads, head_size)`` for what is copied out of the cache; None: nothing is.

    reorder_batch_threshold = 1

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config = context.config
        kernels = {phase: plan.kernel for phase, plan in context.plans.items()}
        self._decode: ClassicDecodeKernel | None = None
        self.partials: Partials | None = None
        self.gathered: tuple[Tensor, Tensor] | None = None
        if "decode" in kernels:
            decode = kernels["decode"]
            assert isinstance(decode, ClassicDecodeKernel)
            self._decode, self.partials = decode, room_for_partials(context, decode)
        if "prefill" in kernels:
            prefill = kernels["prefill"]
            assert isinstance(prefill, PrefillKernel)
            self.gathered = room_for_copies(context, prefill.gather_bytes)
        self._group = config.num_heads // config.num_kv_heads
        self._cached_as_is = config.cache_dtype == config.dtype
        dtypes = PLAIN_DTYPES[config.dtype], storage_dtype(config.cache_dtype)
        self._launch = classic_prefill_launch(capability_of(context.device), config.head_size, *dtypes)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """As ``AttentionMetadataBuilder.build``. Launches nothing; it copies rows of a workspace to the device."""
        common, num_reqs, num_decodes = common_attn_metadata, common_attn_metadata.num_reqs, 0
        if common.max_query_len > 1:
            # A batch padded for a graph ends in requests without a query. Behind prefills they do not count as decodes.
            lens = common.query_lens_cpu.tolist()
            while num_reqs and not lens[num_reqs - 1]:
                num_reqs -= 1
        metadata = PagedAttentionMetadata(causal=common.causal)
        if self._decode is not None:
            num_decodes = split_decodes_and_prefills(common.requests(0, num_reqs)).num_decodes
            if num_decodes:
                self._decodes(metadata, common, num_decodes, self._decode)
        if num_decodes == num_reqs:
            return metadata
        part = slice(num_decodes, num_reqs)
        query_lens, seq_lens = common.query_lens_cpu[part].tolist(), common.seq_lens_cpu[part].tolist()
        chunks = [Chunk(0, len(query_lens), sum(query_lens), None, 0)]
        if query_lens == seq_lens and self._cached_as_is:
            prompts = _arguments(common, part) | {"num_tokens": sum(query_lens), "max_seq_len": max(seq_lens)}
            metadata.prompts = prompts | {"block_table": None, "key_start_loc": prompts["query_start_loc"][:-1]}
        elif self.gathered is not None and copy_pays(query_lens, seq_lens, self._group):
            chunks = gathered_chunks(query_lens, seq_lens, 0, len(self.gathered[0]))
        metadata.prefills = self._prefills(common, num_decodes, chunks)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """Leave a mixed batch to prefill as a whole: which of its requests are decodes will differ at each replay."""
        common = common_attn_metadata
        if common.max_query_len <= 1:
            return self.build(0, common)
        chunk = Chunk(0, common.num_reqs, common.num_actual_tokens, None, 0)
        return PagedAttentionMetadata(prefills=self._prefills(common, 0, [chunk]), causal=common.causal)

    def _decodes(
        self, metadata: PagedAttentionMetadata, common: CommonAttentionMetadata, count: int, kernel: ClassicDecodeKernel
    ) -> None:
        """Choose the version for the first ``count`` requests."""
        longest = common.max_seq_len if count == common.num_reqs else int(common.seq_lens_cpu[:count].max())
        longest = min(longest, self.context.max_model_len)
        metadata.version = kernel.version(count, self.context.config.num_heads, longest)
        metadata.decode = _arguments(common, slice(0, count))
        if metadata.version == "v2":
            own = {"partials": self.partials, "max_seq_len": longest, "partition_size": kernel.partition_size}
            metadata.decode |= own

    def _prefills(self, common: CommonAttentionMetadata, first: int, chunks: Sequence[Chunk]) -> list[Prefill]:
        """Return the launches of the requests from ``first`` on, in chunks of them."""
        starts = [row for chunk in chunks for row in chunk.starts or [0] * (chunk.last - chunk.first)]
        rows: Tensor | None = None
        if any(chunk.starts is not None for chunk in chunks):
            rows = to_device(torch.tensor(starts, dtype=torch.int32), self.context.device)
        found = []
        for chunk in chunks:
            arguments = _arguments(common, slice(first + chunk.first, first + chunk.last))
            gather: dict[str, Any] | None = None
            if chunk.starts is None or rows is None or self.gathered is None:
                arguments["launch"] = self._launch
            else:
                gather = dict(zip(("key_out", "value_out"), self.gathered, strict=True))
                gather |= {name: arguments[name] for name in ("block_table", "seq_lens")}
                gather |= {"key_start_loc": rows[chunk.first : chunk.last], "max_keys": chunk.most_rows}
                arguments |= {"block_table": None, "key_start_loc": gather["key_start_loc"], "clean": True}
            arguments |= {"num_tokens": chunk.tokens, "max_seq_len": common.max_seq_len}
            found.append(Prefill(arguments, gather))
        return found


def _arguments(common: CommonAttentionMetadata, requests: slice) -> dict[str, Any]:
    """Return what all kernels take of some requests, views of the step's tensors."""
    table = common.block_table_tensor
    assert table is not None
    return {
        "query_start_loc": common.query_start_loc[requests.start : requests.stop + 1],
        "seq_lens": common.seq_lens[requests],
        "block_table": table[requests],
    }


def room_for_partials(context: BackendContext, kernel: ClassicDecodeKernel) -> Partials | None:
    """Return room for the partial results of version 2, as the kernel limits it; None where version 2 never runs."""
    config, longest = context.config, context.max_model_len
    seqs = context.max_num_seqs
    if longest <= kernel.v1_most_tokens:
        seqs = min(seqs, kernel.v1_least_rows // config.num_heads)  # with more of them version 1 runs
        if longest <= kernel.partition_size or not seqs:
            return None
    of_one = config.num_heads * -(-longest // kernel.partition_size)
    rows = max(of_one, min(seqs * of_one, kernel.partials_bytes // partial_bytes(config)))
    return Partials.reserve(rows, config.head_size, PLAIN_DTYPES[config.dtype], context.device)


class PagedAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = context.config
        self._views = CacheView(lambda kv_cache: paged_attention_views(kv_cache, config))
        self._terms = {causal: KernelTerms(causal=causal, slopes=terms.alibi_slopes) for causal in (True, False)}
        self._fp8 = config.cache_dtype in FP8_DTYPES
        self._attend = on_device(context.device, self._run)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: PagedAttentionMetadata,
        outputs: Outputs,
    ) -> Tensor:
        """As ``AttentionImpl.forward``."""
        assert kv_cache is not None
        own = (key, value) if key is not None and value is not None else None
        factors: dict[str, Any] = {"scale": self.terms.scale}
        if self._fp8:
            factors |= {"k_scale": self.terms.scales.k_float, "v_scale": self.terms.scales.v_float}
        self._attend(query, own, self._views(kv_cache), attn_metadata, outputs.output, factors)
        return outputs.output

    def _run(
        self,
        query: Tensor,
        own: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        metadata: PagedAttentionMetadata,
        output: Tensor,
        factors: dict[str, Any],
    ) -> None:
        if metadata.version is not None:
            kernel = paged_attention_v1 if metadata.version == "v1" else paged_attention_v2
            kernel(query, cache[0], cache[1], output, slopes=self.terms.alibi_slopes, **factors, **metadata.decode)
        terms = self._terms[metadata.causal]
        if metadata.prompts is not None and own is not None:
            prefill_attention(query, own[0], own[1], output, terms=terms, **factors, **metadata.prompts)
            return
        for prefill in metadata.prefills:
            key, value = cache[0], cache[1].permute(0, 3, 1, 2)
            if prefill.gather is not None:
                gather_classic(cache[0], cache[1], **prefill.gather)
                key, value = prefill.gather["key_out"], prefill.gather["value_out"]
            prefill_attention(query, key, value, output, terms=terms, **factors, **prefill.arguments)


class PagedAttentionBackend(AttentionBackend):
    """``PAGED_ATTENTION``."""

    impl_cls = PagedAttentionImpl
    builder_cls = PagedAttentionMetadataBuilder
    compiling = COMPILING

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
