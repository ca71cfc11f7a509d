"""Layers over several ranks compute what one rank computes: prefills, chunks of them, decodes, drafts, mixed steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import AttentionConfig, select
from attn_select.runtime import (
    Attention,
    BlockTable,
    Capacity,
    ContextParallel,
    MLAAttention,
    attention_group,
    prepare_batch,
)
from attn_select.runtime.context_parallel.agreement import facts_of
from attn_select.testing import mla_layer
from attn_select.testing.ranks import ThreadCollectives, run_ranks

CAPACITY = Capacity(3, 64, 96)
SIZE = 2
DENSE = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=4)
LATENT = mla_layer(
    num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, head_size=48,
    dtype="float32", kv_cache_dtype="auto", block_size=4,
)  # fmt: skip
STEPS = [
    [(20, 20), (5, 5)],  # prompts
    [(1, 21), (12, 17)],  # a decode, and a chunk over cached context
    [(3, 24), (2, 19)],  # drafts
    [(1, 25), (1, 20), (9, 9)],
]
"""Query lengths and sequence lengths of the requests of each step."""


def run_steps(
    group: Any, heads: Tensor, drawn: list[list[Tensor]], weight: Tensor | None, sinks: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Run ``STEPS`` with the query heads of one rank; return outputs and LSEs."""
    layer: Any
    if weight is None:
        layer = Attention(group, sinks=None if sinks is None else sinks[heads])
    else:
        layer = MLAAttention(group, weight[heads].flatten(0, 1))
    per_request = -(-32 // group.block_size)
    table = BlockTable(3, per_request, group.block_size, "cpu")
    for row in range(3):  # not in order
        table.set_row(row, [per_request * ((row + 1) % 3) + block for block in range(per_request)])
    cache, found = group.allocate_kv_cache(3 * per_request), []
    for step, (query, *new) in zip(STEPS, drawn, strict=True):
        metadata = group.build(prepare_batch(*map(list, zip(*step, strict=True)), table))
        if weight is not None:
            decoded = sum(part.rows.stop for part in metadata.parts if part.phase == "decode")
            assert decoded == sum(count for count, _ in step if count <= 3)
        lse = torch.full((len(query), len(heads)), torch.nan)
        output = layer(query[:, heads].contiguous(), *new, cache, metadata, output_lse=lse)
        found.append((output, lse))
    return found


@pytest.mark.parametrize("queries", ["sharded", "replicated"])
@pytest.mark.parametrize("merge", ["auto", "a2a"])
@pytest.mark.parametrize(
    ("config", "sinks"), [(DENSE, False), (DENSE, True), (LATENT, False)], ids=["dense", "sinks", "mla"]
)
def test_all_kinds_of_steps(config: AttentionConfig, sinks: bool, merge: str, queries: str) -> None:
    config = config.model_copy(update={"num_speculative_tokens": 2, "sinks": sinks})
    draw = torch.Generator().manual_seed(0)
    sharded = queries == "sharded"
    every = config.num_heads * (SIZE if sharded else 1)
    weight, options = None, {}
    shapes: list[tuple[int, ...]] = [(every, 16), (config.num_kv_heads, 16), (config.num_kv_heads, 16)]
    if config.mla:
        weight, options = torch.randn(every, 32, 32, generator=draw) * 32**-0.5, {"workspace_tokens": 8}
        shapes = [(every, 32), (32,), (16,)]
    logits = torch.randn(every, generator=draw) if sinks else None
    counts = [sum(query for query, _ in step) for step in STEPS]
    drawn = [[torch.randn(count, *shape, generator=draw) for shape in shapes] for count in counts]
    whole = select(config.model_copy(update={"num_heads": every}), "cpu")
    alone = attention_group(whole, capacity=CAPACITY, **options)
    wanted = run_steps(alone, torch.arange(every), drawn, weight, logits)
    selection = select(config.model_copy(update={"decode_context_parallel_size": SIZE}), "cpu")

    def heads_of(rank: int) -> Tensor:
        by_rank = torch.arange(every).view(config.num_kv_heads, SIZE if sharded else 1, -1)
        return by_rank[:, rank if sharded else 0].flatten()

    def run(collectives: ThreadCollectives) -> list[tuple[Tensor, Tensor]]:
        ranks = ContextParallel(collectives, merge=merge, queries=queries)
        group = attention_group(selection, capacity=CAPACITY, context_parallel=ranks, **options)
        return run_steps(group, heads_of(collectives.rank), drawn, weight, logits)

    for rank, found in enumerate(run_ranks(SIZE, run)):
        for (output, lse), (whole_output, whole_lse) in zip(found, wanted, strict=True):
            torch.testing.assert_close(output, whole_output[:, heads_of(rank)], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse, whole_lse[:, heads_of(rank)], rtol=1e-4, atol=1e-5)


def test_what_all_ranks_must_have_in_common() -> None:
    selection = select(DENSE, "cpu")
    (found,) = run_ranks(1, lambda each: facts_of(selection, ContextParallel(each), CAPACITY))
    assert set(found) == {
        "selections", "configs", "caches", "interleaves", "ways to merge", "queries", "capacities",
    }  # fmt: skip
    assert "TORCH_SDPA" in found["selections"]
