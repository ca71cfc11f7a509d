"""What else an engine asks of a group whose cache lies on several ranks, besides building and running."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_select import AttentionConfig, select
from attn_select.runtime import (
    Attention,
    BatchError,
    BlockTable,
    Capacity,
    ContextParallel,
    MLAAttention,
    attention_group,
    prepare_batch,
)
from attn_select.testing import mla_layer
from attn_select.testing.ranks import ThreadCollectives, run_ranks

CAPACITY = Capacity(4, 64, 256)
DENSE = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=8)
LAYERS = pytest.mark.parametrize("config", [DENSE, mla_layer(block_size=8)], ids=["dense", "mla"])


def group_of(collectives: ThreadCollectives, config: AttentionConfig, **options: Any) -> Any:
    selection = select(config.model_copy(update={"decode_context_parallel_size": collectives.size}), "cpu")
    return attention_group(selection, capacity=CAPACITY, context_parallel=ContextParallel(collectives), **options)


def layer_of(group: Any) -> Any:
    config = group.config
    if not config.mla:
        return Attention(group)
    width = config.qk_nope_head_dim + config.v_head_dim
    return MLAAttention(group, torch.ones(config.num_heads * width, config.kv_lora_rank))


@LAYERS
def test_workspace_counts_both_parts_and_what_ranks_share(config: AttentionConfig) -> None:
    def run(collectives: ThreadCollectives) -> None:
        group = group_of(collectives, config)
        found = group.workspace_bytes
        assert found.pop("ranks") == group.merger.memory.layout.num_bytes
        parts = [group.latent] if config.mla else [group.shared, group.own]
        names = {name for part in parts for name in part.workspace_bytes}
        assert names <= set(found)
        for name in names:
            assert found[name] >= sum(part.workspace_bytes.get(name, 0) for part in parts)
        if not config.mla:
            assert found["scratch"] == group.scratch.nbytes

    run_ranks(2, run)


@LAYERS
def test_warm_up_runs_every_kind_of_step_on_all_ranks(config: AttentionConfig) -> None:
    def run(collectives: ThreadCollectives) -> int:
        group = group_of(collectives, config)
        kept = layer_of(group)  # the group refers to its layers weakly
        done: list[str] = []
        found = group.warm_up(lambda name, *_: done.append(name))
        assert kept is not None
        assert found.steps == len(done) > 0
        return found.steps

    assert len(set(run_ranks(2, run))) == 1


@LAYERS
def test_zeroed_blocks_are_the_schedulers(config: AttentionConfig) -> None:
    def run(collectives: ThreadCollectives) -> None:
        group = group_of(collectives, config)
        cache = group.allocate_kv_cache(5).fill_(1)
        group.zero_blocks(cache, [1, 3])
        tokens = 5 * 8  # of this rank's share
        by_block = cache.flatten().view(-1, tokens, cache.numel() // tokens // (1 if config.mla else 2))
        clean = (by_block == 0).all(-1).all(0).view(5, 8)
        assert torch.equal(clean.any(1), clean.all(1))
        assert clean.any(1).nonzero().flatten().tolist() == [1, 3]
        assert bool((by_block[:, ~clean.flatten()] == 1).all())
        with pytest.raises(ValueError, match="block_ids holds 5: accepted are the cache's blocks, 0 to 4"):
            group.zero_blocks(cache, [5])

    run_ranks(2, run)


@pytest.mark.parametrize("phases", [None, ["prefill"], ["decode"]])
def test_sparse_layers_give_the_results_of_one_rank(phases: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one and of several tokens, each over chosen slots of both ranks, of one rank and of none."""
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    fields = {"num_heads": 2, "sparse_top_k": 6, "block_size": 8, "dtype": "float32", "kv_cache_dtype": "auto"}
    config = mla_layer(**fields)
    draw = torch.Generator().manual_seed(0)
    rank, rope = config.kv_lora_rank or 0, config.qk_rope_head_dim or 0
    nope, width = config.qk_nope_head_dim or 0, config.v_head_dim or 0
    weight = torch.randn(2 * 2, nope + width, rank, generator=draw) * rank**-0.5
    steps = [(20, 20), (1, 21)] if phases is None else [(20, 20)] if phases == ["prefill"] else [(1, 1), (1, 2)]
    drawn = []
    for new, length in steps:
        chosen = torch.randint(0, length, (new, 6), generator=draw, dtype=torch.int32)
        chosen[0] = torch.tensor([0, -1, -1, -1, -1, -1])
        shapes = (new, 4, nope + rope), (new, rank), (new, rope)
        drawn.append((new, length, [torch.randn(shape, generator=draw) for shape in shapes], chosen))

    def outputs(group: Any, heads: slice) -> list[torch.Tensor]:
        layer = MLAAttention(group, weight[heads].flatten(0, 1))
        table = BlockTable(1, -(-24 // group.block_size), group.block_size, "cpu")
        table.set_row(0, list(range(-(-24 // group.block_size))))
        cache, found = group.allocate_kv_cache(-(-24 // group.block_size)), []
        for new, length, (query, latent, part), chosen in drawn:
            metadata = group.build(prepare_batch([new], [length], table))
            given = query[:, heads].contiguous(), latent, part
            found.append(layer(*given, kv_cache=cache, attn_metadata=metadata, topk_indices=chosen))
        assert group.workspace_bytes.keys() >= {"TORCH_MLA_SPARSE"}
        return found

    whole = config.model_copy(update={"num_heads": 4})
    wanted = outputs(attention_group(select(whole, "cpu"), capacity=CAPACITY, phases=phases), slice(0, 4))

    def run(collectives: ThreadCollectives) -> list[torch.Tensor]:
        group = group_of(collectives, config, phases=phases)
        return outputs(group, slice(2 * collectives.rank, 2 * collectives.rank + 2))

    for number, found in enumerate(run_ranks(2, run)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other[:, 2 * number : 2 * number + 2], rtol=1e-4, atol=1e-5)


def test_slots_beyond_all_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    config = mla_layer(num_heads=2, sparse_top_k=4, block_size=8, dtype="float32", kv_cache_dtype="auto")

    def run(collectives: ThreadCollectives) -> None:
        group = group_of(collectives, config)
        layer, cache = layer_of(group), group.allocate_kv_cache(2)
        table = BlockTable(1, 2, group.block_size, "cpu")
        table.set_row(0, [0, 1])
        given = layer.dummy_inputs(1)
        for slot, accepted in ((31, True), (32, False)):
            metadata = group.build(prepare_batch([1], [32], table))
            given["topk_indices"] = torch.tensor([[slot, -1, -1, -1]], dtype=torch.int32)
            if accepted:
                layer(**given, kv_cache=cache, attn_metadata=metadata)
                continue
            with pytest.raises(BatchError, match="32"):
                layer(**given, kv_cache=cache, attn_metadata=metadata)

    run_ranks(2, run)
