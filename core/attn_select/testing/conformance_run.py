"""Runs one backend on one configuration through the layers that engines call, and compares with the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig, Phase
from attn_select.dtypes import is_quantized
from attn_select.runtime import Attention, Capacity, CommonAttentionMetadata, MLAAttention, Scales, attention_group
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.selection import Selection
from attn_select.spec import BackendPlan
from attn_select.testing import conformance_batches as drawing
from attn_select.testing.conformance_batches import Drawn, poison, rows_of, step_of
from attn_select.testing.conformance_checks import check_cache, check_lse, check_output, request_name
from attn_select.testing.error_bounds import ErrorBound
from attn_select.testing.oracle_errors import same_bits
from attn_select.testing.oracle_mla_problems import MLAProblem
from attn_select.testing.oracle_problems import Request

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them
PADDING = 3
"""Rows of every tensor behind the batch's tokens."""
WORKSPACE_TOKENS = 64
"""Of MLA prefill: few enough that contexts are cut."""
OUTPUT_SCALE = 0.02
"""Of FP8 outputs: means of standard normal values, and e4m3 holds 448 scales."""


@dataclass(slots=True)
class Terms:
    """What a suite asks beside the configuration; ``BackendConformance`` documents the fields."""

    error_bound: Callable[[AttentionConfig, Mapping[Phase, BackendPlan]], ErrorBound]
    nan_tail_safe: bool = False
    rows_without_keys: bool = True
    exact_alibi_lse: bool = True
    fp8_cache_steps: int = 0


@dataclass(slots=True)
class Result:
    """What a step left: output ``(T, H, Dv)``, LSE ``(T, H)`` or None, the cache in the allocator's blocks or None."""

    output: Tensor
    lse: Tensor | None
    kv_cache: Tensor | None


class Rig:
    """One configuration's group of layers, fed with drawn batches.

    Args:
        selection: of one backend.
        device: where tensors live.
        seed: of everything that is drawn.
        terms: the suite's.
        cuda_graphs: made to be captured.
    """

    def __init__(
        self, selection: Selection, device: torch.device, seed: int, terms: Terms, *, cuda_graphs: bool = False
    ) -> None:
        self.config, self.plans, self.seed, self.terms = selection.config, selection.plans, seed, terms
        size = selection.block_size or 16
        requests = drawing.MOST_REQUESTS + 2
        capacity = Capacity(requests, requests * drawing.LONGEST, max_model_len=max(1024, 4 * size))
        made: dict[str, Any] = {"cuda_graphs": cuda_graphs, "phases": [*selection.backends]}
        if self.config.mla:
            made["workspace_tokens"] = WORKSPACE_TOKENS
        self.group = attention_group(selection, device, capacity, **made)
        threshold = self.group.reorder_batch_threshold
        self.longest_decode = threshold or 1
        prefill = self.plans.get("prefill")
        self.batches = drawing.Batches(
            config=self.config,
            kv_layout=self.group.kv_layout,
            block_size=size,
            device=device,
            phases=self.plans,
            longest_decode=self.longest_decode,
            in_order=threshold is not None,
            whole_prompts=self.config.mla and prefill is not None and not prefill.returns_lse,
            nan_tails=terms.nan_tail_safe,
        )
        self.returns_lse = all(plan.returns_lse for plan in self.plans.values())
        quantised = self.config.output_quantization == "fp8"
        self.output_scale = torch.tensor(OUTPUT_SCALE, device=device) if quantised else None

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured at all; image ranges come from the host, step by step."""
        decoder = self.config.attn_type == "decoder" and not self.config.mm_prefix
        return decoder and self.group.cudagraph_support != "NEVER"

    def check_batches(self) -> int:
        """Run a mixed batch and one of equal queries, and compare with the oracle; return the number of runs."""
        seed, runs = self.seed, 0
        decodes = "decode" in self.plans and self.config.attn_type == "decoder"
        draw = self.batches
        second = draw.uniform(seed, rows_without_keys=self.terms.rows_without_keys) if decodes else draw.mixed(seed + 1)
        for number, requests in enumerate((draw.mixed(seed), second)):
            drawn = draw.draw(seed + number, requests)
            result = self._run(drawn)
            self._check(drawn, result)
            runs += 1
            if self.config.batch_invariant:
                runs += self._check_alone(drawn, result)
        return runs

    def check_graphs(self) -> int:
        """Capture what the level allows, replay with other lengths, tables and batch sizes; return the replays."""
        level, replays = self.group.cudagraph_support, 0
        if "decode" in self.plans:
            query_len = 1
            if level != "UNIFORM_SINGLE_TOKEN_DECODE":
                query_len = min(1 + self.config.num_speculative_tokens, self.longest_decode)
            replays += self._replay([(query_len, 0)] * 5, [2, 5], ((0, 2), (0, 5), (0, 1), (1, 4)), query_len)
        if len(self.plans) == 2 and {plan.cuda_graph for plan in self.plans.values()} == {"ALWAYS"}:
            requests, most = self.batches.mixed(self.seed), self.group.capacity.max_num_batched_tokens
            replays += self._replay(requests, [most // 2, most], ((0, len(requests)), (0, 2), (1, len(requests))), None)
        return replays

    def _layer(self, drawn: Drawn) -> Attention | MLAAttention:
        step = step_of(drawn)
        heads = self.config.num_kv_heads if self.config.per_head_quant_scales else 0
        given = {"q": step.q_scale, "k": step.k_scale, "v": step.v_scale}
        wanted = {name: scale for name, scale in given.items() if scale is not None}
        scales = Scales.make(self.group.device, num_kv_heads=heads, **wanted)
        extras: dict[str, Any] = {"alibi_slopes": step.alibi_slopes, "sinks": step.sinks, "scales": scales}
        group: Any = self.group
        if isinstance(drawn, MLAProblem):
            return MLAAttention(group, drawn.kv_b_proj, scale=step.scale, **extras)
        return Attention(group, scale=step.scale, **extras)

    def _inputs(self, drawn: Drawn) -> dict[str, Tensor]:
        """Return what has one row per token, padded with poison."""
        step = step_of(drawn)
        named = {"query": drawn.query, "key": step.key, "value": step.value, "topk_indices": step.topk_indices}
        if self.config.attn_type == "encoder_decoder":  # the cache holds all keys already
            named = {"query": drawn.query}
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        return {name: torch.cat([t, poison((PADDING, *t.shape[1:]), t)]) for name, t in given.items()}

    def _common(self, drawn: Drawn) -> CommonAttentionMetadata:
        step = step_of(drawn)
        bounds, lens = step.query_start_loc.cpu(), step.seq_lens.cpu()
        return CommonAttentionMetadata(
            query_start_loc=step.query_start_loc,
            query_start_loc_cpu=bounds,
            seq_lens=step.seq_lens,
            seq_lens_cpu=lens,
            num_reqs=len(lens),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(bounds.diff().max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=step.block_table,
            slot_mapping=step.slot_mapping,
            mm_prefix_ranges=step.mm_prefix_ranges,
        )

    def _kernel_cache(self, drawn: Drawn) -> Tensor | None:
        """Return a copy of the drawn cache in the kernel's blocks."""
        step = step_of(drawn)
        if step.kv_cache is None or step.layout is None:
            return None
        size = self.group.kernel_block_size or self.batches.block_size
        return drawing.reblocked(step.kv_cache, step.layout, self.config, size)

    def _lse(self, query: Tensor) -> Tensor | None:
        return poison((len(query), self.config.num_heads), query, torch.float32) if self.returns_lse else None

    def _call(
        self,
        layer: Attention | MLAAttention,
        inputs: Mapping[str, Tensor],
        kv_cache: Tensor | None,
        metadata: Any,
        lse: Tensor | None,
    ) -> Tensor:
        """Run the layer on a poisoned output; return it as it is, padding included."""
        query, key, value = inputs["query"], inputs.get("key"), inputs.get("value")
        dtype = query.dtype if self.output_scale is None else torch.float8_e4m3fn
        size = self.config.v_head_dim or self.config.value_head_size
        output = poison((len(query), self.config.num_heads, size), query, dtype)
        if isinstance(layer, MLAAttention):
            layer.forward(query, key, value, kv_cache, metadata, output, inputs.get("topk_indices"), lse)
        else:
            layer.forward(query, key, value, kv_cache, metadata, output, lse, self.output_scale)
        return output

    def _run(self, drawn: Drawn) -> Result:
        common, inputs, cache = self._common(drawn), self._inputs(drawn), self._kernel_cache(drawn)
        lse = self._lse(inputs["query"])
        output = self._call(self._layer(drawn), inputs, cache, self.group.build(common), lse)
        tokens = common.num_actual_tokens
        for name, tensor in (("output", output), ("LSE", lse)):
            if tensor is not None and not same_bits(tensor[tokens:], poison(tensor[tokens:].shape, tensor)):
                raise AssertionError(f"{name} rows behind num_actual_tokens = {tokens} were written")
        return self._result(drawn, output[:tokens], lse, cache)

    def _result(self, drawn: Drawn, output: Tensor, lse: Tensor | None, cache: Tensor | None) -> Result:
        layout = step_of(drawn).layout
        if cache is not None and layout is not None:
            cache = drawing.reblocked(cache, layout, self.config, self.batches.block_size)
        if self.output_scale is not None:
            output = output.float() * self.output_scale
        return Result(output, None if lse is None else lse[: len(output)], cache)

    def _replay(
        self, requests: Sequence[Request], sizes: list[int], parts: Sequence[tuple[int, int]], query_len: int | None
    ) -> int:
        """Capture, then replay parts of two batches that differ in lengths and tables; return the number of replays."""
        rng = random.Random(self.seed)
        # Equal queries draw equal weights, scales and sinks: one layer serves all.
        both = [[(query, rng.randint(max(query, 1), drawing.LONGEST)) for query, _ in requests] for _ in range(2)]
        drawn = [self.batches.draw(self.seed, with_lengths) for with_lengths in both]
        layer, cache, inputs = self._layer(drawn[0]), self._kernel_cache(drawn[0]), self._inputs(drawn[0])
        most = self.group.capacity.max_num_batched_tokens
        lse = self._lse(inputs["query"].new_empty(most))

        def step(inputs: Mapping[str, Tensor], metadata: Mapping[Any, Any]) -> Tensor:
            rows = None if lse is None else lse[: len(inputs["query"])]
            return self._call(layer, inputs, cache, metadata[self.group], rows)

        runner = CudaGraphRunner(step, [self.group], inputs, sizes, query_len=query_len or 1, mixed=query_len is None)
        runner.capture()
        for number, (first, last) in enumerate(parts):
            part = drawing.part_of(drawn[number % 2], first, last)
            if cache is not None and (wanted := self._kernel_cache(part)) is not None:
                cache.copy_(wanted)
            output = runner(self._inputs(part), {self.group: self._common(part)})
            self._check(part, self._result(part, output, lse, cache))
        return len(parts)

    def _check_alone(self, drawn: Drawn, result: Result) -> int:
        """Run every request by itself: bit by bit the same as in the batch."""
        requests = step_of(drawn).requests
        for index, request in enumerate(requests):
            alone = self._run(drawing.part_of(drawn, index, index + 1)).output
            if not same_bits(alone, result.output[rows_of(drawn, index, index + 1)]):
                name = request_name(index, request)
                raise AssertionError(f"batch_invariant: {name} gives other bits alone than in the batch")
        return len(requests)

    def _check(self, drawn: Drawn, result: Result) -> None:
        """Compare cache, output and LSE with the oracle's, phase by phase: each has its own path."""
        step = step_of(drawn)
        if result.kv_cache is not None:
            check_cache(step, result.kv_cache, self.terms.fp8_cache_steps)
        decodes = [query <= self.longest_decode for query, _ in step.requests]
        by_phase: dict[Phase, list[Tensor]] = {}
        for index, is_decode in enumerate(decodes):
            phase: Phase = "decode" if is_decode else "prefill"
            rows = rows_of(drawn, index, index + 1)
            found = by_phase.setdefault(phase if phase in self.plans else next(iter(self.plans)), [])
            found.append(torch.arange(rows.start, rows.stop))
        references: dict[str | None, tuple[Tensor, Tensor]] = {}
        for phase, parts in by_phase.items():
            plan, chosen = self.plans[phase], torch.cat(parts)
            query_dtype = plan.query_dtype if is_quantized(plan.query_dtype) else None
            if query_dtype not in references:
                given: dict[str, Any] = {"kv_cache": result.kv_cache, "query_dtype": query_dtype}
                if isinstance(drawn, MLAProblem):
                    given["num_decode_requests"] = sum(decodes)
                references[query_dtype] = drawn.reference(**given)
            output, lse = references[query_dtype]
            bound = self.terms.error_bound(self.config, {phase: plan})
            try:
                check_output(step, chosen, result.output, output, bound)
                if result.lse is not None and (self.terms.exact_alibi_lse or not self.config.alibi):
                    check_lse(step, chosen, result.lse, lse, bound)
            except AssertionError as wrong:
                raise AssertionError(f"{phase} by {plan.path}: {wrong}") from None
