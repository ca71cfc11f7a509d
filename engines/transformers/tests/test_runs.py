"""A mask is read exactly or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from attn_select_transformers.runs import Runs, read_mask, without_mask  # noqa: E402

ROWS = 12


def implied(runs: Runs, sequences: int) -> torch.Tensor:
    """What a kernel that is told of these runs lets each query see."""
    seen = torch.zeros(sequences, runs.rows, runs.keys, dtype=torch.bool)
    for run in runs.runs:
        for row in range(run.first_row, run.last_row):
            last = run.last_key if runs.bidirectional else run.last_key - (run.last_row - 1 - row)
            first = run.first_key if runs.window is None else max(run.first_key, last - runs.window)
            assert not seen[run.sequence, row].any(), "a query in two runs"
            seen[run.sequence, row, first:last] = True
    return seen


def causal(rows: int = ROWS, keys: int = ROWS) -> torch.Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def windowed(window: int, rows: int = ROWS, keys: int = ROWS) -> torch.Tensor:
    return causal(rows, keys) & ~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows - window)


def left_padded(mask: torch.Tensor) -> torch.Tensor:
    pads = (torch.arange(ROWS) >= torch.tensor([0, 3, 11])[:, None])[:, None]
    return mask & pads


def right_padded(mask: torch.Tensor) -> torch.Tensor:
    pads = (torch.arange(ROWS) < torch.tensor([12, 9, 1])[:, None])[:, None]
    return mask & pads


def chunked(size: int) -> torch.Tensor:
    chunk = torch.arange(ROWS) // size
    return causal() & (chunk[:, None] == chunk)


def prefix(length: int) -> torch.Tensor:
    """Image tokens at the start see each other, as in PaliGemma."""
    return causal() | ((torch.arange(ROWS) < length) & (torch.arange(ROWS)[:, None] < length))


READ: dict[str, Callable[[], torch.Tensor]] = {
    "causal": lambda: causal()[None],
    "a chunk of a prompt": lambda: causal(5, 12)[None],
    "a decode": lambda: causal(1, 12)[None],
    "a decode in a static cache": lambda: (torch.arange(20) < 7)[None, None],
    "window": lambda: windowed(4)[None],
    "a window and a chunk": lambda: windowed(4, 5, 12)[None],
    "padded on the left": lambda: left_padded(causal()),
    "padded on the left, a window": lambda: left_padded(windowed(4)),
    "padded on the right": lambda: right_padded(causal()),
    "whole": lambda: torch.ones(3, ROWS, ROWS, dtype=torch.bool),
    "whole, padded": lambda: right_padded(torch.ones(ROWS, ROWS, dtype=torch.bool)),
    "cross": lambda: torch.ones(3, 4, ROWS, dtype=torch.bool),
    "chunks": lambda: chunked(5)[None],
    "a prefix": lambda: prefix(5)[None],
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("additive", [False, True])
def test_masks_that_kernels_express(name: str, additive: bool) -> None:
    mask = READ[name]()
    given = torch.where(mask, 0.0, -torch.inf) if additive else mask
    runs = read_mask(given[:, None], len(mask))
    assert runs is not None
    assert torch.equal(implied(runs, len(mask)), mask)


def test_one_mask_for_all_sequences_and_heads() -> None:
    runs = read_mask(causal()[None, None].expand(1, 4, ROWS, ROWS), 3)
    assert runs is not None
    assert torch.equal(implied(runs, 3), causal().expand(3, ROWS, ROWS))
    assert len(runs.runs) == 3


NOT_READ: dict[str, Callable[[], torch.Tensor]] = {
    "a hole": lambda: (causal() & (torch.arange(ROWS) != 3))[None, None],
    "two windows": lambda: torch.stack((windowed(3), windowed(5)))[:, None],
    "a window beside none": lambda: torch.stack((windowed(3), causal()))[:, None],
    "a window that grows": lambda: (causal() & (torch.arange(ROWS) >= torch.arange(ROWS)[:, None] // 2))[None, None],
    "heads that differ": lambda: torch.stack((causal(), windowed(3)))[None],
    "a bias": lambda: torch.full((1, 1, ROWS, ROWS), -0.5),
    "numbers": lambda: causal().long()[None, None],
    "too few sequences": lambda: causal().expand(2, 1, ROWS, ROWS),
    "no keys": lambda: torch.ones(1, 1, ROWS, 0, dtype=torch.bool),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_masks_that_kernels_do_not_express(name: str) -> None:
    mask = NOT_READ[name]()
    assert read_mask(mask, 3 if name == "too few sequences" else len(mask)) is None


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_mask_is_read_exactly_or_not_at_all(seed: int) -> None:
    """Masks of intervals with a few changes of what follows from what."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    last = (torch.arange(ROWS) * draw(2, 1) + draw(3, 2, ROWS).cumsum(1) // 2).clamp(max=ROWS)
    first = (last - 1 - draw(5, 2, 1) * draw(2, 2, ROWS)).clamp(min=0) * draw(2, 1)
    keys = torch.arange(ROWS)
    mask = (keys >= first[..., None]) & (keys < last[..., None])
    runs = read_mask(mask[:, None], 2)
    if runs is not None:
        assert torch.equal(implied(runs, 2), mask)


@pytest.mark.parametrize(
    ("rows", "keys", "is_causal", "expected"),
    [
        (ROWS, ROWS, True, causal()),
        (5, ROWS, True, torch.ones(5, ROWS, dtype=torch.bool).tril()),  # a static cache that holds nothing yet
        (1, ROWS, True, torch.ones(1, ROWS, dtype=torch.bool)),
        (5, ROWS, False, torch.ones(5, ROWS, dtype=torch.bool)),
    ],
)
def test_no_mask_means_what_sdpa_takes_it_for(rows: int, keys: int, is_causal: bool, expected: torch.Tensor) -> None:
    assert torch.equal(implied(without_mask(2, rows, keys, is_causal), 2), expected.expand(2, rows, keys))
