"""A request's result has the same bits whatever else is in the batch: decode, prefill and MLA decode.

Splits are of a fixed number of tokens, and the launch is one for all batches, as a batch-invariant group has it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
from one_decode import decode_attention
from triton_mla_layers import listed

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASHINFER_NHD, MLA
from attn_select.runtime.kv_cache import key_value_views
from attn_select.testing import Problem, random_problem, same_bits
from attn_select_triton.kernels import cache, decode, launch, mla_decode, prefill, prefill_hopper
from attn_select_triton.kernels.launch import Launch, Terms, power_of_two
from attn_select_triton.kernels.mla_decode import MLALaunch
from attn_select_triton.kernels.work_list import list_work

pytestmark = pytest.mark.long

REQUESTS = ((1, 90), (3, 40), (1, 0), (2, 64), (1, 16), (17, 33), (1, 70))
LONG_REQUESTS = ((1, 5000), (3, 700), (1, 0), (2, 4096), (1, 64), (130, 1000), (1, 2049), (256, 256))
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Part:
    """Some requests of a problem, in an order of their own; ``split_tokens`` is of its fixed splits."""

    def __init__(self, problem: Problem, picked: list[int], split_tokens: int) -> None:
        assert problem.block_table is not None
        starts = problem.query_start_loc.tolist()
        self.problem, self.picked, self.split_tokens = problem, picked, split_tokens
        self.rows = torch.cat([torch.arange(starts[one], starts[one + 1]) for one in picked]).to(problem.query.device)
        self.lens = [problem.requests[one][0] for one in picked]
        query = problem.absorbed.to(problem.query.dtype) if problem.config.mla else problem.query
        self.query = query[self.rows]
        self.table = problem.block_table[picked]
        start = torch.tensor([0, *self.lens]).cumsum(0).int().to(self.query.device)
        self.batch = {"query_start_loc": start, "seq_lens": problem.seq_lens[picked]}
        self.longest = max(problem.requests[one][1] for one in picked)
        # Never one: without splits it is another kernel, whose multiplications may be contracted in another way.
        self.splits = max(2, -(-self.longest // split_tokens))

    def poisoned(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.full((*self.query.shape[:2], size), torch.nan, dtype=self.query.dtype, device=self.query.device)
        return output, torch.full(output.shape[:2], torch.nan, device=output.device)


def check(problem: Problem, split_tokens: int, attend: Callable[[Part], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compare each request alone, all reversed and random choices with the whole batch."""
    everything = list(range(len(problem.requests)))
    rng = random.Random(0)
    choices = [[one] for one in everything] + [everything[::-1]]
    choices += [rng.sample(everything, rng.randint(2, len(everything) - 1)) for _ in range(3)]
    wanted, wanted_lse = attend(Part(problem, everything, split_tokens))
    assert wanted.isfinite().all()
    for picked in choices:
        part = Part(problem, picked, split_tokens)
        output, lse = attend(part)
        assert same_bits(output, wanted[part.rows]), picked
        assert same_bits(lse, wanted_lse[part.rows]), picked


def decoded(part: Part, kv_cache: torch.Tensor, terms: Terms, used: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    config = part.problem.config
    key, value = key_value_views(kv_cache, FLASHINFER_NHD, config)
    output, lse = part.poisoned(config.value_head_size)
    slots = len(part.lens) * part.splits
    size = decode.decode_workspace(max(part.lens), config.num_heads, config.value_head_size, slots)
    decode_attention(
        part.query, key, value, output, **part.batch, block_table=part.table, max_query_len=max(part.lens),
        scale=part.problem.scale, num_splits=part.splits, split_tokens=part.split_tokens, terms=terms, output_lse=lse,
        workspace=torch.full((size,), torch.nan, device=output.device), launch=used,
    )  # fmt: skip
    return output, lse


def prefilled(
    part: Part, kv_cache: torch.Tensor, terms: Terms, used: Launch, gather: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    config = part.problem.config
    key, value = key_value_views(kv_cache, FLASHINFER_NHD, config)
    output, lse = part.poisoned(config.value_head_size)
    where: dict[str, Any] = {"block_table": part.table}
    if gather:
        align = cache.GATHER_ALIGN
        spans = (part.batch["seq_lens"] + align - 1) // align * align
        starts = (spans.cumsum(0) - spans).int()
        shape = 2, int(spans.sum()), config.num_kv_heads, power_of_two(config.head_size)
        rows = torch.full(shape, torch.nan, dtype=output.dtype, device=output.device)
        cache.gather_pages(
            key, value, rows[0], rows[1], block_table=part.table, **part.batch, key_start_loc=starts,
            max_keys=-(-part.longest // align) * align, window=terms.window,
        )  # fmt: skip
        (key, value), where = rows[..., : config.head_size].unbind(0), {"key_start_loc": starts, "clean": True}
    prefill.prefill_attention(
        part.query, key, value, output, **part.batch, max_seq_len=part.longest, scale=part.problem.scale, terms=terms,
        output_lse=lse, launch=used, **where,
    )  # fmt: skip
    return output, lse


def mla_decoded(part: Part, kv_cache: torch.Tensor, used: MLALaunch) -> tuple[torch.Tensor, torch.Tensor]:
    rank = part.problem.config.kv_lora_rank or 0
    output, lse = part.poisoned(rank)
    size = len(part.lens) * part.splits * mla_decode.mla_workspace(max(part.lens), part.query.shape[1], rank)
    mla_decode.mla_decode(
        part.query, kv_cache, output, **part.batch, block_table=part.table, max_query_len=max(part.lens),
        scale=part.problem.scale, launch=used, workspace=torch.full((size,), torch.nan, device=output.device),
        output_lse=lse, **listed(*part.batch.values(), part.splits, part.split_tokens),
    )  # fmt: skip
    return output, lse


def config_of(**changes: Any) -> AttentionConfig:
    small: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
    return AttentionConfig(**(small | changes))


def mla_config(heads: int, rank: int, rope: int, dtype: str) -> AttentionConfig:
    return AttentionConfig(
        num_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=32, qk_rope_head_dim=rope, v_head_dim=32, dtype=dtype
    )  # fmt: skip


PLAIN = pytest.param(Terms(), marks=pytest.mark.slow(guard="test_triton_attn_run.test_batch_invariance"), id="plain")


@pytest.mark.parametrize("terms", [PLAIN, pytest.param(Terms(window=20, soft_cap=3.0), id="window")])
def test_decode(terms: Terms, device: torch.device) -> None:
    requests = [request for request in REQUESTS if request[0] < 4]
    problem = random_problem(1, config_of(), FLASHINFER_NHD, requests=requests, device=device)
    kv_cache = problem.written_cache()
    check(problem, 32, lambda part: decoded(part, kv_cache, terms, Launch(16, 16, 4, 2)))


@pytest.mark.parametrize("terms", [PLAIN, pytest.param(Terms(window=20), id="window")])
@pytest.mark.parametrize("gather", [False, True])
def test_prefill(terms: Terms, gather: bool, device: torch.device) -> None:
    problem = random_problem(2, config_of(), FLASHINFER_NHD, requests=REQUESTS, device=device)
    kv_cache = problem.written_cache()
    check(problem, 32, lambda part: prefilled(part, kv_cache, terms, Launch(16, 16, 4, 2), gather))


def test_mla_decode(device: torch.device) -> None:
    requests = [request for request in REQUESTS if request[0] < 4]
    problem = random_problem(3, mla_config(4, 32, 16, "float16"), MLA, requests=requests, device=device)
    kv_cache = problem.written_cache()
    check(problem, 64, lambda part: mla_decoded(part, kv_cache, MLALaunch(16, 16, 4, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 128), (71, 1, 64), (14, 2, 256)])
def test_decode_on_a_gpu(cache_dtype: str, heads: int, kv_heads: int, size: int) -> None:
    config = config_of(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16", kv_cache_dtype=cache_dtype
    )  # fmt: skip
    requests = [request for request in LONG_REQUESTS if request[0] < 4]
    problem = random_problem(4, config, FLASHINFER_NHD, requests=requests, device="cuda")
    kv_cache = problem.written_cache()
    capability, rows = torch.cuda.get_device_capability(), 3 * heads // kv_heads
    for programs in (0.1, 8.0):
        used = launch.decode_launch(capability, rows, size, problem.query.dtype, kv_cache.dtype, programs)
        check(problem, 512, lambda part, used=used: decoded(part, kv_cache, Terms(), used))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 128), (71, 1, 64), (14, 2, 256)])
@pytest.mark.parametrize("gather", [False, True])
def test_prefill_on_a_gpu(block_size: int, heads: int, kv_heads: int, size: int, gather: bool) -> None:
    config = config_of(num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16")
    problem = random_problem(
        5, config, FLASHINFER_NHD, requests=LONG_REQUESTS, block_size=block_size, device="cuda"
    )  # fmt: skip
    kv_cache = problem.written_cache()
    described = gather or block_size == 64
    used = launch.prefill_launch(
        torch.cuda.get_device_capability(), size, torch.bfloat16, described, not gather, 5000
    )  # fmt: skip
    check(problem, 512, lambda part: prefilled(part, kv_cache, Terms(), used, gather))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (71, 1)])
def test_warp_specialised_prefill_on_a_gpu(block_size: int, heads: int, kv_heads: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a CUDA device of compute capability 9.0")
    config = config_of(num_heads=heads, num_kv_heads=kv_heads, head_size=128, dtype="bfloat16")
    problem = random_problem(
        7, config, FLASHINFER_NHD, requests=LONG_REQUESTS, block_size=block_size, device="cuda"
    )  # fmt: skip
    views = key_value_views(problem.written_cache(), FLASHINFER_NHD, config)

    def attend(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = part.poisoned(128)
        counter = torch.zeros(2, dtype=torch.int32, device="cuda")
        lens = part.batch["query_start_loc"].diff().tolist()
        work = list_work(lens, [1] * len(lens), heads=(heads, kv_heads), tile_rows=128, device=output.device)
        step = prefill_hopper.Prefill(
            max_seq_len=5000, counter=counter, work=work, block_table=part.table, **part.batch
        )  # fmt: skip
        step(part.query, *views, output, scale=problem.scale, output_lse=lse)
        return output, lse

    check(problem, 512, attend)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_mla_decode_on_a_gpu(block_size: int, heads: int) -> None:
    requests = [request for request in LONG_REQUESTS if request[0] < 4]
    config = mla_config(heads, 512, 64, "bfloat16")
    problem = random_problem(6, config, MLA, requests=requests, block_size=block_size, device="cuda")
    kv_cache = problem.written_cache()
    used = mla_decode.mla_launch(
        torch.cuda.get_device_capability(), 3 * heads, 512, 64, block_size, torch.bfloat16, torch.bfloat16
    )  # fmt: skip
    check(problem, 512, lambda part: mla_decoded(part, kv_cache, used))
