"""Measures ``TORCH_SDPA`` against SDPA by hand on this CPU or GPU and prints a table; nothing here is asserted.

By hand means: keys and values gathered out of the paged cache by slot numbers that are worked out beforehand, then
``scaled_dot_product_attention`` with ``enable_gqa``, either one call per request or one padded call with a mask for the
whole batch. Ours is ``Attention.forward`` without the write of the cache, on metadata built beforehand as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_select import AttentionConfig, select
from attn_select.runtime import Attention, BlockTable, Capacity, attention_group, prepare_batch

BLOCK_SIZE = 16


def timed(function: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the best of several rounds, microseconds per call."""

    def once(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / count

    first = min(once(1), once(1))
    count = max(1, int(seconds / 5 / first))
    return min(once(count) for _ in range(5)) * 1e6


class Case:
    """One batch of one layer."""

    def __init__(self, config: AttentionConfig, requests: list[tuple[int, int]], device: torch.device) -> None:
        self.config, self.requests = config, requests
        lens = [seq_len for _, seq_len in requests]
        needed = [-(-seq_len // BLOCK_SIZE) for seq_len in lens]
        self.group = attention_group(
            select(config, "cpu" if device.type == "cpu" else None, backend="TORCH_SDPA"),
            device,
            Capacity(len(requests), sum(query for query, _ in requests), max(lens)),
        )
        table = BlockTable(len(requests), max(needed), BLOCK_SIZE, device)
        ids = iter(torch.randperm(sum(needed)).tolist())
        for row, count in enumerate(needed):
            table.append_row(row, [next(ids) for _ in range(count)])
        self.common = prepare_batch([query for query, _ in requests], lens, table)
        self.layer = Attention(self.group, caller_writes=True)
        self.cache = self.group.allocate_kv_cache(sum(needed))
        self.cache.copy_(torch.randn(self.cache.shape))
        tokens = self.common.num_actual_tokens
        self.query = torch.randn(tokens, config.num_heads, config.head_size).to(self.cache.dtype).to(device)
        self.output = torch.empty_like(self.query)
        self._slots = [
            (table.device_table[row, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[
                :seq_len
            ]
            for row, seq_len in enumerate(lens)
        ]
        self._masks = [self._mask(query, seq_len) for query, seq_len in requests]

    def _mask(self, query_len: int, seq_len: int) -> Tensor:
        device = self.cache.device
        distance = torch.arange(seq_len - query_len, seq_len, device=device)[:, None] - torch.arange(
            seq_len, device=device
        )
        mask = distance >= 0
        window = self.config.sliding_window
        return mask if window is None else mask & (distance < window)

    def build(self) -> None:
        self.metadata = self.group.build(self.common)

    def ours(self) -> None:
        self.layer(self.query, None, None, self.cache, self.metadata, self.output)

    def by_request(self) -> None:
        flat = self.cache.flatten(1, 2).flatten(2)
        start = 0
        for (query_len, seq_len), slots, mask in zip(self.requests, self._slots, self._masks, strict=True):
            keys, values = (
                half.index_select(0, slots).view(1, seq_len, self.config.num_kv_heads, -1).transpose(1, 2)
                for half in flat
            )
            query = self.query[start : start + query_len].transpose(0, 1)[None]
            whole = query_len == seq_len and self.config.sliding_window is None
            masked = {"is_causal": True} if whole else {"attn_mask": None if query_len == 1 else mask}
            out = scaled_dot_product_attention(query, keys, values, **masked, enable_gqa=True)  # type: ignore[arg-type]
            self.output[start : start + query_len] = out[0].transpose(0, 1)
            start += query_len

    def padded(self) -> None:
        """All requests at once; for decodes."""
        longest = max(seq_len for _, seq_len in self.requests)
        flat = self.cache.flatten(1, 2).flatten(2)
        keys, values = (
            half.index_select(0, self._padded_slots).view(len(self.requests), longest, self.config.num_kv_heads, -1)
            for half in flat
        )
        query = self.query[:, :, None]
        out = scaled_dot_product_attention(
            query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self._padding, enable_gqa=True
        )
        self.output.copy_(out[:, :, 0])

    def pad(self) -> None:
        """Work out what ``padded`` needs."""
        longest = max(seq_len for _, seq_len in self.requests)
        pad = torch.nn.functional.pad
        self._padded_slots = torch.cat([pad(slots, (0, longest - len(slots))) for slots in self._slots])
        lens = torch.tensor([seq_len for _, seq_len in self.requests], device=self.cache.device)
        self._padding = (torch.arange(longest, device=self.cache.device) < lens[:, None])[:, None, None]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose names hold this")
    parser.add_argument("--kv-heads", type=int, default=8, help="of 32 query heads")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    mixed = [int(length) for length in torch.randint(200, 2000, (16,))]
    batches: dict[str, tuple[list[tuple[int, int]], int | None]] = {
        "decode, 1 x 1024": ([(1, 1024)], None),
        "decode, 16 x 1024": ([(1, 1024)] * 16, None),
        "decode, 16 x 200-2000": ([(1, length) for length in mixed], None),
        "decode, 64 x 1024": ([(1, 1024)] * 64, None),
        "decode, 64 x 64": ([(1, 64)] * 64, None),
        "decode, 1 x 16": ([(1, 16)], None),
        "decode, 16 x 4096, window 512": ([(1, 4096)] * 16, 512),
        "prefill, 512": ([(512, 512)], None),
        "prefill, 2048": ([(2048, 2048)], None),
        "prefill, 512 behind 1536": ([(512, 2048)], None),
        "prefill, 2048, window 256": ([(2048, 2048)], 256),
    }
    threads = f"{torch.get_num_threads()} threads"
    heads = f"32 query and {arguments.kv_heads} KV heads of 128"
    print(f"{device}, torch {torch.__version__}, {threads}, {heads}; microseconds")
    print(f"{'':32}{'build':>10}{'ours':>12}{'by request':>12}{'padded':>12}{'ours/best':>11}")
    for dtype in arguments.dtypes:
        for name, (requests, window) in batches.items():
            if arguments.only not in name:
                continue
            config = AttentionConfig(
                num_heads=32,
                num_kv_heads=arguments.kv_heads,
                head_size=128,
                dtype=dtype,
                block_size=BLOCK_SIZE,
                sliding_window=window,
            )
            case = Case(config, requests, device)
            figures = [timed(one, device, arguments.seconds) for one in (case.build, case.ours, case.by_request)]
            text = ""
            if requests[0][0] == 1 and window is None:
                case.pad()
                figures.append(timed(case.padded, device, arguments.seconds))
                text = f"{figures[-1]:12,.0f}"
            best = min(figures[2:])
            row = f"{figures[0]:10,.0f}{figures[1]:12,.0f}{figures[2]:12,.0f}{text:>12}"
            print(f"{f'{dtype}, {name}':32}".ljust(44) + f"{row}{figures[1] / best:11.2f}", flush=True)


if __name__ == "__main__":
    main()
