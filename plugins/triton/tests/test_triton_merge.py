"""Merging partial results: two states, and the pieces of a decode."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.testing import lse_error, merge_reference, relative_error, same_bits
from attn_select_triton.kernels import merge
from attn_select_triton.kernels.launch import power_of_two
from attn_select_triton.kernels.work_list import list_work

INF = float("inf")
CHUNK = 16


def states(tokens: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return two outputs and two LSEs, some of them empty with NaN in the output."""
    torch.manual_seed(0)
    outputs = [torch.randn(tokens, heads, size).to(device, dtype) for _ in range(2)]
    lses = [3 * torch.randn(tokens, heads).to(device) for _ in range(2)]
    for part, (first, last) in enumerate(((0, 2), (1, 3))):
        lses[part][first:last] = -INF
        outputs[part][first:last] = torch.nan
    return [*outputs, *lses]


def check(output: torch.Tensor, lse: torch.Tensor, parts: list[torch.Tensor]) -> None:
    wanted, wanted_lse = merge_reference(parts[:2], parts[2:])
    assert relative_error(output, wanted).row < (1e-6 if output.dtype == torch.float32 else 1e-2)
    assert lse_error(lse, wanted_lse) < 1e-5


@pytest.mark.parametrize("size", [32, 40, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_states(size: int, dtype: torch.dtype, device: torch.device) -> None:
    parts = states(7, 3, size, dtype, device)
    output, lse = torch.full_like(parts[0], torch.nan), torch.full_like(parts[2], torch.nan)
    merge.merge_attn_states(output, parts[0], parts[2], parts[1], parts[3], lse)
    check(output, lse, parts)
    assert (output[1] == 0).all()
    assert (lse[1] == -INF).all()


def test_in_place_strided_and_without_lse(device: torch.device) -> None:
    parts = states(5, 4, 32, torch.float32, device)
    wanted, wanted_lse = merge_reference(parts[:2], parts[2:])
    wide = torch.cat([parts[0], parts[1]], dim=-1)
    lses = [lse.T.contiguous().T for lse in parts[2:]]
    merge.merge_attn_states(wide[..., :32], wide[..., :32], lses[0], wide[..., 32:], lses[1])
    assert relative_error(wide[..., :32], wanted).row < 1e-6
    assert same_bits(wide[..., 32:].contiguous(), parts[1])
    merge.merge_attn_states(parts[0], parts[0], lses[0], parts[1], lses[1], lses[0])
    assert lse_error(lses[0], wanted_lse) < 1e-5


def test_nothing_to_merge(device: torch.device) -> None:
    outputs, lses = torch.ones(4, 2, 32, device=device), torch.ones(4, 2, device=device)
    none, lse = outputs[:0], lses[:0]
    merge.merge_attn_states(none, none, lse, none, lse, lse)
    assert outputs.eq(1).all()
    assert lses.eq(1).all()


def merge_pieces(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    starts: list[int],
    pieces: torch.Tensor | None = None,
) -> None:
    """Merge float32 partials ``(slots, rows, Dv)`` with LSEs ``(slots, rows)``, as a decode launches it.

    Args:
        starts: of the requests' tokens.
        pieces: of the requests in several pieces; None: all have as many.
    """
    _, heads, size = output.shape
    requests, start = len(starts) - 1, torch.tensor(starts, dtype=torch.int32, device=output.device)
    count = requests if pieces is None else len(pieces)
    merge.merge_pieces_kernel[(parts.shape[1], min(count, 2))](
        parts, part_lse, output, None, lse, pieces, start, torch.zeros_like(start), 0, count, len(parts) // requests,
        output.stride(0), output.stride(1), heads, size, power_of_two(size), CHUNK,
        num_warps=4,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [2, 5, CHUNK, CHUNK + 3])
def test_pieces_of_requests_that_have_as_many(splits: int, device: torch.device) -> None:
    torch.manual_seed(splits)
    parts, lses = torch.randn(3, splits, 2, 40).to(device), 3 * torch.randn(3, splits, 2).to(device)
    lses[0, :, 0] = -INF
    lses[1, 1:] = -INF
    lses[2, 0, 1] = -INF
    parts[lses == -INF] = torch.nan
    wanted, wanted_lse = merge_reference(list(parts.unbind(1)), list(lses.unbind(1)))
    output, lse = torch.full((3, 2, 40), torch.nan, device=device), torch.full((3, 2), torch.nan, device=device)
    merge_pieces(parts.flatten(0, 1), lses.flatten(0, 1), output, lse, [0, 1, 2, 3])
    assert relative_error(output, wanted).row < 1e-6
    assert lse_error(lse, wanted_lse) < 1e-5


def test_pieces_of_requests_that_have_different_numbers(device: torch.device) -> None:
    """Two, one, none, 20 and six, of 2, 1, 0, 3 and 1 tokens; rows of one piece and slots that no piece has stay."""
    torch.manual_seed(1)
    tokens, splits, heads, size = [2, 1, 0, 3, 1], [2, 1, 0, 20, 6], 2, 32
    starts = torch.tensor([0, *tokens]).cumsum(0).tolist()
    slots = [0, 0, 0, 2, 22]
    parts, lses = torch.full((40, 3 * heads, size), torch.nan), torch.full((40, 3 * heads), torch.nan)
    output, lse = torch.full((7, heads, size), torch.nan), torch.full((7, heads), torch.nan)
    wanted, wanted_lse = output.clone(), lse.clone()
    listed = []
    for request, (count, own, slot) in enumerate(zip(tokens, splits, slots, strict=True)):
        if own < 2:
            continue
        rows = count * heads
        parts[slot : slot + own, :rows] = torch.randn(own, rows, size)
        lses[slot : slot + own, :rows] = 3 * torch.randn(own, rows)
        some = slice(starts[request], starts[request + 1])
        merged = merge_reference(list(parts[slot : slot + own, :rows]), list(lses[slot : slot + own, :rows]))
        wanted[some], wanted_lse[some] = (each.float().unflatten(0, (count, heads)) for each in merged)
        listed.append([request, 0, own, slot, starts[request], count, 0, 0])
    listed.append([-1] + [7] * 7)
    pieces = torch.tensor(listed, dtype=torch.int32, device=device)
    parts, lses, output, lse = (each.to(device) for each in (parts, lses, output, lse))
    merge_pieces(parts, lses, output, lse, starts, pieces)
    assert output[2].isnan().all()
    assert lse[2].isnan().all()
    there = [0, 1, 3, 4, 5, 6]
    assert relative_error(output[there], wanted[there].double()).row < 1e-6
    assert lse_error(lse[there], wanted_lse[there].double()) < 1e-5
    for only in range(len(listed) - 1):
        alone = torch.full_like(output, torch.nan)
        merge_pieces(parts, lses, alone, None, starts, pieces[only : only + 1])
        rows = slice(listed[only][4], listed[only][4] + listed[only][5])
        assert same_bits(alone[rows], output[rows])
        assert alone.isnan().sum() == alone.numel() - alone[rows].numel()


@pytest.mark.parametrize("size", [64, 40])
def test_shares_of_requests_that_are_cut(size: int, device: torch.device) -> None:
    """Of 4 requests two are cut, into 2 and 11 shares; rows of the others are left alone."""
    torch.manual_seed(size)
    lens, shares = [3, 2, 4, 1], [1, 2, 1, 11]
    work = list_work(lens, shares, heads=(3, 3), tile_rows=16, device=device)
    assert work.partials == 2 * 6 + 11 * 3
    parts = torch.randn(work.partials, size, device=device)
    lses = 3 * torch.randn(work.partials, device=device)
    lses[1], lses[6:12], lses[14:] = -INF, -INF, -INF
    lses[18] = 2.0
    parts[lses == -INF] = 0.0
    starts = torch.tensor([0, 3, 5, 9, 10], dtype=torch.int32, device=device)
    for given in (True, False):
        output, lse = torch.full((10, 3, size), torch.nan, device=device), torch.full((10, 3), torch.nan, device=device)
        merge.merge_shares(parts, lses, output, None, lse if given else None, starts, work)
        for first, rows, begin, count in ((3, 2, 0, 2), (9, 1, 12, 11)):
            end = begin + count * rows * 3
            wanted, wanted_lse = merge_reference(
                list(parts[begin:end].view(count, rows, 3, size)), list(lses[begin:end].view(count, rows, 3))
            )
            assert relative_error(output[first : first + rows], wanted).row < 1e-6
            assert not given or lse_error(lse[first : first + rows], wanted_lse) < 1e-5
        assert output[:3].isnan().all()
        assert output[5:9].isnan().all()
