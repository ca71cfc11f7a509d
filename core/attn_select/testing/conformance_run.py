"""Runs one backend on one configuration: drawn batches, each request alone, and replays of CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.backends.spec import BackendPlan
from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.reference.comparison import ROW, UNIT_ROUNDOFF, ErrorBound, error_bound, request_name, same_bits
from attn_select.reference.problems import (
    PEAK,
    Problem,
    Request,
    of_another_layer,
    of_layer,
    random_problem,
    random_requests,
    with_peaks,
)
from attn_select.reference.running import (
    Bound,
    Result,
    StepMemory,
    call_layer,
    check_result,
    common_of,
    inputs_of,
    kernel_cache,
    layer_of,
    poison,
    result_of,
    returns_lse,
    run_problem,
)
from attn_select.runtime import Capacity, ContextParallel, LayerGroup, attention_group, decodes_first
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.testing.conformance_configs import Large
from attn_select.testing.rank_steps import joined, part_of_rank, whole_layer

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them
WORKSPACE_TOKENS = 64
"""Of MLA prefill: few enough that contexts are cut."""
OUTPUT_SCALE = 0.02
"""Of FP8 outputs: means of standard normal values, and e4m3 holds 448 scales."""
LONGEST = 96
"""Tokens of a sequence: several blocks, few enough for a float64 oracle."""
MOST_REQUESTS = 6
EMPTY_REQUESTS = 2
"""Without a query, beside them."""
LONG = (320, 384, 640, 1152)
"""Tokens of the sequences of large steps, one more or one less: at the edges of tiles, splits and many pages."""
LONG_QUERY = 257
"""Tokens of the longest query of large steps."""
MOST_GRAPH_TOKENS = 1024
MANY_REQUESTS = 130
FEW_KEYS = 24
"""Tokens of a sequence where there are many."""
LARGE_CACHE = 16 << 20
"""Bytes of the cache of large steps: as many blocks as that, up to ``LARGE_BLOCKS``, lie around the ones in use."""
LARGE_BLOCKS = 300
SCALES = (1.0, 0.7, 1.3)
"""Of a layer, in units of the usual one."""


class Batches:
    """Draws steps of a group's layer, of served phases alone."""

    # ``config``: of the whole layer, whose cache has blocks of ``block_size``; ``scale`` as in ``random_problem``;
    # ``large`` as in ``Rig``.

    def __init__(
        self, group: LayerGroup, config: AttentionConfig, block_size: int, scale: float, large: Large | None
    ) -> None:
        self.config, self.block_size, self.scale, self.large = config, block_size, scale, large
        self.kv_layout, self.device, self.phases = group.kv_layout, group.device, group.selection.plans
        # Queries up to this many tokens are decodes, which come first where ``in_order``.
        self.longest_decode = group.reorder_batch_threshold or 1
        self.in_order = group.reorder_batch_threshold is not None
        # Slots behind a sequence's end hold NaN, not large finite numbers.
        self.nan_tails = group.nan_tail_safe
        # A prefill has no cached context where its parts could not be merged.
        prefill = self.phases.get("prefill")
        self.whole_prompts = config.mla and prefill is not None and not prefill.returns_lse

    def mixed(self, seed: int) -> list[Request]:
        """Draw decodes, whole and chunked prefills, short queries and requests without a query, in one batch."""
        rng = random.Random(f"mixed {seed}")
        sizes = {"num_requests": MOST_REQUESTS, "max_seq_len": LONGEST, "block_size": self.block_size}
        requests = [self._fitted(*request) for request in random_requests(seed, self.config, **sizes)]
        if self.large == "keys":
            requests[2:] = [self._fitted(*request) for request in self._long(rng)]
        if self.takes_empty:
            if self.config.attn_type == "decoder" and rng.random() < 0.25:  # no decode has a query
                requests = [(0 if query <= self.longest_decode else query, seq_len) for query, seq_len in requests]
            for request in self.empty(rng):
                requests.insert(rng.randint(0, len(requests)), request)
        return self.in_turn(requests)

    def in_turn(self, requests: Sequence[Request]) -> list[Request]:
        """Return requests with decodes first, where they have to be."""
        if not self.in_order:
            return [*requests]
        return [requests[i] for i in decodes_first([query for query, _ in requests], self.longest_decode)]

    def uniform(self, seed: int) -> list[Request]:
        """Draw decodes of equal query length, one of them without context and one without keys."""
        rng = random.Random(seed)
        query_len = min(self.config.max_decode_query_len, self.longest_decode)
        whole_blocks = min(LONGEST, -(-query_len // self.block_size) * self.block_size)
        lengths = [query_len, max(query_len, whole_blocks), *(rng.randint(query_len, LONGEST) for _ in range(2))]
        if self.large == "keys":
            lengths[2:] = [seq_len for _, seq_len in self._long(rng)][::2]
        requests = [(query_len, length) for length in lengths] + [(query_len, 0)]
        return rng.sample(requests, len(requests))

    def many(self, seed: int) -> list[Request]:
        """Draw many short requests of one phase."""
        rng = random.Random(f"many {seed}")
        lengths = [rng.randint(1, FEW_KEYS) for _ in range(MANY_REQUESTS)]
        return [self._fitted(length if not self.config.has_cache else 1, length) for length in lengths]

    def empty(self, rng: random.Random) -> list[Request]:
        """Draw requests without a query, with keys and without."""
        return [(0, rng.randint(1, LONGEST) if self.config.has_cache else 0), (0, 0)]

    @property
    def takes_empty(self) -> bool:
        """Whether requests without a query, which are decodes where there are any, are of a served phase."""
        return "decode" in self.phases or not self.config.has_cache

    def _long(self, rng: random.Random) -> list[Request]:
        """Draw a long decode, a long prompt and a long piece of a longer one."""
        short, long = (length + rng.choice((-1, 0, 0, 1)) for length in (rng.choice(LONG[:2]), rng.choice(LONG[2:])))
        if not self.config.has_cache:
            return [(short, short)]
        return [(1, long), (LONG_QUERY, LONG_QUERY), (LONG_QUERY, short)]

    def _fitted(self, query_len: int, seq_len: int) -> Request:
        """Return a request like this one of a phase that is served."""
        if "decode" not in self.phases and self.config.has_cache:
            query_len = max(query_len, self.longest_decode + 1)
        elif "prefill" not in self.phases:
            query_len = min(query_len, self.longest_decode)
        if self.whole_prompts and query_len > self.longest_decode:
            seq_len = query_len
        return query_len, seq_len if self.config.attn_type == "encoder_decoder" else max(query_len, seq_len)

    @property
    def num_blocks(self) -> int:
        """Blocks of all caches; of large steps more than the requests need, so that ids are large."""
        size, config = self.block_size, self.config
        most = (MOST_REQUESTS + EMPTY_REQUESTS) * -(-LONGEST // size) + 2
        if self.large is None:
            return most
        most += 4 * -(-max(LONG) // size) + 4 if self.large == "keys" else MANY_REQUESTS * -(-FEW_KEYS // size)
        per_block = 4 * size * config.num_kv_heads * (config.head_size + config.value_head_size)
        return max(most, min(LARGE_BLOCKS, LARGE_CACHE // per_block))

    def draw(self, seed: int, requests: Sequence[Request]) -> Problem:
        """Draw a step of these requests; all steps have caches of the same size."""
        return random_problem(
            seed,
            self.config,
            self.kv_layout,
            block_size=self.block_size,
            requests=requests,
            nan_tails=self.nan_tails,
            spare_blocks=self.num_blocks - sum(-(-seq_len // self.block_size) for _, seq_len in requests),
            device=self.device,
            scale=self.scale,
        )


class Rig:
    """One configuration's group of layers, fed with drawn batches."""

    # ``ranks``: the ranks that the cache lies on, each of which has a rig like this one; None: it lies on one.
    # ``large``: what its steps have many of. ``bound``: the accepted errors.

    def __init__(
        self,
        selection: Selection,
        device: torch.device,
        seed: int,
        *,
        bound: Bound = error_bound,
        cuda_graphs: bool = False,
        ranks: ContextParallel | None = None,
        large: Large | None = None,
    ) -> None:
        self.ranks = ranks
        config = self.config = selection.config
        self.plans, self.seed, self._accepted = selection.plans, seed, bound
        size = selection.block_size or 16
        requests = MANY_REQUESTS if large == "requests" else MOST_REQUESTS + EMPTY_REQUESTS
        longest = 2048 if large == "keys" else 1024
        capacity = Capacity(requests, max(MOST_GRAPH_TOKENS, FEW_KEYS * requests), max_model_len=max(longest, 4 * size))
        made: dict[str, Any] = {"cuda_graphs": cuda_graphs, "phases": [*selection.backends], "context_parallel": ranks}
        if self.config.mla:
            made["workspace_tokens"] = WORKSPACE_TOKENS
        self.group = attention_group(selection, device, capacity, **made)
        whole = config if ranks is None else whole_layer(config, ranks, size)
        scale = config.softmax_scale * SCALES[seed % len(SCALES)]
        self.batches = Batches(self.group, whole, size if ranks is None else ranks.size * size, scale, large)
        self.longest_decode = self.batches.longest_decode
        quantised = self.config.output_quantization == "fp8"
        self.output_scale = torch.tensor(OUTPUT_SCALE, device=device) if quantised else None

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured at all; image ranges come from the host, step by step."""
        decoder = self.config.attn_type == "decoder" and not self.config.mm_prefix
        return decoder and self.group.cudagraph_support != "NEVER"

    def check_batches(self) -> int:
        """Run drawn batches and compare with the oracle; return the number of runs."""
        # A mixed batch, one of equal queries, then the latter (of one in four the former) again with other tables and
        # tokens, as steps of decodes are: in the memory of the first time or in memory of its own, in the same order
        # or reversed. Two layers of the group take turns over it, each with caches of its own. What a layer or builder
        # keeps of an earlier call shows. The last batch has no token. Large batches come once.
        seed, draw = self.seed, self.batches
        requests = draw.mixed(seed), self._second()
        first, second = (draw.draw(seed + number, each) for number, each in enumerate(requests))
        memories = [StepMemory(wide=bool(seed & 4)), StepMemory(wide=not seed & 4)]
        own, other = 0, 1
        steps: list[tuple[Problem, StepMemory, tuple[int, ...]]]
        steps = [(first, memories[0], (own,)), (second, memories[1], (own,))]
        if draw.large is None:
            again = 0 if seed % 4 == 0 else 1
            order = requests[again] if seed % 3 else draw.in_turn(requests[again][::-1])
            # A layer that is captured or timed is called twice.
            twice = (own, own) if seed % 8 == 4 else (other, own)
            memory = memories[again] if seed & 2 else StepMemory()
            steps = [steps[1 - again], steps[again], (draw.draw(seed + 2, order), memory, twice)]
        if draw.takes_empty:
            steps.append((draw.draw(seed + 3, draw.empty(random.Random(seed))), StepMemory(), (own,)))
        layers: list[Any] = []
        if self.ranks is None:  # there every run makes its layers, so none is called twice
            layers = [layer_of(self.group, each) for each in (first, of_another_layer(first))]
        runs = 0
        for number, (step, memory, turns) in enumerate(steps):
            base = of_layer(step, first)
            metadata = self.group.build(memory.common(base)) if layers else None
            for layer in turns if layers else (own,):
                drawn = with_peaks(seed + number, base if layer == own else of_another_layer(base))
                given = {"layer": layers[layer], "metadata": metadata, "memory": memory} if layers else {}
                result = self._run(drawn, **given)
                check_result(self.group, drawn, result, bound=self._bound)
                runs += 1
            if self.config.batch_invariant and number < 2:
                runs += self._check_alone(drawn, result, memory.wide)
        return runs

    def _second(self) -> list[Request]:
        """Draw a batch of another kind than the mixed one."""
        seed, draw = self.seed, self.batches
        if draw.large == "requests":
            return draw.many(seed)
        if "decode" in self.plans and self.config.attn_type == "decoder":
            return draw.uniform(seed)
        return draw.mixed(seed + 1)

    def check_graphs(self) -> int:
        """Capture what the level allows, replay with other lengths, tables and batch sizes; return the replays."""
        level, replays = self.group.cudagraph_support, 0
        if "decode" in self.plans:
            query_len = 1
            if level != "UNIFORM_SINGLE_TOKEN_DECODE":
                query_len = min(self.config.max_decode_query_len, self.longest_decode)
            replays += self._replay([(query_len, 0)] * 5, [2, 5], ((0, 2), (0, 5), (0, 1), (1, 4)), query_len)
        if len(self.plans) == 2 and {plan.cuda_graph for plan in self.plans.values()} == {"ALWAYS"}:
            requests = [(max(query, 1), seq_len) for query, seq_len in self.batches.mixed(self.seed)]
            most = MOST_GRAPH_TOKENS
            replays += self._replay(requests, [most // 2, most], ((0, len(requests)), (0, 2), (1, len(requests))), None)
        return replays

    def _replay(
        self, requests: Sequence[Request], sizes: list[int], parts: Sequence[tuple[int, int]], query_len: int | None
    ) -> int:
        """Capture, then replay parts of two batches that differ in lengths and tables; return the number of replays."""
        rng = random.Random(self.seed)
        # Equal queries draw equal weights, scales and sinks: one layer serves all.
        both = [[(query, rng.randint(max(query, 1), LONGEST)) for query, _ in requests] for _ in range(2)]
        drawn = [self.batches.draw(self.seed, with_lengths) for with_lengths in both]
        group, ranks = self.group, self.ranks
        own = drawn if ranks is None else [part_of_rank(each, group, ranks) for each in drawn]
        inputs, layer, cache = inputs_of(own[0]), layer_of(group, own[0]), kernel_cache(group, own[0])
        most, lse = group.capacity.max_num_batched_tokens, None
        if returns_lse(group):
            lse = poison((most, self.config.num_heads), inputs["query"], torch.float32)

        def step(inputs: Mapping[str, Tensor], metadata: Mapping[Any, Any]) -> Tensor:
            rows = None if lse is None else lse[: len(inputs["query"])]
            return call_layer(layer, inputs, cache, metadata[group], rows, self.output_scale)

        runner = CudaGraphRunner(step, [group], inputs, sizes, query_len=query_len or 1, mixed=query_len is None)
        runner.capture()
        for number, (first, last) in enumerate(parts):
            part = own[number % 2].part(first, last)
            if cache is not None and (wanted := kernel_cache(group, part)) is not None:
                cache.copy_(wanted)
            output = runner(inputs_of(part), {group: common_of(part)})
            result, whole = result_of(group, part, output, lse, cache, self.output_scale), part
            if ranks is not None:
                whole = drawn[number % 2].part(first, last)
                result = joined(group, whole, ranks, result)
            check_result(self.group, whole, result, bound=self._bound)
        return len(parts)

    def _check_alone(self, drawn: Problem, result: Result, wide: bool) -> int:
        """Run the first requests by themselves, in memory of the same strides: bit by bit the same as in the batch."""
        requests = [*enumerate(drawn.requests)][: MOST_REQUESTS + EMPTY_REQUESTS]
        requests = [(index, request) for index, request in requests if request[0]]
        for index, request in requests:
            alone = self._run(drawn.part(index, index + 1), memory=StepMemory(wide)).output
            if not same_bits(alone, result.output[drawn.tokens_of(index, index + 1)]):
                name = request_name(index, request)
                raise AssertionError(f"batch_invariant: {name} gives other bits alone than in the batch")
        return len(requests)

    def _run(self, drawn: Problem, **given: Any) -> Result:
        if self.ranks is None:
            return run_problem(self.group, drawn, output_scale=self.output_scale, **given)
        own = run_problem(self.group, part_of_rank(drawn, self.group, self.ranks), output_scale=self.output_scale)
        return joined(self.group, drawn, self.ranks, own)

    def _bound(self, config: AttentionConfig, plans: Mapping[Phase, BackendPlan]) -> ErrorBound:
        """Return the suite's bound; what float32 rounds of a score of ``PEAK`` is accepted in its exponential."""
        bound, rounded = self._accepted(config, plans), PEAK * UNIT_ROUNDOFF["float32"]
        return bound._replace(norm=max(bound.norm, rounded), row=max(bound.row, ROW * rounded))
