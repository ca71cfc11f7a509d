"""CUDA graphs: what a runner refuses, how it pads, and (on a GPU) that replays follow new lengths and tables."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_select import AttentionConfig, select
from attn_select.errors import ConfigError
from attn_select.layer.config import CudaGraphLevel
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BatchError,
    BlockTable,
    Capacity,
    CommonAttentionMetadata,
    attention_group,
    prepare_batch,
)
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch, check_level
from attn_select.testing import paged_reference, relative_error

CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
CAPACITY = Capacity(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=96)


def inputs_for(group: AttentionGroup, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    config = group.config
    shapes = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    return {
        name: torch.randn(tokens, heads, config.head_size, generator=draw).to(
            group.device, getattr(torch, config.dtype)
        )
        for name, heads in shapes.items()
    }


def function_of(layer: Attention, cache: Tensor) -> Any:
    def function(inputs: Mapping[str, Tensor], metadata: Mapping[Any, Any]) -> Tensor:
        return layer(inputs["query"], inputs["key"], inputs["value"], cache, metadata[layer.group])

    return function


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_uniform_batch_is_padded_with_requests_without_keys(make_group: Any, make_batch: Any, query_len: int) -> None:
    group = make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True)
    static = StaticBatch(group, query_len)
    first = static.load(make_batch([(query_len, 20), (query_len, 33)]), 4)
    assert first.query_start_loc.tolist() == [query_len * i for i in range(5)] == first.query_start_loc_cpu.tolist()
    assert first.seq_lens.tolist() == [20, 33, 0, 0] == first.seq_lens_cpu.tolist()
    assert first.slot_mapping is not None
    assert (first.slot_mapping[2 * query_len :] == -1).all()
    assert (first.num_reqs, first.num_actual_tokens, first.max_query_len) == (4, 4 * query_len, query_len)
    second = static.load(make_batch([(query_len, 5), (query_len, 8), (query_len, 90)]), 4)
    assert second.seq_lens.tolist() == [5, 8, 90, 0]
    for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def test_a_mixed_batch_is_padded_with_tokens_of_no_request(make_group: Any, make_batch: Any) -> None:
    group = make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True)
    padded = StaticBatch(group, None).load(make_batch([(1, 20), (7, 7)]), 16)
    assert padded.query_start_loc.tolist() == [0, 1, 8, 8, 8, 8, 8]
    assert (padded.num_reqs, padded.num_actual_tokens) == (6, 16)
    assert padded.slot_mapping is not None
    assert (padded.slot_mapping[8:] == -1).all()


@pytest.mark.parametrize("mixed", [False, True])
def test_padding_changes_no_row(make_group: Any, make_batch: Any, mixed: bool) -> None:
    group = make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True)
    common = make_batch([(1, 20), (1, 33), (1, 1)] if not mixed else [(1, 20), (9, 33), (4, 4)])
    tokens = common.num_actual_tokens
    layer, inputs = Attention(group), inputs_for(group, 16)
    plain_cache, padded_cache = group.allocate_kv_cache(12), group.allocate_kv_cache(12)
    plain = layer(*(tensor[:tokens] for tensor in inputs.values()), plain_cache, group.build(common))
    static = StaticBatch(group, None if mixed else 1)
    padded = layer(*inputs.values(), padded_cache, group.build(static.load(common, 16 if mixed else 6)))
    torch.testing.assert_close(padded[:tokens], plain, rtol=0, atol=0)
    assert torch.equal(plain_cache, padded_cache)


@pytest.mark.parametrize(
    ("level", "query_len", "mixed", "said"),
    [
        (
            "NEVER",
            1,
            False,
            "uniform batches of query length 1 need level UNIFORM_SINGLE_TOKEN_DECODE: TOY is at NEVER",
        ),
        ("UNIFORM_SINGLE_TOKEN_DECODE", 2, False, "need level UNIFORM_BATCH: TOY is at UNIFORM_SINGLE_TOKEN_DECODE"),
        ("UNIFORM_BATCH", 2, True, "mixed batches need level ALWAYS: TOY is at UNIFORM_BATCH"),
        ("UNIFORM_BATCH", 2, False, None),
        ("ALWAYS", 2, True, None),
    ],
)
def test_levels(
    make_group: Any, make_toy: Any, level: CudaGraphLevel, query_len: int, mixed: bool, said: str | None
) -> None:
    group = make_group(CONFIG, make_toy(level=level), capacity=CAPACITY, cuda_graphs=True)
    if said is None:
        check_level(group, query_len, mixed)
        return
    with pytest.raises(ConfigError, match=said):
        check_level(group, query_len, mixed)


def random_batch(group: AttentionGroup, query_lens: Sequence[int], rng: random.Random) -> CommonAttentionMetadata:
    """A batch with blocks in random order out of 64."""
    seq_lens = [rng.randint(length, CAPACITY.max_model_len) for length in query_lens]
    table = BlockTable(len(query_lens), 6, 16, group.device)
    blocks = rng.sample(range(64), 6 * len(query_lens))
    for row, seq_len in enumerate(seq_lens):
        table.append_row(row, blocks[6 * row : 6 * row + -(-seq_len // 16)])
    return prepare_batch(query_lens, seq_lens, table)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLEX_ATTENTION"])
@pytest.mark.parametrize(("query_len", "mixed"), [(1, False), (3, False), (1, True)])
def test_replays_follow_new_lengths_and_tables(backend: str, query_len: int, mixed: bool) -> None:
    config = CONFIG.model_copy(update={"dtype": "bfloat16", "num_speculative_tokens": query_len - 1})
    group = attention_group(select(config, backend=backend), capacity=CAPACITY, cuda_graphs=True)
    layer = Attention(group)
    cache = group.allocate_kv_cache(64).normal_()
    sizes = [8, 16, 48] if mixed else [1, 2, 4, 6]
    runner = CudaGraphRunner(
        function_of(layer, cache), [group], inputs_for(group, 1), sizes, query_len=query_len, mixed=mixed
    )
    runner.capture()
    rng = random.Random(0)
    for replay in range(8):
        requests = rng.randint(1, 6)
        lens = [rng.choice((1, 1, 7, 3)) if mixed else query_len for _ in range(requests)]
        common = random_batch(group, lens, rng)
        inputs = inputs_for(group, sum(lens), seed=replay)
        output = runner(inputs, {group: common})
        assert common.block_table_tensor is not None
        reference, _ = paged_reference(
            inputs["query"],
            cache,
            group.kv_layout or "",
            common.block_table_tensor,
            common.query_start_loc,
            common.seq_lens,
            config,
            layer.terms.scale,
        )
        error = relative_error(output, reference)
        # The rounding of weights and output to bfloat16, unit roundoff 3.9e-3.
        assert error.norm < 6e-3
        assert error.row < 4e-2


@pytest.mark.parametrize("query_len", [1, None])
def test_nothing_of_a_larger_batch_is_left(make_group: Any, make_batch: Any, query_len: int | None) -> None:
    group = make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True)
    static = StaticBatch(group, query_len)
    static.load(make_batch([(1, 20), (1, 33), (1, 41)]), 4)
    padded = static.load(make_batch([(1, 7)]), 4)
    lens = [7] + [0] * (padded.num_reqs - 1)
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu.tolist() == lens
    assert padded.slot_mapping is not None
    assert padded.slot_mapping.tolist() == [6, -1, -1, -1]


class Copies(TorchDispatchMode):
    """Counts the copies between tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.copy_.default
        return function(*args, **(kwargs or {}))


def test_what_an_engine_wrote_into_the_buffers_is_not_copied(make_group: Any, make_batch: Any) -> None:
    static = StaticBatch(make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True), 1)
    batch = make_batch([(1, 20), (1, 33)])
    table = batch.block_table_tensor
    with Copies() as copies:
        static.load(batch, 2)
    assert copies.count == 3
    lens, slots, blocks = static.seq_lens[:2], static.slot_mapping[:2], static.block_table[:2, : table.shape[1]]
    with Copies() as copies:
        padded = static.load(replace(batch, seq_lens=lens, slot_mapping=slots, block_table_tensor=blocks), 2)
    assert copies.count == 0
    assert padded.seq_lens.tolist() == [20, 33] == padded.seq_lens_cpu.tolist()
    assert padded.slot_mapping is not None
    assert padded.block_table_tensor is not None
    assert torch.equal(padded.slot_mapping, batch.slot_mapping)
    assert torch.equal(padded.block_table_tensor[:, : table.shape[1]], table)


@pytest.mark.parametrize(("query_len", "size", "bound"), [(1, 4, 1), (3, 4, 3), (None, 16, 16)])
def test_launch_grids_are_captured_for_the_longest_query_of_a_size(
    make_group: Any, make_batch: Any, query_len: int | None, size: int, bound: int
) -> None:
    group = make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True)
    static = StaticBatch(group, query_len)
    batch = make_batch([(query_len or 2, 20), (query_len or 7, 33)])
    assert static.load(batch, size).max_query_len == static.dummy(size).max_query_len == bound


def test_a_batch_runs_in_the_smallest_size_that_holds_it(make_group: Any, make_batch: Any) -> None:
    group = make_group(CONFIG, capacity=CAPACITY, cuda_graphs=True)
    group.device = torch.device("cuda")  # of tensors without memory: no kernel is launched
    with FakeTensorMode():
        uniform = CudaGraphRunner(function_of(Attention, torch.empty(0)), [group], {}, [4, 2])
        mixed = CudaGraphRunner(function_of(Attention, torch.empty(0)), [group], {}, [32, 8], mixed=True)
    assert [uniform.size_for(make_batch([(1, 5)] * count)) for count in (1, 2, 3, 4)] == [2, 2, 4, 4]
    assert [mixed.size_for(make_batch([(count, 40)])) for count in (1, 8, 9, 32)] == [8, 8, 32, 32]
    with pytest.raises(BatchError, match=r"a batch of 5 requests: graphs were captured for 2, 4\n.*run it eagerly"):
        uniform.size_for(make_batch([(1, 5)] * 5))
    with pytest.raises(BatchError, match="a batch of 33 tokens: graphs were captured for 8, 32"):
        mixed.size_for(make_batch([(33, 40)]))
    with pytest.raises(BatchError, match="nothing is captured yet"):
        uniform({}, {group: make_batch([(1, 5)])})


def test_a_captured_batch_has_a_tree_mask_for_chains_too(make_group: Any, make_batch: Any) -> None:
    config = AttentionConfig(num_heads=4, head_size=32, dtype="float32", num_speculative_tokens=2, draft_tree=True)
    static = StaticBatch(make_group(config), 3)
    chains = static.load(make_batch([(3, 9), (3, 4)]), 3).tree_mask
    assert chains is not None
    assert chains.shape == (9, 3)
    assert torch.equal(chains[:6], torch.ones(3, 3, dtype=torch.bool).tril().repeat(2, 1))
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).repeat(2, 1)
    trees = static.load(replace(make_batch([(3, 9), (3, 4)]), tree_mask=tree), 3).tree_mask
    assert trees is not None
    assert torch.equal(trees[:6], tree)
    assert trees.data_ptr() == chains.data_ptr()
