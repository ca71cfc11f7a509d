"""One step of one attention layer as data: what a backend gets, drawn from a seed on poisoned memory, and its solution.

A ``Problem`` is a step on a cache; an ``MLAProblem`` adds the query and the weight that a whole MLA layer starts from.
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
from attn_select.reference.oracle import attention_options, last_positions, varlen_reference
from attn_select.reference.oracle_indexer import E4M3_MAX
from attn_select.reference.oracle_mla import absorb_query, mla_reference, project_output, sparse_mla_reference
from attn_select.reference.oracle_paged import (
    gather_reference,
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
    """The inputs of one step, as a backend gets them: B requests, T tokens, tensors on one device.

    A layer without a cache (encoders) has None in ``layout``, ``kv_cache``, ``block_table`` and ``slot_mapping``;
    it attends to ``key`` and ``value`` alone. In cross-attention the cache is complete, and no token is written.
    """

    config: AttentionConfig
    requests: tuple[Request, ...]
    scale: float
    query: Tensor
    """``(T, H, D)`` in the config's dtype; with MLA the absorbed query."""
    key: Tensor
    """``(T, Hkv, D)``, with MLA the latent ``(T, kv_lora_rank)``: this step's, not yet in the cache."""
    value: Tensor
    """``(T, Hkv, Dv)``, with MLA ``k_pe`` ``(T, qk_rope_head_dim)``."""
    query_start_loc: Tensor
    """int32 ``(B + 1,)``."""
    seq_lens: Tensor
    """int32 ``(B,)``."""
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

    def to(self, device: torch.device | str) -> Problem:
        """Return the same problem with its tensors on ``device``."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
        return Problem(**{**fields, **tensors})

    def written_cache(self) -> Tensor:
        """Return a copy of the cache with this step's key and value written.

        Raises:
            ValueError: the layer has no cache.
        """
        if self.layout is None or self.kv_cache is None or self.slot_mapping is None:
            raise ValueError(f"attn_type = {self.config.attn_type!r}: this problem has no cache")
        cache = self.kv_cache.clone()
        scales: dict[str, Any] = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        write_reference(cache, self.key, self.value, self.slot_mapping, self.layout, self.config, **scales)
        return cache

    def reference(self, *, kv_cache: Tensor | None = None, query_dtype: str | None = None) -> tuple[Tensor, Tensor]:
        """Return output float64 ``(T, H, Dv)``, with MLA the latent, and natural-log LSE float64 ``(T, H)``.

        Args:
            kv_cache: the cache after this step's write; left out: ``written_cache()``.
            query_dtype: an FP8 dtype where the path quantises the query with ``q_scale``.
        """
        extras: dict[str, Any] = self.per_head
        if self.layout is None:
            bounds = self.query_start_loc
            dense = (self.query, self.key, self.value, bounds, bounds)
            return varlen_reference(*dense, self.config, self.scale, **extras)
        cache = self.written_cache() if kv_cache is None else kv_cache
        fp8: dict[str, Any] = {"k_scale": self.k_scale, "query_dtype": query_dtype, "q_scale": self.q_scale}
        if self.topk_indices is not None:
            sparse = (self.query, cache, self.layout, self.topk_indices)
            return sparse_mla_reference(*sparse, self.config, self.scale, **(extras | fp8))
        assert self.block_table is not None
        extras |= {"v_scale": self.v_scale, "mm_prefix_ranges": self.mm_prefix_ranges, **fp8}
        extras["tree_mask"] = self.tree_mask
        paged = (self.query, cache, self.layout, self.block_table, self.query_start_loc, self.seq_lens)
        return paged_reference(*paged, self.config, self.scale, **extras)


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
    """Draw one step of one layer. A seed gives the same problem on every device.

    Queries, keys and values are standard normal, rounded to the config's dtype. With MLA the query is drawn in its
    absorbed form.

    Args:
        layout: a name from ``attn_select.layer.layouts``; None for layers without a cache.
        block_size: tokens per block where the config names no ``block_size``.
        requests: ``(query_len, seq_len)`` each; None: ``random_requests``. Where ``query_len`` exceeds ``seq_len``
            (padding of a CUDA graph has 1 and 0) the first rows see no key and have no slot.
        nan_tails: poison the slots behind a sequence's end in its last block with NaN; False: with +-``LARGE``, which
            FP8 saturates. Spare blocks, and the slots that this step writes, hold NaN in any case.
        spare_blocks: blocks that no request owns, at least 1.
        scale: factor on ``q . k``; None: ``config.softmax_scale``.

    Raises:
        ValueError: ``layout`` is missing or not wanted, or ``spare_blocks`` is below 1.
    """
    if config.has_cache != (layout is not None):
        wanted = "the name of a KV layout" if config.has_cache else "None, since such a layer keeps no cache"
        raise ValueError(f"layout = {layout!r}: with attn_type = {config.attn_type!r} accepted is {wanted}")
    if spare_blocks < 1:
        raise ValueError(
            f"spare_blocks = {spare_blocks}: accepted are integers from 1, since unused table entries point to one"
        )
    block_size = config.block_size or block_size
    requests = tuple(requests or random_requests(seed, config, block_size=block_size))
    draw = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *(query_len for query_len, _ in requests)]).cumsum(0)
    tokens = int(starts[-1])
    key, value = _key_and_value(config, 0 if config.attn_type == "encoder_decoder" else tokens, draw)
    k_scale, v_scale, q_scale = _scales(config, draw)
    problem = Problem(
        config=config,
        requests=requests,
        scale=config.softmax_scale if scale is None else scale,
        query=_normal(config, draw, tokens, config.num_heads, config.head_size),
        key=key,
        value=value,
        query_start_loc=starts.int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32),
        **random_per_head(config, lambda *shape: _normal(config, draw, *shape)),
        mm_prefix_ranges=_ranges(seed, requests) if config.mm_prefix else None,
        tree_mask=_trees(draw, config, requests) if config.draft_tree else None,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
    )
    if layout is not None:
        problem = _with_cache(problem, layout, block_size, nan_tails, spare_blocks, draw)
    return problem.to(device)


def _with_cache(
    problem: Problem, layout: str, block_size: int, nan_tails: bool, spare_blocks: int, draw: torch.Generator
) -> Problem:
    """Add a cache that holds every request's context, and the tables that lead to it."""
    config, requests = problem.config, problem.requests
    needed = [-(-seq_len // block_size) for _, seq_len in requests]
    num_blocks = sum(needed) + spare_blocks
    blocks = torch.randperm(num_blocks, generator=draw)
    # The table is wider than any request needs; its unused entries point to a spare block, the last one drawn.
    block_table = blocks[-1].expand(len(requests), max(needed) + 1).int().clone()
    for row, part in zip(block_table, blocks[: sum(needed)].split_with_sizes(needed), strict=True):
        row[: len(part)] = part
    positions = torch.cat([last_positions(query_len, seq_len) for query_len, seq_len in requests])
    slot_mapping = slot_mapping_reference(block_table, positions, block_size, problem.query_start_loc)

    shape = [num_blocks if size == "num_blocks" else int(size) for size in cache_shape(layout, config, block_size)]
    # A cache of dtype fp8_e4m3 may be stored in this layout, too.
    dtype = torch.uint8 if layout == FP8_DS_MLA else storage_dtype(config.cache_dtype)
    cache = torch.empty(shape, dtype=dtype)
    cache.view(torch.uint8).fill_(0xFF)  # NaN in every float format, and in all parts of an fp8_ds_mla token

    def write(row: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        slots = slot_mapping_reference(row, positions, block_size)
        scales: dict[str, Any] = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
        write_reference(cache, key, value, slots, layout, config, **scales)

    for row, count, (query_len, seq_len) in zip(block_table, needed, requests, strict=True):
        cached = seq_len if config.attn_type == "encoder_decoder" else max(0, seq_len - query_len)
        write(row, torch.arange(cached), *_key_and_value(config, cached, draw))
        if not nan_tails:
            tail = torch.arange(seq_len, count * block_size)
            key, value = _key_and_value(config, len(tail), draw)
            write(row, tail, key.sign() * LARGE, value.sign() * LARGE)
    return dataclasses.replace(
        problem,
        layout=layout,
        block_size=block_size,
        kv_cache=cache,
        block_table=block_table,
        slot_mapping=slot_mapping[: len(problem.key)],
        topk_indices=_topk(problem, block_table, block_size, draw) if config.sparse else None,
    )


def _topk(problem: Problem, block_table: Tensor, block_size: int, draw: torch.Generator) -> Tensor:
    """Choose for each token up to ``sparse_top_k`` of the positions up to its own; int32 ``(T, top_k)`` slots."""
    # Of every other token the padding stands between them, not behind.
    top_k = problem.config.sparse_top_k or 0
    chosen: list[Tensor] = []
    for row, (query_len, seq_len) in zip(block_table, problem.requests, strict=True):
        for position in last_positions(query_len, seq_len).tolist():
            positions = torch.randperm(max(0, position + 1), generator=draw)[:top_k]
            slots = slot_mapping_reference(row, positions, block_size)
            padded = torch.nn.functional.pad(slots, (0, top_k - len(slots)), value=-1)
            chosen.append(padded if len(chosen) % 2 else padded[torch.randperm(top_k, generator=draw)])
    return torch.stack(chosen).int() if chosen else torch.empty(0, top_k, dtype=torch.int32)


def _normal(config: AttentionConfig, draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw).to(PLAIN_DTYPES[config.dtype])


def _key_and_value(config: AttentionConfig, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw what ``write_reference`` takes: K and V, or with MLA latent and rope part."""
    if config.kv_lora_rank is not None:
        rope = config.head_size - config.kv_lora_rank
        return _normal(config, draw, tokens, config.kv_lora_rank), _normal(config, draw, tokens, rope)
    heads = config.num_kv_heads
    return _normal(config, draw, tokens, heads, config.head_size), _normal(
        config, draw, tokens, heads, config.value_head_size
    )


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
    k_scale, v_scale = 0.01 + 0.05 * torch.rand((2, *shape), generator=draw)
    return k_scale, None if config.mla else v_scale, 0.01 + 0.05 * torch.rand((), generator=draw)


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
    drawn = torch.randint(2, (sum(query_len for query_len, _ in requests), columns), generator=draw).bool()
    start = 0
    for query_len, _ in requests:
        if query_len <= columns:
            tree = torch.eye(query_len, dtype=torch.bool)
            for token in range(1, query_len):
                tree[token] |= tree[int(torch.randint(token, (), generator=draw))]
            drawn[start : start + query_len, :query_len] = tree
        start += query_len
    return drawn


@dataclasses.dataclass(frozen=True, slots=True)
class MLAProblem:
    """A ``Problem`` with the layer's query and weight. ``step.query`` is that query with the weight absorbed.

    Decodes come first, as MLA layers require.
    """

    step: Problem
    """Batch, cache, tables, slots, scales, sinks. ``key`` is ``kv_c``, ``value`` is ``k_pe``, the query absorbed."""
    query: Tensor
    """``(T, H, P + Pr)`` in the config's dtype."""
    kv_b_proj: Tensor
    """``(H * (P + V), R)`` in the config's dtype; head by head the rows of W_UK, then of W_UV."""

    def to(self, device: torch.device | str) -> MLAProblem:
        """Return the same problem with its tensors on ``device``."""
        return MLAProblem(self.step.to(device), self.query.to(device), self.kv_b_proj.to(device))

    @property
    def num_decode_requests(self) -> int:
        """Leading requests whose query is at most ``1 + num_speculative_tokens`` tokens long."""
        threshold = self.step.config.max_decode_query_len
        is_prefill = [query_len > threshold for query_len, _ in self.step.requests]
        return (*is_prefill, True).index(True)

    def reference(
        self,
        num_decode_requests: int | None = None,
        *,
        kv_cache: Tensor | None = None,
        query_dtype: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return output float64 ``(T, H, V)`` and natural-log LSE float64 ``(T, H)``.

        Decodes read everything from the cache, this step's latents as it stores them. Prefills read their context from
        the cache and this step's latents as they are. With sparse MLA all requests are computed like decodes.

        Args:
            num_decode_requests: leading requests that are decodes; left out: the property of that name.
            kv_cache: the cache after this step's write; left out: ``step.written_cache()``.
            query_dtype: an FP8 dtype where the decode path quantises the absorbed query with ``q_scale``.
        """
        step, config = self.step, self.step.config
        decodes = self.num_decode_requests if num_decode_requests is None else num_decode_requests
        cache = step.written_cache() if kv_cache is None else kv_cache
        if query_dtype is not None:  # a layer's absorbed query is rounded to the config's dtype before
            step = dataclasses.replace(step, query=step.query.to(self.query.dtype))
        output, lse = step.reference(kv_cache=cache, query_dtype=query_dtype)
        w_uk, w_uv = _weights(self.kv_b_proj, config)
        output = project_output(output, w_uv)
        if config.sparse:
            return output, lse
        assert step.layout is not None
        assert step.block_size is not None
        assert step.block_table is not None
        options = attention_options(config, **step.per_head)
        bounds = step.query_start_loc.tolist()
        rank, nope = len(w_uk), w_uk.shape[2]
        for request, (query_len, seq_len) in list(enumerate(step.requests))[decodes:]:
            rows = slice(bounds[request], bounds[request + 1])
            positions = torch.arange(seq_len - query_len, device=cache.device)
            slots = slot_mapping_reference(step.block_table[request], positions, step.block_size)
            context, _ = gather_reference(cache, step.layout, slots, config, k_scale=step.k_scale)
            kv_c = torch.cat([context[:, 0, :rank], step.key[rows].double()])
            k_pe = torch.cat([context[:, 0, rank:], step.value[rows].double()])
            q_nope, q_pe = self.query[rows, :, :nope], self.query[rows, :, nope:]
            if step.mm_prefix_ranges is not None:
                options["mm_prefix_ranges"] = step.mm_prefix_ranges[request]
            output[rows], lse[rows] = mla_reference(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, scale=step.scale, **options)
        return output, lse


def random_mla_problem(
    seed: int, config: AttentionConfig, layout: str = MLA, *, requests: Sequence[Request] | None = None, **options: Any
) -> MLAProblem:
    """Draw one step of one MLA layer: ``random_problem`` with decodes moved to the front, a query and a weight.

    Args:
        layout: ``MLA`` or ``FP8_DS_MLA``.
        requests: ``(query_len, seq_len)`` each, in any order; left out: ``random_requests``.
        options: as in ``random_problem``.
    """
    size = config.block_size or options.get("block_size", 16)
    drawn = requests or random_requests(seed, config, block_size=size)
    in_order = sorted(drawn, key=lambda request: request[0] > config.max_decode_query_len)
    step = random_problem(seed, config, layout, requests=in_order, **options)
    rank, nope = config.kv_lora_rank or 0, config.qk_nope_head_dim or 0
    width, value_size = nope + (config.qk_rope_head_dim or 0), config.v_head_dim or 0
    draw = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(len(step.query), config.num_heads, width, generator=draw).to(PLAIN_DTYPES[config.dtype])
    weight = torch.randn(config.num_heads * (nope + value_size), rank, generator=draw) * rank**-0.5
    device = options.get("device", "cpu")
    return _absorbed(MLAProblem(step, query, weight.to(query.dtype))).to(device)


def of_layer(drawn: Problem | MLAProblem, layer: Problem | MLAProblem) -> Any:
    """Return a step with the numbers that belong to the layer of another one: scale, slopes, sinks, scales, weight."""
    step, like = (each.step if isinstance(each, MLAProblem) else each for each in (drawn, layer))
    names = ("scale", *PER_HEAD, "k_scale", "v_scale", "q_scale")
    step = dataclasses.replace(step, **{name: getattr(like, name) for name in names})
    if not isinstance(drawn, MLAProblem):
        return step
    assert isinstance(layer, MLAProblem)
    if drawn.kv_b_proj is layer.kv_b_proj:
        return dataclasses.replace(drawn, step=step)
    return _absorbed(dataclasses.replace(drawn, step=step, kv_b_proj=layer.kv_b_proj))


def of_another_layer(drawn: Problem | MLAProblem) -> Any:
    """Return the same batch for a layer of the group with sinks and queries of its own."""
    # Its scale is the same: FlashInfer's plans serve one scale.
    step = drawn.step if isinstance(drawn, MLAProblem) else drawn
    step = dataclasses.replace(step, sinks=None if step.sinks is None else -step.sinks, query=-step.query)
    if not isinstance(drawn, MLAProblem):
        return step
    return dataclasses.replace(drawn, step=step, query=-drawn.query)


PEAK = 120.0
"""A score whose exponential no float32 holds, and whose inverse neither."""
_OWN_TO_PEAK = 0.92
_NARROW = 32
"""Below this width random keys come too near to a row's own one."""


def with_peaks(seed: int, drawn: Problem | MLAProblem) -> Any:
    """Return the step with scores of about ``PEAK`` in the first rows of two requests, with a context and without."""
    # The row's query lies along its own key, and so does a key of the context, its first, its last or any other one,
    # with a score that is a twelfth larger. So the row is known exactly however scores are rounded, unless they
    # overflow or are clamped, or the key is not read. In a causal row that sees itself alone the score is negative.
    # With an FP8 cache the query is no larger than FP8 holds. A soft cap and ALiBi bring scores near each other, so
    # that their rounding counts: there the step stays as it is.
    step = drawn.step if isinstance(drawn, MLAProblem) else drawn
    config, width = step.config, drawn.query.shape[-1]
    starts = [(index, seq_len - query_len) for index, (query_len, seq_len) in enumerate(step.requests) if query_len]
    if width < _NARROW or not len(step.key) or config.alibi or config.logits_soft_cap:
        return drawn
    rng, query = random.Random(f"peaks {seed}"), drawn.query.clone()
    changed: list[int] = []
    cache, topk = (None if each is None else each.clone() for each in (step.kv_cache, step.topk_indices))
    for group in ([each for each in starts if each[1] > 0], [each for each in starts if each[1] == 0]):
        if not group:
            continue
        index, before = rng.choice(group)
        row = int(step.query_start_loc[index])
        changed.append(row)
        key, value = step.key[row], step.value[row]
        if isinstance(drawn, MLAProblem):
            w_uk = _weights(drawn.kv_b_proj, config)[0]
            shared = value.float().expand(config.num_heads, -1)
            met = torch.cat([torch.einsum("r,rhp->hp", key.float(), w_uk.float()), shared], dim=-1)
            along = key / _OWN_TO_PEAK, value / _OWN_TO_PEAK
        else:
            met = key.float().repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
            along = key / _OWN_TO_PEAK, -value
        alone = not before and config.attn_type == "decoder" and not (config.non_causal or config.mm_prefix)
        factor = (_OWN_TO_PEAK if before else 1.0) * PEAK / step.scale / met.square().sum(-1, keepdim=True)
        if step.q_scale is not None:  # beyond that an FP8 query saturates, as its path has it
            factor = factor.clamp_max(E4M3_MAX * step.q_scale / met.abs().max())
        query[row] = (-factor if alone else factor) * met
        if before and cache is not None:
            assert step.layout is not None
            assert step.block_table is not None
            place = torch.tensor([rng.choice((0, before - 1, rng.randrange(before)))], device=cache.device)
            slots = slot_mapping_reference(step.block_table[index], place, step.block_size or 16)
            scales: dict[str, Any] = {"k_scale": step.k_scale, "v_scale": step.v_scale}
            write_reference(cache, along[0][None], along[1][None], slots, step.layout, config, **scales)
        if topk is not None and step.slot_mapping is not None:
            own = step.slot_mapping[row]
            topk[row, 0] = topk[row, 0] if bool((topk[row] == own).any()) else own
    if not isinstance(drawn, MLAProblem):
        return dataclasses.replace(step, query=query, kv_cache=cache, topk_indices=topk)
    absorbed = step.query.clone()
    absorbed[changed] = _absorbed(dataclasses.replace(drawn, query=query[changed])).step.query
    step = dataclasses.replace(step, query=absorbed, kv_cache=cache, topk_indices=topk)
    return dataclasses.replace(drawn, step=step, query=query)


def _absorbed(drawn: MLAProblem) -> MLAProblem:
    """Return the problem with the absorbed query that belongs to its query and weight."""
    nope = drawn.step.config.qk_nope_head_dim or 0
    query, w_uk = drawn.query, _weights(drawn.kv_b_proj, drawn.step.config)[0]
    absorbed = absorb_query(query[..., :nope], query[..., nope:], w_uk)
    return dataclasses.replace(drawn, step=dataclasses.replace(drawn.step, query=absorbed))


def _weights(kv_b_proj: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return W_UK ``(R, H, P)`` and W_UV ``(R, H, V)``."""
    by_head = kv_b_proj.view(config.num_heads, -1, kv_b_proj.shape[1]).permute(2, 0, 1)
    nope = config.qk_nope_head_dim or 0
    return by_head[..., :nope], by_head[..., nope:]
