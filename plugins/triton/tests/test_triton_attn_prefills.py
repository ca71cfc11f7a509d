"""Prefills of TRITON_ATTN's layer against the oracle: every way to run one, and which is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
import triton_attn_layers as layers

from attn_select.errors import KernelMismatchError
from attn_select.reference.running import common_of
from attn_select.testing import lse_error
from attn_select_triton.runtime import schedule, triton_attn_metadata
from attn_select_triton.tuning import Gpu, way_cost

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("apart")]


H100 = Gpu((9, 0), 132)


@pytest.fixture
def always_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: "gathered")


@pytest.fixture
def always_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: "split")


@pytest.mark.parametrize(
    "fields",
    [
        layers.slow({}),
        {"sliding_window": 20},
        layers.slow({"non_causal": True}),
        layers.slow({"mm_prefix": True, "sliding_window": 9}),
        {"kv_cache_dtype": "fp8_e4m3"},
        layers.slow({"kv_cache_dtype": "float32", "head_size": 96, "v_head_size": 64}),
        {"attn_type": "encoder_decoder"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("always_gather")
def test_gathered(fields: dict[str, Any], device: torch.device) -> None:
    requests = ((1, 40), (1, 33), (70, 140), (17, 17), (100, 130))
    group = layers.made(device, layers.layer_config(**fields))
    problem = layers.problem_of(group, requests)
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    assert [part.gather is not None for part in parts] == [False, True]
    layers.check(group, problem)


@pytest.mark.usefixtures("always_gather")
def test_what_does_not_fit_is_gathered_in_chunks(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(num_heads=4, num_kv_heads=4))
    builder = layers.builder_of(group)
    builder._gathered = tuple(tensor[:192] for tensor in builder._gathered)
    problem = layers.problem_of(group, ((1, 40), (30, 100), (17, 64), (40, 120), (9, 9), (65, 65)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    rows = [None if part.gather is None else part.gather.arguments["key_start_loc"].tolist() for part in parts]
    assert rows == [None, [0, 128], [0, 128], [0]]
    assert {part.gather.heads for part in parts[1:]} == {4}
    layers.check(group, problem)


@pytest.mark.usefixtures("always_gather")
@pytest.mark.parametrize("fields", [{}, {"sinks": True, "alibi": True}], ids=str)
def test_what_is_longer_goes_a_few_heads_at_a_time(fields: dict[str, Any], device: torch.device) -> None:
    """Of the longest request there is room for two of four KV heads; a second one would fit for one head alone."""
    group = layers.made(device, layers.layer_config(num_heads=8, num_kv_heads=4, **fields))
    builder = layers.builder_of(group)
    builder._gathered = tuple(tensor[:128] for tensor in builder._gathered)
    problem = layers.problem_of(group, ((1, 40), (30, 100), (20, 200), (9, 9)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    assert [part.gather.heads for part in parts[1:]] == [2, 2, 2]
    layers.check(group, problem)
    problem = layers.problem_of(group, ((30, 600),))
    (part,) = group.build(common_of(problem)).parts[0].metadata.parts
    assert part.gather is None  # longer than what can be copied even of one head
    layers.check(group, problem)


def test_a_window_bounds_what_is_gathered() -> None:
    (chunk,) = schedule.gathered_chunks([512], [100_000], 4096, 8192)
    assert chunk.most_rows <= 4096 + 512 + 2 * 64
    assert chunk.starts == [-(100_000 - 512 - 4095) // 64 * 64 + 64 * bool((100_000 - 512 - 4095) % 64)]
    (chunk,) = schedule.gathered_chunks([512], [100_000], 0, 8192)
    assert chunk.starts is None


def test_requests_without_keys_are_gathered_with_others() -> None:
    """Prompts whose context lies on other ranks: first, and behind a request that does not fit."""
    (chunk,) = schedule.gathered_chunks([7, 3], [0, 5], 0, 64)
    assert (chunk.first, chunk.last, chunk.tokens, chunk.starts) == (0, 2, 10, [0, 0])
    alone, behind = schedule.gathered_chunks([7, 3], [100, 0], 0, 64)
    assert (alone.starts, behind.starts) == (None, [0])
    assert (behind.first, behind.last, behind.tokens) == (1, 2, 3)


def test_a_plan_for_gluon_is_refused_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attn_metadata, "capability_of", lambda device: (10, 0))
    with pytest.raises(KernelMismatchError, match=r"warp-specialised prefill .* cuda:0 has 10\.0"):
        triton_attn_metadata.check_gluon(torch.device("cuda", 0))
    monkeypatch.setattr(triton_attn_metadata, "capability_of", lambda device: (9, 0))
    triton_attn_metadata.check_gluon(torch.device("cuda", 0))


def way_of(ways: Any, queries: list[int], keys: list[int], *, window: int = 0, room: int = 0) -> str:
    work = schedule.prefill_work(queries, keys, heads=(32, 8), causal=True, window=window)
    return schedule.prefill_way(ways, work, schedule.prefill_shares(way_cost("warps"), work, H100, room), H100)


def test_the_cheapest_way_is_taken() -> None:
    """The way that was the fastest on an H200, by less than 5 % where two are named."""
    every = {"pages": way_cost("pages"), "gathered": way_cost("gathered"), "split": way_cost("split")}

    def way(requests: int, seq_len: int, query_len: int, ways: Any = every) -> str:
        return way_of(ways, [query_len] * requests, [seq_len] * requests)

    for query_len in (16, 32, 64, 128, 256):
        assert way(1, 16896, query_len) == "split"
    assert way(1, 2048, 64) == way(8, 4096, 16) == "split"
    assert way(8, 4096, 64) in ("pages", "split")
    gathered = [(1, 16896, 512), (1, 16896, 1024), (1, 2048, 256), (1, 2048, 1024), (8, 4096, 256)]
    for case in (*gathered, (16, 128, 128), (16, 256, 256), (16, 512, 512)):
        assert way(*case) == "gathered"
    fp8 = {**every, "split": way_cost("split_fp8")}
    assert [way(1, 16896, q, fp8) for q in (16, 32, 64, 128)] == ["split"] * 4
    assert [way(8, 4096, q, fp8) for q in (16, 256)] == ["split", "gathered"]
    assert way(8, 4096, 64, fp8) in ("pages", "gathered")
    by_tma = {"pages": way_cost("tma_pages"), "split": way_cost("split")}
    assert [way(1, 16896, q, by_tma) for q in (64, 512)] == ["split", "pages"]
    warps = {**every, "warps": way_cost("warps")}
    for query_len in (512, 1024):
        assert way(1, 16896, query_len, warps) == "warps"
    assert way(8, 4096, 16, warps) in ("warps", "split")
    longer = [(8, 4096, 64), (8, 4096, 256), (4, 2048, 2048), (2, 4096, 4096), (1, 16384, 16384)]
    for case in ((1, 2048, 256), (1, 2048, 1024), *longer):
        assert way(*case, warps) == "warps"
    assert way(8, 1024, 1024, warps) == "warps"
    for query_len in (128, 256, 512):
        assert way(16, query_len, query_len, warps) == "warps"
    copied = {**fp8, "gathered_warps": way_cost("gathered_warps")}
    for query_len in (512, 1024, 2048, 4096):
        assert way(8192 // query_len, query_len, query_len, copied) == "gathered_warps"
    assert way(1, 16896, 128, copied) == "split"
    assert [way(1, 16896, q, warps) for q in (16, 32, 64, 128)] == ["split"] * 4
    assert way(1, 2048, 64, warps) == "split"


def shares_of(queries: list[int], keys: list[int], room: int = 1 << 20) -> list[int]:
    work = schedule.prefill_work(queries, keys, heads=(32, 8), causal=True, window=0)
    return schedule.prefill_shares(way_cost("warps"), work, H100, room).counts.tolist()


def test_few_tokens_over_many_keys_share_them_where_sms_are_idle() -> None:
    (shares,) = shares_of([128], [8320])  # 4 tiles of 128 rows for each of 8 heads
    assert 3 <= shares <= 8
    assert shares_of([128], [8320], room=128 * 32 - 1) == [1]
    assert shares_of([128], [8320], room=128 * 32 * 2) == [2]
    assert shares_of([128], [400]) == [1]
    ways = {name: way_cost(name) for name in ("pages", "gathered", "split", "warps")}
    assert way_of(ways, [128], [8320], room=1 << 20) == "warps"
    assert way_of(ways, [128], [8320]) == "split"


def test_only_a_request_that_would_end_last_is_cut() -> None:
    """A few tokens over many keys beside a prompt that fills the GPU for a while."""
    prompt, chunk = shares_of([4496, 35], [4613, 160302])
    assert prompt == 1
    assert chunk >= 4
    assert shares_of([4096] * 4, [4096] * 4) == [1] * 4


def test_a_window_costs_what_it_holds_on_paper() -> None:
    every = {"pages": way_cost("pages"), "gathered": way_cost("gathered")}
    assert [way_of(every, [128], [100_000], window=window) for window in (0, 4096)] == ["gathered", "gathered"]
    assert way_of(every, [16] * 64, [4096] * 64) == "pages"


@pytest.mark.parametrize(
    "fields", [{}, layers.slow({"sinks": True, "sliding_window": 300}), layers.slow({"alibi": True})], ids=str
)
@pytest.mark.usefixtures("always_split")
def test_a_few_tokens_over_a_long_context_are_split(fields: dict[str, Any], device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config(**fields)))
    problem = layers.problem_of(group, ((1, 600), (1, 500), (20, 700), (9, 9), (3, 40)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    assert [max(layers.pieces_of(part)) > 1 for part in parts] == [True, True]
    layers.check(group, problem)


def test_images_of_other_steps_are_left_out(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(mm_prefix=True))
    problem = layers.problem_of(group, ((1, 40), (30, 60), (60, 60)))
    ranges = (((2, 9), (11, 20)), ((3, 9), (35, 44), (50, 50)), ((0, 4), (7, 30), (40, 59)))
    problem = dataclasses.replace(problem, mm_prefix_ranges=ranges)
    decode, prefill = group.build(common_of(problem)).parts[0].metadata.parts
    assert decode.ranges is None
    unused = [1, 0]
    wanted = [[[35, 44], unused, unused, unused], [[0, 4], [7, 30], [40, 59], unused]]
    assert prefill.ranges.tolist() == wanted
    layers.check(group, problem)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9}, {"non_causal": True, "sliding_window": 30}], ids=str)
def test_many_images(fields: dict[str, Any], device: torch.device) -> None:
    """More than the kernel unrolls."""
    group = layers.made(device, layers.layer_config(mm_prefix=True, **fields))
    problem = layers.problem_of(group, ((100, 120), (60, 60)))
    ranges = (tuple((first, first + 5) for first in range(2, 110, 9)), ((0, 40),))
    problem = dataclasses.replace(problem, mm_prefix_ranges=ranges)
    (part,) = group.build(common_of(problem)).parts[0].metadata.parts
    assert part.ranges.shape == (2, 16, 2)
    layers.check(group, problem)


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0, 200.0])
def test_float32_is_capped_to_its_last_bits(cap: float, device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(dtype="float32", head_size=64, logits_soft_cap=cap))
    problem = layers.problem_of(group, ((1, 3), (9, 9), (20, 60)))
    _, lse = layers.check(group, problem)
    assert lse_error(lse, problem.reference()[1]) < 2e-6


def test_steps_in_both_directions(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(sliding_window=12))
    problem = layers.problem_of(group, layers.MIXED)
    metadata = group.build(dataclasses.replace(common_of(problem), causal=False))
    output, lse = layers.run(group, problem, metadata)
    config = problem.config.model_copy(update={"non_causal": True})
    layers.compare(group, dataclasses.replace(problem, config=config), output, lse)
