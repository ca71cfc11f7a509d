"""From an attention mask to runs: queries that lie side by side and whose keys a kernel can count out by itself.

A kernel knows where a request's keys begin and end, whether it is causal, and a window; it takes no mask. A mask that
consists of such requests is read into them here, exactly: each row's keys must be one interval, and neighbouring rows
must follow from each other. Any other mask is ``None``, and the caller decides what happens to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOST_COPIES = 4
"""Of the keys that a mask may ask for, where its requests begin at different keys."""


@dataclass(slots=True, frozen=True)
class Run:
    """Queries of one sequence of the batch that lie side by side, and the keys that they see."""

    # Rows are ``first_row .. last_row - 1``, keys ``first_key .. last_key - 1``. The last query sees the last key;
    # each query before it sees one key less, except where ``full`` says that all see all.

    sequence: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int
    full: bool

    @property
    def rows(self) -> int:
        """Number of queries."""
        return self.last_row - self.first_row


@dataclass(slots=True, frozen=True, eq=False)
class Runs:
    """A whole call's attention as runs; compared by identity, so that metadata can be kept for it."""

    # In order of sequence and row.
    runs: tuple[Run, ...]
    # Tokens that a query sees, itself included, where the mask shows a window; else None.
    window: int | None
    # The most keys that a query sees.
    widest: int
    # B of the dense tensors.
    sequences: int
    # Rows and keys of the dense tensors, per sequence.
    rows: int
    keys: int
    # Whether runs of several queries see all their keys; else they are causal.
    bidirectional: bool


@functools.lru_cache(64)
def without_mask(sequences: int, rows: int, keys: int, causal: bool) -> Runs:
    """Return the runs of a call without a mask, as transformers' sdpa attention reads it."""
    # One query sees all keys. Causal queries see the first ``rows`` keys alone: a static cache that holds nothing yet.
    causal = causal and rows > 1
    seen = min(rows, keys) if causal else keys
    runs = tuple(Run(sequence, 0, rows, 0, seen, full=rows > 1 and not causal) for sequence in range(sequences))
    return Runs(runs, None, seen, sequences, rows, keys, bidirectional=rows > 1 and not causal)


def read_mask(mask: Tensor, sequences: int) -> Runs | None:
    """Return what a 4-D mask says as runs; None where it says something else. Reads the mask back once."""
    # It is ``(B or 1, H or 1, rows, keys)``: boolean, True where a query sees a key, or floating and added to the
    # scores, 0 where it does and at most half the dtype's least number where it does not.
    seen = _boolean(mask)
    if seen is None or seen.shape[0] not in (1, sequences):
        return None
    rows, keys = seen.shape[1:]
    if not rows or not keys:
        return None
    counts = seen.sum(-1, dtype=torch.int32)
    # argmax finds the first of equal numbers: the first seen key, and from the other end the last one.
    ints = seen.to(torch.int8)
    firsts = ints.argmax(-1).to(torch.int32)
    lasts = keys - ints.flip(-1).argmax(-1).to(torch.int32)
    # One copy for all three: each would make the host wait.
    counts, firsts, lasts = torch.stack((counts, firsts, lasts)).cpu().unbind(0)
    if not torch.equal(counts, torch.where(counts > 0, lasts - firsts, 0)):
        return None  # a row with a hole
    found: list[Run] = []
    windows: set[int] = set()
    for sequence, (count, first, last) in enumerate(zip(counts, firsts, lasts, strict=True)):
        for run, window in _runs_of(sequence, count, first, last):
            found.append(run)
            if window is not None:
                windows.add(window)
    widest = int(counts.max())
    if len(windows) > 1 or (windows and widest > min(windows)):
        return None
    several = [run for run in found if run.rows > 1]
    bidirectional = bool(several) and all(run.full for run in several)
    if not bidirectional:  # pad queries behind a prompt see what its last query sees: one request each
        found = [part for run in found for part in _one_by_one(run)]
    if len(counts) < sequences:
        found = [replace(run, sequence=sequence) for sequence in range(sequences) for run in found]
    if sum(run.last_key - run.first_key for run in _holders(found)) > MOST_COPIES * sequences * keys:
        return None
    return Runs(tuple(found), min(windows, default=None), widest, sequences, rows, keys, bidirectional)


def _boolean(mask: Tensor) -> Tensor | None:
    """Return the mask as booleans without the axis of heads, or None where it is neither a mask nor shared by heads."""
    if mask.ndim != 4 or (mask.shape[1] != 1 and mask.stride(1) != 0):
        return None
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return seen if bool((seen | hidden).all()) else None


def _runs_of(sequence: int, count: Tensor, first: Tensor, last: Tensor) -> Iterator[tuple[Run, int | None]]:
    """Yield one sequence's runs, each with the window that it shows, if any. Rows without keys are left out."""
    # How the last and the first key move from row to row. In causal rows the last key moves by one, and the first
    # stays, or moves with it (a window).
    moved, began = last.diff(), first.diff()
    both = (count[1:] > 0) & (count[:-1] > 0)
    causal = both & (moved == 1) & ((began == 0) | (began == 1))
    # Once a window moves it goes on moving.
    causal[1:] &= ~((began[1:] == 0) & (began[:-1] == 1) & causal[:-1])
    full = both & (moved == 0) & (began == 0)
    kinds = (causal.to(torch.int8) + 2 * full.to(torch.int8)).tolist()
    firsts, lasts, counts = first.tolist(), last.tolist(), count.tolist()
    start, kind = 0, 0
    for row in range(1, len(counts) + 1):
        step = kinds[row - 1] if row < len(counts) else 0
        if step and kind in (0, step):
            kind = step
            continue
        if counts[start]:
            end = row - 1
            run = Run(sequence, start, row, firsts[start], lasts[end], full=kind == 2)
            yield run, counts[end] if firsts[end] != firsts[start] else None
        start, kind = row, 0


def _one_by_one(run: Run) -> Iterator[Run]:
    if not run.full or run.rows == 1:
        yield run
        return
    for row in range(run.first_row, run.last_row):
        yield Run(run.sequence, row, row + 1, run.first_key, run.last_key, full=False)


def _holders(runs: list[Run]) -> list[Run]:
    """Return per sequence and first key the run with the most keys."""
    longest: dict[tuple[int, int], Run] = {}
    for run in runs:
        key = (run.sequence, run.first_key)
        if key not in longest or longest[key].last_key < run.last_key:
            longest[key] = run
    return list(longest.values())


def holders(runs: Runs) -> dict[tuple[int, int], int]:
    """Return per ``(sequence, first_key)`` how many keys have to be held for the runs that begin there."""
    return {(r.sequence, r.first_key): r.last_key - r.first_key for r in _holders(list(runs.runs))}
