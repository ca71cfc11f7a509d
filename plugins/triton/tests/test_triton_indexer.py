"""The sparse indexer's kernels against torch's form and float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
from torch import Tensor

from attn_select.reference.oracle_indexer import index_scores_reference, wrong_choice
from attn_select.runtime import torch_indexer
from attn_select.runtime.torch_indexer import IndexedRows
from attn_select_triton.kernels import indexer
from attn_select_triton.runtime import op_kernels

BLOCK = 16
REQUESTS = ((1, 150), (3, 70), (1, 20), (4, 4), (2, 0), (1, 33))
HELD = torch.tensor([-3.0, -1.75, -1.0, -0.5, 0.0, 0.25, 0.75, 1.5, 2.5])


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers, off a GPU those that FP8 holds: the interpreter's cast loses the carry of rounding."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    if device.type == "cpu":
        drawn = HELD[(drawn.abs() * 1000).int() % len(HELD)]
    return drawn.to(device, dtype)


class Batch:
    """Requests in random blocks between poison, their keys cached by torch's form."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        size: int,
        cache: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.requests, self.device, self.fp8 = requests, device, cache == torch.uint8
        width = size + 4 if self.fp8 else size
        needed = [-(-length // BLOCK) for _, length in requests]
        blocks = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(1)).int()
        self.table = torch.full((len(requests), max(needed) + 1), int(blocks[-1]), dtype=torch.int32)
        for row, part in zip(self.table, blocks.split([*needed, 2]), strict=False):
            row[: len(part)] = part
        self.table = self.table.to(device)
        self.cache = torch.empty(len(blocks), BLOCK, width, dtype=cache, device=device)
        self.cache.view(torch.uint8).fill_(0xFF)
        self.keys = [numbers(device, length, size, dtype=dtype) for _, length in requests]
        for row, keys in enumerate(self.keys):
            torch_indexer.indexer_k_quant_and_cache(keys, self.cache, self.slots(row))
        counts = [count for count, _ in requests]
        self.bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
        num_keys = [max(0, length - count + i + 1) for count, length in requests for i in range(count)]
        owner = [row for row, count in enumerate(counts) for _ in range(count)]
        self.rows = IndexedRows(
            torch.tensor(owner, dtype=torch.int32, device=device),
            torch.tensor(num_keys, dtype=torch.int32, device=device),
            self.table,
            self.bounds,
            [length for _, length in requests],
            max(length for _, length in requests),
        )

    def slots(self, row: int) -> Tensor:
        position = torch.arange(self.requests[row][1], device=self.device)
        return self.table[row][position // BLOCK].long() * BLOCK + position % BLOCK

    def check(self, query: Tensor, weights: Tensor, chosen: Tensor, tie: float) -> None:
        top_k = chosen.shape[1]
        for row, (count, _) in enumerate(self.requests):
            tokens = slice(self.bounds[row], self.bounds[row] + count)
            scores = index_scores_reference(query[tokens], weights[tokens], self.keys[row], fp8=self.fp8)
            slots = self.slots(row)
            for token in range(tokens.start, tokens.stop):
                num_keys = int(self.rows.num_keys[token])
                found = chosen[token][: min(top_k, num_keys)]
                assert bool((chosen[token][len(found) :] == -1).all()), f"request {row}, token {token}"
                if not num_keys:
                    continue
                places = (found[:, None] == slots).int()
                assert bool((places.sum(1) == 1).all()), f"request {row}, token {token}: slots of another request"
                wrong = wrong_choice(places.argmax(1), scores[token - tokens.start], num_keys, top_k, tie=tie)
                assert wrong is None, f"request {row}, token {token}: {wrong}"


@pytest.mark.parametrize(
    ("cache", "dtype"),
    [(torch.uint8, torch.bfloat16), (torch.uint8, torch.float32), (torch.float32, torch.float32)],
    ids=["fp8-bfloat16", "fp8-float32", "float32"],
)
@pytest.mark.parametrize(("heads", "size", "top_k"), [(4, 32, 16), (20, 48, 30)])
def test_the_best_tokens_are_chosen(
    cache: torch.dtype,
    dtype: torch.dtype,
    heads: int,
    size: int,
    top_k: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":  # several steps of each loop
        monkeypatch.setattr(indexer, "KEYS", 64)
        monkeypatch.setattr(indexer, "BLOCK_N", 32)
        monkeypatch.setattr(indexer, "TOPK_BLOCK", 64)
    batch = Batch(REQUESTS, size, cache, dtype, device)
    tokens = batch.bounds[-1]
    query = numbers(device, tokens, heads, size, dtype=dtype)
    weights = torch.randn(tokens, heads, generator=torch.Generator().manual_seed(2)).to(device)
    chosen = torch.full((tokens, top_k), -7, dtype=torch.int32, device=device)
    indexer.indexer_topk(query, weights, batch.cache, batch.rows, BLOCK, chosen)
    # A GPU's products of FP8 are summed in fewer bits than float32 has.
    batch.check(query, weights, chosen, tie=1e-3 if batch.fp8 and device.type == "cuda" else 1e-5)


def test_equal_scores_are_kept_from_the_first_on(device: torch.device) -> None:
    batch = Batch(((1, 100),), 32, torch.float32, torch.float32, device)
    query = torch.zeros(1, 4, 32, device=device)
    chosen = torch.empty(1, 40, dtype=torch.int32, device=device)
    indexer.indexer_topk(query, torch.ones(1, 4, device=device), batch.cache, batch.rows, BLOCK, chosen)
    assert chosen[0].tolist() == batch.slots(0)[:40].tolist()


def test_requests_without_keys_choose_nothing(device: torch.device) -> None:
    batch = Batch(((2, 0), (1, 0)), 32, torch.float32, torch.float32, device)
    chosen = torch.empty(3, 40, dtype=torch.int32, device=device)
    indexer.indexer_topk(
        numbers(device, 3, 4, 32), torch.ones(3, 4, device=device), batch.cache, batch.rows, BLOCK, chosen
    )
    assert bool((chosen == -1).all())


def test_negative_scores_are_in_order_too(device: torch.device) -> None:
    batch = Batch(((1, 100),), 32, torch.float32, torch.float32, device)
    query = numbers(device, 1, 4, 32)
    weights = torch.tensor([[-1.0, -0.5, 0.25, -2.0]], device=device)
    chosen = torch.empty(1, 40, dtype=torch.int32, device=device)
    indexer.indexer_topk(query, weights, batch.cache, batch.rows, BLOCK, chosen)
    batch.check(query, weights, chosen, tie=1e-5)


def test_few_scores_at_a_time_choose_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(REQUESTS, 32, torch.float32, torch.float32, device)
    query, weights = numbers(device, 12, 4, 32), torch.ones(12, 4, device=device)
    both = [torch.empty(12, 16, dtype=torch.int32, device=device) for _ in range(2)]
    for most, chosen in zip((2**26, 450), both, strict=True):
        monkeypatch.setattr(indexer, "MOST_LOGITS", most)
        indexer.indexer_topk(query, weights, batch.cache, batch.rows, BLOCK, chosen)
    assert torch.equal(*both)


@pytest.mark.parametrize("equal", [False, True])
def test_programs_that_share_long_rows_choose_the_same(
    equal: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(((2, 301), *REQUESTS), 32, torch.float32, torch.float32, device)
    query, weights = numbers(device, 14, 4, 32), torch.ones(14, 4, device=device)
    query *= not equal
    both = [torch.full((14, 40), -7, dtype=torch.int32, device=device) for _ in range(2)]
    monkeypatch.setattr(indexer, "TOPK_BLOCK", 32)
    monkeypatch.setattr(indexer, "CHUNK", 64)
    for longest, chosen in zip((1024, 16), both, strict=True):
        monkeypatch.setattr(indexer, "LONG", longest)
        indexer.indexer_topk(query, weights, batch.cache, batch.rows, BLOCK, chosen)
    assert torch.equal(*both)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [32, 48, 128])
def test_keys_are_cached_as_torch_caches_them(size: int, dtype: torch.dtype, device: torch.device) -> None:
    key = numbers(device, 21, size, dtype=dtype)
    key[3], key[4] = 0, key[4] * 2.0**9
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:21].to(device)
    slots[5] = -1
    both = [torch.full((3, BLOCK, size + 4), 0xFF, dtype=torch.uint8, device=device) for _ in range(2)]
    indexer.indexer_k_quant_and_cache(key, both[0], slots)
    torch_indexer.indexer_k_quant_and_cache(key, both[1], slots)
    assert torch.equal(*both)


@pytest.mark.parametrize(("capability", "taken"), [((7, 5), "torch_indexer"), ((8, 0), "indexer")])
def test_16_bit_scores_need_tensor_cores(
    capability: tuple[int, int], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(op_kernels, "capability_of", lambda _: capability)
    for name in ("indexer", "torch_indexer"):
        monkeypatch.setattr(getattr(op_kernels, name), "indexer_topk", lambda *_, name=name: called.append(name))
    index_cache = torch.empty(1, 16, 32, dtype=torch.bfloat16)
    rows = IndexedRows(*(torch.empty(1, dtype=torch.int32),) * 3, [0, 1], [1], 1)
    op_kernels.indexer_topk(index_cache, index_cache, index_cache, rows, 16, index_cache)
    assert called == [taken]
