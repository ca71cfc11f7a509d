"""What the tests of this plugin share: batches in random pages, for the emulated entries and the real ones."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch

from attn_select.reference.oracle import attention_reference

E4M3 = torch.float8_e4m3fn


def ints(values: Any) -> Any:
    return torch.tensor(list(values), dtype=torch.int32)


class Batch:
    """Requests in random pages of a cache whose unused slots hold ``tails``."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        page: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 64,
        layout: str = "NHD",
        dtype: Any = torch.bfloat16,
        kv_dtype: Any = None,
        tails: float = torch.nan,
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        kv_dtype = kv_dtype or dtype
        counts = [-(-length // page) for length in seq_lens]
        order = torch.randperm(sum(counts) + 2, generator=draw).tolist()
        self.page, self.heads, self.kv_heads, self.size, self.layout = page, heads, kv_heads, size, layout
        self.seq_lens, self.query_lens = seq_lens, query_lens
        self.qo_indptr = ints(itertools.accumulate(query_lens, initial=0))
        self.indptr = ints(itertools.accumulate(counts, initial=0))
        self.indices = ints(order[: sum(counts)])
        self.last = ints([(length - 1) % page + 1 if length else 0 for length in seq_lens])
        self.keys = [torch.randn(n, kv_heads, size, generator=draw).to(kv_dtype) for n in seq_lens]
        self.values = [torch.randn(n, kv_heads, size, generator=draw).to(kv_dtype) for n in seq_lens]
        cache = torch.full((len(order), 2, page, kv_heads, size), tails).to(kv_dtype)
        self.table = torch.zeros(len(seq_lens), max(*counts, 1), dtype=torch.int32)
        for request, length in enumerate(seq_lens):
            own = self.indices[self.indptr[request] : self.indptr[request + 1]].tolist()
            self.table[request, : len(own)] = ints(own)
            for position in range(length):
                place = cache[own[position // page], :, position % page]
                place[0], place[1] = self.keys[request][position], self.values[request][position]
        self.cache = cache if layout == "NHD" else cache.transpose(2, 3).contiguous()
        self.query = torch.randn(sum(query_lens), heads, size, generator=draw).to(dtype)
        self.out = torch.full(self.query.shape, torch.nan, dtype=torch.bfloat16 if dtype == E4M3 else dtype)
        self.lse = torch.full(self.query.shape[:2], torch.nan)

    def on(self, device: str) -> Batch:
        """Return the batch with what a GPU holds on ``device``; the lists that plans read stay on the host."""
        moved = copy.copy(self)
        for name in ("indices", "table", "cache", "query", "out", "lse"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    @property
    def lists(self) -> tuple[Any, ...]:
        return self.qo_indptr, self.indptr, self.indices, self.last

    @property
    def shape(self) -> tuple[int, ...]:
        return self.heads, self.kv_heads, self.size, self.page

    def reference(self, scale: float, k_scale: float = 1.0, v_scale: float = 1.0, **options: Any) -> tuple[Any, Any]:
        """Return what the oracle says, the LSE in base 2 with the library's number for rows without keys."""
        parts = []
        for request in range(len(self.seq_lens)):
            rows = slice(*self.qo_indptr[request : request + 2].tolist())
            keys, values = self.keys[request].double() * k_scale, self.values[request].double() * v_scale
            parts.append(attention_reference(self.query[rows].double(), keys, values, scale=scale, **options))
        out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
        return out, torch.where(lse.isneginf(), -5e4, lse / math.log(2.0))


def workspace(size: int = 16 << 20) -> Any:
    return torch.zeros(size, dtype=torch.uint8)


def packed(rows: list[list[int]]) -> Any:
    words = [sum(bit << place for place, bit in enumerate(row)) for row in rows]
    return torch.tensor([[word & 0xFFFF, word >> 16] for word in words], dtype=torch.uint16)


def draft_mask(requests: int, drafts: int) -> Any:
    """Return the causal mask of drafts as XQA takes it."""
    rows = [[int(seen <= row) for seen in range(drafts)] for row in range(drafts)]
    return torch.stack([packed(rows)] * requests)
