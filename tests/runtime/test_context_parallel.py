"""Shares of positions, the merge of ranks' results, and groups of layers across ranks, all in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import AttentionConfig, select
from attn_select.errors import ConfigError
from attn_select.runtime import (
    Capacity,
    ContextParallel,
    RankError,
    attention_group,
)
from attn_select.runtime.context_parallel.merging import Merger
from attn_select.runtime.context_parallel.shares import Shares
from attn_select.runtime.rank_memory import RankLayout
from attn_select.testing.ranks import ThreadCollectives, run_ranks

CAPACITY = Capacity(4, 64, 256)


def layer(**fields: Any) -> AttentionConfig:
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": 8}
    return AttentionConfig(**{**given, "decode_context_parallel_size": 2, **fields})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("interleave", [1, 2, 8])
def test_every_position_lies_on_one_rank_in_a_slot_of_its_own(size: int, interleave: int) -> None:
    shares = [Shares(rank, size, interleave, 8, "cpu") for rank in range(size)]
    for tokens in range(100):
        assert sum(share.length(tokens) for share in shares) == tokens
    lengths = torch.arange(100, dtype=torch.int32)
    slots = torch.arange(-1, 13 * 8 * size)
    for rank, share in enumerate(shares):
        own = share.positions(13 * 8 * size)
        assert torch.equal(own // interleave % size, torch.full_like(own, rank))
        assert share.length(lengths).tolist() == [int((own < length).sum()) for length in lengths]
        assert share.length(lengths).dtype == torch.int32
        # With the blocks in order, a rank's slots are its positions in order.
        local = share.slots(slots)
        assert torch.equal((local[1:] >= 0).nonzero().flatten(), own)
        assert local[0] == -1
        assert local[local >= 0].tolist() == list(range(13 * 8))


def test_arguments_are_checked() -> None:
    for given, text in (
        ({"interleave": 0}, "interleave = 0: accepted are integers from 1"),
        ({"merge": "ring"}, "merge = 'ring': accepted are auto, a2a, symm"),
        ({"queries": "split"}, "queries = 'split': accepted are sharded, replicated"),
    ):
        with pytest.raises(ConfigError, match=text):
            ContextParallel(**given)
    with pytest.raises(RankError, match=r"torch\.distributed is not initialised"):
        ContextParallel()


@pytest.mark.parametrize("way", ["a2a", "symm"])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_merged_results_are_those_over_all_keys(way: str, sharded: bool, kv_heads: int, with_sinks: bool) -> None:
    size, tokens, heads, width = 3, 5, 4, 8
    every = heads * size if sharded else heads
    draw = torch.Generator().manual_seed(0)
    partial, lse = torch.randn(size, tokens, every, width, generator=draw), torch.randn(size, tokens, every) * 3
    lse[0, 0], partial[0, 0] = -torch.inf, torch.nan  # a rank without keys for this row; what it left is not read
    lse[:, -1] = -torch.inf  # no keys at all
    sinks = torch.randn(every, generator=draw) if with_sinks else None
    counted = lse if sinks is None else torch.cat([lse, sinks.expand(1, tokens, every)])
    wanted_lse = counted.double().logsumexp(0)
    weights = (lse.double() - wanted_lse.masked_fill(wanted_lse.isneginf(), 0)).exp().unsqueeze(-1)
    wanted = torch.where(weights == 0, 0.0, weights * partial.double()).sum(0)

    def run(collectives: ThreadCollectives) -> tuple[Tensor, Tensor]:
        output, output_lse = torch.full((tokens, heads, width), torch.nan), torch.full((tokens, heads), torch.nan)
        merger = Merger(collectives, kv_heads, sharded)
        if way == "symm":
            assert merger.share_memory(tokens, every, 16, width, torch.float32, torch.device("cpu"))
        merger.merge(partial[collectives.rank], lse[collectives.rank], output, output_lse, sinks)
        return output, output_lse

    held = torch.arange(every).view(kv_heads, size if sharded else 1, -1)
    for rank, (output, output_lse) in enumerate(run_ranks(size, run)):
        own = held[:, rank if sharded else 0].flatten()
        torch.testing.assert_close(output.double(), wanted[:, own], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output_lse.double(), wanted_lse[:, own], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharded", [True, False])
def test_steps_one_after_the_other_through_the_same_memory(sharded: bool) -> None:
    size, kv_heads, heads, width = 2, 2, 4, 8
    every = heads * size if sharded else heads

    def run(collectives: ThreadCollectives) -> None:
        merger = Merger(collectives, kv_heads, sharded)
        assert merger.share_memory(6, every, 16, width, torch.float32, torch.device("cpu"))
        draw = torch.Generator().manual_seed(0)  # the same numbers on all ranks
        for tokens in (3, 6, 7, 1, 6):
            queries = torch.randn(size, tokens, heads, 16, generator=draw)
            partial, lse = torch.randn(size, tokens, every, width, generator=draw), torch.randn(size, tokens, every)
            lse = lse.mul_(0).add_(torch.arange(size).view(-1, 1, 1))
            gathered = merger.gather_queries(queries[collectives.rank])
            assert torch.equal(gathered, Merger(collectives, kv_heads, sharded).gather_heads(queries[collectives.rank]))
            own, own_lse = merger.partials(gathered, every, width)
            memory = merger.memory
            assert memory is not None
            begins, ends = memory.buffers[collectives.rank].data_ptr(), memory.layout.num_bytes
            assert (0 <= own.data_ptr() - begins < ends) is (tokens < 7)  # more tokens go by collectives
            own.copy_(partial[collectives.rank])
            own_lse.copy_(lse[collectives.rank])
            output = torch.full((tokens, heads, width), torch.nan)
            merger.merge(own, own_lse, output)
            held = torch.arange(every).view(kv_heads, size if sharded else 1, -1)
            held = held[:, collectives.rank if sharded else 0].flatten()
            wanted = (lse.softmax(0).unsqueeze(-1) * partial).sum(0)[:, held]
            torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)

    run_ranks(size, run)


class Apart(ThreadCollectives):
    """Ranks that share no memory."""

    def share_memory(self, layout: RankLayout, device: torch.device) -> None:
        return None


@pytest.mark.parametrize("merge", ["auto", "symm"])
def test_ranks_that_share_no_memory(merge: str) -> None:
    selection = select(layer(), "cpu")

    def run(collectives: ThreadCollectives) -> str:
        ranks = ContextParallel(Apart(collectives._shared, collectives.rank), merge=merge)
        try:
            return str(attention_group(selection, capacity=CAPACITY, context_parallel=ranks).merger.memory)
        except ConfigError as error:
            return str(error)

    wanted = (
        "None" if merge == "auto" else "merge = 'symm': these ranks cannot read each other's memory (accepted: auto"
    )
    assert all(found.startswith(wanted) for found in run_ranks(2, run))


@pytest.mark.parametrize(
    ("fields", "merge", "shares"),
    [({}, "auto", True), ({}, "a2a", False), ({"batch_invariant": True}, "auto", False)],
)
def test_when_memory_is_shared(fields: dict[str, Any], merge: str, shares: bool) -> None:
    selection = select(layer(**fields), "cpu")

    def run(collectives: ThreadCollectives) -> bool:
        ranks = ContextParallel(collectives, merge=merge)
        return attention_group(selection, capacity=CAPACITY, context_parallel=ranks).merger.memory is not None

    assert run_ranks(2, run) == [shares] * 2


def test_the_cache_is_a_share_and_the_tables_are_the_schedulers() -> None:
    selection = select(layer(), "cpu")

    def run(collectives: ThreadCollectives) -> tuple[Any, ...]:
        group = attention_group(selection, capacity=CAPACITY, context_parallel=ContextParallel(collectives, 4))
        form = group.cache_format
        assert form is not None
        assert (form.facts()["interleave"], form.block_size) == (4, 8)
        return group.block_size, group.allocate_kv_cache(10).numel(), group.reorder_batch_threshold

    alone = attention_group(select(layer(decode_context_parallel_size=1), "cpu"), capacity=CAPACITY)
    numel = alone.allocate_kv_cache(10).numel()  # blocks of half as many tokens
    assert run_ranks(2, run) == [(16, numel, alone.reorder_batch_threshold)] * 2


def _errors_of(make: Any) -> list[Exception]:
    """Return the error that each of two ranks gets when it makes its group with ``make(rank)``."""

    def run(collectives: ThreadCollectives) -> Exception:
        selection, options = make(collectives.rank)
        with pytest.raises((ConfigError, RankError)) as error:
            attention_group(selection, capacity=CAPACITY, context_parallel=ContextParallel(collectives, **options))
        return error.value

    return run_ranks(2, run)


def test_different_groups_on_the_ranks_are_found_by_all() -> None:
    first = select(layer(), "cpu")
    errors = _errors_of(lambda rank: (select(layer(block_size=16), "cpu") if rank else first, {}))
    assert all(isinstance(error, RankError) for error in errors)
    assert "the ranks of the group have different configs (rank 0: " in str(errors[0])
    assert str(errors[0]) == str(errors[1])
    errors = _errors_of(lambda rank: (first, {"interleave": 1 + rank}))
    assert "different interleaves (rank 0: 1, rank 1: 2)" in str(errors[1])


def test_a_rank_that_cannot_make_its_group_tells_the_others() -> None:
    wrong = select(layer(decode_context_parallel_size=4), "cpu")
    right, left = _errors_of(lambda rank: (select(layer(), "cpu") if rank == 0 else wrong, {}))
    assert isinstance(right, RankError)
    assert "rank 1: ConfigError: decode_context_parallel_size = 4" in str(right)
    assert isinstance(left, ConfigError)
