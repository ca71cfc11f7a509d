"""One attention layer whose cache lies on all ranks that torchrun starts, on GPUs (NCCL) or CPUs (gloo).

torchrun --nproc-per-node 2 examples/context_parallel.py

Every rank holds its own query heads, as under tensor parallelism, and keeps 1 / N of every request's keys and values. A
prompt is prefilled in two chunks, then two tokens are decoded. Rank 0 compares the results with plain attention.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from attn_select import AttentionConfig, select
from attn_select.runtime import (
    Attention,
    BlockPool,
    BlockTable,
    Capacity,
    ContextParallel,
    attention_group,
    prepare_batch,
)

NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 64, 16  # query heads of all ranks; one KV head, which every rank has
STEPS = (100, 60, 1, 1)


def main() -> None:
    on_gpu, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks = ContextParallel(dist.group.WORLD, interleave=BLOCK_SIZE)

    config = AttentionConfig(
        num_heads=NUM_HEADS // ranks.size,  # of one rank
        num_kv_heads=1,
        head_size=HEAD_SIZE,
        dtype="float32",
        block_size=BLOCK_SIZE,  # of one rank's cache
        decode_context_parallel_size=ranks.size,
    )
    selection = select(config, None if on_gpu else "cpu")
    group = attention_group(selection, capacity=Capacity(4, 256, 1024), context_parallel=ranks)
    layer = Attention(group)

    # From here on an engine's own code. A block of its tables holds the tokens of all ranks: group.block_size.
    pool = BlockPool(32, group.block_size)
    table = BlockTable(4, 32, group.block_size, group.device)
    cache = group.allocate_kv_cache(pool.num_blocks)
    draw = torch.Generator().manual_seed(0)
    tokens = sum(STEPS)
    query = torch.randn(tokens, NUM_HEADS, HEAD_SIZE, generator=draw).to(group.device)
    key, value = torch.randn(2, tokens, 1, HEAD_SIZE, generator=draw).to(group.device)
    own = slice(rank * config.num_heads, (rank + 1) * config.num_heads)
    outputs, done = [], 0
    for count in STEPS:
        rows, done = slice(done, done + count), done + count
        table.append_row(0, pool.allocate("request", done))
        metadata = group.build(prepare_batch([count], [done], table))
        outputs.append(layer(query[rows, own], key[rows], value[rows], cache, metadata))

    every = torch.empty(ranks.size, tokens, config.num_heads, HEAD_SIZE, device=group.device)
    ranks.collectives.all_gather(every, torch.cat(outputs))
    if rank == 0:
        plain = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            *(part.expand(-1, NUM_HEADS, -1).transpose(0, 1) for part in (key, value)),
            is_causal=True,
        )
        error = (every.transpose(0, 1).flatten(1, 2) - plain.transpose(0, 1)).abs().max().item()
        print(
            f"{ranks.size} ranks, {config.num_heads} of {NUM_HEADS} query heads on each, {selection.selected['decode']}"
        )
        lengths = [group.shares.length(tokens, each) for each in range(ranks.size)]
        print(f"cached tokens {lengths} of a request of {tokens}")
        print(f"block size    {group.block_size} of the tables, {BLOCK_SIZE} of each cache")
        print(f"results       as without ranks: {error < 1e-4}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
