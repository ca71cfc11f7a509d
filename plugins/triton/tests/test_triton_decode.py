"""The decode kernel against the float64 oracle: every term, splits, FP8, batch invariance, split counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
from one_decode import decode_attention

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD, PAGED_ATTENTION
from attn_select.runtime.kv_cache import key_value_views, paged_attention_views
from attn_select.testing import Problem, lse_error, random_problem, relative_error, same_bits
from attn_select_triton.facts.triton_attn import PROGRAMS_PER_SM
from attn_select_triton.kernels import decode, launch
from attn_select_triton.kernels.launch import Launch, Terms
from attn_select_triton.tuning import Gpu, decode_splits

pytestmark = pytest.mark.long

SMALL = Launch(16, 16, 4, 2)
REQUESTS = ((1, 49), (1, 16), (3, 40), (2, 2), (1, 0), (4, 33))
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window both ways": {"sliding_window": 9, "non_causal": True},
    "soft cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "ranges and window": {"mm_prefix": True, "sliding_window": 5},
    "all": {"sinks": True, "sliding_window": 20, "logits_soft_cap": 3.0, "alibi": True},
}


def config_of(**changes: Any) -> AttentionConfig:
    small: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
    return AttentionConfig(**(small | changes))


def run(
    problem: Problem, terms: Terms, splits: int = 1, split_tokens: int = 0, used: Launch | None = SMALL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the step into the cache, decode on poisoned outputs, compare with the oracle, return output and LSE."""
    config, kv_cache = problem.config, problem.written_cache()
    assert problem.layout is not None
    if problem.layout == PAGED_ATTENTION:
        key, value = paged_attention_views(kv_cache, config)
        value = value.permute(0, 3, 1, 2)
    else:
        key, value = key_value_views(kv_cache, problem.layout, config)
    wanted, wanted_lse = problem.reference(kv_cache=kv_cache)
    output = torch.full(wanted.shape, torch.nan, dtype=problem.query.dtype, device=problem.query.device)
    lse = torch.full(wanted_lse.shape, torch.nan, dtype=torch.float32, device=output.device)
    longest = max(query_len for query_len, _ in problem.requests)
    size = decode.decode_workspace(longest, config.num_heads, config.value_head_size, len(problem.requests) * splits)
    assert problem.block_table is not None
    decode_attention(
        problem.query, key, value, output, query_start_loc=problem.query_start_loc, seq_lens=problem.seq_lens,
        block_table=problem.block_table, max_query_len=longest,
        scale=problem.scale, num_splits=splits, split_tokens=split_tokens, terms=terms, output_lse=lse, launch=used,
        workspace=torch.full((size,), torch.nan, device=output.device),
        k_scale=float(problem.k_scale or 1.0), v_scale=float(problem.v_scale or 1.0),
    )  # fmt: skip
    bound = BOUNDS[config.dtype]
    assert relative_error(output, wanted).row < bound
    assert lse_error(lse, wanted_lse) < bound
    return output, lse


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("splits", [1, 3])
def test_terms(name: str, splits: int, device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    requests = tuple(request for request in REQUESTS if request[1]) if "ranges" in name else REQUESTS
    problem = random_problem(1, config_of(**TERMS[name]), FLASHINFER_NHD, requests=requests, device=device)
    run(problem, terms_of(problem), splits)


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_HND, PAGED_ATTENTION])
def test_layouts(layout: str, device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    problem = random_problem(2, config_of(dtype="float16"), layout, requests=REQUESTS, device=device)
    run(problem, terms_of(problem), 2)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 7, "num_kv_heads": 1, "head_size": 40},
        {"num_heads": 4, "num_kv_heads": 2, "head_size": 512},
        {"num_heads": 71, "num_kv_heads": 1, "head_size": 32},
        {"num_heads": 2, "num_kv_heads": 2, "head_size": 48, "v_head_size": 32},
    ],
)
def test_shapes(shape: dict[str, Any], device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    problem = random_problem(3, config_of(**shape), FLASH_ATTN_NHD, requests=((2, 20), (1, 33)), device=device)
    run(problem, terms_of(problem), 2)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8(kv_cache_dtype: str, dtype: str, device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    config = config_of(dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    problem = random_problem(4, config, FLASHINFER_NHD, requests=REQUESTS, device=device)
    run(problem, terms_of(problem), 2)


def test_a_request_alone_gives_the_same_bits(device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    problem = random_problem(5, config_of(), FLASH_ATTN_NHD, requests=((1, 90), (2, 40), (1, 70)), device=device)
    output, lse = run(problem, terms_of(problem), 3, 32)
    assert problem.block_table is not None
    key, value = key_value_views(problem.written_cache(), FLASH_ATTN_NHD, problem.config)
    for request, (rows, splits) in enumerate(((slice(0, 1), 3), (slice(1, 3), 2), (slice(3, 4), 7))):
        alone, alone_lse = torch.full_like(output[rows], torch.nan), torch.full_like(lse[rows], torch.nan)
        query = problem.query[rows]
        size = decode.decode_workspace(2, 4, 32, splits)
        decode_attention(
            query, key, value, alone, max_query_len=2, scale=problem.scale, num_splits=splits, split_tokens=32,
            query_start_loc=torch.tensor([0, len(query)], dtype=torch.int32, device=device),
            seq_lens=problem.seq_lens[request : request + 1], block_table=problem.block_table[request : request + 1],
            workspace=torch.full((size,), torch.nan, device=device), output_lse=alone_lse, launch=SMALL,
        )  # fmt: skip
        assert same_bits(alone, output[rows])
        assert same_bits(alone_lse, lse[rows])


def test_a_workspace_that_is_too_small_is_refused(device: torch.device) -> None:
    problem = random_problem(6, config_of(), FLASH_ATTN_NHD, requests=((1, 40),), device=device)
    key, value = key_value_views(problem.written_cache(), FLASH_ATTN_NHD, problem.config)
    assert problem.block_table is not None
    for workspace in (None, torch.empty(2 * 4 * 33 - 1, device=device)):
        with pytest.raises(ValueError, match=r"2 partial results of 1 tokens need 264"):
            decode_attention(
                problem.query, key, value, problem.query, query_start_loc=problem.query_start_loc,
                seq_lens=problem.seq_lens, block_table=problem.block_table, max_query_len=1, scale=1.0,
                num_splits=2, workspace=workspace,
            )  # fmt: skip


def test_split_counts_keep_to_the_workspace_and_fill_the_gpu() -> None:
    for sms in (1, 14, 132, 192):
        for programs in (1, 8, 64, 100, 131, 132, 263, 300, 512, 2048):
            used = launch.decode_launch((9, 0), 4, 128, torch.bfloat16, torch.bfloat16, programs / sms)
            for keys in (1, 64, 1000, 131072):
                apart = programs <= decode_splits().apart
                splits = launch.num_splits_for(programs, keys, Gpu((9, 0), sms), used, 512, 4, apart)
                tiles = -(-keys // 64)
                assert 1 <= splits <= tiles
                assert splits == 1 or programs * splits <= PROGRAMS_PER_SM * sms
                # One idle multiprocessor of 132 costs less than a split and its merge would.
                assert programs * splits >= 0.99 * sms or splits == tiles


@pytest.mark.gpu
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("shape", [(32, 8, 128), (28, 4, 128), (8, 2, 64), (8, 2, 256), (16, 2, 80), (71, 1, 64)])
def test_on_a_gpu(
    name: str, kv_cache_dtype: str, shape: tuple[int, int, int], terms_of: Callable[[Problem], Terms]
) -> None:
    heads, kv_heads, size = shape
    config = config_of(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype,
        **TERMS[name],
    )  # fmt: skip
    requests = ((1, 2000), (4, 513), (1, 64), (3, 3))
    problem = random_problem(7, config, FLASHINFER_HND, requests=requests, device="cuda")
    for splits in (1, 5):
        run(problem, terms_of(problem), splits, used=None)
