"""A serving engine in one file: continuous batching on a paged KV cache, with attention chosen and run by attn-select.

Requests arrive over time, are prefilled in chunks, decode together, are preempted when the cache is full, finish and
give their blocks back. The model is small and random; its layers alternate between a sliding window and full attention,
so that two kinds of layers share one block table. Prompts with the same beginning share its blocks. On a GPU pure
decode steps are replayed as CUDA graphs.

At the end every logit that a token was chosen by is compared with the same model run over the whole sequence at once,
without a cache. The program fails if they differ.

    python examples/serve.py
    python examples/serve.py --requests 40 --num-blocks 60 --seed 3
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_select import AttentionConfig, select_model
from attn_select.machine.amx import avoid_trapping_amx
from attn_select.runtime import (
    Attention,
    BlockPool,
    BlockTable,
    Capacity,
    OutOfBlocksError,
    attention_group,
    common_prefix_len,
    prepare_batch,
)
from attn_select.runtime.cuda_graph import CudaGraphRunner

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 4, 2, 64
HIDDEN, VOCABULARY, WINDOW = NUM_HEADS * HEAD_SIZE, 128, 24
CAPACITY = Capacity(max_num_seqs=8, max_num_batched_tokens=48, max_model_len=256)
BLOCK_SIZE = 16
"""Tokens per block: few, so that short requests fill several, on a GPU too."""
GRAPH_SIZES = (1, 2, 4, 8)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, query (T, heads, size), key, value) -> (T, heads, size)``."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest accepted error of a row of logits, relative to its norm: some thousand roundings of 2**-24, or a dozen of
2**-9 that add up over the layers."""


# --- The model: everything but attention, which is passed in ----------------------------------------------------------


class Model:
    """Random weights of a decoder with learned positions, on one device in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)

        def weight(*shape: int, scale: float) -> Tensor:
            return (scale * torch.randn(shape, generator=draw)).to(device, dtype)

        kv_size = NUM_KV_HEADS * HEAD_SIZE
        self.embedding, self.positions = (weight(n, HIDDEN, scale=1.0) for n in (VOCABULARY, CAPACITY.max_model_len))
        self.qkv = [weight(HIDDEN, HIDDEN + 2 * kv_size, scale=HIDDEN**-0.5) for _ in range(NUM_LAYERS)]
        self.out = [weight(HIDDEN, HIDDEN, scale=2 * HIDDEN**-0.5) for _ in range(NUM_LAYERS)]
        self.splits = [HIDDEN, kv_size, kv_size]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return logits ``(T, VOCABULARY)`` of token ids ``(T,)`` at positions ``(T,)``."""
        hidden = self.embedding[tokens] + self.positions[positions]
        for layer in range(NUM_LAYERS):
            query, key, value = torch.split(F.rms_norm(hidden, (HIDDEN,)) @ self.qkv[layer], self.splits, dim=-1)
            heads = (part.reshape(len(part), -1, HEAD_SIZE) for part in (query, key, value))
            hidden = hidden + attend(layer, *heads).flatten(1) @ self.out[layer]
        return F.rms_norm(hidden, (HIDDEN,)) @ self.embedding.T


def window_of(layer: int) -> int | None:
    """Return the sliding window of a layer; None: full attention."""
    return WINDOW if layer % 2 == 0 else None


def reference_logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """Return the logits of a whole sequence at once, ``(len(tokens), VOCABULARY)``: plain attention, no cache."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        age = torch.arange(len(query), device=query.device)[:, None] - torch.arange(len(query), device=query.device)
        visible = (age >= 0) & (age < (window_of(layer) or len(query)))
        key, value = (t.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for t in (key, value))
        scores = torch.einsum("thd,shd->hts", query.float(), key.float()) * HEAD_SIZE**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", weights, value.float()).to(query.dtype)

    ids = torch.tensor(tokens, device=model.embedding.device)
    return model(ids, torch.arange(len(tokens), device=ids.device), attend)


# --- Requests and the scheduler ---------------------------------------------------------------------------------------


@dataclass
class Request:
    """One request: its prompt, what was generated so far, and how much of both lies in the cache."""

    name: str
    arrives_at: int
    prompt: list[int]
    max_new_tokens: int
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    num_computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def finished(self) -> bool:
        return len(self.generated) == self.max_new_tokens


@dataclass
class Counts:
    """What happened in a run."""

    steps: int = 0
    graph_steps: int = 0
    prefill_chunks: int = 0
    decode_tokens: int = 0
    cached_prefix_tokens: int = 0
    preemptions: int = 0
    most_blocks: int = 0


class Scheduler:
    """Decides which tokens of which requests run in a step, and keeps blocks and block-table rows in agreement.

    The i-th running request is row i of the block table, always. Prompts that were prefilled leave their whole blocks
    in the pool under a name of their own, so that later prompts with the same beginning can share them; such blocks are
    given up, the oldest first, before a request is preempted.

    Preemption cannot go back and forth for ever. The request of row 0 always runs: all others are preempted before it,
    and the pool holds any one request. A step brings no token only if a chunk of that request took the whole budget;
    then nobody else ran, and it keeps row 0. After at most ``max_model_len / max_num_batched_tokens`` such steps it is
    up to date and gets a token, and no token is ever lost.
    """

    def __init__(self, pool: BlockPool, table: BlockTable) -> None:
        self.pool, self.table, self.counts = pool, table, Counts()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.new_blocks: list[int] = []  # handed out since the last step
        self.prefixes: dict[tuple[int, ...], str] = {}

    def schedule(self) -> dict[str, int]:
        """Return how many tokens of each request run in this step; the requests scheduled are the first rows."""
        budget, scheduled = CAPACITY.max_num_batched_tokens, dict[str, int]()
        preemptions = self.counts.preemptions
        for request in list(self.running):  # running requests go before waiting ones
            count = min(budget, len(request.tokens) - request.num_computed)
            if request in self.running and count and self.make_room(request, request.num_computed + count, scheduled):
                scheduled[request.name] = count
                budget -= count
        while self.waiting and budget and len(self.running) < CAPACITY.max_num_seqs:
            if self.counts.preemptions > preemptions:
                break  # the cache is full
            request, row = self.waiting[0], len(self.running)
            self.share_prefix(request, row)
            count = min(budget, len(request.tokens) - request.num_computed)
            if not self.allocate(request, row, request.num_computed + count):
                self.release(request, row)  # a cached prefix that was shared above
                break
            self.running.append(self.waiting.popleft())
            self.counts.cached_prefix_tokens += request.num_computed
            scheduled[request.name] = count
            budget -= count
        self.order_rows(scheduled)
        return scheduled

    def make_room(self, request: Request, num_tokens: int, scheduled: dict[str, int]) -> bool:
        """Allocate for a running request, preempting the youngest ones; return False if it was preempted itself."""
        while not self.allocate(request, self.running.index(request), num_tokens):
            youngest = self.running[-1]
            scheduled.pop(youngest.name, None)
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def allocate(self, request: Request, row: int, num_tokens: int) -> bool:
        """Give a request blocks for ``num_tokens`` tokens in all, giving up cached prefixes where there are too few."""
        while True:
            try:
                added = self.pool.allocate(request.name, num_tokens)
            except OutOfBlocksError:
                if not self.prefixes:
                    return False
                self.forget_prefix(next(iter(self.prefixes.values())))
            else:
                self.table.append_row(row, added)
                self.new_blocks += added
                return True

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away. It waits in front and is computed again, its generated tokens included."""
        self.leave(request)
        self.waiting.appendleft(request)
        self.counts.preemptions += 1

    def leave(self, request: Request) -> None:
        """End a request's run, finished or not: close the gap in the rows, and give row and blocks back."""
        last = len(self.running) - 1
        self.swap_rows(self.running.index(request), last)
        self.running.pop()
        self.release(request, last)

    def release(self, request: Request, row: int) -> None:
        """Give a request's row and blocks back: these two calls belong together."""
        self.table.clear_row(row)
        if request.name in self.pool.requests():
            self.pool.free(request.name)
        request.num_computed = 0

    def share_prefix(self, request: Request, row: int) -> None:
        """Start a request on the longest cached beginning of its tokens; at least one token is left to compute."""
        size, tokens = self.pool.block_size, request.tokens
        for length in range((len(tokens) - 1) // size * size, 0, -size):
            if (entry := self.prefixes.get(tuple(tokens[:length]))) is not None:
                self.table.append_row(row, self.pool.share_prefix(entry, request.name, length))
                request.num_computed = length
                return

    def remember_prefix(self, request: Request) -> None:
        """Keep the whole blocks of a prefilled prompt for others; each of its beginnings can be found."""
        size = self.pool.block_size
        length = len(request.prompt) // size * size
        if length and tuple(request.prompt[:length]) not in self.prefixes:
            entry = f"prefix of {request.name}"
            self.pool.share_prefix(request.name, entry, length)
            for end in range(size, length + 1, size):
                self.prefixes.setdefault(tuple(request.prompt[:end]), entry)

    def forget_prefix(self, entry: str) -> None:
        self.pool.free(entry)
        self.prefixes = {tokens: found for tokens, found in self.prefixes.items() if found != entry}

    def order_rows(self, scheduled: Mapping[str, int]) -> None:
        """Bring the shortest queries to the front, as ``group.reorder_batch_threshold`` asks; unscheduled rows last."""
        for row in range(len(self.running)):
            lens = [scheduled.get(request.name, CAPACITY.max_model_len) for request in self.running[row:]]
            self.swap_rows(row, row + lens.index(min(lens)))

    def swap_rows(self, first: int, second: int) -> None:
        if first != second:
            self.table.swap_rows(first, second)
            self.running[first], self.running[second] = self.running[second], self.running[first]


# --- The engine: what runs a step -------------------------------------------------------------------------------------


class Engine:
    """The model on a paged cache, and the scheduler that feeds it."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.device, self.model = device, Model(device, dtype)
        # One group per kind of layers: the loaded kernels, and the builder that all layers of the kind share.
        shared: dict[str, Any] = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE}
        shared |= {"dtype": str(dtype).removeprefix("torch."), "block_size": BLOCK_SIZE}
        windows = dict.fromkeys(map(window_of, range(NUM_LAYERS)))
        configs = [AttentionConfig(**shared, sliding_window=window) for window in windows]
        selections = select_model(configs, None if on_gpu else "cpu")
        groups = [attention_group(s, device, CAPACITY, cuda_graphs=on_gpu) for s in selections]
        self.groups = dict(zip(windows, groups, strict=True))
        self.layers = [Attention(self.groups[window_of(layer)]) for layer in range(NUM_LAYERS)]
        # One pool and one table for all layers: block b is reserved in the cache of every layer.
        self.caches = [layer.group.allocate_kv_cache(num_blocks) for layer in self.layers]
        columns = -(-CAPACITY.max_model_len // BLOCK_SIZE)
        table = BlockTable(CAPACITY.max_num_seqs, columns, BLOCK_SIZE, device)
        self.scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), table)
        self.runner = self.captured(groups) if on_gpu else None

    def captured(self, groups: Sequence[Any]) -> CudaGraphRunner[Any] | None:
        """Capture decode steps for a few batch sizes; None where the kernels of a group cannot be captured."""
        if any(group.cudagraph_support == "NEVER" for group in groups):
            return None
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        runner = CudaGraphRunner(self.forward, groups, {"tokens": ids, "positions": ids}, GRAPH_SIZES)
        runner.capture()
        return runner

    def forward(self, inputs: Mapping[str, Tensor], metadata: Mapping[Any, Any]) -> Tensor:
        """Run the model on a batch; every layer takes the metadata of its own group."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attention = self.layers[layer]
            output: Tensor = attention(query, key, value, self.caches[layer], metadata[attention.group])
            return output

        return self.model(inputs["tokens"], inputs["positions"], attend)

    def step(self) -> None:
        """Schedule and run one batch, and hand each request that is up to date its next token."""
        scheduler, counts = self.scheduler, self.scheduler.counts
        scheduled = scheduler.schedule()
        batch = scheduler.running[: len(scheduled)]
        if not batch:
            return
        for layer, cache in zip(self.layers, self.caches, strict=True):
            if not layer.group.nan_tail_safe:  # a block's former owner may have left a NaN in it
                layer.group.zero_blocks(cache, scheduler.new_blocks)
        scheduler.new_blocks.clear()
        query_lens = [scheduled[request.name] for request in batch]
        spans = [(r, r.num_computed, r.num_computed + n) for r, n in zip(batch, query_lens, strict=True)]
        ids = [token for request, start, end in spans for token in request.tokens[start:end]]
        places = [position for _, start, end in spans for position in range(start, end)]
        inputs = {"tokens": torch.tensor(ids).to(self.device), "positions": torch.tensor(places).to(self.device)}
        # One batch for all kinds: they share the table, and so the slots.
        common = prepare_batch(query_lens, [end for _, _, end in spans], scheduler.table)
        groups = self.groups.values()
        if self.runner is not None and max(query_lens) == 1:
            logits = self.runner(inputs, {group: common for group in groups})
            counts.graph_steps += 1
        else:
            tables = [scheduler.pool.blocks(request.name) for request in batch]
            shared = common_prefix_len(tables, [start for _, start, _ in spans], BLOCK_SIZE)
            logits = self.forward(inputs, {group: group.build(common, shared) for group in groups})
        rows = logits[common.query_start_loc[1:].long() - 1].float().cpu()
        counts.steps += 1
        decodes = sum(bool(request.generated) and end - start == 1 for request, start, end in spans)
        counts.decode_tokens += decodes
        counts.prefill_chunks += len(batch) - decodes
        counts.most_blocks = max(counts.most_blocks, scheduler.pool.num_blocks - scheduler.pool.num_free_blocks)
        for (request, _, end), row in zip(spans, rows, strict=True):
            self.advance(request, end, row)

    def advance(self, request: Request, num_computed: int, logits: Tensor) -> None:
        """Note what of a request is cached now; if that is all of it, choose its next token."""
        request.num_computed = num_computed
        if num_computed < len(request.tokens):
            return  # a chunk of a prompt; more of it is to come
        if not request.generated:
            self.scheduler.remember_prefix(request)
        request.logits.append(logits)
        request.generated.append(int(logits.argmax()))
        if request.finished:
            self.scheduler.leave(request)

    def serve(self, requests: Sequence[Request]) -> None:
        """Run requests, each from the step of its arrival, until all have finished."""
        arriving, now = deque(sorted(requests, key=lambda request: request.arrives_at)), 0
        while arriving or self.scheduler.waiting or self.scheduler.running:
            while arriving and arriving[0].arrives_at <= now:
                self.scheduler.waiting.append(arriving.popleft())
            self.step()
            now += 1
        for entry in set(self.scheduler.prefixes.values()):
            self.scheduler.forget_prefix(entry)


# --- The program ------------------------------------------------------------------------------------------------------


def workload(num_requests: int, seed: int) -> list[Request]:
    """Draw requests; half of the prompts begin with the same two and a half blocks."""
    draw = random.Random(seed)
    system_prompt = [draw.randrange(VOCABULARY) for _ in range(2 * BLOCK_SIZE + BLOCK_SIZE // 2)]
    requests = []
    for number in range(num_requests):
        own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 70))]
        prompt = system_prompt + own if number % 2 else own
        requests.append(Request(f"request {number}", draw.randrange(num_requests), prompt, draw.randint(1, 30)))
    return requests


def largest_error(model: Model, request: Request) -> float:
    """Return the largest relative error of a row of logits that a token of the request was chosen by."""
    reference = reference_logits(model, request.tokens[:-1])[len(request.prompt) - 1 :].float().cpu()
    error = (torch.stack(request.logits) - reference).norm(dim=-1) / reference.norm(dim=-1)
    return float(error.max())


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> tuple[Counts, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=16, help="how many requests arrive [default: %(default)s]")
    parser.add_argument("--num-blocks", type=int, default=24, help="size of the KV cache [default: %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals [default: %(default)s]")
    options = parser.parse_args(arguments)
    avoid_trapping_amx()
    requests = workload(options.requests, options.seed)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    if -(-longest // BLOCK_SIZE) > options.num_blocks:
        parser.error(f"--num-blocks {options.num_blocks}: a request of {longest} tokens does not fit")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        print("kernels compile (seconds or minutes each), and decode steps are captured as graphs", flush=True)
    engine = Engine(options.num_blocks, device)
    counts, pool = engine.scheduler.counts, engine.scheduler.pool
    print(f"{len(requests)} requests on {device}: {NUM_LAYERS} layers, {pool.num_blocks} blocks of {pool.block_size}")
    for window, group in engine.groups.items():
        kind = f"window of {window}" if window else "full"
        print(f"  {kind:<18} {group.selection.selected['decode']}, {group.kv_layout}", flush=True)
    engine.serve(requests)
    print(f"  {'steps':<18} {counts.steps}, of which {counts.graph_steps} replayed as CUDA graphs")
    print(f"  {'tokens':<18} {counts.prefill_chunks} prefill chunks, {counts.decode_tokens} decodes")
    print(f"  {'prefix caching':<18} {counts.cached_prefix_tokens} tokens were not computed again")
    print(f"  {'preemptions':<18} {counts.preemptions}")
    print(f"  {'blocks':<18} at most {counts.most_blocks} in use, {pool.num_free_blocks} free at the end")
    error = max(largest_error(engine.model, request) for request in requests)
    bound = TOLERANCE[engine.model.embedding.dtype]
    verdict = "as without a cache" if error <= bound else "WRONG"
    print(f"  {'logits':<18} {verdict}: the largest relative error is {error:.1e}, accepted up to {bound:.0e}")
    if error > bound:
        raise SystemExit(1)
    return counts, error


if __name__ == "__main__":
    main()
