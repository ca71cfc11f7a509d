"""The Gluon prefill on a Hopper GPU against the float64 oracle: pages, no cache, groups, lengths, layouts, 128 Ki."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import numpy as np
import torch
import triton_attn_layers as layers

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.reference.running import call_layer, common_of, inputs_of, kernel_cache, layer_of
from attn_select.runtime import Capacity
from attn_select.runtime.kv_cache import key_value_views
from attn_select.runtime.torch_ops import quantize_fp8
from attn_select.testing import lse_error, random_problem, relative_error, varlen_reference
from attn_select_triton.kernels import prefill_hopper as kernel
from attn_select_triton.kernels.launch import Terms, hopper_prefill_launch
from attn_select_triton.kernels.prefill_hopper import box_rows, readable
from attn_select_triton.kernels.work_list import list_work
from attn_select_triton.runtime import schedule

CHANGES = (
    {}, {"non_causal": True}, {"dtype": "float16"}, {"head_size": 64}, {"head_size": 256, "logits_soft_cap": 30.0},
    {"sliding_window": 100}, {"sliding_window": 1, "sinks": True}, {"head_size": 64, "sinks": True},
    {"head_size": 80}, {"head_size": 96, "sliding_window": 100}, {"head_size": 112, "sinks": True}, {"head_size": 192},
)  # fmt: skip
REQUESTS = ((1, 300), (257, 257), (0, 40), (64, 512), (1, 0), (130, 1000), (128, 128), (63, 129), (5, 3))
BATCHES = (REQUESTS, ((1000, 1000),), ((3, 2000), (700, 900), (65, 65)))
"""Each test compiles one kernel, which takes longest, and runs it on all of them."""


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a CUDA device of compute capability 9.0")


LAYER = ("scale", "terms", "output_scale", "output_lse")


def launched(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, *, shares: Any = 1, **given: Any
) -> None:
    """Launch the kernel, which must leave its counter as the next launch needs it.

    Args:
        shares: of the keys, of each request or of all.
    """
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    lens = given["query_start_loc"].diff().cpu().numpy()
    tile = hopper_prefill_launch(query.shape[2], output.shape[2])
    assert tile is not None
    work = list_work(
        lens, np.broadcast_to(shares, lens.shape), heads=(query.shape[1], value.shape[-2]), tile_rows=tile.block_m,
        device=query.device, longest_first=np.argsort(-lens),
    )  # fmt: skip
    workspace = torch.full((work.partials * (output.shape[2] + 1),), torch.nan, device="cuda")
    layer = {name: given.pop(name) for name in LAYER if name in given}
    kernel.Prefill(work=work, counter=counter, workspace=workspace, **given)(query, key, value, output, **layer)
    assert counter.tolist() == [0, 0]


def config_of(heads: int, kv_heads: int, **changes: Any) -> AttentionConfig:
    options: dict[str, Any] = {"head_size": 128, "dtype": "bfloat16"}
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, **(options | changes))


def check_pages(
    terms_of: Callable[[Any], Terms],
    changes: dict[str, Any],
    layout: str = FLASHINFER_NHD,
    block_size: int = 16,
    heads: tuple[int, int] = (8, 2),
) -> None:
    needs_hopper()
    config = config_of(*heads, **changes)
    for requests in BATCHES:
        problem = random_problem(1, config, layout, requests=requests, block_size=block_size, device="cuda")
        kv_cache = problem.written_cache()
        wanted, wanted_lse = problem.reference(kv_cache=kv_cache)
        output = torch.full_like(problem.query, torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device="cuda")
        launched(
            problem.query, *key_value_views(kv_cache, layout, config), output, output_lse=lse, terms=terms_of(problem),
            query_start_loc=problem.query_start_loc, seq_lens=problem.seq_lens, block_table=problem.block_table,
            max_seq_len=max(keys for _, keys in requests), scale=problem.scale,
        )  # fmt: skip
        assert relative_error(output, wanted).row < 2e-2
        assert lse_error(lse, wanted_lse) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (14, 2)], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_terms(changes: dict[str, Any], heads: tuple[int, int], terms_of: Callable[[Any], Terms]) -> None:
    check_pages(terms_of, changes, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND])
@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_pages(layout: str, block_size: int, terms_of: Callable[[Any], Terms]) -> None:
    check_pages(terms_of, {}, layout, block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 96, 192, 256])
@pytest.mark.parametrize(("layout", "block_size"), [(FLASH_ATTN_NHD, 64), (FLASHINFER_HND, 48)])
def test_pages_of_other_head_sizes(layout: str, block_size: int, size: int, terms_of: Callable[[Any], Terms]) -> None:
    check_pages(terms_of, {"head_size": size}, layout, block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2), (71, 1)], ids=str)
def test_groups(heads: tuple[int, int], terms_of: Callable[[Any], Terms]) -> None:
    check_pages(terms_of, {}, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_size", "value_size", "longest"), [(128, 128, 523), (192, 128, 523), (192, 128, 1 << 15), (96, 64, 523)]
)
def test_keys_and_values_as_they_come(head_size: int, value_size: int, longest: int, causal: bool) -> None:
    """Cut from one tensor, behind them nothing: reads behind the last request are TMA's zeros.

    Of long requests some head sizes have a variant of the kernel.
    """
    needs_hopper()
    config = config_of(8, 2, non_causal=not causal, head_size=head_size, v_head_size=value_size)
    both = torch.randn(900, 2 * (head_size + value_size), device="cuda", dtype=torch.bfloat16)
    key, value = (
        part.view(900, 2, size) for part, size in zip(both.split([2 * head_size, 2 * value_size], -1),
                                                      (head_size, value_size), strict=True)
    )  # fmt: skip
    query = torch.randn(900, 8, head_size, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 77, 77, 600, 900], device="cuda", dtype=torch.int32)
    wanted, wanted_lse = varlen_reference(
        query, key, value, starts, starts, config, 128**-0.5
    )  # fmt: skip
    output, lse = torch.full_like(query[..., :value_size], torch.nan), torch.full((900, 8), torch.nan, device="cuda")
    launched(
        query, key, value, output, query_start_loc=starts, key_start_loc=starts[:-1],
        seq_lens=starts.diff().int(), max_seq_len=longest, scale=128**-0.5, terms=Terms(causal=causal), output_lse=lse,
    )  # fmt: skip
    assert relative_error(output, wanted).row < 2e-2
    assert lse_error(lse, wanted_lse) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_keys_are_split(changes: dict[str, Any], terms_of: Callable[[Any], Terms]) -> None:
    """Some requests in one share, others in many; rows of other requests, before and behind, are left alone."""
    needs_hopper()
    config = config_of(14, 2, **changes)
    problem = random_problem(2, config, FLASHINFER_NHD, requests=REQUESTS, device="cuda")
    kv_cache = problem.written_cache()
    wanted, wanted_lse = problem.reference(kv_cache=kv_cache)
    first, last = int(problem.query_start_loc[1]), int(problem.query_start_loc[-2])
    for shares in (2, [1, 2, 1, 1, 7, 1, 20]):
        output = torch.full_like(problem.query, torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device="cuda")
        launched(
            problem.query, *key_value_views(kv_cache, FLASHINFER_NHD, config), output,
            query_start_loc=problem.query_start_loc[1:-1], seq_lens=problem.seq_lens[1:-1], max_seq_len=1000,
            scale=problem.scale, block_table=problem.block_table[1:-1], output_lse=lse, terms=terms_of(problem),
            shares=shares,
        )  # fmt: skip
        assert output[:first].isnan().all()
        assert output[last:].isnan().all()
        assert relative_error(output[first:last], wanted[first:last]).row < 2e-2
        assert lse_error(lse[first:last], wanted_lse[first:last]) < 1e-2


@pytest.mark.gpu
def test_keys_wider_than_the_query(terms_of: Callable[[Any], Terms]) -> None:
    """As they are copied from an FP8 cache: zeros behind each head."""
    needs_hopper()
    config = config_of(8, 2, head_size=80)
    query = torch.randn(300, 8, 80, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.zeros(300, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for rows in (key, value):
        rows[..., :80].normal_()
    starts = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    wanted, wanted_lse = varlen_reference(query, key[..., :80], value[..., :80], starts, starts, config, 80**-0.5)
    output, lse = torch.full_like(query, torch.nan), torch.full((300, 8), torch.nan, device="cuda")
    launched(
        query, key, value, output, query_start_loc=starts, key_start_loc=starts[:-1], seq_lens=starts.diff().int(),
        max_seq_len=200, scale=80**-0.5, output_lse=lse, shares=[1, 3],
    )  # fmt: skip
    assert relative_error(output, wanted).row < 2e-2
    assert lse_error(lse, wanted_lse) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CHANGES[3:7], ids=str)
def test_outputs_in_e4m3(changes: dict[str, Any], terms_of: Callable[[Any], Terms]) -> None:
    """Within a step of e4m3 of what the same kernel writes in 16 bits, saturated where the scale is too small."""
    needs_hopper()
    config = config_of(8, 2, **changes)
    problem = random_problem(1, config, FLASHINFER_NHD, requests=REQUESTS, device="cuda")
    views = key_value_views(problem.written_cache(), FLASHINFER_NHD, config)
    given: dict[str, Any] = {
        "query_start_loc": problem.query_start_loc, "seq_lens": problem.seq_lens, "max_seq_len": 1000,
        "scale": problem.scale, "block_table": problem.block_table, "terms": terms_of(problem),
    }  # fmt: skip
    wanted = torch.full_like(problem.query, torch.nan)
    launched(problem.query, *views, wanted, **given)
    for size in (0.01, 0.0005):
        scale, output = torch.tensor(size, device="cuda"), torch.full_like(wanted, torch.nan).to(torch.float8_e4m3fn)
        launched(problem.query, *views, output, output_scale=scale, **given)
        stored = quantize_fp8(wanted, scale, torch.float8_e4m3fn)
        off = (output.view(torch.uint8).int() - stored.view(torch.uint8).int()).abs()
        assert off.max() <= 1
        assert (off > 0).float().mean() < 0.1  # 16 bits come between in both, before and behind the scale


STEPS = (((1, 700), (1, 3), (200, 900), (130, 130)), ((16, 2000), (0, 40)), ((600, 5000),))
PLACES: list[dict[str, Any]] = [
    {}, {"block_size": 64, "dtype": "float16"}, {"non_causal": True}, {"kv_cache_dtype": "fp8_e4m3"},
    {"kv_cache_dtype": "fp8_e5m2", "head_size": 256, "block_size": 64, "sliding_window": 300},
    {"kv_cache_dtype": "fp8_e4m3", "head_size": 96}, {"head_size": 192},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fields", PLACES, ids=str)
def test_a_layer_runs_by_it(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From its pages; an FP8 cache from what was copied out of them, in as many launches as that takes."""
    needs_hopper()
    way = "gathered_warps" if "kv_cache_dtype" in fields else "warps"
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: way)
    monkeypatch.setattr(schedule, "few_programs", lambda *_: False)  # no launch of the decode kernel serves all
    group = layers.made(torch.device("cuda"), config_of(8, 2, **fields), capacity=Capacity(16, 2048, 8192))
    calls: list[None] = []

    class Counted(kernel.Prefill):
        def __call__(self, *args: Any, **given: Any) -> None:
            calls.append(super().__call__(*args, **given))

    monkeypatch.setattr(kernel, "Prefill", Counted)
    for step in STEPS:
        calls.clear()
        problem = layers.problem_of(group, step)
        parts = group.build(common_of(problem)).parts[0].metadata.parts
        assert parts[-1].warps
        layers.check(group, problem)
        assert len(calls) == sum(part.warps for part in parts)


@pytest.mark.gpu
def test_layers_of_two_groups_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has a counter of its own, which the programs of a launch share."""
    needs_hopper()
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: "warps")
    groups = [layers.made(torch.device("cuda"), config_of(8, 2), capacity=Capacity(16, 4096, 8192)) for _ in range(2)]
    calls, wanted = [], []
    for group in groups:
        problem = layers.problem_of(group, ((2000, 4000), (700, 700)))
        inputs, kv_cache = inputs_of(problem, padding=0), kernel_cache(group, problem)
        calls.append((layer_of(group, problem), inputs, kv_cache, group.build(common_of(problem)), None))
        wanted.append(problem.reference()[0])
    streams, found = [torch.cuda.Stream() for _ in groups], []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, call, reference in zip(streams, calls, wanted, strict=True):
            with torch.cuda.stream(stream):
                found.append((call_layer(*call), reference))
    torch.cuda.synchronize()
    assert all(relative_error(*pair).row < 2e-2 for pair in found)


@pytest.mark.gpu
def test_a_layer_takes_it_where_it_is_cheapest() -> None:
    needs_hopper()
    group = layers.made(torch.device("cuda"), config_of(32, 8), capacity=Capacity(16, 8192, 8192))
    for requests, expected in ((((512, 8192),), True), (((4096, 4096),), True), (((32, 32),), False)):
        problem = layers.problem_of(group, requests)
        parts = group.build(common_of(problem)).parts[0].metadata.parts
        assert [part.warps for part in parts] == [expected]


def test_what_boxes_can_read() -> None:
    pages = torch.zeros(4, 2, 16, 2, 128, dtype=torch.bfloat16)
    assert readable(*pages.unbind(1))
    assert readable(pages[:, 0].transpose(1, 2).contiguous().transpose(1, 2), pages[:, 1])
    assert readable(pages[0, 0], pages[0, 1])
    assert not readable(*torch.zeros(4, 2, 8, 2, 128, dtype=torch.bfloat16).unbind(1))
    assert readable(*torch.zeros(4, 2, 16, 2, 80, dtype=torch.bfloat16).unbind(1))
    assert not readable(*torch.zeros(4, 2, 16, 2, 512, dtype=torch.bfloat16).unbind(1))
    wide = torch.zeros(9, 2, 128, dtype=torch.bfloat16)
    assert readable(wide[..., :64], wide[..., :64])
    assert not readable(wide[..., :80], wide[..., :80])  # what lies between two heads may be NaN
    assert readable(
        torch.zeros(9, 2, 192, dtype=torch.bfloat16), torch.zeros(9, 2, 256, dtype=torch.bfloat16)[..., 128:]
    )
    shifted = torch.zeros(pages.numel() + 1, dtype=torch.bfloat16)[1:].view(pages.shape)
    assert not readable(*shifted.unbind(1))


def test_boxes_lie_in_one_page() -> None:
    assert [box_rows(size, True, 128) for size in (16, 24, 48, 64, 128, 256)] == [16, 8, 16, 64, 128, 128]
    assert box_rows(256, True, 64) == 64
    assert box_rows(1, False, 128) == 128
