"""``FLEX_ATTENTION`` against the float64 oracle. Few shapes, since each kind of layer compiles for seconds.

The bounds are those of the conformance suite (``attn_select.reference.comparison``, which states their reasons).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch_layers import check_close, context_of

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD
from attn_select.reference.running import common_of
from attn_select.runtime import Outputs, Terms
from attn_select.testing import Problem, error_bound, random_problem, same_bits
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION, TILE
from attn_select_torch.runtime.flex import FlexImpl
from attn_select_torch.runtime.flex_builder import FlexBuilder, FlexMetadata, Tails

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
another_kind = pytest.mark.slow(guard="the tests of the usual kind of layer, which is compiled once for them all")
LAYER: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32", "block_size": TILE}
BATCH = ((1, 37), (20, 20), (1, 36), (5, 31), (1, 1), (40, 90), (3, 64), (1, 128), (17, 17))


def drawn(config: AttentionConfig, seed: int = 1, requests: Any = BATCH, **options: Any) -> Problem:
    layout = FLASH_ATTN_NHD if config.has_cache else None
    return random_problem(seed, config, layout, requests=requests, **options)


class Rig:
    """One layer and its builder."""

    def __init__(self, config: AttentionConfig, device: str = "cpu", *, cuda_graphs: bool = False) -> None:
        where = torch.device(device)
        self.context = context_of(
            FLEX_ATTENTION,
            config,
            where,
            kv_layout=FLASH_ATTN_NHD if config.has_cache else None,
            block_size=TILE if config.has_cache else None,
            max_num_seqs=12,
            max_num_batched_tokens=256,
            max_model_len=256,
            cuda_graphs=cuda_graphs,
        )
        self.builder = FlexBuilder(self.context)
        self.impl = FlexImpl(self.context, Terms.of(config, where))

    def run(self, problem: Problem, cache: Any, metadata: FlexMetadata) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = problem.query
        shape = (len(query) + 1, query.shape[1], self.context.config.value_head_size)
        output = query.new_full(shape, torch.nan)
        lse = torch.full(shape[:2], torch.nan, device=query.device) if query.is_cuda else None
        keys = (None, None) if cache is not None else (problem.key, problem.value)
        self.impl.forward(query, *keys, cache, metadata, Outputs(output, lse))
        assert output[-1].isnan().all(), "rows behind the step's tokens were written"
        return output[:-1], None if lse is None else lse[:-1]

    def check(self, problem: Problem, **changes: Any) -> None:
        """Run a problem; a change may ask for another config's mask."""
        cache = problem.written_cache() if problem.layout else None
        metadata = self.builder.build(0, common_of(problem, **changes))
        self.assert_right(problem, cache, *self.run(problem, cache, metadata))

    def assert_right(self, problem: Problem, cache: Any, output: torch.Tensor, lse: torch.Tensor | None) -> None:
        bound = error_bound(problem.config, self.context.plans)
        expected, expected_lse = problem.reference(kv_cache=cache)
        check_close(output, lse, expected, expected_lse, bound)


def test_masks_lengths_and_sizes_of_one_kind_compile_once() -> None:
    rig = Rig(AttentionConfig(**LAYER))
    rig.check(drawn(AttentionConfig(**LAYER)))
    compiled = counters["stats"]["unique_graphs"]
    for seed, asked in enumerate(
        ({"sliding_window": 19}, {"non_causal": True}, {"non_causal": True, "sliding_window": 8})
    ):
        config = AttentionConfig(**(LAYER | asked))
        requests = BATCH[seed : seed + 4]
        Rig(config).check(drawn(config, seed, requests, spare_blocks=3 + seed))
    problem = drawn(AttentionConfig(**LAYER), 5, ((1, 100), (1, 3)))
    rig.check(problem)
    both = replace(problem, config=AttentionConfig(**(LAYER | {"non_causal": True})))
    rig.check(both, causal=False)
    assert counters["stats"]["unique_graphs"] == compiled


def test_requests_that_share_blocks() -> None:
    config = AttentionConfig(**LAYER)
    problem = drawn(config, 2, ((1, 64), (9, 70), (1, 49), (30, 64)))
    assert problem.block_table is not None
    # The first two blocks are everybody's. The fourth of request 0 is also the third of request 2: nobody promises that
    # a shared block stands at one place in all its requests.
    problem.block_table[1:, :2] = problem.block_table[:1, :2]
    problem.block_table[2, 2] = problem.block_table[0, 3]
    cache = problem.written_cache()
    rig = Rig(config)
    metadata = rig.builder.build(0, common_of(problem))
    rig.assert_right(problem, cache, *rig.run(problem, cache, metadata))


def test_blocks_outside_the_window_and_behind_the_end_are_not_read() -> None:
    config = AttentionConfig(**(LAYER | {"sliding_window": 20}))
    problem = drawn(config, 3, ((1, 90), (4, 100), (20, 70)))
    assert problem.block_table is not None
    assert problem.kv_cache is not None
    for row, (query_len, seq_len) in zip(problem.block_table, problem.requests, strict=True):
        freed = row[: max(0, seq_len - query_len - 19) // TILE]
        problem.kv_cache[:, freed.long()] = torch.nan
        # Ids that other blocks have in this request: what no row sees must not be taken for them.
        freed.fill_(row[-(-seq_len // TILE) - 1])
        row[-(-seq_len // TILE) :] = row[-(-seq_len // TILE) - 1]
    Rig(config).check(problem)


def test_rows_without_keys_give_zero() -> None:
    config = AttentionConfig(**LAYER)
    problem = drawn(config, 4, ((1, 0), (20, 5), (1, 33), (3, 0)))
    rig = Rig(config)
    cache = problem.written_cache()
    output, lse = rig.run(problem, cache, rig.builder.build(0, common_of(problem)))
    rig.assert_right(problem, cache, output, lse)
    assert not output[:16].any()


def test_captured_steps_read_tensors_that_stay() -> None:
    """What a replay does, without a graph: build for another batch, then run with the metadata of the first."""
    config = AttentionConfig(**LAYER)
    rig = Rig(config, cuda_graphs=True)
    captured = None
    for seed, requests in enumerate((((1, 9), (1, 200), (30, 31)), ((20, 90), (2, 17), (10, 64)))):
        problem = drawn(config, seed, requests, spare_blocks=40 - sum(-(-seq_len // TILE) for _, seq_len in requests))
        metadata = rig.builder.build(0, common_of(problem))
        captured = captured or metadata
        cache = problem.written_cache()
        rig.assert_right(problem, cache, *rig.run(problem, cache, captured))
        assert all(same_bits(*pair) for pair in zip(read_by(captured, 40), read_by(metadata, 40), strict=True))


def read_by(metadata: FlexMetadata, num_blocks: int) -> list[torch.Tensor]:
    """Return what kernels read of a step."""
    pages = metadata.pages(num_blocks)
    lists = [tensor for one in (metadata.partial, metadata.full) for tensor in (one.counts, one.indices)]
    return [metadata.tokens, metadata.rows, *metadata.bounds, pages.first, pages.places, *lists]


GPU: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float32", "sliding_window": 19, "v_head_size": 16},
    {"dtype": "float16", "kv_cache_dtype": "bfloat16", "non_causal": True},
    {"dtype": "bfloat16", "mm_prefix": True, "head_size": 128},
    {"dtype": "bfloat16", "attn_type": "encoder", "num_kv_heads": 1},
]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", GPU, ids=lambda asked: " ".join(map(str, asked.values())))
def test_on_a_gpu(asked: dict[str, Any]) -> None:
    config = AttentionConfig(**(LAYER | asked))
    requests = (*BATCH, (1, 0), (6, 2))
    if not config.has_cache or config.mm_prefix:
        requests = tuple((length if not config.has_cache else query, length) for query, length in BATCH)
    problem = drawn(config, 8, requests, device="cuda")
    rig = Rig(config, "cuda")
    common = common_of(problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metadata = rig.builder.build(0, common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache = problem.written_cache() if config.has_cache else None
    rig.assert_right(problem, cache, *rig.run(problem, cache, metadata))


@another_kind
def test_encoders_do_not_see_the_nan_of_another_request() -> None:
    config = AttentionConfig(**(LAYER | {"attn_type": "encoder_only"}))
    problem = drawn(config, 6, ((20, 20), (13, 13), (3, 3), (17, 17)))
    assert problem.key is not None
    assert problem.value is not None
    rig = Rig(config)
    common = common_of(problem)
    expected, _ = rig.run(problem, None, rig.builder.build(0, common))
    spoilt = slice(20, 33)
    problem.key[spoilt] = problem.value[spoilt] = torch.nan
    output, _ = rig.run(problem, None, rig.builder.build(0, common))
    assert output[spoilt].isnan().all()
    assert same_bits(output[:20], expected[:20])
    assert same_bits(output[33:], expected[33:])


@pytest.mark.gpu
def test_batch_invariance_of_an_encoder_on_a_gpu() -> None:
    config = AttentionConfig(**(LAYER | {"attn_type": "encoder_only", "batch_invariant": True}))
    problem = drawn(config, 9, ((20, 20), (13, 13), (3, 3), (48, 48)), device="cuda")
    assert problem.key is not None
    assert problem.value is not None
    rig = Rig(config, "cuda")
    common = common_of(problem)
    output, _ = rig.run(problem, None, rig.builder.build(0, common))
    for index in range(common.num_reqs):
        rows = slice(int(common.query_start_loc_cpu[index]), int(common.query_start_loc_cpu[index + 1]))
        one = replace(problem, query=problem.query[rows], key=problem.key[rows], value=problem.value[rows])
        alone, _ = rig.run(one, None, rig.builder.build(0, common.requests(index, index + 1)))
        assert same_bits(alone, output[rows])


@pytest.mark.gpu
def test_batch_invariance_on_a_gpu() -> None:
    config = AttentionConfig(**(LAYER | {"dtype": "bfloat16", "batch_invariant": True}))
    problem = drawn(config, 9, BATCH, device="cuda")
    rig = Rig(config, "cuda")
    cache = problem.written_cache()
    common = common_of(problem)
    output, _ = rig.run(problem, cache, rig.builder.build(0, common))
    for index in range(len(BATCH)):
        rows = slice(int(common.query_start_loc_cpu[index]), int(common.query_start_loc_cpu[index + 1]))
        one = replace(problem, query=problem.query[rows])
        alone, _ = rig.run(one, cache, rig.builder.build(0, common.requests(index, index + 1)))
        assert same_bits(alone, output[rows])


@pytest.mark.gpu
def test_graph_replays_other_lengths_and_tables() -> None:
    config = AttentionConfig(**(LAYER | {"dtype": "bfloat16"}))
    rig = Rig(config, "cuda", cuda_graphs=True)
    batches = (((1, 9), (1, 200), (30, 31)), ((20, 90), (2, 17), (10, 64)), ((30, 60), (1, 1), (1, 256)))
    problems = [
        drawn(
            config,
            seed,
            requests,
            spare_blocks=40 - sum(-(-seq_len // TILE) for _, seq_len in requests),
            device="cuda",
        )
        for seed, requests in enumerate(batches)
    ]
    first = problems[0]
    query, cache = first.query.clone(), first.written_cache()
    output = torch.zeros_like(query)
    lse = torch.zeros(output.shape[:2], device="cuda")

    def step(metadata: FlexMetadata) -> None:
        rig.impl.forward(query, None, None, cache, metadata, Outputs(output, lse))

    for _ in range(2):
        step(rig.builder.build_for_cudagraph_capture(common_of(first)))
    metadata = rig.builder.build_for_cudagraph_capture(common_of(first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(metadata)
    for problem in problems[::-1]:
        query.copy_(problem.query)
        cache.copy_(problem.written_cache())
        rig.builder.build(0, common_of(problem))
        graph.replay()
        rig.assert_right(problem, cache, output, lse)


def test_tokens_behind_a_batch_s_keys_are_kept() -> None:
    """A batch against the context alone: this step's tokens lie behind its last key, and are of use."""
    values = torch.randn(40, 2, 8)
    values[3], values[5, 0, 0], values[6] = torch.nan, torch.inf, -torch.inf
    before = values.clone()
    Tails(torch.tensor([2, 3, 4, 5, 6]), torch.tensor([False, True, True, True, True])).clear(values)
    wanted = before.clone()
    wanted[3], wanted[5, 0, 0], wanted[6] = 0, 0, 0
    assert torch.equal(values, wanted)
