"""The classic paged attention's kernels, both versions, against the float64 oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import PAGED_ATTENTION
from attn_select.runtime.kv_cache import paged_attention_views
from attn_select.testing import Problem, random_problem, relative_error, same_bits
from attn_select_triton.kernels import paged_attention
from attn_select_triton.kernels.launch import Launch
from attn_select_triton.kernels.paged_attention import (
    Partials,
    gather_classic,
    paged_attention_v1,
    paged_attention_v2,
)
from attn_select_triton.kernels.relaunch import Relaunch

pytestmark = pytest.mark.long

SMALL = Launch(16, 32, 4, 2)
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
VERSIONS = (1, 2)


def config_of(**changes: Any) -> AttentionConfig:
    small: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float16"}
    return AttentionConfig(**(small | changes))


def problem_of(config: AttentionConfig, seq_lens: list[int], device: torch.device, **options: Any) -> Problem:
    """Return a step of one token per sequence, in blocks in random order; slots behind a sequence's end hold NaN."""
    requests = tuple((1, seq_len) for seq_len in seq_lens)
    return random_problem(1, config, PAGED_ATTENTION, requests=requests, device=device, **options)


def run(
    problem: Problem, version: int, *, partition_size: int = 32, room: int | None = None, launch: Launch | None = SMALL
) -> torch.Tensor:
    """Write the step into the cache, attend on poisoned outputs, compare with the oracle, return the output.

    Args:
        room: sequences that the partial results have room for; None: all.
    """
    config, kv_cache = problem.config, problem.written_cache()
    key, value = paged_attention_views(kv_cache, config)
    wanted, _ = problem.reference(kv_cache=kv_cache)
    device, seqs = problem.query.device, len(problem.seq_lens)
    output = torch.full(wanted.shape, torch.nan, dtype=problem.query.dtype, device=device)
    given: dict[str, Any] = {
        "query_start_loc": problem.query_start_loc, "seq_lens": problem.seq_lens, "block_table": problem.block_table,
        "scale": problem.scale, "slopes": problem.alibi_slopes, "launch": launch,
        "k_scale": float(problem.k_scale or 1.0), "v_scale": float(problem.v_scale or 1.0),
    }  # fmt: skip
    if version == 1:
        paged_attention_v1(problem.query, key, value, output, **given)
    else:
        longest = max(1, int(problem.seq_lens.max()))
        rows = (room or seqs) * config.num_heads * -(-longest // partition_size)
        partials = Partials.reserve(rows, config.head_size, output.dtype, device)
        for poisoned in (partials.outputs, partials.maxima, partials.sums):
            poisoned.fill_(torch.nan)
        paged_attention_v2(
            problem.query, key, value, output, partials=partials, max_seq_len=longest, partition_size=partition_size,
            **given,
        )  # fmt: skip
    assert relative_error(output, wanted).row < BOUNDS[config.dtype]
    return output


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_lengths_at_the_edges_of_blocks_and_partitions(version: int, block_size: int, device: torch.device) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 31, 32, 33, 64, 0, 65]
    run(problem_of(config_of(), lengths, device, block_size=block_size), version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 2, "num_kv_heads": 2, "head_size": 64},
        {"num_heads": 7, "num_kv_heads": 1, "head_size": 80},
        {"num_heads": 71, "num_kv_heads": 1},
        {"num_heads": 8, "num_kv_heads": 2, "head_size": 256},
        {"num_heads": 3, "num_kv_heads": 3, "head_size": 120, "dtype": "float32"},
    ],
    ids=str,
)
def test_groups_and_head_sizes(version: int, shape: dict[str, Any], device: torch.device) -> None:
    run(problem_of(config_of(**shape), [40, 0, 17], device), version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cache_dtypes(version: int, kv_cache_dtype: str, dtype: str, device: torch.device) -> None:
    config = config_of(dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_heads=2, num_kv_heads=1)
    run(problem_of(config, [33, 20], device), version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
def test_alibi(version: int, heads: tuple[int, int], device: torch.device) -> None:
    config = config_of(num_heads=heads[0], num_kv_heads=heads[1], alibi=True, dtype="float32")
    run(problem_of(config, [50, 1, 0, 32], device), version)


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed: int, device: torch.device) -> None:
    """Both versions on shapes that nobody chose."""
    rng = random.Random(seed)
    kv_heads, group = rng.randint(1, 3), rng.randint(1, 9)
    config = config_of(
        num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=rng.choice((32, 64, 80, 96, 112)),
        dtype=rng.choice(("float16", "float32")), alibi=rng.random() < 0.5,
    )  # fmt: skip
    lengths = [rng.randint(0, 90) for _ in range(rng.randint(1, 5))]
    problem = problem_of(config, lengths, device, block_size=rng.choice((8, 16, 32)))
    launch = Launch(rng.choice((16, 32)), rng.choice((32, 64)), 4, 2)
    for version in VERSIONS:
        run(problem, version, partition_size=64, launch=launch)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_version_2_takes_sequences_in_several_launches(
    room: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(config_of(dtype="float32"), [70, 0, 33, 64, 5], device)
    at_once = run(problem, 2)
    launched, call = [], Relaunch.__call__

    def counted(self: Relaunch, grid: tuple[int, int, int], *arguments: Any) -> None:
        launched.append(grid[1])
        call(self, grid, *arguments)

    monkeypatch.setattr(Relaunch, "__call__", counted)
    assert same_bits(run(problem, 2, room=room), at_once)
    assert launched[::2] == launched[1::2] == {1: [1] * 5, 2: [2, 2, 1], 3: [3, 2]}[room]


def test_a_program_of_version_2_takes_several_partitions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(config_of(dtype="float32"), [150, 32, 33, 97], device)
    one_each = run(problem, 2)
    monkeypatch.setattr(paged_attention, "PROGRAMS_PER_SM", 0)
    assert same_bits(run(problem, 2), one_each)


def test_a_sequence_without_a_query_is_left_out(device: torch.device) -> None:
    problem = random_problem(
        2, config_of(dtype="float32"), PAGED_ATTENTION, requests=((1, 20), (0, 40), (1, 33)), device=device
    )  # fmt: skip
    for version in VERSIONS:
        assert len(run(problem, version)) == 2


def test_room_and_partitions_that_do_not_fit_are_refused(device: torch.device) -> None:
    problem = problem_of(config_of(), [40], device)
    key, value = paged_attention_views(problem.written_cache(), problem.config)
    partials = Partials.reserve(7, 32, torch.float16, device)

    def call(partition_size: int) -> None:
        paged_attention_v2(
            problem.query, key, value, problem.query, partials=partials, query_start_loc=problem.query_start_loc,
            seq_lens=problem.seq_lens, max_seq_len=40, partition_size=partition_size, launch=SMALL, scale=1.0,
            block_table=problem.block_table,
        )  # fmt: skip

    with pytest.raises(ValueError, match="partials has 7 rows; one sequence of 2 partitions and 4 heads needs 8"):
        call(32)
    with pytest.raises(ValueError, match="partition_size = 48: accepted are multiples of 32"):
        call(48)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("block_size", [8, 32])
def test_whole_sequences_are_copied_into_rows(kv_cache_dtype: str, block_size: int, device: torch.device) -> None:
    config = config_of(kv_cache_dtype=kv_cache_dtype, head_size=64)
    problem = problem_of(config, [70, 0, 64, 9], device, block_size=block_size)
    key, value = paged_attention_views(problem.written_cache(), config)
    starts = [64, 0, 192, 256]  # in any order, with rows between them that are nobody's
    rows = torch.full((2, 320, 2, 64), torch.nan, dtype=torch.float16, device=device)
    assert problem.block_table is not None
    gather_classic(
        key, value, rows[0], rows[1], block_table=problem.block_table, seq_lens=problem.seq_lens, max_keys=128,
        key_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
    )  # fmt: skip
    for request, (start, seq_len) in enumerate(zip(starts, problem.seq_lens.tolist(), strict=True)):
        blocks = problem.block_table[request, : -(-seq_len // block_size)].long()
        wanted = key[blocks].permute(0, 3, 1, 2, 4).reshape(-1, 2, 64), value[blocks].permute(0, 3, 1, 2).flatten(0, 1)
        padded = -(-seq_len // 64) * 64
        for half, stored in zip(rows, wanted, strict=True):
            copied = half[start : start + padded]
            assert torch.equal(copied[:seq_len], stored[:seq_len].to(half.dtype))
            assert copied[seq_len:].eq(0).all()
    assert rows[:, :64].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    "shape", [(32, 8, 128), (28, 4, 128), (8, 8, 64), (8, 2, 256), (16, 2, 80), (71, 1, 64), (6, 2, 192)], ids=str
)
def test_on_a_gpu(kv_cache_dtype: str, block_size: int, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, size = shape
    config = config_of(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype,
        alibi=block_size == 8,
    )  # fmt: skip
    problem = problem_of(config, [2000, 513, 512, 64, 3, 0, 1], torch.device("cuda"), block_size=block_size)
    for version in VERSIONS:
        run(problem, version, partition_size=512, launch=None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_long_contexts_on_a_gpu(dtype: str) -> None:
    config = config_of(num_heads=4, num_kv_heads=1, head_size=128, dtype=dtype)
    problem = problem_of(config, [131072, 8193], torch.device("cuda"))
    for version in VERSIONS:
        run(problem, version, partition_size=512, launch=None)
