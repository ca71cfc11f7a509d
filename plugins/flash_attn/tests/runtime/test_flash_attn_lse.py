"""FlashAttention's log-sum-exp becomes the runtime's: one row per token, -inf without keys, sinks counted."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from attn_select_flash_attn.runtime.lse import by_token

INF = float("inf")


def test_fa2s_rows_without_keys_become_minus_infinity() -> None:
    kernels = torch.tensor([[1.5, INF, -2.0], [INF, INF, 0.0]])
    assert by_token(kernels, 2).tolist() == [[1.5, -INF], [-INF, -INF], [-2.0, 0.0]]


def test_fa3s_rows_without_keys_count_the_sink() -> None:
    kernels = torch.tensor([[1.5, -INF], [-INF, 0.0]])
    assert by_token(kernels, 3).tolist() == [[1.5, -INF], [-INF, 0.0]]
    assert by_token(kernels, 3, torch.tensor([0.25, 0.5])).tolist() == [[1.5, 0.5], [0.25, 0.0]]


def test_fa3s_rows_far_below_their_sink_have_the_sinks_lse() -> None:
    """The kernel's sum overflows there, and its LSE is infinite: merged with another part it would give NaN."""
    kernels = torch.tensor([[INF, 1.0], [3.0, INF]])
    assert by_token(kernels, 3, torch.tensor([0.25, 0.5])).tolist() == [[0.25, 3.0], [1.0, 0.5]]
