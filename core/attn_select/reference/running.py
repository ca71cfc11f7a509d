"""Runs a drawn step through the layers that engines call, on poisoned memory, and compares it with the oracle.

group = attention_group(selection_of(ACME_ATTN, gqa_layer(), "h100"), "cpu", Capacity(16, 1024, 1024))
problem = problem_for(group, [(1, 40), (17, 33)])
check_result(group, problem, run_problem(group, problem))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import is_quantized
from attn_select.reference.comparison import ErrorBound, check_cache, check_lse, check_output, error_bound, same_bits
from attn_select.reference.oracle_paged import token_views
from attn_select.reference.problems import Problem, Request, random_problem
from attn_select.runtime import (
    Attention,
    BlockTable,
    CommonAttentionMetadata,
    LayerGroup,
    MLAAttention,
    Scales,
    prepare_batch,
)
from attn_select.runtime.kv_cache import kv_cache_shape
from attn_select.runtime.loaded_backend import LoadedBackend
from attn_select.runtime.terms import GivenTerms, Terms

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them
PADDING = 3
"""Rows of every tensor behind the batch's tokens."""
WIDER = 16
"""Numbers behind each row of a tensor that is a part of a wider one; kernels may want rows at multiples of 16 bytes."""

Layer = Attention | MLAAttention
Bound = Callable[[AttentionConfig, Mapping[Phase, BackendPlan]], ErrorBound]


@dataclass(slots=True)
class Result:
    """What a step left."""

    # ``(T, H, Dv)``; FP8 outputs with their scale multiplied in.
    output: Tensor
    # float32 ``(T, H)``, None where it was not asked for; then the cache in the allocator's blocks, None without one.
    lse: Tensor | None
    kv_cache: Tensor | None
    # What the output saturates to; FP8 outputs hold 448 scales.
    largest: float = math.inf


def poison(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory that is NaN in every float format, on the device of ``like``."""
    dtype = dtype or like.dtype
    count = math.prod(shape) * dtype.itemsize
    return torch.full((count,), 0xFF, dtype=torch.uint8, device=like.device).view(dtype).view(*shape)


def reblocked(kv_cache: Tensor, layout: str, config: AttentionConfig, block_size: int) -> Tensor:
    """Return a copy of a cache in blocks of another size, its tokens in the same slots; poison between them."""
    views = token_views(kv_cache, layout, config)
    num_blocks = views[0].shape[0] * views[0].shape[1] // block_size
    shape = kv_cache_shape(layout, config, num_blocks, block_size)
    if shape == tuple(kv_cache.shape):
        return kv_cache.clone()
    copy = poison(shape, kv_cache)
    for target, source in zip(token_views(copy, layout, config), views, strict=True):
        target.copy_(source.reshape(target.shape))
    return copy


def problem_for(group: LayerGroup, requests: Sequence[Request] | None = None, seed: int = 0, **options: Any) -> Problem:
    """Draw a step of a group's layers; ``requests`` and ``options`` as in ``random_problem``."""
    options = {"block_size": group.block_size or 16, "device": group.device, "requests": requests, **options}
    return random_problem(seed, group.config, group.kv_layout, **options)


def shared_prefix(problem: Problem, blocks: int) -> Problem:
    """Return the problem with the first ``blocks`` blocks of its first request at the start of every request."""
    assert problem.block_table is not None, "a layer without a cache shares no blocks"
    table = problem.block_table.clone()
    table[:, :blocks] = table[:1, :blocks]
    return dataclasses.replace(problem, block_table=table)


def random_batch(
    group: LayerGroup, query_lens: Sequence[int], seq_lens: Sequence[int], shared_blocks: int = 0
) -> tuple[CommonAttentionMetadata, Tensor]:
    """Return a batch whose requests lie in random blocks, the first ``shared_blocks`` in common, and a random cache."""
    # ``random_problem`` also draws queries and sinks, and says what is expected.
    assert group.block_size is not None
    width = -(-max(*seq_lens, 1) // group.block_size)
    draw = torch.Generator().manual_seed(len(query_lens) + sum(seq_lens))
    blocks = torch.randperm(len(seq_lens) * width + 1, generator=draw).tolist()
    table = BlockTable(len(seq_lens), width, group.block_size, group.device)
    for row in range(len(seq_lens)):
        own = blocks[row * width : (row + 1) * width]
        table.set_row(row, [*blocks[:shared_blocks], *own[shared_blocks:]])
    cache = group.allocate_kv_cache(len(blocks))
    cache.copy_(torch.randn(cache.shape, generator=draw).to(cache.dtype))
    return prepare_batch(query_lens, seq_lens, table), cache


class StepMemory:
    """The memory that steps are brought to a layer in. A step of the same shapes takes the last one's place."""

    # ``wide``: what has one row per token lies side by side in one tensor, as projections leave it, and outputs and
    # block tables are parts of tensors that are wider in their last axis.

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self._read: dict[str, tuple[Tensor, Tensor]] = {}

    def common(self, problem: Problem, **changes: Any) -> CommonAttentionMetadata:
        """Return a step's batch in this memory, as ``common_of``."""
        self._read.clear()
        common = common_of(problem, **changes)
        names = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "block_table_tensor")
        given = {name: getattr(common, name) for name in (*names, "slot_mapping", "tree_mask")}
        copied: dict[str, Any] = {name: self._copied(name, each) for name, each in given.items() if each is not None}
        return dataclasses.replace(common, **copied)

    def inputs(self, problem: Problem) -> dict[str, Tensor]:
        """Return ``inputs_of`` in this memory."""
        inputs = inputs_of(problem)
        if not self.wide:
            return {name: self._copied(name, rows) for name, rows in inputs.items()}
        side = {name: rows for name, rows in inputs.items() if rows.dtype == inputs["query"].dtype}
        widths = [rows[0].numel() for rows in side.values()]
        whole = self._memory("inputs", (len(inputs["query"]), sum(widths)), inputs["query"])
        for (name, rows), columns in zip(side.items(), torch.split(whole, widths, dim=1), strict=True):
            inputs[name] = columns.view(rows.shape).copy_(rows)
            self._read[name] = inputs[name], rows
        return inputs

    def cache(self, layer: Layer, kv_cache: Tensor) -> Tensor:
        """Return a copy of one layer's cache in this memory."""
        return self._memory(f"kv_cache of {id(layer)}", kv_cache.shape, kv_cache).copy_(kv_cache)

    def poisoned(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return poison of a shape, and the tensor that it is a part of."""
        whole = self._memory(name, (*shape[:-1], shape[-1] + WIDER * self.wide), like, dtype)
        whole.view(torch.uint8).fill_(0xFF)
        return whole[..., : shape[-1]], whole

    def check_unchanged(self) -> None:
        """Compare what the layer was to read with what was brought; AssertionError names what was changed."""
        for name, (tensor, brought) in self._read.items():
            if not same_bits(tensor, brought):
                raise AssertionError(f"{name} was changed: it is the caller's, and other layers read it")

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        extra = WIDER if self.wide and name == "block_table_tensor" else 0
        whole = self._memory(name, (*tensor.shape[:-1], tensor.shape[-1] + extra), tensor)
        part = (whole[..., : tensor.shape[-1]] if extra else whole).copy_(tensor)
        self._read[name] = part, tensor
        return part

    def _memory(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        key = (name, tuple(shape), dtype or like.dtype)
        if key not in self._kept:
            self._kept[key] = torch.zeros(tuple(shape), dtype=dtype or like.dtype, device=like.device)
        return self._kept[key]


def common_of(problem: Problem, **changes: Any) -> CommonAttentionMetadata:
    """Return a step's batch as engines hand it over, with fields changed."""
    query_lens, seq_lens = problem.query_start_loc.diff().tolist(), problem.seq_lens.tolist()
    # The slots are the problem's, so that no new keys are counted: padding has queries and no keys.
    common = prepare_batch(query_lens, seq_lens, new_lens=[0] * len(seq_lens), device=problem.query.device)
    names = ("slot_mapping", "mm_prefix_ranges", "tree_mask")
    given: dict[str, Any] = {name: getattr(problem, name) for name in names}
    return dataclasses.replace(common, **{"block_table_tensor": problem.block_table, **given, **changes})


def layer_of(group: LayerGroup, problem: Problem, **changes: Any) -> Any:
    """Return the layer that a step was drawn for (an ``MLAAttention`` for MLA), with constructor arguments changed."""
    config = group.config
    given = {"q": problem.q_scale, "k": problem.k_scale, "v": problem.v_scale}
    scales = Scales.make(
        group.device,
        num_kv_heads=config.num_kv_heads if config.per_head_quant_scales else 0,
        **{name: scale for name, scale in given.items() if scale is not None},
    )
    # Copies, so that what a layer does to its own numbers does not reach the reference.
    own = {name: None if tensor is None else tensor.clone() for name, tensor in problem.per_head.items()}
    extras = {"scale": problem.scale, "scales": scales, **own, **changes}
    made: Any = group
    return Attention(made, **extras) if problem.kv_b_proj is None else MLAAttention(made, problem.kv_b_proj, **extras)


def impl_of(backend: LoadedBackend, **terms: Unpack[GivenTerms]) -> Any:
    """Return the impl of a layer of a group's backend, without the layer; ``terms`` as ``Attention`` takes them."""
    return backend.impl(Terms.of(backend.context.config, backend.context.device, **terms))


def inputs_of(problem: Problem, padding: int = PADDING) -> dict[str, Tensor]:
    """Return what has one row per token, by the layer's argument, with ``padding`` poisoned rows behind the batch's."""
    names = ["query", "key", "value", "topk_indices"]
    if problem.config.attn_type == "encoder_decoder":  # the cache holds all keys already
        names = ["query"]
    given = {name: rows for name in names if (rows := getattr(problem, name)) is not None}
    return {name: torch.cat([rows, poison((padding, *rows.shape[1:]), rows)]) for name, rows in given.items()}


def kernel_cache(group: LayerGroup, problem: Problem) -> Tensor | None:
    """Return a copy of the drawn cache in the kernel's blocks, None without a cache."""
    if problem.kv_cache is None or problem.layout is None:
        return None
    size = group.kernel_block_size or group.block_size or 16
    return reblocked(problem.kv_cache, problem.layout, group.config, size)


def returns_lse(group: LayerGroup) -> bool:
    """Whether every phase of the group returns an LSE."""
    return all(plan.returns_lse for plan in plans_of_group(group).values())


def call_layer(
    layer: Layer,
    inputs: Mapping[str, Tensor],
    kv_cache: Tensor | None,
    metadata: Any,
    lse: Tensor | None,
    output_scale: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Run the layer on a poisoned output; return it as it is, padding included."""
    query, key, value, config = inputs["query"], inputs.get("key"), inputs.get("value"), layer.group.config
    if output is None:
        output = poison(_output_shape(config, len(query)), query, _output_dtype(query, output_scale))
    if isinstance(layer, MLAAttention):
        layer.forward(query, key, value, kv_cache, metadata, output, inputs.get("topk_indices"), lse)
    else:
        layer.forward(query, key, value, kv_cache, metadata, output, lse, output_scale)
    return output


def _output_shape(config: AttentionConfig, tokens: int) -> tuple[int, int, int]:
    return tokens, config.num_heads, config.v_head_dim or config.value_head_size


def _output_dtype(query: Tensor, output_scale: Tensor | None) -> torch.dtype:
    return query.dtype if output_scale is None else torch.float8_e4m3fn


def plans_of_group(group: LayerGroup) -> dict[Phase, BackendPlan]:
    """Return the plans that the group's backends were made for, by phase."""
    return {phase: backend.context.plans[phase] for phase, backend in group.backends.items()}


def result_of(
    group: LayerGroup,
    problem: Problem,
    output: Tensor,
    lse: Tensor | None,
    kv_cache: Tensor | None,
    output_scale: Tensor | None = None,
) -> Result:
    """Return what a step left, without its padding, the cache in the allocator's blocks."""
    tokens = len(problem.query)
    if kv_cache is not None and problem.layout is not None:
        kv_cache = reblocked(kv_cache, problem.layout, group.config, problem.block_size or 16)
    lse = None if lse is None else lse[:tokens]
    if output_scale is None:
        return Result(output[:tokens], lse, kv_cache)
    largest = torch.finfo(output.dtype).max * float(output_scale)
    return Result(output[:tokens].float() * output_scale, lse, kv_cache, largest)


def run_problem(
    group: LayerGroup,
    problem: Problem,
    *,
    layer: Any = None,
    metadata: Any = None,
    wants_lse: bool | None = None,
    output_scale: Tensor | None = None,
    memory: StepMemory | None = None,
    **build: Any,
) -> Result:
    """Run a step on a copy of its cache, with poisoned outputs and poisoned rows behind the batch's.

    Args:
        layer: left out: ``layer_of``.
        metadata: left out: what ``group.build(memory.common(problem), **build)`` returns.
        wants_lse: left out: where every phase returns one.
        output_scale: of an FP8 output, float32 ``()``.
        memory: left out: of its own.

    Raises:
        AssertionError: rows behind the batch's were written, or what was to be read.
    """
    memory = memory or StepMemory()
    metadata = group.build(memory.common(problem), **build) if metadata is None else metadata
    layer = layer or layer_of(group, problem)
    inputs, kv_cache = memory.inputs(problem), kernel_cache(group, problem)
    if kv_cache is not None:
        kv_cache = memory.cache(layer, kv_cache)
    tokens, shape = len(problem.query), _output_shape(group.config, len(inputs["query"]))
    output, whole = memory.poisoned("output", shape, problem.query, _output_dtype(problem.query, output_scale))
    written, lse = {"output": whole}, None
    if returns_lse(group) if wants_lse is None else wants_lse:
        lse, written["LSE"] = memory.poisoned("LSE", shape[:2], problem.query, torch.float32)
    call_layer(layer, inputs, kv_cache, metadata, lse, output_scale, output)
    for name, tensor in written.items():
        left = tensor.view(torch.uint8).clone()
        left[:tokens, ..., : left.shape[-1] - WIDER * memory.wide * tensor.element_size()] = 0xFF
        if not bool((left == 0xFF).all()):
            raise AssertionError(
                f"{name} rows behind num_actual_tokens = {tokens}, or memory between rows, were written"
            )
    memory.check_unchanged()
    return result_of(group, problem, output, lse, kv_cache, output_scale)


def check_result(
    group: LayerGroup,
    problem: Problem,
    result: Result,
    *,
    bound: Bound = error_bound,
) -> None:
    """Compare cache, output and LSE with the oracle's, phase by phase: each phase has a path of its own.

    Args:
        bound: the accepted errors of a layer by its plans.

    Raises:
        AssertionError: names the phase, the path and the worst row of which request.
    """
    if result.kv_cache is not None:
        check_cache(problem, result.kv_cache)
    for phase, plan, rows, output, lse in expected(group, problem, result.kv_cache):
        accepted = bound(group.config, {phase: plan})
        try:
            check_output(problem, rows, result.output, output.clamp(-result.largest, result.largest), accepted)
            if result.lse is not None:
                check_lse(problem, rows, result.lse, lse, accepted)
        except AssertionError as wrong:
            raise AssertionError(f"{phase} by {plan.path}: {wrong}") from None


def expected(
    group: LayerGroup,
    problem: Problem,
    kv_cache: Tensor | None,
    tokens: Collection[int] | None = None,
    spread: Tensor | None = None,
) -> Iterator[tuple[Phase, BackendPlan, Tensor, Tensor, Tensor]]:
    """Yield for each phase of a step its plan, its rows, and the outputs and LSEs that the oracle has for these.

    Args:
        kv_cache: after the step.
        tokens: those that are computed; None: all.
        spread: float64 ``(T, H)``, the rows of a phase filled before it is yielded; as in ``Problem.reference``.
    """
    plans, longest_decode = plans_of_group(group), group.reorder_batch_threshold or 1
    by_phase: dict[Phase, list[int]] = {}
    for index, (query_len, _) in enumerate(problem.requests):
        phase: Phase = "decode" if query_len <= longest_decode else "prefill"
        own = problem.tokens_of(index, index + 1)
        rows = [token for token in range(own.start, own.stop) if tokens is None or token in tokens]
        by_phase.setdefault(phase if phase in plans else next(iter(plans)), []).extend(rows)
    for phase, rows in by_phase.items():
        plan = plans[phase]
        dtype = plan.query_dtype if is_quantized(plan.query_dtype) else None
        chosen = torch.tensor(rows, dtype=torch.int64, device=problem.query.device)
        if rows:  # there may be requests without query tokens alone
            part = None if spread is None else spread[chosen]
            given: dict[str, Any] = {"kv_cache": kv_cache, "query_dtype": dtype, "longest_decode": longest_decode}
            output, lse = problem.reference(chosen, spread=part, **given)
            if spread is not None and part is not None:
                spread[chosen] = part
            yield phase, plan, chosen, output, lse
