"""One attention layer serves a batch of requests as an engine would, and every output is compared with the oracle.

Prompts are prefilled in chunks under a token budget while earlier requests already decode (continuous batching), on a
paged cache whose blocks a pool hands out. Queries, keys and values are random; the references are computed in float64
from what the cache holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.layouts import FP8_DS_MLA
from attn_select.layer.state import StateConfig
from attn_select.reference.comparison import ErrorBound, RelativeError, error_bound, relative_error
from attn_select.reference.oracle import AttentionOptions, attention_options, attention_reference
from attn_select.reference.oracle_indexer import index_scores_reference, topk_reference, wrong_choice
from attn_select.reference.oracle_mla import absorb_query, mla_absorbed_reference, mla_reference, project_output
from attn_select.reference.oracle_quant import decode, encode, pack_fp8_ds_mla, quantize_query, unpack_fp8_ds_mla
from attn_select.reference.problems import FP8_SCALE, alibi_slopes, softmax_scale
from attn_select.reference.state_serving import StateServing, state_bound
from attn_select.runtime import (
    Attention,
    BlockPool,
    BlockTable,
    Capacity,
    MLAAttention,
    Scales,
    SparseIndexer,
    attention_group,
)
from attn_select.runtime.batch import prepare_batch
from attn_select.runtime.metadata import decodes_first
from attn_select.runtime.mla_group import MLALayerGroup

Batch = list[tuple[int, int, int]]
"""``(request, first position, tokens)`` of one step."""


@dataclass(slots=True)
class Workload:
    """What the layer is asked to serve."""

    num_requests: int = 4  # requests; the first prompt is the longest, the others are drawn from half of it up
    prompt_tokens: int = 256  # of the longest prompt
    decode_steps: int = 16  # tokens generated per request
    max_num_batched_tokens: int = 192  # tokens of one step; longer prompts are prefilled in chunks
    seed: int = 0  # of everything that is random

    def __post_init__(self) -> None:
        least = {"num_requests": 1, "prompt_tokens": 1, "decode_steps": 0, "max_num_batched_tokens": self.num_requests}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                why = ", one token for each request" if name == "max_num_batched_tokens" else ""
                raise ConfigError(
                    f"{name} = {getattr(self, name)}: accepted are integers from {bound}{why}", fields=[name]
                )

    def prompts(self) -> list[int]:
        """Return the prompt lengths."""
        rng = random.Random(self.seed)
        shorter = [rng.randint(-(-self.prompt_tokens // 2), self.prompt_tokens) for _ in range(self.num_requests - 1)]
        return [self.prompt_tokens, *shorter]

    def steps(self, has_cache: bool, drafts: int = 0) -> Iterator[Batch]:
        """Yield the batches: decodes first, then prompts as far as the budget goes; whole prompts without a cache."""
        prompts = self.prompts()
        if not has_cache:
            yield from ([(request, 0, length)] for request, length in enumerate(prompts))
            return
        done = [0] * len(prompts)
        while True:
            running = [r for r, prompt in enumerate(prompts) if prompt <= done[r] < prompt + self.decode_steps]
            most = min(1 + drafts, self.max_num_batched_tokens // max(1, len(running)))
            batch = [(r, done[r], min(most, prompts[r] + self.decode_steps - done[r])) for r in running]
            budget = self.max_num_batched_tokens - sum(tokens for _, _, tokens in batch)
            for request, prompt in enumerate(prompts):
                if done[request] < prompt and budget:
                    tokens = min(budget, prompt - done[request])
                    batch.append((request, done[request], tokens))
                    budget -= tokens
            if not batch:
                return
            for request, _, tokens in batch:
                done[request] += tokens
            yield batch


@dataclass(slots=True)
class StepKind:
    """Steps of one kind: ``prefill``, ``decode``, or both in one batch, ``mixed``."""

    name: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0  # metadata, cache update and attention together, host time with the device idle at the end
    error: RelativeError = field(default_factory=lambda: RelativeError(0.0, 0.0))  # the largest of the steps' errors


@dataclass(slots=True)
class RunResult:
    """How one layer did."""

    kinds: list[StepKind]
    bound: ErrorBound
    num_blocks: int  # blocks that the pool had, or slots of states
    cache_shape: tuple[int, ...] | None  # of the cache; None and 0 without one
    cache_bytes: int
    prompts: list[int]  # the prompts' lengths in tokens

    @property
    def ok(self) -> bool:
        """Whether every error is within the bound."""
        return all(map(self.within, self.kinds))

    def within(self, kind: StepKind) -> bool:
        """Whether both errors of one kind of step are within the bound: of the norm, and of the worst row."""
        return kind.error.norm <= self.bound.norm and kind.error.row <= self.bound.row


def unserved(config: LayerConfig) -> str | None:
    """Return why the workload has no inputs for a layer; None where it has."""
    across = isinstance(config, AttentionConfig) and config.attn_type == "encoder_decoder"
    return "cross-attention needs an encoder's tokens" if across else None


def serve(selection: Selection[Any], workload: Workload, progress: Callable[[int], None] | None = None) -> RunResult:
    """Serve the workload twice through one layer: once checked, then once timed."""
    if (reason := unserved(selection.config)) is not None:
        raise ConfigError(f"this layer cannot be served alone: {reason}", fields=["attn_type"])
    try:
        if isinstance(selection.config, StateConfig):
            return _serve_states(selection, workload, progress)
        return _serve(selection, workload, progress)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "DefaultCPUAllocator" not in str(error):
            raise
        sizes = f"num_requests = {workload.num_requests}, prompt_tokens = {workload.prompt_tokens}"
        hint = "take fewer --requests, or shorter ones with --prompt-tokens"
        raise ConfigError(
            f"not enough memory for {sizes}", fields=["num_requests", "prompt_tokens"], hint=hint
        ) from error


def _serve(selection: Selection, workload: Workload, progress: Callable[[int], None] | None) -> RunResult:
    layer = _Layer(selection, workload)
    kinds: dict[str, StepKind] = {name: StepKind(name) for name in ("prefill", "mixed", "decode")}
    for checked in (True, False):
        layer.restart()
        for batch in layer.batches():
            began = time.perf_counter()
            output, num_decode_tokens = layer.step(batch)
            seconds = time.perf_counter() - began
            kind = kinds[_kind(batch, workload.prompts())]
            if not checked:
                kind.steps, kind.tokens = kind.steps + 1, kind.tokens + len(output)
                kind.seconds += seconds
                continue
            error = relative_error(output, *layer.reference(batch, num_decode_tokens))
            kind.error = RelativeError(*map(max, kind.error, error))
            if progress is not None:
                progress(len(output))
    cache = layer.kv_cache
    return RunResult(
        [kind for kind in kinds.values() if kind.steps],
        error_bound(selection.config, selection.plans),
        layer.pool.num_blocks,
        None if cache is None else tuple(cache.shape),
        0 if cache is None else cache.nbytes,
        workload.prompts(),
    )


def _serve_states(selection: Selection[Any], workload: Workload, progress: Callable[[int], None] | None) -> RunResult:
    """Serve the workload through one layer that keeps a state: a slot per request, all of them NaN at the start."""
    kinds: dict[str, StepKind] = {name: StepKind(name) for name in ("prefill", "mixed", "decode")}
    prompts = workload.prompts()
    for checked in (True, False):
        slots = len(prompts) * selection.config.max_decode_query_len
        serving = StateServing(selection, slots, workload.seed)
        for request in range(len(prompts)):
            serving.add(request)
        for batch in workload.steps(has_cache=True):
            lens = {request: tokens for request, _, tokens in batch}
            kind = kinds[_kind(batch, prompts)]
            if checked:
                kind.error = RelativeError(*map(max, kind.error, serving.step(lens)))
                if progress is not None:
                    progress(sum(lens.values()))
                continue
            serving.run(lens)
            kind.steps, kind.tokens = kind.steps + 1, kind.tokens + sum(lens.values())
            kind.seconds += serving.seconds
    state, conv = serving.cache.state, serving.cache.conv
    return RunResult(
        [kind for kind in kinds.values() if kind.steps],
        state_bound(selection.config),
        slots,
        tuple(state.shape),
        state.nbytes + (0 if conv is None else conv.nbytes),
        prompts,
    )


def _kind(batch: Batch, prompts: Sequence[int]) -> str:
    decodes = [start >= prompts[request] for request, start, _ in batch]
    return "decode" if all(decodes) else "mixed" if any(decodes) else "prefill"


class _Layer:
    """The layer, its random inputs and its cache."""

    def __init__(self, selection: Selection, workload: Workload) -> None:
        config = self.config = selection.config
        self.plans, self.workload = selection.plans, workload
        self.lengths = [prompt + workload.decode_steps for prompt in workload.prompts()]
        budget = max(workload.max_num_batched_tokens, 0 if config.has_cache else workload.prompt_tokens)
        capacity = Capacity(workload.num_requests, budget, max(self.lengths))
        self.group = attention_group(selection, capacity=capacity)
        draw = torch.Generator().manual_seed(workload.seed)
        self.scale = softmax_scale(config)
        self.slopes = alibi_slopes(config.num_heads) if config.alibi else None
        self.sinks = self._normal(draw, config.num_heads) if config.sinks else None
        fp8 = FP8_SCALE if config.cache_dtype.startswith("fp8") else 1.0
        heads = config.num_kv_heads if config.per_head_quant_scales else 0
        self.scales = Scales.make(self.group.device, q=fp8, k=fp8, v=fp8, num_kv_heads=heads)
        options: dict[str, Any] = {"alibi_slopes": self.slopes, "sinks": self.sinks, "scales": self.scales}
        self.layer: Any
        if isinstance(self.group, MLALayerGroup):
            nope, rank = config.qk_nope_head_dim or 0, config.kv_lora_rank or 0
            self.rank, self.nope = rank, nope
            width = nope + (config.v_head_dim or 0)
            # Decompressed keys and values are then about standard normal, too.
            self.kv_b_proj = self._normal(draw, config.num_heads * width, rank) * rank**-0.5
            self.layer = MLAAttention(self.group, self.kv_b_proj, scale=self.scale, **options)
            shapes = [(config.num_heads, nope + (config.qk_rope_head_dim or 0)), (rank,), (config.head_size - rank,)]
        else:
            self.layer = Attention(self.group, scale=self.scale, **options)
            kv = config.num_kv_heads
            shapes = [(config.num_heads, config.head_size), (kv, config.head_size), (kv, config.value_head_size)]
        self.indexer: SparseIndexer | None = None
        if config.sparse and isinstance(self.group, MLALayerGroup):
            self.indexer = SparseIndexer(self.group)
            heads, size = self.indexer.num_heads, self.indexer.head_dim
            shapes += [(heads, size), (size,), (heads,)]
        # Per request: query, key, value, or with MLA query, latent, rope part; for an indexer query, key, weights.
        self.inputs = [[self._normal(draw, length, *shape) for shape in shapes] for length in self.lengths]
        self.restart()

    def _normal(self, draw: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(self.group.device, getattr(torch, self.config.dtype))

    def restart(self) -> None:
        """Begin anew with an empty cache."""
        size = self.group.block_size or 1
        needed = sum(-(-length // size) for length in self.lengths)
        self.pool = BlockPool(needed + 1, size)
        self.table = BlockTable(len(self.lengths), -(-max(self.lengths) // size), size, self.group.device)
        self.kv_cache = self.group.allocate_kv_cache(needed + 1) if self.config.has_cache else None
        self.index_cache = None if self.indexer is None else self.indexer.allocate_cache(needed + 1)

    def batches(self) -> Iterator[Batch]:
        """Yield the workload's batches, in the order that the group wants; drafts only where they form trees."""
        drafts = self.config.num_speculative_tokens if self.config.draft_tree else 0
        for batch in self.workload.steps(self.config.has_cache, drafts):
            order = decodes_first([tokens for _, _, tokens in batch], self.group.reorder_batch_threshold or 0)
            yield [batch[index] for index in order]

    def _tree(self, part: tuple[int, int, int]) -> Tensor:
        """Return bool ``(T, T)``, which of its own tokens each token of a request sees.

        The parent of a draft is the token at half its place; a short prompt is no tree.
        """
        request, start, tokens = part
        if start < self.workload.prompts()[request]:
            return torch.ones(tokens, tokens, dtype=torch.bool, device=self.group.device).tril_()
        tree = torch.eye(tokens, dtype=torch.bool, device=self.group.device)
        for token in range(1, tokens):
            tree[token] |= tree[(token - 1) // 2]
        return tree

    def _tree_mask(self, batch: Batch) -> Tensor:
        """Return the batch's ``tree_mask``."""
        columns = self.config.max_decode_query_len
        rows = sum(tokens for _, _, tokens in batch)
        mask, first = torch.zeros(rows, columns, dtype=torch.bool, device=self.group.device), 0
        for part in batch:
            if part[2] <= columns:
                mask[first : first + part[2], : part[2]] = self._tree(part)
            first += part[2]
        return mask

    def step(self, batch: Batch) -> tuple[Tensor, int]:
        """Run one batch; return the output and how many of its tokens went the decode path of MLA."""
        query_lens, seq_lens = [n for _, _, n in batch], [start + n for _, start, n in batch]
        table = self.table if self.config.has_cache else None
        if table is not None:
            for row, (request, start, tokens) in enumerate(batch):
                self.pool.allocate(request, start + tokens)
                table.set_row(row, self.pool.blocks(request))
        images = [self._images(request, start + n) for request, start, n in batch] if self.config.mm_prefix else None
        trees = self._tree_mask(batch) if self.config.draft_tree else None
        made: dict[str, Any] = {"mm_prefix_ranges": images, "tree_mask": trees}
        common = prepare_batch(query_lens, seq_lens, table, device=self.group.device, **made)
        metadata = self.group.build(common)
        tensors = [torch.cat(parts) for parts in zip(*(self._slices(part) for part in batch), strict=True)]
        extras = {}
        if self.indexer is not None and self.index_cache is not None:
            *tensors, query, key, weights = tensors
            self.chosen = self.indexer(query, key, weights.float(), self.index_cache, metadata)
            extras["topk_indices"] = self.chosen
        output: Tensor = self.layer(*tensors, self.kv_cache, metadata, **extras)
        if output.is_cuda:
            torch.cuda.synchronize()
        return output, getattr(metadata, "num_decode_tokens", 0)

    def _images(self, request: int, seq_len: int) -> list[tuple[int, int]]:
        """Return the positions of a request's image, a quarter of its prompt from the second quarter on, so far."""
        prompt = self.workload.prompts()[request]
        first, last = prompt // 4, min(prompt // 2, seq_len) - 1
        return [(first, last)] if self.config.mm_prefix and first < last else []

    def _slices(self, part: tuple[int, int, int]) -> list[Tensor]:
        request, start, tokens = part
        return [tensor[start : start + tokens] for tensor in self.inputs[request]]

    def reference(self, batch: Batch, num_decode_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the batch's outputs in float64, ``(T, H, Dv)``, and their spread ``(T, H)``."""
        outputs: list[Tensor] = []
        spreads: list[Tensor] = []
        for request, start, tokens in batch:
            query, key, value, *index = (tensor[: start + tokens] for tensor in self.inputs[request])
            spreads.append(query.new_empty((tokens, self.config.num_heads), dtype=torch.float64))
            if index:
                first = sum(map(len, outputs))
                chosen = self._chosen(request, start, index, self.chosen[first : first + tokens])
                outputs.append(self._sparse(query[start:], key, value, chosen, spreads[-1]))
                continue
            short = tokens <= self.config.max_decode_query_len
            masks: AttentionOptions = {
                "mm_prefix_ranges": self._images(request, start + tokens),
                "spread": spreads[-1],
            }
            if self.config.draft_tree and short:
                masks["tree_mask"] = self._tree((request, start, tokens))
            query = self._quantized(query[start:], "decode" if short else "prefill")
            if self.config.mla:
                is_decode = sum(map(len, outputs)) < num_decode_tokens
                outputs.append(self._mla(query, key, value, start + tokens if is_decode else start, masks))
                continue
            k, v = self._stored(key, self.scales.k), self._stored(value, self.scales.v)
            options = attention_options(self.config, self.slopes, self.sinks)
            options |= masks
            outputs.append(attention_reference(query, k, v, scale=self.scale, **options)[0])
        return torch.cat(outputs), torch.cat(spreads)

    def _chosen(self, request: int, start: int, index: list[Tensor], slots: Tensor) -> list[Tensor]:
        """Return the positions that each token attends to: the layer's choice, the reference's where that is wrong."""
        query, key, weights = index
        assert self.indexer is not None
        scores = index_scores_reference(query[start:], weights[start:], key, fp8=True)
        size, top_k = self.table.block_size, self.indexer.top_k
        blocks = torch.tensor(self.pool.blocks(request), device=slots.device)
        block_of = torch.full((int(blocks.max()) + 1,), -len(key), device=slots.device)
        block_of[blocks] = torch.arange(len(blocks), device=slots.device)
        found = []
        for token, own in enumerate(slots):
            own = own[own >= 0].long()
            positions = block_of[(own // size).clamp_max(len(block_of) - 1)] * size + own % size
            num_keys = start + token + 1
            if wrong_choice(positions, scores[token], num_keys, top_k) is not None:
                positions = topk_reference(scores[token], num_keys, top_k)
            found.append(positions)
        return found

    def _sparse(self, query: Tensor, latent: Tensor, rope: Tensor, chosen: list[Tensor], spread: Tensor) -> Tensor:
        """Attend from each token to the positions that were chosen for it, all as the cache holds them.

        ``spread`` is filled: of latents, times what the random ``W_UV`` leaves of their norm.
        """
        if self.group.kv_layout == FP8_DS_MLA:
            stored = unpack_fp8_ds_mla(pack_fp8_ds_mla(latent, rope))
        else:
            stored = self._stored(torch.cat([latent, rope], dim=-1)[:, None], self.scales.k)[:, 0]
        by_head = self.kv_b_proj.view(self.config.num_heads, -1, self.rank).permute(2, 0, 1)
        absorbed = absorb_query(query[..., : self.nope], query[..., self.nope :], by_head[..., : self.nope])
        options = attention_options(self.config, self.slopes, self.sinks)
        options["causal"] = False
        rows = []
        for token, positions in enumerate(chosen):
            options["spread"] = spread[token : token + 1]
            latents, ropes = stored[positions, : self.rank], stored[positions, self.rank :]
            row = absorbed[token : token + 1]
            rows.append(mla_absorbed_reference(row, latents, ropes, scale=self.scale, **options)[0])
        w_uv = by_head[..., self.nope :]
        spread *= (w_uv.shape[2] / self.rank) ** 0.5
        return project_output(torch.cat(rows), w_uv)

    def _quantized(self, query: Tensor, phase: Phase) -> Tensor:
        dtype = self.plans[phase].query_dtype if phase in self.plans else self.config.dtype
        return quantize_query(query, dtype, self.scales.q) if dtype.startswith("fp8") and not self.config.mla else query

    def _mla(self, query: Tensor, latent: Tensor, rope: Tensor, cached: int, masks: AttentionOptions) -> Tensor:
        """Attend decompressed to the first ``cached`` tokens as the cache holds them and to the rest as they are."""
        both = torch.cat([latent, rope], dim=-1)
        stored = self._stored(both[:, None], self.scales.k)[:, 0]
        both = torch.cat([stored[:cached], both[cached:].double()])
        options = attention_options(self.config, self.slopes, self.sinks)
        options |= masks
        by_head = self.kv_b_proj.view(self.config.num_heads, -1, self.rank).permute(2, 0, 1)
        return mla_reference(
            query[..., : self.nope],
            query[..., self.nope :],
            both[:, : self.rank],
            both[:, self.rank :],
            by_head[..., : self.nope],
            by_head[..., self.nope :],
            scale=self.scale,
            **options,
        )[0]

    def _stored(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """Return numbers as the cache gives them back, float64."""
        config: AttentionConfig = self.config
        fp8 = config.cache_dtype.startswith("fp8")
        used = scale if fp8 else None
        return decode(encode(numbers, config.cache_dtype, used), config.cache_dtype, used)
