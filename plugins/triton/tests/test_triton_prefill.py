"""The prefill kernel against the float64 oracle: every term, layouts, FP8, no cache, TMA, the gather before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD, PAGED_ATTENTION
from attn_select.runtime.kv_cache import key_value_views, paged_attention_views
from attn_select.testing import Problem, lse_error, random_problem, relative_error
from attn_select_triton.kernels import cache, prefill
from attn_select_triton.kernels.launch import FP8, Launch, Terms, describable, describe, two_powers

pytestmark = pytest.mark.long

SMALL = Launch(16, 16, 4, 2)
REQUESTS = ((1, 33), (21, 21), (6, 40), (3, 32), (1, 0))
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window both ways": {"sliding_window": 9, "non_causal": True},
    "not causal": {"non_causal": True},
    "soft cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi": True},
    "alibi both ways": {"alibi": True, "non_causal": True},
    "sinks": {"sinks": True},
    "ranges": {"mm_prefix": True},
    "ranges and window": {"mm_prefix": True, "sliding_window": 5},
    "all": {"sinks": True, "sliding_window": 20, "logits_soft_cap": 3.0, "alibi": True},
}


def config_of(**changes: Any) -> AttentionConfig:
    small: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
    return AttentionConfig(**(small | changes))


def views(problem: Problem, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert problem.layout is not None
    if problem.layout == PAGED_ATTENTION:
        key, value = paged_attention_views(kv_cache, problem.config)
        return key, value.permute(0, 3, 1, 2)
    return key_value_views(kv_cache, problem.layout, problem.config)


def check(problem: Problem, terms: Terms, launch: Launch | None = SMALL, gather: bool = False) -> None:
    config, kv_cache = problem.config, problem.written_cache()
    wanted, wanted_lse = problem.reference(kv_cache=kv_cache)
    key, value = views(problem, kv_cache)
    output = torch.full(wanted.shape, torch.nan, dtype=problem.query.dtype, device=problem.query.device)
    lse = torch.full(wanted_lse.shape, torch.nan, dtype=torch.float32, device=output.device)
    arguments: dict[str, Any] = {"block_table": problem.block_table}
    most = int(problem.seq_lens.max())
    if gather:
        align = cache.GATHER_ALIGN
        spans = (problem.seq_lens + align - 1) // align * align
        starts = (spans.cumsum(0) - spans).int()
        rows, size = int(spans.sum()), cache.power_of_two(config.head_size)
        work = torch.full((2, rows, config.num_kv_heads, size), torch.nan, dtype=output.dtype, device=output.device)
        window = 0 if config.mm_prefix else terms.window
        cache.gather_pages(
            key, value, work[0], work[1], block_table=problem.block_table, query_start_loc=problem.query_start_loc,
            key_start_loc=starts, seq_lens=problem.seq_lens, max_keys=-(-most // align) * align, window=window,
        )  # fmt: skip
        key, value = work[0][..., : config.head_size], work[1][..., : config.value_head_size]
        arguments = {"key_start_loc": starts, "clean": True}
    scales = {"k_scale": float(problem.k_scale or 1.0), "v_scale": float(problem.v_scale or 1.0)}
    prefill.prefill_attention(
        problem.query, key, value, output, query_start_loc=problem.query_start_loc, seq_lens=problem.seq_lens,
        max_seq_len=most, scale=problem.scale, terms=terms, output_lse=lse, launch=launch, **scales, **arguments,
    )  # fmt: skip
    bound = BOUNDS[config.dtype]
    assert relative_error(output, wanted).row < bound
    assert lse_error(lse, wanted_lse) < bound


@pytest.mark.parametrize("name", TERMS)
def test_terms(name: str, device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    requests = REQUESTS[:-1] if "ranges" in name else REQUESTS
    problem = random_problem(1, config_of(**TERMS[name]), FLASH_ATTN_NHD, requests=requests, device=device)
    check(problem, terms_of(problem))


@pytest.mark.parametrize("layout", [FLASHINFER_NHD, FLASHINFER_HND, PAGED_ATTENTION])
def test_layouts(layout: str, device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    problem = random_problem(2, config_of(dtype="float16"), layout, requests=REQUESTS, device=device)
    check(problem, terms_of(problem))


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
    problem = random_problem(3, config_of(**shape), FLASH_ATTN_NHD, requests=REQUESTS[-2:], device=device)
    check(problem, terms_of(problem))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("gather", [False, True])
def test_fp8(kv_cache_dtype: str, gather: bool, device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    # The interpreter multiplies bfloat16 as the integers that it keeps it in; over an FP8 cache the kernel has float16.
    dtype = "float16" if gather else "bfloat16"
    config = config_of(dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    problem = random_problem(4, config, FLASHINFER_HND, requests=REQUESTS, device=device)
    check(problem, terms_of(problem), gather=gather)


@pytest.mark.parametrize("terms", [{}, {"sliding_window": 9}])
def test_gathered(terms: dict[str, Any], device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    problem = random_problem(5, config_of(**terms, head_size=40), FLASH_ATTN_NHD, requests=REQUESTS, device=device)
    check(problem, terms_of(problem), gather=True)


@pytest.mark.parametrize("name", ["plain", "window", "sinks", "not causal"])
@pytest.mark.parametrize("gather", [False, True])
def test_described(
    name: str,
    gather: bool,
    device: torch.device,
    terms_of: Callable[[Problem], Terms],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through tensor descriptors, which the interpreter knows too."""
    if device.type == "cpu":
        monkeypatch.setattr(prefill, "capability_of", lambda device: (9, 0))
    used = []

    def counted(*arguments: Any) -> Any:
        used.append(arguments)
        return describe(*arguments)

    monkeypatch.setattr(prefill, "describe", counted)
    config = config_of(dtype="float16", num_heads=2, num_kv_heads=1, **TERMS[name])
    layout = FLASHINFER_NHD if name == "plain" else FLASHINFER_HND
    problem = random_problem(6, config, layout, block_size=16, requests=REQUESTS, device=device)
    check(problem, terms_of(problem), gather=gather)
    assert used


def test_no_cache(device: torch.device, terms_of: Callable[[Problem], Terms]) -> None:
    config = config_of(attn_type="encoder_only", sliding_window=7)
    problem = random_problem(7, config, requests=((9, 9), (33, 33), (1, 1)), device=device)
    wanted, wanted_lse = problem.reference()
    output, lse = torch.full_like(problem.query, torch.nan), torch.empty_like(problem.query[..., 0])
    prefill.prefill_attention(
        problem.query, problem.key, problem.value, output, query_start_loc=problem.query_start_loc,
        key_start_loc=problem.query_start_loc[:-1], seq_lens=problem.seq_lens, max_seq_len=33, scale=problem.scale,
        terms=terms_of(problem), output_lse=lse, launch=SMALL,
    )  # fmt: skip
    assert relative_error(output, wanted).row < 1e-5
    assert lse_error(lse, wanted_lse) < 1e-5


def test_two_powers() -> None:
    for size in range(32, 257, 8):
        high, rest = two_powers(size)
        if high:
            assert high + rest == size
            assert high & (high - 1) == 0
            assert rest == 0 or (rest >= 16 and rest & (rest - 1) == 0)
    assert two_powers(192) == (128, 64)
    assert two_powers(128) == (128, 0)
    assert two_powers(112) == (0, 0)


def test_describable_wants_alignment_and_whole_tiles() -> None:
    pages = torch.zeros(4, 64, 2, 128, dtype=torch.bfloat16)
    assert describable(pages, torch.bfloat16, 64, (9, 0))
    assert not describable(pages, torch.bfloat16, 128, (9, 0))
    assert not describable(pages, torch.bfloat16, 64, (8, 9))
    assert not describable(pages, torch.float16, 64, (9, 0))
    assert not describable(pages.to(FP8[0]), torch.bfloat16, 64, (9, 0))
    assert not describable(torch.zeros(4, 64, 2, 66, dtype=torch.bfloat16)[..., :64], torch.bfloat16, 64, (9, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_on_a_gpu(name: str, block_size: int, size: int, terms_of: Callable[[Problem], Terms]) -> None:
    config = config_of(num_heads=8, num_kv_heads=2, head_size=size, dtype="bfloat16", **TERMS[name])
    requests = ((1, 300), (257, 257), (64, 512), (130, 1000))
    problem = random_problem(8, config, FLASHINFER_NHD, block_size=block_size, requests=requests, device="cuda")
    for gather in (False, True):
        check(problem, terms_of(problem), None, gather)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("gather", [False, True])
def test_fp8_on_a_gpu(kv_cache_dtype: str, size: int, gather: bool, terms_of: Callable[[Problem], Terms]) -> None:
    config = config_of(
        num_heads=8, num_kv_heads=2, head_size=size, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype
    )  # fmt: skip
    requests = ((1, 300), (257, 257), (64, 512), (130, 1000))
    problem = random_problem(9, config, FLASHINFER_NHD, requests=requests, device="cuda")
    check(problem, terms_of(problem), None, gather)


@pytest.mark.gpu
def test_mla_prefill_sizes() -> None:
    """QK 192 wide in two parts, V 128, both views of one tensor, as decompressed MLA has them."""
    from attn_select.testing import varlen_reference

    torch.manual_seed(0)
    config = AttentionConfig(num_heads=4, num_kv_heads=4, head_size=192, v_head_size=128, dtype="bfloat16")
    both = torch.randn(600, 4, 320, device="cuda", dtype=torch.bfloat16)
    key, value = both[..., :192], both[..., 192:]
    query = torch.randn(600, 4, 192, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 77, 600], device="cuda", dtype=torch.int32)
    wanted, wanted_lse = varlen_reference(query, key, value, starts, starts, config, 192**-0.5)
    output, lse = torch.full_like(query[..., :128], torch.nan), torch.empty(600, 4, device="cuda")
    prefill.prefill_attention(
        query, key, value, output, query_start_loc=starts, key_start_loc=starts[:-1], seq_lens=starts.diff().int(),
        max_seq_len=523, scale=192**-0.5, output_lse=lse,
    )  # fmt: skip
    assert relative_error(output, wanted).row < 2e-2
    assert lse_error(lse, wanted_lse) < 1e-2


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_description_serves_tensors_of_other_lengths(paged: bool, heads_first: bool) -> None:
    """Those of a kind differ in address and first dimension alone."""
    pool = torch.zeros(9, 2, 16, 4, 64, dtype=torch.float16) if paged else torch.zeros(9 * 16, 4, 64)
    if heads_first and paged:
        pool = torch.zeros(9, 2, 4, 16, 64, dtype=torch.float16).transpose(2, 3)
    elif heads_first:
        pool = torch.zeros(4, 9 * 16, 64).transpose(0, 1)
    first, other = (pool[:5, 0], pool[2:, 1]) if paged else (pool[:5], pool[7:])
    made, wanted = describe(first, 16, 64).over(other), describe(other, 16, 64)
    assert (made.base.data_ptr(), made.base.dtype) == (other.data_ptr(), other.dtype)
    assert (tuple(made.shape), tuple(made.strides), made.block_shape) == (wanted.shape, wanted.strides, [16, 64])
