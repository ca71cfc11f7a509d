"""The shape classes that are compiled ahead of time: layers that the gates accept, and what is launched for them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fake_gpu import SMS, tensor

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.gate import check
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASHINFER_HND, FLASHINFER_NHD, MLA
from attn_select.layer.layouts import PAGED_ATTENTION as CLASSIC
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.runtime.kv_cache import key_value_unchecked, kv_cache_shape, paged_attention_views
from attn_select.runtime.torch_dtypes import storage_dtype
from attn_select.runtime.torch_indexer import IndexedRows
from attn_select_triton.facts.paged_attention import DECODE, PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA
from attn_select_triton.facts.triton_mla_sparse import TRITON_MLA_SPARSE
from attn_select_triton.kernels import (
    cache,
    chosen_slots,
    convert,
    decode,
    indexer,
    launch,
    merge,
    mla_cache,
    mla_decode,
    paged_attention,
    pieces,
    prefill,
    prefill_hopper,
    rank_merge,
    work_list,
)
from attn_select_triton.kernels.launch import Terms

sys.path.insert(0, str(Path(__file__).parents[1]))

from one_decode import decode_attention

BLOCKS = 8
"""Of a cache."""


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """One kind of layer.

    Attributes:
        backend: whose gate it must pass.
        config: the layer.
        launches: what is launched for it, each with the layer's tensors.
        block_size: of its cache.
        query_len: tokens per request of a decode.
        layout: of its cache.
    """

    backend: BackendSpec
    config: AttentionConfig
    launches: tuple[Callable[[Tensors], None], ...]
    block_size: int = 16
    query_len: int = 1
    layout: str = FLASHINFER_NHD

    def accepted(self, target: int) -> bool:
        """Whether the gate accepts the layer, in every phase, on a GPU of compute capability ``target / 10``."""
        there = Device("gpu", divmod(target, 10), sm_count=SMS[target]), Environment(assume_installed=True)
        plans = [
            check(self.backend, self.config, *there, self.backend.options(), phase) for phase in self.config.phases
        ]
        return all(isinstance(plan, BackendPlan) for plan in plans)


class Tensors:
    """What a layer's launchers take, on the GPU that is not there.

    Args:
        requests: of the batch.
        first: the batch is cut from a larger one at this request, so its tensors' alignment may be anything.
        width: of the block table.
        shift: elements that every tensor made here, but for the scale, lies behind an address of 16 bytes.
    """

    def __init__(
        self, shape: ShapeClass, target: int, requests: int = 4, first: int = 0, width: int = 8, shift: int = 0
    ) -> None:
        self.config, self.target, self.query_len, self.longest = shape.config, target, shape.query_len, 4096
        config, kv_heads = shape.config, shape.config.num_kv_heads
        self.dtype, self.heads = storage_dtype(config.dtype), config.num_heads
        tokens, rows = (
            slice(first * self.query_len, (first + requests) * self.query_len),
            slice(first, first + requests),
        )

        def shifted(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
            return tensor(math.prod(sizes) + shift, dtype=dtype)[shift:].view(sizes)

        def cut(where: slice, *sizes: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return shifted(where.stop, *sizes, dtype=dtype)[where]

        self.query = cut(tokens, self.heads, config.head_size)
        value_size = config.value_head_size
        quantised = config.output_quantization == "fp8"
        written = torch.float8_e4m3fn if quantised else self.dtype
        self.output = cut(tokens, self.heads, config.kv_lora_rank or value_size, dtype=written)
        self.lse = cut(tokens, self.heads, dtype=torch.float32)
        self.key, self.value = cut(tokens, kv_heads, config.head_size), cut(tokens, kv_heads, value_size)
        self.query_start_loc = cut(slice(first, first + requests + 1), dtype=torch.int32)
        self.seq_lens = cut(rows, dtype=torch.int32)
        self.table = cut(rows, width, dtype=torch.int32)
        self.slots = cut(tokens, dtype=torch.int64)
        self.trees = cut(tokens, config.max_decode_query_len, dtype=torch.bool) if config.draft_tree else None
        self.scale = tensor(1, dtype=torch.float32)[0]
        self.output_scale = self.scale if quantised else None
        if config.has_cache:
            layout = MLA if config.kv_lora_rank else shape.layout
            sizes = kv_cache_shape(layout, config, BLOCKS, shape.block_size)
            self.cache = shifted(*sizes, dtype=storage_dtype(config.cache_dtype))
            if layout == CLASSIC:
                self.classic = paged_attention_views(self.cache, config)
                self.k_cache, self.v_cache = self.classic[0], self.classic[1].permute(0, 3, 1, 2)
            elif layout != MLA:
                self.k_cache, self.v_cache = key_value_unchecked(self.cache, layout, config)
        self.terms = Terms(
            causal=config.attn_type == "decoder" and not config.non_causal,
            window=config.sliding_window or 0,
            soft_cap=config.logits_soft_cap or 0.0,
            slopes=tensor(self.heads, dtype=torch.float32) if config.alibi else None,
            sinks=tensor(self.heads, dtype=self.dtype) if config.sinks else None,
            ranges=cut(rows, 2, 2, dtype=torch.int32) if config.mm_prefix else None,
        )
        self.batch = {"query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens}


def write(t: Tensors) -> None:
    """The cache update."""
    cache.write_kv(t.key, t.value, t.k_cache, t.v_cache, t.slots, t.scale, t.scale)


def _decode(t: Tensors, splits: int, split_tokens: int = 0, lse: torch.Tensor | None = None) -> None:
    size = decode.decode_workspace(len(t.query), t.heads, t.config.value_head_size, splits)
    decode_attention(
        t.query, t.k_cache, t.v_cache, t.output, **t.batch, block_table=t.table, max_query_len=t.query_len, scale=0.1,
        num_splits=splits, split_tokens=split_tokens, workspace=tensor(size, dtype=torch.float32), terms=t.terms,
        output_scale=t.output_scale, output_lse=lse, tree_mask=t.trees,
    )  # fmt: skip


def split_decode(t: Tensors) -> None:
    """Few requests: the keys are split, and the parts merged."""
    _decode(t, 4, lse=t.lse)


def fixed_split_decode(t: Tensors) -> None:
    """Batch-invariant: splits of a fixed number of tokens."""
    _decode(t, 4, 512)


def whole_decode(t: Tensors) -> None:
    """Requests enough to fill the GPU, so none is split."""
    many = 4 * SMS[t.target] // t.config.num_kv_heads
    t.batch = {"query_start_loc": tensor(many + 1, dtype=torch.int32), "seq_lens": tensor(many, dtype=torch.int32)}
    _decode(t, 1)


def _prefill(t: Tensors, lse: torch.Tensor | None, **where: Any) -> None:
    key, value = where.pop("key", None), where.pop("value", None)
    prefill.prefill_attention(
        t.query, t.k_cache if key is None else key, t.v_cache if value is None else value, t.output, **t.batch,
        max_seq_len=t.longest, scale=0.1, terms=t.terms, output_scale=t.output_scale, output_lse=lse, **where,
    )  # fmt: skip


def paged_prefill(t: Tensors) -> None:
    """Straight from the pages."""
    _prefill(t, t.lse, block_table=t.table)


def gathered_prefill(t: Tensors) -> None:
    """From pages gathered before."""
    config = t.config
    starts = t.seq_lens
    rows = [
        tensor(512, config.num_kv_heads, launch.power_of_two(size), dtype=t.dtype)
        for size in (config.head_size, config.value_head_size)
    ]
    cache.gather_pages(
        t.k_cache, t.v_cache, rows[0], rows[1], block_table=t.table, **t.batch, key_start_loc=starts,
        max_keys=t.longest, window=0 if config.mm_prefix else t.terms.window,
    )  # fmt: skip
    key, value = rows[0][..., : config.head_size], rows[1][..., : config.value_head_size]
    _prefill(t, None, key=key, value=value, key_start_loc=starts, clean=True)


def short_gathered_prefill(t: Tensors) -> None:
    """The same of short sequences, which the launch table has tiles of their own for."""
    t.longest = 512
    gathered_prefill(t)


def _hopper_prefill(t: Tensors, key: Any, value: Any, *, cut: int = 0, **given: Any) -> None:
    rows = tensor(2, work_list.FIELDS, dtype=torch.int32)
    work = work_list.WorkList(rows, rows, 9, cut, cut)
    size = cut * (t.config.value_head_size + 1)
    step = prefill_hopper.Prefill(
        work=work, counter=tensor(2, dtype=torch.int32), workspace=tensor(size, dtype=torch.float32) if cut else None,
        max_seq_len=t.longest, **t.batch, **given,
    )  # fmt: skip
    step(
        t.query, key, value, t.output, scale=0.1, output_scale=t.output_scale, output_lse=t.lse, terms=t.terms
    )  # fmt: skip


def hopper_prefill(t: Tensors) -> None:
    """The Gluon kernel, straight from the pages."""
    _hopper_prefill(t, t.k_cache, t.v_cache, block_table=t.table)


def split_hopper_prefill(t: Tensors) -> None:
    """The Gluon kernel, the keys split."""
    _hopper_prefill(t, t.k_cache, t.v_cache, block_table=t.table, cut=64)


def plain_hopper_prefill(t: Tensors) -> None:
    """The Gluon kernel over K and V as they come."""
    _hopper_prefill(t, t.key, t.value, key_start_loc=t.seq_lens)


def long_plain_hopper_prefill(t: Tensors) -> None:
    """The same of long requests, whose scores are begun early."""
    t.longest = 8192
    plain_hopper_prefill(t)


def plain_prefill(t: Tensors) -> None:
    """No cache: K and V as they come."""
    _prefill(t, t.lse, key=t.key, value=t.value, key_start_loc=t.seq_lens)


def decompressed_prefill(t: Tensors) -> None:
    """MLA's prefill: QK and V of different sizes, cut from one tensor."""
    config, tokens = t.config, len(t.query)
    nope, rope, width = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0, config.v_head_dim or 0
    t.query = tensor(tokens, t.heads, nope + rope, dtype=t.dtype)
    t.output = tensor(tokens, t.heads, width, dtype=t.dtype)
    key = tensor(tokens, t.heads, nope + rope, dtype=t.dtype)
    value = tensor(tokens, t.heads, nope + width, dtype=t.dtype)[..., nope:]
    _prefill(t, t.lse, key=key, value=value, key_start_loc=t.seq_lens)


def merge_states(t: Tensors) -> None:
    """A prefix and a suffix, one LSE of FlashAttention's layout."""
    merge.merge_attn_states(t.output, t.output, t.lse, t.output, t.lse.t().contiguous().t(), t.lse)


def merge_ranks(t: Tensors) -> None:
    """Four ranks' results, packed, merged, and weighed."""
    tokens, heads, width = t.output.shape
    parts, lses = tensor(4, tokens, heads, width, dtype=t.dtype), tensor(4, tokens, heads, dtype=torch.float32)
    grouped = (4, tokens, 1, heads)
    rank_merge.pack_attn_states(
        parts.view(*grouped, width), lses.view(grouped), parts.view(*grouped, width), lses.view(grouped)
    )
    rank_merge.merge_rank_states(parts, lses, -1, lses[0, 0], t.output, t.lse)
    rank_merge.merge_rank_states(parts[:1], lses, 1, None, t.output)


def conversions(t: Tensors) -> None:
    """A query quantised to FP8, whole and in part, and a block table flattened."""
    dtype = torch.float8_e4m3fn if t.target >= 89 else torch.float8_e5m2
    rows = t.query.flatten(1)
    for query in (rows, rows[:, :-8], rows[:, :-1]):
        convert.quantize_fp8(query, t.scale, dtype)
    convert.flatten_block_table(t.table, t.query_start_loc, tensor(64, dtype=torch.int32))


def write_latents(t: Tensors) -> None:
    """The update of a cache of latents, and a query in two parts quantised to FP8."""
    rank = t.config.kv_lora_rank or 0
    dtype = torch.float8_e4m3fn if t.target >= 89 else torch.float8_e5m2
    convert.concat_and_quantize_mla_q(t.query[..., :rank], t.query[..., rank:], t.scale, dtype)
    latents = t.query[:, 0, :rank], t.query[:, 0, rank:]
    mla_cache.concat_and_cache_mla(*latents, t.cache, t.slots, t.scale)


def _mla(t: Tensors, splits: int, lse: torch.Tensor | None = None) -> None:
    config, rank, requests = t.config, t.config.kv_lora_rank or 0, len(t.seq_lens)
    rows, rope = t.heads * t.query_len, config.qk_rope_head_dim or 0
    chosen = mla_decode.mla_launch(
        divmod(t.target, 10), rows, rank, rope, t.cache.shape[1], t.query.dtype, t.cache.dtype
    )  # fmt: skip
    split: dict[str, Any] = {}
    if splits > 1:
        rows = requests * (splits + 1)
        split = {"pieces": tensor(rows, pieces.FIELDS.value, dtype=torch.int32), "merges": requests}
    mla_decode.mla_decode(
        t.query, t.cache, t.output, **t.batch, block_table=t.table, max_query_len=t.query_len, scale=0.1, launch=chosen,
        causal=not config.non_causal, output_lse=lse, **split,
        workspace=tensor(len(t.query) * t.heads * splits * (rank + 1), dtype=torch.float32),
    )  # fmt: skip


def split_mla_decode(t: Tensors) -> None:
    """The keys of some requests are split."""
    _mla(t, 4, t.lse)


def whole_mla_decode(t: Tensors) -> None:
    """Requests enough to fill the GPU."""
    _mla(t, 1)


def _chosen(t: Tensors, splits: int, lse: torch.Tensor | None = None) -> None:
    config, rank, rope = t.config, t.config.kv_lora_rank or 0, t.config.qk_rope_head_dim or 0
    tokens, top_k = len(t.query), config.sparse_top_k or 0
    slots = tensor(tokens, top_k, dtype=torch.int32)
    chosen = mla_decode.mla_launch(
        divmod(t.target, 10), t.heads, rank, rope, 1, t.query.dtype, t.cache.dtype, gluon=False
    )  # fmt: skip
    if t.target == 90 and t.cache.dtype == t.query.dtype and rope:
        chosen = mla_decode.gathered_launch(t.heads)
    front, counts = chosen_slots.slots_in_front(slots)
    mla_decode.mla_decode(
        t.query, t.cache.view(-1, 1, t.cache.shape[2]), t.output, query_start_loc=tensor(tokens + 1, dtype=torch.int32),
        seq_lens=counts, block_table=front, max_query_len=1, scale=0.1, launch=chosen,
        num_splits=splits, causal=False, output_lse=lse,
        workspace=tensor(tokens * t.heads * splits * (rank + 1), dtype=torch.float32),
    )  # fmt: skip


def split_sparse_mla(t: Tensors) -> None:
    """Chosen tokens of a few requests."""
    _chosen(t, 4)


def whole_sparse_mla(t: Tensors) -> None:
    """Chosen tokens of requests enough to fill the GPU."""
    _chosen(t, 1, t.lse)


def _index(t: Tensors, fp8: bool, heads: int = 64, size: int = 128) -> None:
    """The indexer's keys written, and its tokens chosen of few keys and of many."""
    tokens, top_k, block_size = len(t.query), t.config.sparse_top_k or 0, t.cache.shape[1]
    kind = torch.uint8 if fp8 else t.dtype
    keys = tensor(BLOCKS, block_size, size + 4 if fp8 else size, dtype=kind)
    if fp8:
        indexer.indexer_k_quant_and_cache(tensor(tokens, size, dtype=t.dtype), keys, t.slots)
    chosen, seen = tensor(tokens, top_k, dtype=torch.int32), tensor(tokens, dtype=torch.int32)
    for longest in (indexer.LONG, 4 * indexer.LONG):
        rows = IndexedRows(seen, seen, t.table, range(tokens + 1), [longest] * tokens, longest)
        indexer.indexer_topk(
            tensor(tokens, heads, size, dtype=t.dtype), tensor(tokens, heads, dtype=torch.float32), keys, rows,
            block_size, chosen,
        )  # fmt: skip


def index(t: Tensors) -> None:
    """The indexer over a 16-bit cache."""
    _index(t, fp8=False)


def index_fp8(t: Tensors) -> None:
    """The indexer over its FP8 cache."""
    _index(t, fp8=True)


def gather_latents(t: Tensors) -> None:
    """Cached latents made contiguous, for a chunk of a prefill's context."""
    rows = tensor(64, t.config.head_size, dtype=t.dtype)
    mla_cache.gather_cache_mla(
        t.cache, rows, t.table, t.seq_lens, t.query_start_loc, len(t.query), t.cache.shape[1], t.scale
    )  # fmt: skip


def version_1(t: Tensors) -> None:
    """Classic paged attention, one program for all of a sequence."""
    paged_attention.paged_attention_v1(
        t.query, *t.classic, t.output, **t.batch, block_table=t.table, scale=0.1, slopes=t.terms.slopes
    )  # fmt: skip


def version_2(t: Tensors) -> None:
    """Classic paged attention in partitions."""
    partials = paged_attention.Partials(
        tensor(4096, t.config.head_size, dtype=t.dtype),
        tensor(4096, dtype=torch.float32),
        tensor(4096, dtype=torch.float32),
    )
    paged_attention.paged_attention_v2(
        t.query, *t.classic, t.output, **t.batch, block_table=t.table, scale=0.1, slopes=t.terms.slopes,
        partials=partials, max_seq_len=1500, partition_size=DECODE.partition_size,
    )  # fmt: skip


def classic_prefill(t: Tensors) -> None:
    """Prefill over the classic layout, and over pages gathered out of it."""
    config = t.config
    capability = divmod(t.target, 10)
    chosen = paged_attention.classic_prefill_launch(capability, config.head_size, t.dtype, t.cache.dtype)
    _prefill(t, None, block_table=t.table, launch=chosen)
    rows = [tensor(512, config.num_kv_heads, launch.power_of_two(config.head_size), dtype=t.dtype) for _ in range(2)]
    paged_attention.gather_classic(
        *t.classic, *rows, block_table=t.table, key_start_loc=t.seq_lens, seq_lens=t.seq_lens, max_keys=t.longest
    )  # fmt: skip


def attention(*launches: Callable[[Tensors], None], **changes: Any) -> ShapeClass:
    """Return a class of ``TRITON_ATTN``, 32 heads over 8 of size 128 where ``changes`` do not say otherwise."""
    how = {name: changes.pop(name) for name in ("block_size", "query_len", "layout") if name in changes}
    usual = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    return ShapeClass(TRITON_ATTN, AttentionConfig(**{**usual, **changes}), launches, **how)


def latent(
    *launches: Callable[[Tensors], None], heads: int, backend: BackendSpec = TRITON_MLA, **changes: Any
) -> ShapeClass:
    """Return a class of ``TRITON_MLA``, DeepSeek-V3's sizes where ``changes`` do not say otherwise."""
    how = {name: changes.pop(name) for name in ("block_size", "query_len") if name in changes}
    usual = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return ShapeClass(backend, AttentionConfig(num_heads=heads, **{**usual, **changes}), launches, **how)


def sparse(*launches: Callable[[Tensors], None], **changes: Any) -> ShapeClass:
    """Return a class of ``TRITON_MLA_SPARSE``, DeepSeek-V3.2's sizes where ``changes`` do not say otherwise."""
    return latent(*launches, backend=TRITON_MLA_SPARSE, block_size=64, sparse_top_k=2048, **changes)


def classic(*launches: Callable[[Tensors], None], **changes: Any) -> ShapeClass:
    """Return a class of ``PAGED_ATTENTION``, 32 heads over 8 of size 128 where ``changes`` do not say otherwise."""
    how = {name: changes.pop(name) for name in ("block_size",) if name in changes}
    usual = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    return ShapeClass(PAGED_ATTENTION, AttentionConfig(**{**usual, **changes}), launches, layout=CLASSIC, **how)


def shape_classes(target: int) -> Iterator[ShapeClass]:
    """Yield the shape classes; float16 stands where bfloat16 is emulated, and one class shows that it is."""
    usual, other = ("bfloat16", "float16") if target >= 80 else ("float16", "bfloat16")
    fp8, other_fp8 = ("fp8_e4m3", "fp8_e5m2") if target >= 89 else ("fp8_e5m2", "fp8_e4m3")
    everything = {
        "sliding_window": 100, "logits_soft_cap": 30.0, "alibi": True, "sinks": True, "mm_prefix": True,
    }  # fmt: skip
    tall = {"num_heads": 64, "num_kv_heads": 4, "query_len": 4}
    both = (split_decode, paged_prefill)
    yield attention(
        write, split_decode, whole_decode, gathered_prefill, merge_states, merge_ranks, conversions, dtype=usual
    )
    yield attention(fixed_split_decode, short_gathered_prefill, dtype=usual, sliding_window=100)
    yield attention(*both, dtype=usual, block_size=64, layout=FLASHINFER_HND)
    yield attention(*both, dtype=usual, **everything)
    yield attention(split_decode, dtype=usual, **tall)
    yield attention(split_decode, dtype=usual, query_len=4, num_speculative_tokens=3, draft_tree=True)
    yield attention(split_decode, gathered_prefill, paged_prefill, dtype=usual, head_size=64)
    yield attention(*both, dtype=usual, head_size=80)
    yield attention(split_decode, gathered_prefill, paged_prefill, dtype=usual, head_size=256)
    yield attention(split_decode, gathered_prefill, paged_prefill, dtype=usual, head_size=512)
    yield attention(*both, dtype=other)
    yield attention(write, *both, dtype="float32", head_size=256)
    yield attention(write, split_decode, whole_decode, gathered_prefill, paged_prefill, dtype=usual, kv_cache_dtype=fp8)
    yield attention(split_decode, dtype=usual, kv_cache_dtype=fp8, **tall)
    yield attention(*both, dtype=usual, kv_cache_dtype=fp8, head_size=256)
    yield attention(write, split_decode, dtype=usual, kv_cache_dtype=other_fp8)
    yield attention(plain_prefill, dtype=usual, attn_type="encoder_only")
    yield attention(split_decode, whole_decode, paged_prefill, dtype=usual, output_quantization="fp8")

    if target == 90:
        yield attention(hopper_prefill, split_hopper_prefill, plain_hopper_prefill, dtype=usual)
        yield attention(hopper_prefill, dtype=usual, output_quantization="fp8")
        yield attention(hopper_prefill, split_hopper_prefill, dtype=usual, head_size=256, logits_soft_cap=30.0)
        yield attention(hopper_prefill, dtype=usual, head_size=64, sliding_window=100, sinks=True)
        sizes = {"num_kv_heads": 32, "head_size": 192, "v_head_size": 128}
        yield attention(plain_hopper_prefill, long_plain_hopper_prefill, dtype=usual, **sizes)
    yield classic(write, version_1, version_2, classic_prefill, dtype=usual, alibi=True)
    yield classic(version_1, dtype=usual, block_size=8, num_heads=64, num_kv_heads=2)
    yield classic(version_2, dtype=usual, block_size=32, head_size=256)
    yield classic(version_1, dtype="float32", head_size=256)
    yield classic(write, version_1, version_2, dtype=usual, kv_cache_dtype=fp8)
    yield classic(version_1, version_2, dtype=usual, block_size=32)

    yield latent(
        write_latents, gather_latents, split_mla_decode, whole_mla_decode, heads=16, dtype=usual, block_size=64
    )
    yield latent(split_mla_decode, heads=128, dtype=usual, block_size=64)
    yield latent(whole_mla_decode, heads=128, dtype=usual, block_size=16)
    yield latent(decompressed_prefill, split_mla_decode, heads=16, dtype=usual, block_size=64, query_len=2)
    yield latent(split_mla_decode, heads=128, dtype=usual, block_size=64, qk_rope_head_dim=128)
    yield latent(split_mla_decode, heads=128, dtype=usual, block_size=64, kv_lora_rank=256, qk_rope_head_dim=32)
    yield latent(split_mla_decode, heads=128, dtype=usual, kv_lora_rank=48, qk_rope_head_dim=48)
    yield latent(write_latents, split_mla_decode, heads=16, dtype=usual, block_size=64, kv_cache_dtype=fp8)
    yield latent(split_mla_decode, heads=128, dtype=usual, block_size=64, kv_cache_dtype=fp8)
    chosen = (index, index_fp8) if target >= 89 else (index,) if target >= 80 else ()
    yield sparse(split_sparse_mla, whole_sparse_mla, *chosen, heads=16, dtype=usual)
    yield sparse(split_sparse_mla, heads=24, dtype=usual, kv_lora_rank=256)
    yield sparse(whole_sparse_mla, heads=128, dtype=usual)
    yield sparse(split_sparse_mla, heads=16, dtype=usual, qk_rope_head_dim=0)
    yield sparse(split_sparse_mla, heads=16, dtype=usual, kv_cache_dtype=fp8)


def random_shape_classes(target: int, count: int, seed: int) -> Iterator[ShapeClass]:
    """Yield shape classes drawn from all that the gates accept."""
    rng = random.Random(seed)
    while count:
        dtype = rng.choice(["bfloat16", "float16", "float32"])
        cached = rng.choice(["auto", "auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32"])
        kind = rng.random()
        if kind < 0.15:
            kv_heads, group = rng.choice([1, 2, 8]), rng.choice([1, 2, 4, 5, 7, 8, 16, 71])
            made = classic(
                write, version_1, version_2, classic_prefill, num_heads=kv_heads * group, num_kv_heads=kv_heads,
                head_size=rng.choice([32, 64, 80, 96, 112, 120, 128, 192, 256]), block_size=rng.choice([8, 16, 32]),
                dtype=dtype, kv_cache_dtype=cached, alibi=rng.random() < 0.5,
            )  # fmt: skip
        elif kind < 0.4:
            made = latent(
                write_latents, gather_latents, split_mla_decode, whole_mla_decode,
                decompressed_prefill, heads=rng.choice([1, 5, 16, 20, 64, 71, 128]), dtype=dtype, kv_cache_dtype=cached,
                block_size=rng.choice([16, 32, 48, 64, 128]), query_len=rng.choice([1, 1, 2, 5]),
                kv_lora_rank=rng.choice([rng.randrange(16, 513, 16), 256, 512]),
                qk_rope_head_dim=rng.choice([rng.randrange(16, 129, 16), 32, 64]),
                non_causal=rng.random() < 0.2,
            )  # fmt: skip
        else:
            kv_heads, group = rng.choice([1, 2, 8]), rng.choice([1, 2, 4, 5, 7, 8, 16, 71])
            terms: dict[str, Any] = {
                "sliding_window": 100, "logits_soft_cap": 30.0, "alibi": True, "sinks": True, "mm_prefix": True,
                "non_causal": True, "v_head_size": rng.randrange(32, 257, 8), "output_quantization": "fp8",
            }  # fmt: skip
            drawn = {name: value for name, value in terms.items() if rng.random() < 0.2}
            sizes = [rng.randrange(32, 257, 8), 64, 128, 256]
            try:
                made = attention(
                    write, split_decode, whole_decode, fixed_split_decode, paged_prefill, gathered_prefill,
                    short_gathered_prefill, merge_states, merge_ranks, conversions,
                    num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=rng.choice(sizes), dtype=dtype,
                    kv_cache_dtype=cached, block_size=rng.choice([16, 32, 64, 128]), query_len=rng.choice([1, 1, 2, 8]),
                    layout=rng.choice([FLASHINFER_NHD, FLASHINFER_HND]), **drawn,
                )  # fmt: skip
            except ConfigError:
                continue
        if made.accepted(target):
            count -= 1
            yield made
