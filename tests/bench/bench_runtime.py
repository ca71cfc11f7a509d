"""Measures the runtime's host time and prints a table. Run by ``make bench-runtime``; nothing here is asserted.

``prepare_batch`` and ``group.build`` once per step, and what a layer's ``forward`` adds to the backend's own. On a GPU
nothing waits for the device, so what is timed is what the host does.
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
from attn_select.runtime import Attention, BlockTable, Capacity, attention_group, prepare_batch

CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
SEQ_LEN = 1024
BATCHES = (1, 16, 256)


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
    rows = []
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
    part, slots = metadata.parts[0].metadata, metadata.slot_mapping

    def raw() -> None:
        impl.do_kv_cache_update(layer, key, value, cache, slots)
        impl.forward(layer, query, key, value, cache, part, output, None, None, None)

    return microseconds(lambda: layer(query, key, value, cache, metadata, output)) - microseconds(raw)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", action="append", help="backend (repeatable) [default: the selected one]")
    backends = parser.parse_args().backend or [None]
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {device}; medians, us of host time\n")
    header = ("backend", "batch", "prepare_batch", "table changed", "group.build", "forward over raw")
    table = [header, *(row for backend in backends for row in rows_for(backend))]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
