"""One attention layer serves a batch of requests as an engine would, and every output is compared with the oracle.

Prompts are prefilled in chunks under a token budget while earlier requests already decode (continuous batching), on a
paged cache whose blocks a pool hands out. Queries, keys and values are random; the references are computed in float64
from what the cache holds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.reference.comparison import ErrorBound, RelativeError, error_bound, relative_error
from attn_select.reference.oracle_indexer import index_scores_reference, topk_reference, wrong_choice
from attn_select.reference.oracle_paged import slot_mapping_reference
from attn_select.reference.problems import Problem, timed_problem
from attn_select.reference.running import expected, layer_of
from attn_select.reference.state_serving import StateServing, state_bound
from attn_select.runtime import BlockPool, BlockTable, Capacity, SparseIndexer, attention_group
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
        if self.max_num_batched_tokens < self.num_requests:
            accepted = f"accepted are integers from {self.num_requests}, one token for each request"
            text = f"max_num_batched_tokens = {self.max_num_batched_tokens}: {accepted}"
            raise ConfigError(text, fields=["max_num_batched_tokens"])

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
            output, problem = layer.step(batch)
            seconds = time.perf_counter() - began
            kind = kinds[_kind(batch, workload.prompts())]
            if not checked:
                kind.steps, kind.tokens = kind.steps + 1, kind.tokens + len(output)
                kind.seconds += seconds
                continue
            error = relative_error(output, *layer.reference(batch, problem))
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
        self.workload = workload
        self.lengths = [prompt + workload.decode_steps for prompt in workload.prompts()]
        budget = max(workload.max_num_batched_tokens, 0 if config.has_cache else workload.prompt_tokens)
        self.group = attention_group(selection, capacity=Capacity(workload.num_requests, budget, max(self.lengths)))
        # All tokens of all requests: a step takes its own.
        requests, device = [(length, length) for length in self.lengths], self.group.device
        self.whole = timed_problem(workload.seed, config, None, None, requests, device)
        self.layer = layer_of(self.group, self.whole)
        self.indexer: SparseIndexer | None = None
        if config.sparse and isinstance(self.group, MLALayerGroup):
            self.indexer = SparseIndexer(self.group)
            heads, size, draw = self.indexer.num_heads, self.indexer.head_dim, torch.Generator(device).manual_seed(1)
            # Query, key and weights.
            self.index_inputs = [
                torch.randn(sum(self.lengths), *shape, generator=draw, device=device).to(self.whole.query.dtype)
                for shape in ((heads, size), (size,), (heads,))
            ]
        self.restart()

    def restart(self) -> None:
        """Begin anew with an empty cache."""
        size = self.group.block_size or 1
        needed = sum(-(-length // size) for length in self.lengths)
        self.pool = BlockPool(needed + 1, size)
        self.table = BlockTable(len(self.lengths), -(-max(self.lengths) // size), size, self.group.device)
        self.kv_cache, self.known = (
            self.group.allocate_kv_cache(needed + 1) if self.config.has_cache else None for _ in range(2)
        )
        self.index_cache = None if self.indexer is None else self.indexer.allocate_cache(needed + 1)

    def batches(self) -> Iterator[Batch]:
        """Yield the workload's batches, in the order that the group wants; drafts only where they form trees."""
        drafts = self.config.num_speculative_tokens if self.config.draft_tree else 0
        for batch in self.workload.steps(self.config.has_cache, drafts):
            order = decodes_first([tokens for _, _, tokens in batch], self.group.reorder_batch_threshold or 0)
            yield [batch[index] for index in order]

    def _tree_mask(self, batch: Batch) -> Tensor:
        """Return the batch's ``tree_mask``: the parent of a draft is the token at half its place.

        A short prompt is no tree.
        """
        columns, first = self.config.max_decode_query_len, 0
        mask = torch.zeros(sum(n for _, _, n in batch), columns, dtype=torch.bool, device=self.group.device)
        for request, start, tokens in batch:
            if tokens <= columns:
                tree = mask[first : first + tokens, :tokens]
                tree.fill_diagonal_(True)
                is_prompt = start < self.workload.prompts()[request]
                for token in range(1, tokens):
                    tree[token] |= tree[token - 1 if is_prompt else (token - 1) // 2]
            first += tokens
        return mask

    def step(self, batch: Batch) -> tuple[Tensor, Problem]:
        """Run one batch; return the output, and the batch as a problem on what the oracle knows of the cache."""
        query_lens, seq_lens = [n for _, _, n in batch], [start + n for _, start, n in batch]
        table = self.table if self.config.has_cache else None
        if table is not None:
            for row, (request, start, tokens) in enumerate(batch):
                self.pool.allocate(request, start + tokens)
                table.set_row(row, self.pool.blocks(request))
        images = tuple(self._images(r, start + n) for r, start, n in batch) if self.config.mm_prefix else None
        trees = self._tree_mask(batch) if self.config.draft_tree else None
        made: dict[str, Any] = {"mm_prefix_ranges": images, "tree_mask": trees}
        common = prepare_batch(query_lens, seq_lens, table, device=self.group.device, **made)
        metadata = self.group.build(common)
        rows, whole = torch.cat([self._rows(*part) for part in batch]), self.whole
        inputs, chosen = (whole.query[rows], whole.key[rows], whole.value[rows]), None
        extras = {}
        if self.indexer is not None and self.index_cache is not None:
            query, key, weights = (tensor[rows] for tensor in self.index_inputs)
            chosen = extras["topk_indices"] = self.indexer(query, key, weights.float(), self.index_cache, metadata)
        output: Tensor = self.layer(*inputs, self.kv_cache, metadata, **extras)
        if output.is_cuda:
            torch.cuda.synchronize()
        problem = replace(
            whole,
            requests=tuple(zip(query_lens, seq_lens, strict=True)),
            **dict(zip(("query", "key", "value"), inputs, strict=True)),  # type: ignore[arg-type]
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            layout=self.group.kv_layout,
            block_size=self.group.block_size,
            kv_cache=self.known,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            topk_indices=chosen,
            **made,
        )
        return output, problem

    def _images(self, request: int, seq_len: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of a request's image, a quarter of its prompt from the second quarter on, so far."""
        prompt = self.workload.prompts()[request]
        first, last = prompt // 4, min(prompt // 2, seq_len) - 1
        return ((first, last),) if first < last else ()

    def _rows(self, request: int, start: int, tokens: int) -> Tensor:
        """Return which of all tokens are some of a request's."""
        first = sum(self.lengths[:request]) + start
        return torch.arange(first, first + tokens, device=self.group.device)

    def reference(self, batch: Batch, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return the batch's outputs in float64, ``(T, H, Dv)``, and their spread ``(T, H)``."""
        # The oracle keeps a cache of its own, so that what a layer writes wrongly shows in every later step.
        self.known = problem.written_cache() if self.config.has_cache else None
        if problem.topk_indices is not None:
            parts = torch.split(problem.topk_indices, [n for _, _, n in batch])
            right = [self._right_choice(*part, slots) for part, slots in zip(batch, parts, strict=True)]
            problem = replace(problem, topk_indices=torch.cat(right))
        spread = problem.query.new_empty(problem.query.shape[:2], dtype=torch.float64)
        found = [(rows, output) for _, _, rows, output, _ in expected(self.group, problem, self.known, spread=spread)]
        rows, outputs = (torch.cat(each) for each in zip(*found, strict=True))
        return outputs[rows.argsort()], spread

    def _right_choice(self, request: int, start: int, tokens: int, slots: Tensor) -> Tensor:
        """Return the slots that each token attends to: the layer's choice, the reference's where that is wrong."""
        assert self.indexer is not None
        query, key, weights = (tensor[self._rows(request, 0, start + tokens)] for tensor in self.index_inputs)
        scores = index_scores_reference(query[start:], weights[start:], key, fp8=True)
        size, top_k = self.table.block_size, self.indexer.top_k
        blocks = torch.tensor(self.pool.blocks(request), device=slots.device)
        block_of = torch.full((int(blocks.max()) + 1,), -len(key), device=slots.device)
        block_of[blocks] = torch.arange(len(blocks), device=slots.device)
        found = slots.clone()
        for token, own in enumerate(slots):
            own = own[own >= 0].long()
            positions = block_of[(own // size).clamp_max(len(block_of) - 1)] * size + own % size
            num_keys = start + token + 1
            if wrong_choice(positions, scores[token], num_keys, top_k) is not None:
                right = slot_mapping_reference(blocks, topk_reference(scores[token], num_keys, top_k), size)
                found[token] = -1
                found[token, : len(right)] = right
        return found
