"""Contexts of 128 Ki tokens on a GPU, in blocks of random order, against float64: decode, prefill, extension, MLA.

Outputs, workspaces, slots behind a sequence's end and a block of nobody, to which unused table entries lead, hold NaN.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
from one_decode import decode_attention
from triton_mla_layers import listed

from attn_select.testing import lse_error, relative_error
from attn_select_triton.kernels import cache, decode, launch, mla_decode, prefill
from attn_select_triton.kernels.launch import FP8, Terms

pytestmark = pytest.mark.gpu

LONGEST = 131072
ROWS = 2048
"""Query rows, tokens x heads of a group, that the reference takes at a time: 2 GiB of scores."""
SAMPLED = 24
"""Tokens of a request that are compared, its first and last among them."""
DECODES = [(1, LONGEST), (1, 0), (4, LONGEST - 1), (1, 1), (2, 15), (1, 16), (3, 17), (0, 40), (1, 65535), (1, 65536)]
EXTENSIONS = [(512, LONGEST), (1, 0), (64, 64), (65, 65), (1, 4097), (0, 100), (200, LONGEST - 63), (63, 128), (16, 16)]
MLA_DECODES = [(1, LONGEST), (1, 0), (2, LONGEST - 1), (1, 63), (1, 64), (2, 65), (0, 40), (1, 65536)]


class Batch:
    """Requests ``(query_len, seq_len)`` over one paged cache of ``width`` numbers per KV head and token.

    ``cache`` is ``(num_blocks, block_size, kv_heads, width)``.
    """

    def __init__(
        self, requests: list[tuple[int, int]], kv_heads: int, width: int, block_size: int, dtype: torch.dtype
    ) -> None:
        draw = torch.Generator("cuda").manual_seed(len(requests))
        self.requests = requests
        needed = [-(-seq_len // block_size) for _, seq_len in requests]
        blocks = torch.randperm(sum(needed) + 1, generator=draw, device="cuda").int()
        self.table = blocks[-1].expand(len(requests), max(needed) + 1).clone()
        numbers = torch.randn(len(blocks), block_size, kv_heads, width, generator=draw, device="cuda")
        for row, mine, (_, seq_len) in zip(self.table, blocks[:-1].split(needed), requests, strict=True):
            row[: len(mine)] = mine
            if seq_len % block_size:
                numbers[mine[-1], seq_len % block_size :] = torch.nan
        numbers[blocks[-1]] = torch.nan
        self.cache = numbers.to(dtype)
        del numbers
        starts = torch.tensor([0, *(query_len for query_len, _ in requests)]).cumsum(0)
        self.starts = starts.int().cuda()
        self.seq_lens = torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32, device="cuda")
        self.tokens, self.max_query_len = int(starts[-1]), max(query_len for query_len, _ in requests)
        self.batch = {"query_start_loc": self.starts, "seq_lens": self.seq_lens}

    def rows(self, request: int) -> torch.Tensor:
        """Return a request's keys and values ``(seq_len, kv_heads, width)`` in float64."""
        _, seq_len = self.requests[request]
        pages = -(-seq_len // self.cache.shape[1])
        return self.cache[self.table[request, :pages].long()].flatten(0, 1)[:seq_len].double()

    def check(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        key_size: int,
        values: slice,
        window: int = 0,
    ) -> None:
        """Compare with causal attention: the cache's first ``key_size`` columns are keys, ``values`` the values."""
        assert output.isfinite().all()
        assert not lse.isnan().any()
        start = 0
        for request, (query_len, _) in enumerate(self.requests):
            picked = torch.linspace(0, max(query_len - 1, 0), min(query_len, SAMPLED)).long().unique()
            mine = start + picked.to(query.device)
            start += query_len
            if query_len == 0:
                continue
            wanted, wanted_lse = self.reference(request, query[mine].double(), picked, key_size, values, window)
            assert relative_error(output[mine], wanted).row < 1e-2, (request, self.requests[request])
            assert lse_error(lse[mine], wanted_lse) < 5e-3, (request, self.requests[request])

    def reference(
        self, request: int, query: torch.Tensor, tokens: torch.Tensor, key_size: int, values: slice, window: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output ``(n, heads, size)`` and LSE ``(n, heads)`` in float64 of some tokens of a request."""
        query_len, seq_len = self.requests[request]
        numbers = self.rows(request)
        heads, kv_heads = query.shape[1], numbers.shape[1]
        group = heads // kv_heads
        positions = (seq_len - query_len + tokens).to(query.device).repeat_interleave(group)
        keys = torch.arange(seq_len, device=query.device)
        outputs, lses = [], []
        for head in range(kv_heads):
            rows = query[:, head * group : (head + 1) * group].flatten(0, 1)
            parts = []
            for some, position in zip(rows.split(ROWS), positions.split(ROWS), strict=True):
                scores = some @ numbers[:, head, :key_size].T * key_size**-0.5
                scores.masked_fill_(keys > position[:, None], -torch.inf)
                if window:
                    scores.masked_fill_(keys <= position[:, None] - window, -torch.inf)
                one = torch.logsumexp(scores, 1) if seq_len else scores.new_full((len(some),), -torch.inf)
                weights = (scores - one[:, None]).exp_().nan_to_num_(0.0)
                parts.append((weights @ numbers[:, head, values], one))
            outputs.append(torch.cat([part for part, _ in parts]).unflatten(0, (len(tokens), group)))
            lses.append(torch.cat([one for _, one in parts]).unflatten(0, (len(tokens), group)))
        return torch.cat(outputs, 1), torch.cat(lses, 1)

    def poisoned(self, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an output ``(tokens, heads, size)`` and an LSE that hold NaN."""
        output = torch.full((self.tokens, heads, size), torch.nan, dtype=torch.bfloat16, device="cuda")
        return output, torch.full((self.tokens, heads), torch.nan, device="cuda")


def halves(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    size = batch.cache.shape[-1] // 2
    return batch.cache[..., :size], batch.cache[..., size:]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (14, 2), (71, 1)])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kind", ["plain", "fixed", "window", "fp8"])
def test_decode(size: int, heads: int, kv_heads: int, block_size: int, kind: str) -> None:
    batch = Batch(DECODES, kv_heads, 2 * size, block_size, FP8[0] if kind == "fp8" else torch.bfloat16)
    key, value = halves(batch)
    query, window = drawn(batch.tokens, heads, size), 4096 if kind == "window" else 0
    output, lse = batch.poisoned(heads, size)
    keys = window + batch.max_query_len if window else LONGEST
    gpu, cache = launch.gpu_of(query.device), key.dtype
    rows, programs = heads // kv_heads * batch.max_query_len, len(DECODES) * kv_heads
    used = launch.decode_launch(gpu.capability, rows, size, query.dtype, cache, programs / gpu.sms)
    splits = launch.num_splits_for(programs, keys, gpu, used, 2 * size * cache.itemsize, 4)
    split_tokens = 0
    if kind == "fixed":
        splits, split_tokens = LONGEST // 2048, 2048
    room = decode.decode_workspace(batch.max_query_len, heads, size, len(DECODES) * splits)
    work = torch.full((room,), torch.nan, device="cuda")
    decode_attention(
        query, key, value, output, **batch.batch, block_table=batch.table, max_query_len=batch.max_query_len,
        scale=size**-0.5, num_splits=splits, split_tokens=split_tokens, workspace=work, terms=Terms(window=window),
        output_lse=lse,
    )  # fmt: skip
    batch.check(query, output, lse, size, slice(size, None), window)


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (14, 2), (71, 1)])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kind", ["paged", "gathered", "window"])
def test_extension(size: int, heads: int, kv_heads: int, block_size: int, kind: str) -> None:
    batch = Batch(EXTENSIONS, kv_heads, 2 * size, block_size, torch.bfloat16)
    key, value = halves(batch)
    query, window = drawn(batch.tokens, heads, size), 4096 if kind == "window" else 0
    output, lse = batch.poisoned(heads, size)
    where: dict[str, Any] = {"block_table": batch.table}
    if kind != "paged":
        spans = -(-batch.seq_lens // cache.GATHER_ALIGN) * cache.GATHER_ALIGN
        starts = (spans.cumsum(0) - spans).int()
        rows = torch.full((2, int(spans.sum()), kv_heads, size), torch.nan, dtype=torch.bfloat16, device="cuda")
        cache.gather_pages(
            key, value, rows[0], rows[1], block_table=batch.table, **batch.batch, key_start_loc=starts,
            max_keys=LONGEST, window=window,
        )  # fmt: skip
        (key, value), where = rows.unbind(0), {"key_start_loc": starts, "clean": True}
    prefill.prefill_attention(
        query, key, value, output, **batch.batch, max_seq_len=LONGEST, scale=size**-0.5, terms=Terms(window=window),
        output_lse=lse, **where,
    )  # fmt: skip
    batch.check(query, output, lse, size, slice(size, None), window)


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_whole_prompt(size: int, block_size: int) -> None:
    batch = Batch([(LONGEST, LONGEST)], 1, 2 * size, block_size, torch.bfloat16)
    key, value = halves(batch)
    query = drawn(LONGEST, 2, size)
    output, lse = batch.poisoned(2, size)
    prefill.prefill_attention(
        query, key, value, output, **batch.batch, max_seq_len=LONGEST, scale=size**-0.5, block_table=batch.table,
        output_lse=lse,
    )  # fmt: skip
    batch.check(query, output, lse, size, slice(size, None))


@pytest.mark.parametrize("heads", [1, 16, 71, 128])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8[0]], ids=str)
def test_mla_decode(heads: int, block_size: int, fixed: bool, dtype: torch.dtype) -> None:
    rank, rope = 512, 64
    batch = Batch(MLA_DECODES, 1, rank + rope, block_size, dtype)
    query = drawn(batch.tokens, heads, rank + rope)
    output, lse = batch.poisoned(heads, rank)
    capability, rows = torch.cuda.get_device_capability(), heads * batch.max_query_len
    chosen = mla_decode.mla_launch(capability, rows, rank, rope, block_size, query.dtype, dtype)
    tiles = len(MLA_DECODES) * -(-rows // chosen.block_m)
    splits = mla_decode.mla_num_splits(tiles, LONGEST, launch.sm_count(query.device))
    split: dict[str, Any] = {"num_splits": splits}
    if fixed:
        splits = LONGEST // 8192
        split = listed(batch.starts, batch.seq_lens, splits, 8192)
    size = len(MLA_DECODES) * splits * mla_decode.mla_workspace(batch.max_query_len, heads, rank)
    mla_decode.mla_decode(
        query, batch.cache.squeeze(2), output, **batch.batch, block_table=batch.table, launch=chosen,
        max_query_len=batch.max_query_len, scale=(rank + rope) ** -0.5, output_lse=lse,
        workspace=torch.full((size,), torch.nan, device="cuda"), **split,
    )  # fmt: skip
    if chosen.hopper and dtype != torch.bfloat16:
        query = query.to(dtype).bfloat16()  # as the kernel rounds it: of a zero-mean context 2.7 % alone
    batch.check(query, output, lse, rank + rope, slice(0, rank))
