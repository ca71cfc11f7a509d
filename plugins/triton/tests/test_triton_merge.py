"""Merging partial results: two states, and the splits of a decode."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.testing import lse_error, merge_reference, relative_error, same_bits
from attn_select_triton.kernels import merge
from attn_select_triton.kernels.launch import power_of_two

INF = float("inf")


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


def merge_splits(
    parts: torch.Tensor, part_lse: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """Merge float32 partials ``(T, H, splits, Dv)`` with LSEs ``(T, H, splits)``, as a decode launches it."""
    tokens, heads, size = output.shape
    merge.merge_splits_kernel[(tokens * heads,)](
        parts, part_lse, output, None, lse, parts.shape[2], output.stride(0), output.stride(1),
        heads, size, power_of_two(size), merge.MERGE_CHUNK, lse is not None, num_warps=4,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [2, merge.MERGE_CHUNK, merge.MERGE_CHUNK + 3])
def test_splits(splits: int, device: torch.device) -> None:
    torch.manual_seed(splits)
    parts, lses = torch.randn(3, 2, splits, 40).to(device), 3 * torch.randn(3, 2, splits).to(device)
    lses[0, 0] = -INF
    lses[1, :, 1:] = -INF
    lses[2, 1, 0] = -INF
    parts[lses == -INF] = torch.nan
    wanted, wanted_lse = merge_reference(list(parts.unbind(2)), list(lses.unbind(2)))
    output, lse = torch.full((3, 2, 40), torch.nan, device=device), torch.full((3, 2), torch.nan, device=device)
    merge_splits(parts, lses, output, lse)
    assert relative_error(output, wanted).row < 1e-6
    assert lse_error(lse, wanted_lse) < 1e-5


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("size", [64, 40])
def test_splits_of_many_rows(size: int, splits: int, device: torch.device) -> None:
    torch.manual_seed(splits)
    parts, lses = torch.randn(9, 3, splits, size).to(device), 3 * torch.randn(9, 3, splits).to(device)
    lses[0, 0] = -INF
    lses[1, :, 1:] = -INF
    lses[2, 1, 0] = -INF
    parts[lses == -INF] = torch.nan
    wanted, wanted_lse = merge_reference(list(parts.unbind(2)), list(lses.unbind(2)))
    output, lse = torch.full((10, 3, size), torch.nan, device=device), torch.full((10, 3), torch.nan, device=device)
    merge.merge_rows(parts, lses, output[:9], None, lse[:9], splits)
    assert relative_error(output[:9], wanted).row < 1e-6
    assert lse_error(lse[:9], wanted_lse) < 1e-5
    assert output[9].isnan().all()
    assert lse[9].isnan().all()
    merge.merge_rows(parts, lses, output[:9], None, None, splits)
    assert relative_error(output[:9], wanted).row < 1e-6


def test_empty_splits_behind_change_no_bit(device: torch.device) -> None:
    torch.manual_seed(1)
    parts, lses = torch.randn(2, 2, 5, 32).to(device), torch.randn(2, 2, 5).to(device)
    results = []
    for splits in (5, 8, 40):
        more, more_lse = parts.new_full((2, 2, splits, 32), torch.nan), lses.new_full((2, 2, splits), -INF)
        more[:, :, :5], more_lse[:, :, :5] = parts, lses
        output = parts.new_empty(2, 2, 32)
        merge_splits(more, more_lse, output)
        results.append(output)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.gpu
def test_large_on_a_gpu() -> None:
    parts = states(5000, 32, 128, torch.bfloat16, torch.device("cuda"))
    output, lse = torch.full_like(parts[0], torch.nan), torch.full_like(parts[2], torch.nan)
    merge.merge_attn_states(output, parts[0], parts[2], parts[1], parts[3], lse)
    check(output, lse, parts)
