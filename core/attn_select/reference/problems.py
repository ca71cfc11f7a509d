"""One step of one attention layer as data: what a layer gets, drawn from a seed, and its solution.

``random_problem`` draws it on poisoned memory, to find mistakes; ``timed_problem`` draws large ones where they run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.features import PER_HEAD
from attn_select.layer.layouts import FP8_DS_MLA, MLA, cache_shape
from attn_select.reference.oracle import last_positions, varlen_reference
from attn_select.reference.oracle_indexer import E4M3_MAX
from attn_select.reference.oracle_mla import (
    absorb_query,
    project_output,
    sparse_mla_reference,
)
from attn_select.reference.oracle_paged import (
    paged_reference,
    slot_mapping_reference,
    write_reference,
)
from attn_select.reference.oracle_quant import FP8_DTYPES, PLAIN_DTYPES, storage_dtype

FP8_SCALE = 0.02
"""Of standard normal numbers in an FP8 cache: they reach 5, and e4m3 holds 448 scales."""
Request = tuple[int, int]
"""``(query_len, seq_len)``: tokens of this step, and tokens in all once they are cached."""
TREE_REQUESTS: tuple[Request, ...] = (
    (1, 40), (4, 60), (3, 3), (4, 4), (4, 17), (2, 30), (4, 0), (20, 50), (5, 9)
)  # fmt: skip
"""Requests of layers with trees of up to three drafts: trees with and without a context, padding, then prefills."""
TREE_BATCHES = (TREE_REQUESTS, TREE_REQUESTS[:6], TREE_REQUESTS[2:4], TREE_REQUESTS[-2:])
"""All of them, trees, trees without a context, and prefills alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of one step, as a layer gets them: B requests, T tokens, tensors on one device.

    A layer without a cache (encoders) has None in ``layout``, ``kv_cache``, ``block_table`` and ``slot_mapping``;
    it attends to ``key`` and ``value`` alone. In cross-attention the cache is complete, and no token is written.
    Of MLA layers decodes come first.
    """

    config: AttentionConfig
    requests: tuple[Request, ...]
    scale: float
    query: Tensor
    """``(T, H, D)`` in the config's dtype; with MLA ``(T, H, P + Pr)``, before ``kv_b_proj`` is absorbed."""
    key: Tensor
    """``(T, Hkv, D)``, with MLA the latent ``(T, kv_lora_rank)``: this step's, not yet in the cache."""
    value: Tensor
    """``(T, Hkv, Dv)``, with MLA ``k_pe`` ``(T, qk_rope_head_dim)``."""
    query_start_loc: Tensor
    """int32 ``(B + 1,)``."""
    seq_lens: Tensor
    """int32 ``(B,)``."""
    kv_b_proj: Tensor | None = None
    """With MLA ``(H * (P + V), R)`` in the config's dtype; head by head the rows of W_UK, then of W_UV."""
    layout: str | None = None
    block_size: int | None = None
    kv_cache: Tensor | None = None
    """Of the shape ``layouts.cache_shape``. It holds the context of every request; everything else is poison."""
    block_table: Tensor | None = None
    """int32 ``(B, W)``, blocks in random order; entries that are not needed point to a poisoned block."""
    slot_mapping: Tensor | None = None
    """int64 ``(T,)``."""
    alibi_slopes: Tensor | None = None
    """float32 ``(H,)``."""
    sinks: Tensor | None = None
    """``(H,)`` in the config's dtype."""
    mm_prefix_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Per request, inclusive positions."""
    tree_mask: Tensor | None = None
    """bool ``(T, 1 + num_speculative_tokens)``, with ``draft_tree``; what is not to be read is random."""
    topk_indices: Tensor | None = None
    """int32 ``(T, sparse_top_k)``: physical slots, -1 behind or between them."""
    k_scale: Tensor | None = None
    """float32 ``()``, or ``(Hkv,)`` with ``per_head_quant_scales``; None unless the cache is FP8 and lacks its own."""
    v_scale: Tensor | None = None
    """As ``k_scale``; None with MLA."""
    q_scale: Tensor | None = None
    """float32 ``()``; for paths that want the query in FP8."""

    @property
    def per_head(self) -> dict[str, Tensor | None]:
        """The layer's terms that are one number per query head."""
        return {name: getattr(self, name) for name in PER_HEAD}

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """W_UK ``(R, H, P)`` and W_UV ``(R, H, V)`` of an MLA layer."""
        assert self.kv_b_proj is not None, "the layer is not MLA"
        by_head = self.kv_b_proj.view(self.config.num_heads, -1, self.kv_b_proj.shape[1]).permute(2, 0, 1)
        nope = self.config.qk_nope_head_dim or 0
        return by_head[..., :nope], by_head[..., nope:]

    @property
    def absorbed(self) -> Tensor:
        """The query of an MLA layer with its weight absorbed, float64 ``(T, H, kv_lora_rank + qk_rope_head_dim)``."""
        w_uk, nope = self.weights[0], self.config.qk_nope_head_dim or 0
        return absorb_query(self.query[..., :nope], self.query[..., nope:], w_uk)

    def to(self, device: torch.device | str) -> Problem:
        """Return the same problem with its tensors on ``device``."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
        return Problem(**{**fields, **tensors})

    def tokens_of(self, first: int, last: int) -> slice:
        """Return which tokens are of requests ``first .. last - 1``."""
        return slice(int(self.query_start_loc[first]), int(self.query_start_loc[last]))

    def part(self, first: int, last: int) -> Problem:
        """Return the step of requests ``first .. last - 1`` alone, on the same cache."""
        by_row = ("query", "key", "value", "slot_mapping", "topk_indices", "tree_mask")
        by_request = ("requests", "seq_lens", "block_table", "mm_prefix_ranges")
        cuts = {**dict.fromkeys(by_row, self.tokens_of(first, last)), **dict.fromkeys(by_request, slice(first, last))}
        cut: dict[str, Any] = {n: getattr(self, n)[c] for n, c in cuts.items() if getattr(self, n) is not None}
        bounds = self.query_start_loc[first : last + 1]
        return dataclasses.replace(self, query_start_loc=bounds - bounds[0], **cut)

    def written_cache(self) -> Tensor:
        """Return a copy of the cache with this step's key and value written.

        Raises:
            ValueError: the layer has no cache.
        """
        if self.kv_cache is None or self.slot_mapping is None:
            raise ValueError(f"attn_type = {self.config.attn_type!r}: this problem has no cache")
        cache = self.kv_cache.clone()
        self.write(cache, self.key, self.value, self.slot_mapping)
        return cache

    def write(self, kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write tokens into a cache of this problem's layout and scales; arguments as in ``write_reference``."""
        assert self.layout is not None, "the layer keeps no cache"
        scales: dict[str, Any] = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        write_reference(kv_cache, key, value, slots, self.layout, self.config, **scales)

    def reference(
        self,
        rows: Tensor | None = None,
        *,
        kv_cache: Tensor | None = None,
        query_dtype: str | None = None,
        longest_decode: int | None = None,
        spread: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return output float64 ``(N, H, Dv)``, with MLA ``(N, H, V)``, and natural-log LSE float64 ``(N, H)``.

        Of MLA layers decodes read everything from the cache, this step's latents as it stores them. Prefills read
        their context from the cache and this step's latents as they are. Sparse ones are computed like decodes.

        Args:
            rows: integers ``(N,)`` in order, the tokens that are computed; left out: all.
            kv_cache: the cache after this step's write; left out: ``written_cache()``.
            query_dtype: an FP8 dtype where the path quantises the query, of MLA decodes the absorbed one, with
                ``q_scale``.
            longest_decode: tokens of the longest query that is a decode; left out: 1 + ``num_speculative_tokens``.
            spread: float64 ``(N, H)``, filled as ``attention_reference`` does; with MLA about, by a random ``W_UV``.
        """
        config = self.config
        given: dict[str, Any] = {**self.per_head, "spread": spread}
        if rows is None:
            rows = torch.arange(len(self.query), device=self.query.device)
        if self.layout is None:
            bounds = self.query_start_loc
            dense = (self.query[rows], self.key, self.value, bounds, bounds)
            return varlen_reference(*dense, config, self.scale, rows=rows, **given)
        assert self.block_table is not None
        cache = self.written_cache() if kv_cache is None else kv_cache
        query = self.query[rows]
        if config.mla:
            query = dataclasses.replace(self, query=query).absorbed
            if query_dtype is not None:  # a layer's absorbed query is rounded to the config's dtype before
                query = query.to(self.query.dtype)
        given |= {"k_scale": self.k_scale, "query_dtype": query_dtype, "q_scale": self.q_scale}
        if self.topk_indices is not None:
            sparse = (query, cache, self.layout, self.topk_indices[rows])
            output, lse = sparse_mla_reference(*sparse, config, self.scale, **given)
        else:
            if config.mla:
                given["latents"] = torch.cat([self.key, self.value], dim=-1)
                given["longest_decode"] = config.max_decode_query_len if longest_decode is None else longest_decode
            given |= {"v_scale": self.v_scale, "mm_prefix_ranges": self.mm_prefix_ranges, "tree_mask": self.tree_mask}
            paged = (query, cache, self.layout, self.block_table, self.query_start_loc, self.seq_lens)
            output, lse = paged_reference(*paged, config, self.scale, rows=rows, block_size=self.block_size, **given)
        if config.mla:
            w_uv = self.weights[1]
            output = project_output(output, w_uv)
            if spread is not None:
                spread *= (w_uv.shape[2] / w_uv.shape[0]) ** 0.5
        return output, lse


LARGE = 1e4
"""Finite poison: shows in any sum it leaks into, while its products with a query stay finite in float32."""


def random_requests(
    seed: int, config: AttentionConfig, *, num_requests: int = 6, max_seq_len: int = 96, block_size: int = 16
) -> tuple[Request, ...]:
    """Draw a batch that mixes decode, prefill, chunked prefill and speculative decode, in random order.

    Four or more requests include every kind. Half of the lengths are multiples of ``block_size``, where mistakes are
    likely. Encoders get whole sequences; in cross-attention query and key lengths are drawn independently.
    """
    rng = random.Random(f"requests {seed}")
    speculative = 1 + (config.num_speculative_tokens or 3)
    requests: list[Request] = []
    for index in range(num_requests):
        seq_len = rng.randint(1, max_seq_len)
        if rng.random() < 0.5:
            seq_len = min(max_seq_len, -(-seq_len // block_size) * block_size)
        kinds = (1, seq_len, rng.randint(1, max(1, seq_len - 1)), min(speculative, seq_len))
        query_len = kinds[index % len(kinds)]
        if not config.has_cache:
            query_len = seq_len
        elif config.attn_type == "encoder_decoder":
            query_len = rng.randint(1, max_seq_len)
        requests.append((query_len, seq_len))
    rng.shuffle(requests)
    return tuple(requests)


def random_problem(
    seed: int,
    config: AttentionConfig,
    layout: str | None = None,
    *,
    block_size: int = 16,
    requests: Sequence[Request] | None = None,
    device: torch.device | str = "cpu",
    nan_tails: bool = True,
    spare_blocks: int = 2,
    scale: float | None = None,
) -> Problem:
    """Draw one step of one layer on poisoned memory. A seed gives the same problem on every device.

    Queries, keys and values are standard normal, rounded to the config's dtype.

    Args:
        layout: a name from ``attn_select.layer.layouts``; None: no cache, of MLA layers ``MLA``.
        block_size: tokens per block where the config names no ``block_size``.
        requests: ``(query_len, seq_len)`` each; None: ``random_requests``. Where ``query_len`` exceeds ``seq_len``
            (padding of a CUDA graph has 1 and 0) the first rows see no key and have no slot. Of MLA layers decodes are
            moved to the front.
        nan_tails: poison the slots behind a sequence's end in its last block with NaN; False: with +-``LARGE``, which
            FP8 saturates. Spare blocks, and the slots that this step writes, hold NaN in any case.
        spare_blocks: blocks that no request owns, at least 1.
        scale: factor on ``q . k``; None: ``config.softmax_scale``.

    Raises:
        ValueError: ``layout`` is missing or not wanted, or ``spare_blocks`` is below 1.
    """
    if config.mla and layout is None:
        layout = MLA
    if config.has_cache != (layout is not None):
        wanted = "the name of a KV layout" if config.has_cache else "None, since such a layer keeps no cache"
        raise ValueError(f"layout = {layout!r}: with attn_type = {config.attn_type!r} accepted is {wanted}")
    if spare_blocks < 1:
        raise ValueError(
            f"spare_blocks = {spare_blocks}: accepted are integers from 1, since unused table entries point to one"
        )
    block_size = config.block_size or block_size
    requests = [*(requests or random_requests(seed, config, block_size=block_size))]
    if config.mla:
        requests.sort(key=lambda request: request[0] > config.max_decode_query_len)
    draw = torch.Generator().manual_seed(seed)
    problem = _drawn(seed, config, requests, draw)
    if scale is not None:
        problem = dataclasses.replace(problem, scale=scale)
    if layout is not None:
        problem = _in_blocks(problem, layout, block_size, spare_blocks, draw)
        problem = dataclasses.replace(problem, kv_cache=_poisoned_cache(problem, nan_tails, spare_blocks, draw))
    return problem.to(device)


def timed_problem(
    seed: int,
    config: AttentionConfig,
    layout: str | None,
    block_size: int | None,
    requests: Sequence[Request],
    device: torch.device,
) -> Problem:
    """Draw a step on the device that it runs on, without a cache: steps that are compared share one.

    Every FP8 scale is ``FP8_SCALE``. Arguments as in ``random_problem``; without a layout there are no tables.
    """
    draw = torch.Generator(device).manual_seed(seed)
    problem = _drawn(seed, config, requests, draw)
    if layout is not None and block_size is not None:
        problem = _in_blocks(problem, layout, block_size, 0, draw)
    given = {name: getattr(problem, name) for name in ("q_scale", "k_scale", "v_scale")}
    same = {name: None if scale is None else torch.full_like(scale, FP8_SCALE) for name, scale in given.items()}
    return dataclasses.replace(problem, **same).to(device)  # type: ignore[arg-type]


def _drawn(seed: int, config: AttentionConfig, requests: Sequence[Request], draw: torch.Generator) -> Problem:
    """Draw all but the cache and what leads to it."""
    starts = torch.tensor([0, *(query_len for query_len, _ in requests)]).cumsum(0)
    tokens = int(starts[-1])
    key, value = _key_and_value(config, 0 if config.attn_type == "encoder_decoder" else tokens, draw)
    k_scale, v_scale, q_scale = _scales(config, draw)
    nope, width, weight = config.qk_nope_head_dim or 0, config.head_size, None
    if config.mla:
        width = nope + (config.qk_rope_head_dim or 0)
        rank, rows = config.kv_lora_rank or 0, config.num_heads * (nope + (config.v_head_dim or 0))
        # Decompressed keys and values are then about standard normal, too.
        weight = _normal(config, draw, rows, rank) * rank**-0.5
    return Problem(
        config=config,
        requests=tuple(requests),
        scale=config.softmax_scale,
        query=_normal(config, draw, tokens, config.num_heads, width),
        key=key,
        value=value,
        query_start_loc=starts.int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32),
        kv_b_proj=weight,
        **random_per_head(config, lambda *shape: _normal(config, draw, *shape)),
        mm_prefix_ranges=_ranges(seed, requests) if config.mm_prefix else None,
        tree_mask=_trees(draw, config, requests) if config.draft_tree else None,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
    )


def _in_blocks(problem: Problem, layout: str, block_size: int, spare_blocks: int, draw: torch.Generator) -> Problem:
    """Add the tables that lead to a cache, the slots of this step's tokens, and what each token attends to."""
    config, requests = problem.config, problem.requests
    needed = [-(-seq_len // block_size) for _, seq_len in requests]
    blocks = torch.randperm(sum(needed) + spare_blocks, generator=draw, device=draw.device)
    # With spare blocks the table is wider than any request needs. Unused entries point to the last block drawn.
    block_table = blocks[-1].expand(len(requests), max(needed) + bool(spare_blocks)).int().clone()
    for row, part in zip(block_table, blocks[: sum(needed)].split_with_sizes(needed), strict=True):
        row[: len(part)] = part
    positions = torch.cat([last_positions(*request, draw.device) for request in requests])
    slot_mapping = slot_mapping_reference(block_table, positions, block_size, problem.query_start_loc)
    return dataclasses.replace(
        problem,
        layout=layout,
        block_size=block_size,
        block_table=block_table,
        slot_mapping=slot_mapping[: len(problem.key)],
        topk_indices=_topk(problem, block_table, block_size, draw, bool(spare_blocks)) if config.sparse else None,
    )


def _poisoned_cache(problem: Problem, nan_tails: bool, spare_blocks: int, draw: torch.Generator) -> Tensor:
    """Return a cache that holds every request's context."""
    config, layout, block_size = problem.config, problem.layout, problem.block_size
    assert layout is not None
    assert block_size is not None
    assert problem.block_table is not None
    needed = [-(-seq_len // block_size) for _, seq_len in problem.requests]
    num_blocks = sum(needed) + spare_blocks
    shape = [num_blocks if size == "num_blocks" else int(size) for size in cache_shape(layout, config, block_size)]
    # A cache of dtype fp8_e4m3 may be stored in this layout, too.
    dtype = torch.uint8 if layout == FP8_DS_MLA else storage_dtype(config.cache_dtype)
    cache = torch.empty(shape, dtype=dtype)
    cache.view(torch.uint8).fill_(0xFF)  # NaN in every float format, and in all parts of an fp8_ds_mla token

    for row, count, (query_len, seq_len) in zip(problem.block_table, needed, problem.requests, strict=True):
        cached = seq_len if config.attn_type == "encoder_decoder" else max(0, seq_len - query_len)
        slots = slot_mapping_reference(row, torch.arange(count * block_size), block_size)
        problem.write(cache, *_key_and_value(config, cached, draw), slots[:cached])
        if not nan_tails:
            tail = slots[seq_len:]
            key, value = _key_and_value(config, len(tail), draw)
            problem.write(cache, key.sign() * LARGE, value.sign() * LARGE, tail)
    return cache


def _topk(problem: Problem, block_table: Tensor, block_size: int, draw: torch.Generator, between: bool) -> Tensor:
    """Choose for each token up to ``sparse_top_k`` of the positions up to its own; int32 ``(T, top_k)`` slots."""
    # ``between``: of every other token the padding stands between them, not behind.
    top_k, device = problem.config.sparse_top_k or 0, draw.device
    places = torch.arange(top_k, device=device)
    chosen: list[Tensor] = []
    rows = zip(block_table.long(), problem.requests, problem.query_start_loc.tolist(), strict=False)
    for row, (query_len, seq_len), first in rows:
        seen = last_positions(query_len, seq_len, device)[:, None] + 1
        within, order = torch.rand((2, query_len, top_k), generator=draw, device=device)
        # One of each of ``top_k`` equal parts of a long context; all of a short one.
        starts, ends = places * seen // top_k, (places + 1) * seen // top_k
        positions = torch.where(seen > top_k, starts + (within * (ends - starts)).long(), places)
        is_padding = positions >= seen
        blocks = row[(positions // block_size).clamp(0, len(row) - 1)]
        slots = (blocks * block_size + positions % block_size).masked_fill(is_padding, -1)
        behind = is_padding.clone()
        behind[first % 2 :: 2] &= not between
        chosen.append(slots.gather(1, (order + behind).argsort(1)).int())
    return torch.cat(chosen) if chosen else torch.empty(0, top_k, dtype=torch.int32)


def _normal(config: AttentionConfig, draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, device=draw.device).to(PLAIN_DTYPES[config.dtype])


def _key_and_value(config: AttentionConfig, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw what ``write_reference`` takes: K and V, or with MLA latent and rope part."""
    shapes: list[tuple[int, ...]] = [
        (config.num_kv_heads, config.head_size),
        (config.num_kv_heads, config.value_head_size),
    ]
    if config.kv_lora_rank is not None:
        shapes = [(config.kv_lora_rank,), (config.head_size - config.kv_lora_rank,)]
    key, value = (_normal(config, draw, tokens, *shape) for shape in shapes)
    return key, value


def random_per_head(config: AttentionConfig, normal: Callable[..., Tensor]) -> dict[str, Any]:
    """Return what ``PER_HEAD`` names, where the config asks for it; ``normal(*shape)`` draws in the layer's dtype."""
    heads = config.num_heads
    drawn = {
        # The paper's slopes, whose formula is used for any number of heads.
        "alibi_slopes": lambda: torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads),
        "sinks": lambda: normal(heads),
    }
    return {name: drawn[name]() for name, field in PER_HEAD.items() if getattr(config, field)}


def _scales(config: AttentionConfig, draw: torch.Generator) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Draw the scales of K, V and query, all different, so that a swapped or forgotten one changes the result."""
    if config.cache_dtype not in FP8_DTYPES:
        return None, None, None
    shape = (config.num_kv_heads,) if config.per_head_quant_scales else ()
    k_scale, v_scale = 0.01 + 0.05 * torch.rand((2, *shape), generator=draw, device=draw.device)
    q_scale = 0.01 + 0.05 * torch.rand((), generator=draw, device=draw.device)
    return k_scale, None if config.mla else v_scale, q_scale


def _ranges(seed: int, requests: Sequence[Request]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Draw per request up to two ranges of at least two tokens, which do not overlap."""
    rng = random.Random(f"ranges {seed}")
    drawn = []
    for _, seq_len in requests:
        cuts = sorted(rng.sample(range(seq_len), 2 * min(2, seq_len // 2)))
        drawn.append(tuple(zip(cuts[::2], cuts[1::2], strict=True)))
    return tuple(drawn)


def _trees(draw: torch.Generator, config: AttentionConfig, requests: Sequence[Request]) -> Tensor:
    """Draw a tree of tokens for each request: every token but the first has one of those before it as its parent."""
    columns = config.max_decode_query_len
    tokens = sum(query_len for query_len, _ in requests)
    drawn = torch.randint(2, (tokens, columns), generator=draw, device=draw.device).bool()
    start = 0
    for query_len, _ in requests:
        if query_len <= columns:
            tree = torch.eye(query_len, dtype=torch.bool)
            for token in range(1, query_len):
                tree[token] |= tree[int(torch.randint(token, (), generator=draw, device=draw.device))]
            drawn[start : start + query_len, :query_len] = tree
        start += query_len
    return drawn


def of_layer(drawn: Problem, layer: Problem) -> Problem:
    """Return a step with the numbers that belong to the layer of another one: scale, slopes, sinks, scales, weight."""
    names = ("scale", *PER_HEAD, "k_scale", "v_scale", "q_scale", "kv_b_proj")
    return dataclasses.replace(drawn, **{name: getattr(layer, name) for name in names})


def of_another_layer(drawn: Problem) -> Problem:
    """Return the same batch for a layer of the group with sinks and queries of its own."""
    # Its scale is the same: FlashInfer's plans serve one scale.
    return dataclasses.replace(drawn, sinks=None if drawn.sinks is None else -drawn.sinks, query=-drawn.query)


PEAK = 120.0
"""A score whose exponential no float32 holds, and whose inverse neither."""
_OWN_TO_PEAK = 0.92
_NARROW = 32
"""Below this width random keys come too near to a row's own one."""


def with_peaks(seed: int, drawn: Problem) -> Problem:
    """Return the step with scores of about ``PEAK`` in the first rows of two requests, with a context and without."""
    # The row's query lies along its own key, and so does a key of the context, its first, its last or any other one,
    # with a score that is a twelfth larger. So the row is known exactly however scores are rounded, unless they
    # overflow or are clamped, or the key is not read. In a causal row that sees itself alone the score is negative.
    # With an FP8 cache the query is no larger than FP8 holds. A soft cap and ALiBi bring scores near each other, so
    # that their rounding counts: there the step stays as it is.
    config = drawn.config
    starts = [(index, seq_len - query_len) for index, (query_len, seq_len) in enumerate(drawn.requests) if query_len]
    if drawn.query.shape[-1] < _NARROW or not len(drawn.key) or config.alibi or config.logits_soft_cap:
        return drawn
    rng, query = random.Random(f"peaks {seed}"), drawn.query.clone()
    cache, topk = (None if each is None else each.clone() for each in (drawn.kv_cache, drawn.topk_indices))
    for group in ([each for each in starts if each[1] > 0], [each for each in starts if each[1] == 0]):
        if not group:
            continue
        index, before = rng.choice(group)
        row = int(drawn.query_start_loc[index])
        key, value = drawn.key[row], drawn.value[row]
        if config.mla:
            shared = value.float().expand(config.num_heads, -1)
            met = torch.cat([torch.einsum("r,rhp->hp", key.float(), drawn.weights[0].float()), shared], dim=-1)
            along = key / _OWN_TO_PEAK, value / _OWN_TO_PEAK
        else:
            met = key.float().repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
            along = key / _OWN_TO_PEAK, -value
        alone = not before and config.attn_type == "decoder" and not (config.non_causal or config.mm_prefix)
        factor = (_OWN_TO_PEAK if before else 1.0) * PEAK / drawn.scale / met.square().sum(-1, keepdim=True)
        if drawn.q_scale is not None:  # beyond that an FP8 query saturates, as its path has it
            factor = factor.clamp_max(E4M3_MAX * drawn.q_scale / met.abs().max())
        query[row] = (-factor if alone else factor) * met
        if before and cache is not None:
            assert drawn.block_table is not None
            place = torch.tensor([rng.choice((0, before - 1, rng.randrange(before)))], device=cache.device)
            slots = slot_mapping_reference(drawn.block_table[index], place, drawn.block_size or 16)
            drawn.write(cache, along[0][None], along[1][None], slots)
        if topk is not None and drawn.slot_mapping is not None:
            own = drawn.slot_mapping[row]
            topk[row, 0] = topk[row, 0] if bool((topk[row] == own).any()) else own
    return dataclasses.replace(drawn, query=query, kv_cache=cache, topk_indices=topk)
