"""Writing the paged cache, bit for bit as the reference does, and gathering pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD, PAGED_ATTENTION
from attn_select.runtime.kv_cache import key_value_views, paged_attention_views
from attn_select.testing import Problem, random_problem, same_bits
from attn_select_triton.kernels import cache

LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND, PAGED_ATTENTION)
REQUESTS = ((3, 20), (17, 17), (1, 16), (2, 0))


def config_of(**changes: Any) -> AttentionConfig:
    small: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 3, "head_size": 48, "dtype": "float16"}
    return AttentionConfig(**(small | changes))


def views(kv_cache: torch.Tensor, layout: str, config: AttentionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == PAGED_ATTENTION:
        key, value = paged_attention_views(kv_cache, config)
        return key, value.permute(0, 3, 1, 2)
    return key_value_views(kv_cache, layout, config)


def representable(problem: Problem) -> Problem:
    """Return the problem with numbers that FP8 holds exactly: the interpreter's cast loses the carry of rounding."""
    torch.manual_seed(0)
    device = problem.key.device

    def draw(like: torch.Tensor) -> torch.Tensor:
        return (torch.randint(4, 8, like.shape) * 2.0 ** torch.randint(-5, 3, like.shape)).to(device, like.dtype)

    key, value = draw(problem.key), -draw(problem.value)
    key[0, 0, :4] = torch.tensor([6e4, -6e4, 0.0, 4e4])  # beyond both formats' largest numbers, with these scales
    k_scale, v_scale = torch.tensor(0.25, device=device), torch.tensor(2.0, device=device)
    return dataclasses.replace(problem, key=key, value=value, k_scale=k_scale, v_scale=v_scale)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_writes_what_the_reference_writes(layout: str, kv_cache_dtype: str, device: torch.device) -> None:
    config = config_of(kv_cache_dtype=kv_cache_dtype)
    problem = random_problem(1, config, layout, requests=REQUESTS, device=device)
    if problem.k_scale is not None:
        problem = representable(problem)
    assert problem.kv_cache is not None
    assert problem.slot_mapping is not None
    assert (problem.slot_mapping < 0).any()
    wanted, got = problem.written_cache(), problem.kv_cache.clone()
    one = torch.ones((), device=device)
    k_scale, v_scale = (one if scale is None else scale for scale in (problem.k_scale, problem.v_scale))
    key, value = views(got, layout, config)
    cache.write_kv(problem.key, problem.value, key, value, problem.slot_mapping, k_scale, v_scale)
    assert same_bits(raw(got), raw(wanted))


def test_a_value_narrower_than_the_key_and_strided_inputs(device: torch.device) -> None:
    config = config_of(v_head_size=32)
    problem = random_problem(2, config, FLASHINFER_NHD, requests=REQUESTS, device=device)
    assert problem.kv_cache is not None
    assert problem.slot_mapping is not None
    both = torch.cat([problem.value, problem.key], dim=-1)
    wanted, got = problem.written_cache(), problem.kv_cache.clone()
    one = torch.ones((), device=device)
    cache.write_kv(
        both[..., 32:], both[..., :32], *views(got, FLASHINFER_NHD, config), problem.slot_mapping, one, one
    )  # fmt: skip
    assert same_bits(raw(got), raw(wanted))


def test_one_scale_per_head(device: torch.device) -> None:
    torch.manual_seed(3)
    numbers = torch.randint(4, 8, (2, 5, 3, 32)).to(device, torch.float32)
    scales = torch.tensor([[0.25, 0.5, 2.0], [0.125, 1.0, 4.0]], device=device)
    pages = torch.zeros(2, 1, 16, 3, 32, device=device, dtype=torch.float8_e5m2)
    slots = torch.arange(5, device=device)
    cache.write_kv(numbers[0], numbers[1], pages[0], pages[1], slots, scales[0], scales[1])
    wanted = (numbers / scales[:, None, :, None]).to(torch.float8_e5m2)
    assert torch.equal(raw(pages[:, 0, :5]), raw(wanted))


def test_an_update_writes_whatever_steps_bring(device: torch.device) -> None:
    """Keys that lie apart, at another address, or behind which there is padding."""
    torch.manual_seed(5)
    one, slots = torch.ones((), device=device), torch.tensor([3, -1, 17, 8], device=device)
    pages, wanted = (torch.zeros(2, 2, 16, 2, 16, device=device) for _ in range(2))
    update = cache.CacheUpdate(pages[0], pages[1], one, one)
    joined = torch.randn(6, 4, 48, device=device)
    for rows in (joined[:4, :, :16].contiguous(), joined[..., 16:32], joined[1:5, :, 7:23], joined[2:, :, :16] + 1):
        key, value = rows.split(2, dim=1)
        update(key, value, slots)
        for cached, given in zip(wanted, (key, value), strict=True):
            cached.view(-1, 2, 16)[slots[slots >= 0]] = given[:4][slots >= 0]
        assert torch.equal(pages, wanted)


def test_no_tokens(device: torch.device) -> None:
    pages = torch.full((1, 16, 2, 32), torch.nan, device=device)
    none, one = torch.empty(0, 2, 32, device=device), torch.ones((), device=device)
    cache.write_kv(none, none, pages, pages, torch.empty(0, dtype=torch.int64, device=device), one, one)
    assert pages.isnan().all()


@pytest.mark.parametrize("window", [0, 5, 70])
def test_gather(window: int, device: torch.device) -> None:
    config = config_of(head_size=40, num_kv_heads=2, num_heads=2)
    problem = random_problem(4, config, FLASHINFER_HND, requests=((2, 90), (1, 3), (1, 0)), device=device)
    kv_cache = problem.written_cache()
    key, value = views(kv_cache, FLASHINFER_HND, config)
    align = cache.GATHER_ALIGN
    starts = torch.tensor([0, 2 * align, 3 * align], dtype=torch.int32, device=device)
    work = torch.full((2, 3 * align, 2, 64), torch.nan, dtype=torch.float32, device=device)
    cache.gather_pages(
        key, value, work[0], work[1], block_table=problem.block_table, query_start_loc=problem.query_start_loc,
        key_start_loc=starts, seq_lens=problem.seq_lens, max_keys=2 * align, window=window,
    )  # fmt: skip
    for request, (query_len, seq_len) in enumerate(problem.requests):
        low = max(0, seq_len - query_len - window + 1) if window else 0
        first = low // align * align
        for position in range(first, -(-seq_len // align) * align):
            row = work[:, int(starts[request]) + position]
            if low <= position < seq_len:
                assert problem.block_table is not None
                page, offset = problem.block_table[request, position // 16], position % 16
                assert torch.equal(row[0, :, :40], key[page, offset].float())
                assert torch.equal(row[1, :, :40], value[page, offset].float())
                assert (row[..., 40:] == 0).all()
            else:
                assert (row == 0).all()
        assert work[:, int(starts[request]) : int(starts[request]) + first].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("size", [64, 128, 192])
def test_writes_on_a_gpu(layout: str, kv_cache_dtype: str, size: int) -> None:
    config = config_of(kv_cache_dtype=kv_cache_dtype, num_heads=8, num_kv_heads=8, head_size=size, dtype="bfloat16")
    problem = random_problem(5, config, layout, requests=((700, 900), (1, 64), (3, 0)), device="cuda")
    problem.key[0, 0, :2] = torch.tensor([1e5, -1e5])
    assert problem.kv_cache is not None
    assert problem.slot_mapping is not None
    wanted, got = problem.written_cache(), problem.kv_cache.clone()
    one = torch.ones((), device="cuda")
    k_scale, v_scale = (one if scale is None else scale for scale in (problem.k_scale, problem.v_scale))
    key, value = views(got, layout, config)
    cache.write_kv(problem.key, problem.value, key, value, problem.slot_mapping, k_scale, v_scale)
    assert same_bits(raw(got), raw(wanted))
