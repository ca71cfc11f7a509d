"""Measures the runtime's host time and prints a table. Run by ``make bench-runtime``; nothing here is asserted.

``prepare_batch`` and ``group.build`` once per step, what a replayed step adds (``StaticBatch.load``), and what a
layer's ``forward`` adds to the backend's own. On a GPU nothing waits for the device, so what is timed is what the host
does. Where vLLM's FlashAttention 3 is installed, a second table has the host time of a layer's launches beside that of
its operator, which vLLM calls once for any step.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attn_select import AttentionConfig, select
from attn_select.runtime import Attention, BlockTable, Capacity, Outputs, attention_group, prepare_batch
from attn_select.runtime.cuda_graph import StaticBatch

CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
SEQ_LEN = 1024
BATCHES = (1, 16, 256)
STEPS = {
    "decode": ([1] * 16, [SEQ_LEN] * 16),
    "drafts": ([4] * 16, [SEQ_LEN] * 16),
    "mixed": ([1] * 8 + [64], [SEQ_LEN] * 9),
    "prefill": ([64], [64]),
}
"""Query and sequence lengths. So little work that the device is never behind the host."""


def microseconds(function: Callable[[], Any], seconds: float = 0.4) -> float:
    """Return the median over batches of calls of the time of one call."""
    function()
    start = time.perf_counter()
    function()
    calls = max(1, int(0.01 / max(1e-7, time.perf_counter() - start)))
    samples = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples) < 5:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        samples.append((time.perf_counter() - start) / calls * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(samples)


def filled_table(batch: int, device: torch.device) -> BlockTable:
    """Return a table with ``SEQ_LEN`` tokens' blocks of 16 for every request."""
    blocks = SEQ_LEN // 16
    table = BlockTable(batch, blocks, 16, device)
    for row in range(batch):
        table.append_row(row, range(row * blocks, (row + 1) * blocks))
    return table


def rows_for(backend: str | None) -> list[tuple[str, ...]]:
    """Measure one backend at every batch size; return table rows."""
    selection = select(CONFIG, backend=backend)
    group = attention_group(selection, capacity=Capacity(max(BATCHES), 8192, SEQ_LEN))
    name = selection.selected["decode"] or ""
    rows: list[tuple[str, ...]] = []
    for batch in BATCHES:
        table = filled_table(batch, group.device)
        query_lens, seq_lens = [1] * batch, [SEQ_LEN] * batch
        common = prepare_batch(query_lens, seq_lens, table)

        def prepare_after_a_change(table: BlockTable = table, batch: int = batch) -> None:
            table.append_row(0, ())  # so that the table counts as changed and goes to the device, as in large batches
            prepare_batch([1] * batch, [SEQ_LEN] * batch, table)

        rows.append(
            (
                name,
                str(batch),
                f"{microseconds(partial(prepare_batch, query_lens, seq_lens, table)):.1f}",
                f"{microseconds(prepare_after_a_change):.1f}",
                f"{microseconds(partial(group.build, common)):.1f}",
                f"{microseconds(partial(StaticBatch(group, 1).load, common, batch)):.1f}",
                f"{forward_over_raw(group, common):.2f}",
            )
        )
    return rows


def forward_over_raw(group: Any, common: Any) -> float:
    """Return what ``Attention.forward`` adds to cache update and forward of the impl: both are replaced by nothing."""
    layer: Any = Attention(group)
    tokens = common.num_actual_tokens
    shapes = ((CONFIG.num_heads, 128), (CONFIG.num_kv_heads, 128), (CONFIG.num_kv_heads, 128))
    query, key, value = (torch.zeros(tokens, *shape, dtype=torch.bfloat16, device=group.device) for shape in shapes)
    cache, output, metadata = group.allocate_kv_cache(1), torch.empty_like(query), group.build(common)
    impl = layer.impls["decode"]
    impl.forward = lambda *_: output
    impl.do_kv_cache_update = lambda *_: None
    part, slots, outputs = metadata.parts[0].metadata, metadata.slot_mapping, Outputs(output)

    def raw() -> None:
        impl.do_kv_cache_update(key, value, cache, slots)
        impl.forward(query, key, value, cache, part, outputs)

    return microseconds(lambda: layer(query, key, value, cache, metadata, output)) - microseconds(raw)


def blocks_of(common: Any) -> int:
    """Return how many blocks of 16 tokens a table from ``filled_table`` names."""
    return len(common.seq_lens) * (SEQ_LEN // 16)


def launches(group: Any, common: Any, query: torch.Tensor) -> Callable[[], None]:
    """Return what launches a layer's attention by a group's backends: what an engine calls, after the cache update."""
    layer: Any = Attention(group)
    cache, output = group.allocate_kv_cache(blocks_of(common)), torch.empty_like(query)
    metadata = group.build(common)
    key, value = query[:, : CONFIG.num_kv_heads].contiguous(), query[:, : CONFIG.num_kv_heads].contiguous()
    calls = []
    for part in metadata.parts:
        rows = part.rows
        tensors = query[rows], key[rows], value[rows], cache, part.metadata, Outputs(output[rows])
        calls.append(partial(layer.impls[part.phase].forward, *tensors))

    def launch() -> None:
        for call in calls:
            call()

    return launch


def flash_attention_3(common: Any, query: torch.Tensor, function: Any) -> Callable[[], None]:
    """Return a call of FlashAttention 3's operator on a paged cache as vLLM makes it, without a schedule."""
    key, value = torch.zeros(
        2, blocks_of(common), 16, CONFIG.num_kv_heads, CONFIG.head_size, dtype=query.dtype, device="cuda"
    )
    return partial(
        function,
        q=query,
        k=key,
        v=value,
        out=torch.empty_like(query),
        cu_seqlens_q=common.query_start_loc,
        max_seqlen_q=common.max_query_len,
        seqused_k=common.seq_lens,
        max_seqlen_k=common.max_seq_len,
        softmax_scale=CONFIG.head_size**-0.5,
        causal=True,
        block_table=common.block_table_tensor,
        fa_version=3,
    )


def rows_beside(function: Any) -> list[tuple[str, ...]]:
    """Measure each kind of step by our Triton kernels and by FlashAttention 3; return table rows."""
    capacity = Capacity(max(BATCHES), 8192, SEQ_LEN)
    group = attention_group(select(CONFIG, backend="TRITON_ATTN"), capacity=capacity)
    rows: list[tuple[str, ...]] = []
    for step, (query_lens, seq_lens) in STEPS.items():
        table = filled_table(len(seq_lens), group.device)
        common = prepare_batch(query_lens, seq_lens, table)
        query = torch.zeros(sum(query_lens), CONFIG.num_heads, CONFIG.head_size, dtype=torch.bfloat16, device="cuda")
        operator = microseconds(flash_attention_3(common, query, function))
        ours = microseconds(launches(group, common, query))
        rows.append((step, f"{ours:.1f}", f"{operator:.1f}", f"{ours / operator:.2f}"))
    return rows


def print_table(*table: tuple[str, ...]) -> None:
    """Print rows, the first of which is the header."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", action="append", help="backend (repeatable) [default: the selected one]")
    backends = parser.parse_args().backend or [None]
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {device}; medians, us of host time\n")
    header = ("backend", "batch", "prepare_batch", "table changed", "group.build", "to replay", "forward over raw")
    print_table(header, *(row for backend in backends for row in rows_for(backend)))
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        print(f"\nNo launches beside FlashAttention 3: {error}")
        return
    print("\nA layer's launches, us of host time")
    print_table(("step", "TRITON_ATTN", "FA3's operator", "ratio"), *rows_beside(flash_attn_varlen_func))


if __name__ == "__main__":
    main()
