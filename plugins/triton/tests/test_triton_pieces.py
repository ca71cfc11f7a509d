"""The list of pieces that programs of a decode attend to."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select_triton.kernels.pieces import FIELDS, list_pieces

pytestmark = pytest.mark.long


def wanted(queries: list[int], lens: list[int], tokens: int, most: int, reach: int) -> list[list[int]]:
    """Return the pieces in their order, each as request, split, splits, slot, first query, queries and keys."""
    found, slot, start = [], 0, 0
    for request, (query_len, seq_len) in enumerate(zip(queries, lens, strict=True)):
        keys = min(seq_len, query_len - 1 + reach) if reach else seq_len
        splits = max(1, min(-(-keys // tokens), most)) if query_len else 0
        for split in range(splits):
            found.append((-(-keys // splits), [request, split, splits, slot, start, query_len, seq_len]))
        slot += splits if splits > 1 else 0
        start += query_len
    return [piece for _, piece in sorted(found, key=lambda one: -one[0])]


@pytest.mark.parametrize("count", [1, 5, 32, 75])
@pytest.mark.parametrize(("tokens", "most", "reach"), [(64, 100, 0), (100, 3, 0), (50, 100, 300)])
def test_long_pieces_come_first(count: int, tokens: int, most: int, reach: int, device: torch.device) -> None:
    rng = random.Random(count)
    queries = [rng.choice([0, 1, 1, 1, 4]) for _ in range(count - 1)] + [1]
    lens = [query_len + rng.choice([0, 1, 60, 200, 1000]) for query_len in queries]
    expected = wanted(queries, lens, tokens, most, reach)
    start = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    cut = sorted(piece for piece in expected if piece[1] == 0 and piece[2] > 1)
    capacity, merges = len(expected) + 40, len(cut) + 40
    pieces = torch.full((capacity + merges, FIELDS.value), 7, dtype=torch.int32, device=device)
    found = list_pieces(
        start, torch.tensor(lens, dtype=torch.int32, device=device), capacity=capacity, split_tokens=tokens,
        most_splits=most, reach=reach, merges=merges, pieces=pieces,
    )  # fmt: skip
    assert found.data_ptr() == pieces.data_ptr()
    assert found[: len(expected), :7].tolist() == expected
    assert found[len(expected) : capacity, 0].eq(-1).all()
    behind = found[capacity:]
    assert behind[: len(cut), :7].tolist() == cut
    assert behind[len(cut) :, 0].eq(-1).all()
