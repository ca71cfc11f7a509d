"""TRITON_ATTN's layer against the oracle: every path of the builder, captured steps, cascade, batch invariance."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
import triton
import triton_attn_layers as layers

from attn_select.errors import KernelMismatchError
from attn_select.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.runtime import Capacity, torch_ops
from attn_select.runtime.batch import prepare_batch
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch
from attn_select.testing import Problem, lse_error, relative_error, same_bits
from attn_select.testing.running import common_of, layer_of, shared_prefix
from attn_select_triton.facts.tuning import Gpu, Tile, way_cost
from attn_select_triton.runtime import schedule, triton_attn_metadata

pytestmark = pytest.mark.long

H100 = Gpu((9, 0), 132)
AT_8: dict[str, Any] = {
    "units": 8, "room": 6400, "gpu": Gpu((9, 0), 132, 4800), "launch": Tile(16, 128, 4, 2), "key_bytes": 512,
}  # fmt: skip
MIXED = ((1, 40), (1, 1), (0, 9), (1, 0), (30, 70), (17, 17), (2, 50))
UNEVEN = ((1, 700), (1, 20), (1, 1), (1, 33))


def slow(fields: dict[str, Any]) -> Any:
    return pytest.param(fields, marks=pytest.mark.slow(guard="the test's other cases; the kernels' tests of all terms"))


def pieces_of(part: Any) -> list[int]:
    """Return of each request in how many pieces its keys are, of a step whose pieces were checked to be in order."""
    pieces = part.decode.pieces
    if pieces is None:
        return [1] * len(part.decode.seq_lens)
    there = pieces[pieces[:, 0] >= 0].tolist()
    assert [piece[0] >= 0 for piece in pieces.tolist()] == [True] * len(there) + [False] * (len(pieces) - len(there))
    sizes = [-(-seq_len // splits) for _, _, splits, _, _, _, seq_len, _ in there]
    assert sizes == sorted(sizes, reverse=True)
    found = [0] * len(part.decode.seq_lens)
    for request, _, splits, *_ in there:
        found[request] = splits
    assert len(there) == sum(found)
    return found


def builder_of(group: Any) -> Any:
    return group.backends[0].builder


@pytest.fixture
def always_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: "gathered")


@pytest.fixture
def always_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: "split")


def many_sms(group: Any, count: int = 100) -> Any:
    """Make the builder schedule for a GPU that is hard to fill."""
    builder = builder_of(group)
    builder._gpu = dataclasses.replace(builder._gpu, sms=count)
    if builder._pieces is not None:
        builder._reserve_pieces()
    return group


# --- Layouts, blocks, padding ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND])
@pytest.mark.parametrize("fields", [{}, {"head_size": 48, "v_head_size": 32}, {"block_size": 48}], ids=str)
def test_every_layout_is_read_where_it_lies(layout: str, fields: dict[str, Any], device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(**fields), layout)
    assert group.kv_layout == layout
    layers.check(group, layers.problem_of(group, MIXED))


def test_pages_are_handed_through(device: torch.device) -> None:
    for size in (16, 32, 48, 64, 192, 256):
        group = layers.made(device, layers.layer_config(block_size=size))
        assert (group.block_size, group.kernel_block_size) == (size, size)


def test_nothing_to_do(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config())
    problem = layers.problem_of(group, ((0, 9), (0, 0)))
    output, lse = layers.run(group, problem)
    assert output.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


# --- Decodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [2, 1, 1, 1]),
        ({"sinks": True, "sliding_window": 600}, [2, 1, 1, 1]),
        ({"sliding_window": 300}, [2, 1, 1, 1]),
        ({"sliding_window": 100}, [1, 1, 1, 1]),
        ({"kv_cache_dtype": "fp8_e5m2"}, [2, 1, 1, 1]),
    ],
    ids=str,
)
def test_long_requests_are_split_and_short_ones_are_not(
    fields: dict[str, Any], wanted: list[int], device: torch.device
) -> None:
    group = many_sms(layers.made(device, layers.layer_config(**fields)), 4)
    problem = layers.problem_of(group, UNEVEN)
    (part,) = group.build(common_of(problem)).parts[0].metadata.parts
    assert pieces_of(part) == wanted
    layers.check(group, problem)


def test_equal_requests_get_equal_splits() -> None:
    assert schedule.split_keys(np.array([4096] * 64), **AT_8) == (1, 4096)
    assert schedule.split_keys(np.array([16384] * 8), **AT_8) == (4, 4096)
    assert schedule.split_keys(np.array([131072]), **AT_8) == (33, 3972)


def test_a_batch_that_is_a_little_uneven_is_split_evenly() -> None:
    assert schedule.split_keys(np.array([16384] * 12 + [8192] * 4), **AT_8) == (2, 8192)


def test_requests_of_many_lengths_go_into_pieces_that_leave_no_tail() -> None:
    """What was fastest on an H200 (docs/log/triton.md), or as many pieces as it had."""
    lens = np.array([1024] * 63 + [65536])
    splits, tokens = schedule.split_keys(lens, **AT_8)
    assert (splits, tokens) == (34, 1971)
    # Where the workspace has room for fewer, they are larger and still cover everything.
    splits, tokens = schedule.split_keys(lens, **{**AT_8, "room": 20})
    assert 1 < splits <= 20
    assert splits * tokens >= 65536
    # Short requests among long ones fill the places that those leave.
    splits, tokens = schedule.split_keys(np.array([2718] * 2 + [166] * 42), **AT_8)
    assert 166 <= tokens < 700
    assert schedule.split_keys(np.array([300] + [100] * 600), **AT_8)[0] == 1  # there are places for no more


@pytest.mark.parametrize(("room", "wanted"), [(11, [11, 1, 1, 1]), (10, [2, 1, 1, 1]), (1, [1, 1, 1, 1])])
def test_splits_fit_the_reserved_workspace(room: int, wanted: list[int], device: torch.device) -> None:
    group = many_sms(layers.made(device, layers.layer_config(), capacity=Capacity(16, 1024, 4096)), 10_000)
    builder = builder_of(group)
    row = 4 * (32 + 1)
    builder._workspace = builder._workspace[: room * row]
    problem = layers.problem_of(group, UNEVEN)
    (part,) = group.build(common_of(problem)).parts[0].metadata.parts
    assert pieces_of(part) == wanted
    layers.check(group, problem)


def test_speculative_queries_and_prefills_in_one_batch(device: torch.device) -> None:
    group = many_sms(layers.made(device, layers.layer_config(num_speculative_tokens=3)))
    assert group.reorder_batch_threshold == 4
    problem = layers.problem_of(group, ((4, 600), (1, 30), (3, 3), (4, 0), (0, 5), (40, 60), (5, 5)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    assert [part.decode is not None for part in parts] == [True, False]
    layers.check(group, problem)


TREES = (
    {},
    {"sliding_window": 20, "sinks": True},
    {"logits_soft_cap": 5.0, "alibi": True, "num_heads": 14},
    {"num_kv_heads": 1, "head_size": 64, "num_speculative_tokens": 8, "batch_invariant": True},
    {"kv_cache_dtype": "fp8_e4m3", "dtype": "float16", "block_size": 48},
)


@pytest.mark.parametrize("sms", [1, 100], ids=["whole", "split"])
@pytest.mark.parametrize("fields", TREES, ids=str)
def test_trees_of_drafts_and_prefills_in_one_batch(fields: dict[str, Any], sms: int, device: torch.device) -> None:
    config = layers.layer_config(**{"num_speculative_tokens": 3, "draft_tree": True, **fields})
    group = many_sms(layers.made(device, config), sms)
    problem = layers.problem_of(group, ((4, 600), (1, 30), (3, 3), (4, 65), (2, 70), (40, 60)))
    assert problem.tree_mask is not None
    output, _ = layers.check(group, problem)
    chains = dataclasses.replace(problem, tree_mask=None)
    assert not torch.equal(layers.run(group, chains)[0], output)


def test_images_among_drafts_see_each_other_whatever_their_tree(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(num_speculative_tokens=3, draft_tree=True, mm_prefix=True))
    problem = layers.problem_of(group, ((4, 4), (4, 40), (3, 33)))
    assert problem.tree_mask is not None
    ranges = [[(1, 3)], [(5, 9), (38, 39)], [(2, 4)]]
    layers.check(group, dataclasses.replace(problem, mm_prefix_ranges=ranges))


def test_drafts_without_a_tree_are_chains(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(num_speculative_tokens=3, draft_tree=True))
    problem = layers.problem_of(group, ((4, 40), (2, 9)))
    layers.check(group, dataclasses.replace(problem, tree_mask=None))


def test_captured_decodes_read_the_trees_of_each_replay(device: torch.device) -> None:
    config = layers.layer_config(num_speculative_tokens=3, draft_tree=True)
    group = layers.made(device, config, cuda_graphs=True)
    assert group.cudagraph_support == "UNIFORM_BATCH"
    batch = StaticBatch(group, 4)
    metadata = group.build_for_cudagraph_capture(batch.dummy(2))
    address = metadata.parts[0].metadata.parts[0].decode._tree.data_ptr()
    assert batch.tree_mask is not None
    assert address == batch.tree_mask.data_ptr()


# --- Outputs in FP8 -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.01, 0.0005], ids=["fits", "saturates"])
@pytest.mark.parametrize("sms", [1, 100], ids=["whole", "split"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"sliding_window": 20, "sinks": True}, {"kv_cache_dtype": "fp8_e4m3"}, {"attn_type": "encoder"}],
    ids=str,
)
def test_outputs_are_rounded_to_e4m3_over_their_scale(
    fields: dict[str, Any], sms: int, scale: float, device: torch.device
) -> None:
    config = layers.layer_config(dtype="float32", **fields)
    requests = ((40, 40), (5, 5)) if "attn_type" in fields else MIXED
    plain = many_sms(layers.made(device, config), sms)
    group = many_sms(layers.made(device, config.model_copy(update={"output_quantization": "fp8"})), sms)
    problem = layers.problem_of(plain, requests)
    wanted, wanted_lse = layers.check(plain, problem)
    output_scale = torch.tensor(scale, device=device)
    output, lse = layers.run(group, problem, output_scale=output_scale)
    stored = torch_ops.quantize_fp8(wanted, output_scale, torch.float8_e4m3fn)
    assert bool((stored.float().abs() == 448).any()) == (scale < 0.001)
    off = (output.view(torch.uint8).int() - stored.view(torch.uint8).int()).abs()
    assert off.max() <= 1  # compiled for another output, a result may differ in its last bit
    assert (off > 0).float().mean() < 1e-3
    assert torch.allclose(lse, wanted_lse, atol=1e-5)


def test_a_cascade_is_merged_before_its_output_is_rounded(device: torch.device) -> None:
    config = layers.layer_config(dtype="float32", output_quantization="fp8")
    group = layers.made(device, config)
    builder_of(group).least_cascade_bytes = 0
    requests = (*((1, 256 + 10 + i) for i in range(7)), (20, 290))
    problem = shared_prefix(layers.problem_of(group, requests), 256 // group.block_size)
    metadata = group.build(common_of(problem), common_prefix_len=256)
    assert metadata.parts[0].metadata.prefix is not None
    scale = torch.tensor(0.01, device=device)
    output, lse = layers.run(group, problem, metadata, output_scale=scale)
    wanted, wanted_lse = problem.reference()
    assert relative_error(output.float() * scale, wanted).row < 3 * 2.0**-4
    assert lse_error(lse, wanted_lse) < 1e-5


# --- Prefills -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        slow({}),
        {"sliding_window": 20},
        slow({"non_causal": True}),
        slow({"mm_prefix": True, "sliding_window": 9}),
        {"kv_cache_dtype": "fp8_e4m3"},
        slow({"kv_cache_dtype": "float32", "head_size": 96, "v_head_size": 64}),
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
def test_what_does_not_fit_is_gathered_in_chunks_or_not_at_all(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config())
    builder = builder_of(group)
    builder._gathered = tuple(tensor[:192] for tensor in builder._gathered)
    problem = layers.problem_of(group, ((1, 40), (30, 100), (17, 64), (40, 120), (20, 200), (9, 9), (65, 65)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    rows = [None if part.gather is None else part.gather.arguments["key_start_loc"].tolist() for part in parts]
    assert rows == [None, [0, 128], [0], None, [0, 64]]
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


@pytest.mark.parametrize(("capability", "triton_version"), [((9, 0), "3.7.0"), ((10, 0), "3.6.0")])
def test_a_plan_for_gluon_is_refused_where_it_was_not_run(
    capability: tuple[int, int], triton_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_attn_metadata, "capability_of", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", triton_version)
    with pytest.raises(KernelMismatchError, match=rf"warp-specialised prefill .* Triton is {triton_version}"):
        triton_attn_metadata.check_gluon(torch.device("cuda", 0))


def test_gluon_runs_where_it_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attn_metadata, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.1")
    triton_attn_metadata.check_gluon(torch.device("cuda", 0))


def test_the_cheapest_way_is_taken() -> None:
    """The way that was the fastest on an H200, by less than 5 % where two are named."""
    every = {"pages": way_cost("pages"), "gathered": way_cost("gathered"), "split": way_cost("split")}
    heads, h100 = (32, 8), {"gpu": H100, "causal": True, "window": 0}

    def way(requests: int, seq_len: int, query_len: int, ways: Any = every) -> str:
        return schedule.prefill_way(ways, [query_len] * requests, [seq_len] * requests, heads=heads, **h100)

    for query_len in (16, 32, 64, 128, 256):
        assert way(1, 16896, query_len) == "split"
    assert way(1, 2048, 64) == way(8, 4096, 16) == "split"
    assert way(8, 4096, 64) in ("pages", "split")
    gathered = [(1, 16896, 512), (1, 16896, 1024), (1, 2048, 256), (1, 2048, 1024), (8, 4096, 256)]
    for case in (*gathered, (16, 128, 128), (16, 256, 256), (16, 512, 512)):
        assert way(*case) == "gathered"
    fp8 = {**every, "split": way_cost("split_fp8")}
    assert [way(1, 16896, q, fp8) for q in (16, 32, 64, 128)] == ["split"] * 3 + ["gathered"]
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
    assert way(1, 16896, 128, copied) == "gathered"
    assert [way(1, 16896, q, warps) for q in (16, 32, 64, 128)] == ["split"] * 4
    assert way(1, 2048, 64, warps) == "split"


def test_few_tokens_over_many_keys_share_them_where_sms_are_idle() -> None:
    ways = {name: way_cost(name) for name in ("pages", "gathered", "split", "warps", "warps_split")}
    given: dict[str, Any] = {"heads": (32, 8), "gpu": H100}
    batch = [128], [8320]  # 4 tiles of 128 rows for each of 8 heads
    assert schedule.warp_splits(*batch, **given, room=4096) == 4
    assert schedule.warp_splits(*batch, **given, room=300) == 2
    assert schedule.warp_splits([128], [400], **given, room=4096) == 1
    assert schedule.warp_splits([512], [16896], **given, room=4096) == 1
    for queries, keys, room, way in (
        (128, 8320, 4096, "warps_split"),
        (128, 8320, 128, "split"),
        (256, 16896, 1064, "warps_split"),
        (512, 16896, 4096, "warps"),
    ):
        assert schedule.prefill_way(ways, [queries], [keys], **given, causal=True, window=0, room=room) == way


def test_a_window_costs_what_it_holds_on_paper() -> None:
    every = {"pages": way_cost("pages"), "gathered": way_cost("gathered")}
    given = {"heads": (32, 8), "gpu": H100, "causal": True}
    ways = [schedule.prefill_way(every, [128], [100_000], window=window, **given) for window in (0, 4096)]
    assert ways == ["gathered", "gathered"]
    assert schedule.prefill_way(every, [16] * 64, [4096] * 64, window=0, **given) == "pages"


@pytest.mark.parametrize("fields", [{}, slow({"sinks": True, "sliding_window": 300}), slow({"alibi": True})], ids=str)
@pytest.mark.usefixtures("always_split")
def test_a_few_tokens_over_a_long_context_are_split(fields: dict[str, Any], device: torch.device) -> None:
    group = many_sms(layers.made(device, layers.layer_config(**fields)))
    problem = layers.problem_of(group, ((1, 600), (1, 500), (20, 700), (9, 9), (3, 40)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    assert [max(pieces_of(part)) > 1 for part in parts] == [True, True]
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
    problem = layers.problem_of(group, MIXED)
    metadata = group.build(dataclasses.replace(common_of(problem), causal=False))
    output, lse = layers.run(group, problem, metadata)
    config = problem.config.model_copy(update={"non_causal": True})
    layers.compare(group, dataclasses.replace(problem, config=config), output, lse)


# --- Cascade --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [slow({}), {"sinks": True, "logits_soft_cap": 5.0}, slow({"kv_cache_dtype": "fp8_e5m2"})], ids=str
)
def test_cascade(fields: dict[str, Any], device: torch.device) -> None:
    group = many_sms(layers.made(device, layers.layer_config(**fields)))
    builder_of(group).least_cascade_bytes = 0
    requests = (*((1, 256 + 10 + i) for i in range(7)), (20, 290))
    problem = shared_prefix(layers.problem_of(group, requests), 256 // group.block_size)
    metadata = group.build(common_of(problem), common_prefix_len=256).parts[0].metadata
    assert metadata.prefix is not None
    assert [part.causal for part in metadata.prefix] == [False]
    layers.check(group, problem, common_prefix_len=256)


def test_cascade_must_save_more_than_it_costs(device: torch.device) -> None:
    config = layers.layer_config(num_heads=32, num_kv_heads=8, head_size=128)
    builder = builder_of(layers.made(device, config, capacity=Capacity(64, 512, 8192)))

    def worthwhile(requests: int, prefix: int) -> bool:
        return bool(builder.use_cascade_attention(prefix, prepare_batch([1] * requests, [8192] * requests)))

    assert [worthwhile(*case) for case in ((64, 8192), (64, 2048), (16, 8192))] == [True] * 3
    assert [worthwhile(*case) for case in ((64, 1024), (8, 4096), (7, 8192))] == [False] * 3


# --- Batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, slow({"sliding_window": 260}), slow({"num_speculative_tokens": 2})], ids=str)
def test_batch_invariance(fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_FIXED_SPLIT", 128)
    group = many_sms(layers.made(device, layers.layer_config(batch_invariant=True, **fields)))
    problem = layers.problem_of(group, ((1, 300), (1, 129), (1, 128), (1, 5), (40, 150), (20, 20)))
    output, lse = layers.check(group, problem)
    bounds = problem.query_start_loc.tolist()
    for first, last in ((0, 1), (1, 2), (2, 4), (3, 4), (4, 5), (5, 6), (1, 6)):
        rows = slice(bounds[first], bounds[last])
        parts = layers.run(group, part_of(problem, first, last))
        assert same_bits(parts[0], output[rows])
        assert same_bits(parts[1], lse[rows])


def part_of(problem: Problem, first: int, last: int) -> Problem:
    """Return the step of some requests alone, on the cache that the whole step leaves."""
    rows = slice(*problem.query_start_loc[[first, last]].tolist())
    bounds = problem.query_start_loc[first : last + 1]
    assert problem.block_table is not None
    assert problem.slot_mapping is not None
    return dataclasses.replace(
        problem,
        requests=problem.requests[first:last],
        query=problem.query[rows],
        key=problem.key[rows],
        value=problem.value[rows],
        query_start_loc=bounds - bounds[0],
        seq_lens=problem.seq_lens[first:last],
        block_table=problem.block_table[first:last],
        slot_mapping=problem.slot_mapping[rows],
    )


def test_invariant_splits_follow_from_the_models_length() -> None:
    assert schedule.fixed_split(131072) == 8192
    assert schedule.fixed_split(1000) == schedule.LEAST_FIXED_SPLIT


# --- Captured steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("query_len", [1, 3, None])
@pytest.mark.parametrize(
    "fields", [{}, slow({"sinks": True, "sliding_window": 300}), slow({"batch_invariant": True})], ids=str
)
def test_captured_launches_serve_other_batches(
    fields: dict[str, Any], query_len: int | None, device: torch.device
) -> None:
    """What a graph does, without one: the metadata of the capture, tensors of another step at the same addresses."""
    config = layers.layer_config(num_speculative_tokens=(query_len or 1) - 1, **fields)
    group = many_sms(layers.made(device, config, cuda_graphs=True, capacity=Capacity(8, 256, 1024)))
    static = StaticBatch(group, query_len)
    captured = group.build_for_cudagraph_capture(static.dummy(4 if query_len else 80))
    if query_len is None:
        steps = [((1, 700), (30, 60), (20, 20)), ((1, 3), (1, 90), (70, 80))]
    else:
        steps = [((query_len, 700), (query_len, 20)), ((query_len, query_len), (query_len, 90), (query_len, 1000))]
    for number, requests in enumerate(steps):
        problem = layers.problem_of(group, requests, seed=number)
        common = common_of(problem)
        group.build(static.load(common, 4 if query_len else 80))
        metadata = dataclasses.replace(captured, slot_mapping=common.slot_mapping)
        padding = captured.num_actual_tokens - common.num_actual_tokens
        tensors = [torch.cat([t, t.new_zeros(padding, *t.shape[1:])]) for t in (problem.query,)]
        output = torch.full_like(tensors[0], torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device=device)
        layer, kv_cache = layer_of(group, problem), problem.written_cache()
        layer.forward(tensors[0], None, None, kv_cache, metadata, output, lse)
        tokens = common.num_actual_tokens
        layers.compare(group, problem, output[:tokens], lse[:tokens])


def test_a_small_mixed_graph_knows_not_whose_its_tokens_are(device: torch.device) -> None:
    config = layers.layer_config(num_speculative_tokens=3)
    group = layers.made(device, config, cuda_graphs=True, capacity=Capacity(4, 256, 1024))
    static = StaticBatch(group, None)
    captured = group.build_for_cudagraph_capture(static.dummy(2))
    for requests in (((0, 0), (0, 5), (1, 30), (1, 7)), ((2, 50),), ((1, 700),)):
        problem = layers.problem_of(group, requests)
        common = common_of(problem)
        group.build(static.load(common, 2))
        query = torch.cat([problem.query, problem.query])[:2]
        output, lse = torch.full_like(query, torch.nan), torch.full((2, 4), torch.nan, device=device)
        layer_of(group, problem).forward(query, None, None, problem.written_cache(), captured, output, lse)
        tokens = common.num_actual_tokens
        layers.compare(group, problem, output[:tokens], lse[:tokens])


def test_a_captured_decode_splits_by_what_the_replay_brings(device: torch.device) -> None:
    group = many_sms(layers.made(device, layers.layer_config(), cuda_graphs=True))
    static = StaticBatch(group, 1)
    (part,) = group.build_for_cudagraph_capture(static.dummy(4)).parts[0].metadata.parts
    assert len(part.decode.pieces) == 4 + schedule.most_pieces(2, Gpu((9, 0), 100))
    seen = []
    for requests in (UNEVEN, ((1, 2000),) * 4):
        group.build(static.load(common_of(layers.problem_of(group, requests)), 4))
        seen.append(pieces_of(part))
    assert seen == [[11, 1, 1, 1], [12, 12, 12, 12]]


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda")


STEPS = {"decode": UNEVEN, "mixed": ((1, 700), (1, 3), (200, 900)), "extend": ((16, 2000),), "gather": ((600, 1200),)}


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 64}, {"head_size": 128}], ids=str
)
def test_neither_build_nor_forward_waits_or_allocates(step: str, fields: dict[str, Any], cuda: torch.device) -> None:
    config = layers.layer_config(**{"num_heads": 8, "head_size": 64, "dtype": "bfloat16", **fields})
    group = layers.made(cuda, config)
    problem = layers.problem_of(group, STEPS[step])
    layers.check(group, problem)
    common, kv_cache, layer = common_of(problem), problem.written_cache(), layer_of(group, problem)
    output = torch.empty_like(problem.query)
    arguments = (problem.query, problem.key, problem.value, kv_cache)
    layer(*arguments, group.build(common), output)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        metadata = group.build(common)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer(*arguments, metadata, output)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 64}], ids=str)
def test_graphs(fields: dict[str, Any], mixed: bool, cuda: torch.device) -> None:
    config = layers.layer_config(num_heads=8, head_size=128, dtype="bfloat16", **fields)
    group = layers.made(cuda, config, cuda_graphs=True, capacity=Capacity(16, 512, 16384))
    steps = [((1, 9000), (1, 20), (1, 0), (1, 513)), ((1, 3), (1, 4096))]
    if mixed:
        steps = [((1, 9000), (200, 700), (64, 64)), ((1, 3), (1, 400), (300, 9000))]
    first, second = (layers.problem_of(group, requests) for requests in steps)
    scales = {name: getattr(first, name) for name in ("q_scale", "k_scale", "v_scale")}
    problems = [first, dataclasses.replace(second, **scales)]
    most = max(
        len(problem.kv_cache) if group.kv_layout != FLASH_ATTN_NHD else problem.kv_cache.shape[1]
        for problem in problems
    )
    kv_cache = group.allocate_kv_cache(most)
    layer = layer_of(group, problems[0])

    def step(inputs: Any, metadata: Any) -> torch.Tensor:
        return layer(inputs["query"], inputs["key"], inputs["value"], kv_cache, metadata[group])

    def inputs_of(problem: Problem) -> dict[str, torch.Tensor]:
        return {"query": problem.query, "key": problem.key, "value": problem.value}

    sizes = [512] if mixed else [2, 8]
    runner = CudaGraphRunner(step, [group], inputs_of(problems[0]), sizes, mixed=mixed)
    runner.capture()
    for problem in problems:
        axis = 1 if group.kv_layout == FLASH_ATTN_NHD else 0
        kv_cache.narrow(axis, 0, problem.kv_cache.shape[axis]).copy_(problem.kv_cache)
        found = runner(inputs_of(problem), {group: common_of(problem)})
        wanted, _ = problem.reference()
        worst = relative_error(found, wanted).row
        assert worst < layers.BOUNDS["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_decodes_beside_a_chunk(
    fields: dict[str, Any], captured: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = layers.made(cuda, layers.layer_config(num_heads=8, head_size=128, dtype="bfloat16", **fields))
    problem = layers.problem_of(group, ((1, 2000), (1, 900), (1, 1), (700, 900), (64, 64)))
    wanted = layers.check(group, problem)
    monkeypatch.setattr(schedule, "worth_two_streams", lambda *_: True)
    metadata = group.build(common_of(problem))
    assert metadata.parts[0].metadata.beside
    kv_cache, output, lse = problem.written_cache(), torch.empty_like(wanted[0]), torch.empty_like(wanted[1])

    layer = layer_of(group, problem)

    def step() -> None:
        output.fill_(torch.nan)
        layer.forward(problem.query, None, None, kv_cache, metadata, output, lse)
        output.mul_(1)  # behind both streams

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
    else:
        step()
    assert same_bits(output, wanted[0])
    assert same_bits(lse, wanted[1])


@pytest.mark.gpu
def test_a_window_costs_what_it_holds(cuda: torch.device) -> None:
    """Blocks in front of the window are not read: their table entries lead out of the cache."""
    config = layers.layer_config(num_heads=8, head_size=128, dtype="bfloat16", sliding_window=500)
    group = layers.made(cuda, config, capacity=Capacity(16, 2048, 65536))
    for requests in (((1, 60000), (1, 700)), ((700, 60000),), ((30, 50000),)):
        problem = layers.problem_of(group, requests)
        wanted = problem.reference()
        table = problem.block_table.clone()
        for request, (query_len, seq_len) in enumerate(requests):
            table[request, : max(0, seq_len - query_len - 499) // group.block_size] = 2**31 - 1
        broken = dataclasses.replace(problem, block_table=table)
        output, lse = layers.run(group, broken)
        torch.cuda.synchronize()
        assert relative_error(output, wanted[0]).row < layers.BOUNDS["bfloat16"]
        assert lse_error(lse, wanted[1]) < layers.BOUNDS["bfloat16"]
