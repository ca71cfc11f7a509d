"""Decodes of TRITON_ATTN's layer against the oracle: splits, lists of pieces, drafts and their trees."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
import triton_attn_layers as layers

from attn_select.reference.running import common_of
from attn_select.runtime import Capacity
from attn_select.runtime.cuda_graph import StaticBatch
from attn_select_triton.runtime import schedule
from attn_select_triton.tuning import Gpu, Tile

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("apart")]


AT_8: dict[str, Any] = {
    "units": 8, "room": 6400, "gpu": Gpu((9, 0), 132, 4800), "launch": Tile(16, 128, 4, 2), "key_bytes": 512, "rows": 4,
}  # fmt: skip


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
    group = layers.many_sms(layers.made(device, layers.layer_config(**fields)), 4)
    problem = layers.problem_of(group, layers.UNEVEN)
    (part,) = group.build(common_of(problem)).parts[0].metadata.parts
    # Other tiles than the interpreter's make other pieces: ``choices.json`` has those of GPUs.
    assert device.type == "cuda" or layers.pieces_of(part) == wanted
    layers.check(group, problem)


def test_equal_requests_get_equal_splits() -> None:
    assert schedule.split_keys(np.array([4096] * 64), **AT_8) == (1, 4096)
    assert schedule.split_keys(np.array([16384] * 8), **AT_8) == (4, 4096)
    assert schedule.split_keys(np.array([131072]), **AT_8) == (32, 4096)


def test_a_batch_that_is_a_little_uneven_is_split_evenly() -> None:
    assert schedule.split_keys(np.array([16384] * 12 + [8192] * 4), **AT_8) == (2, 8192)


def test_requests_of_many_lengths_go_into_pieces_that_leave_no_tail() -> None:
    """What was fastest on an H200, or as many pieces as it had."""
    lens = np.array([1024] * 63 + [65536])
    splits, tokens = schedule.split_keys(lens, **AT_8)
    assert (splits, tokens) == (32, 2075)
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
    group = layers.many_sms(layers.made(device, layers.layer_config(), capacity=Capacity(16, 1024, 4096)), 10_000)
    builder = layers.builder_of(group)
    row = 4 * (32 + 1)
    builder._workspace = builder._workspace[: room * row]
    problem = layers.problem_of(group, layers.UNEVEN)
    (part,) = group.build(common_of(problem)).parts[0].metadata.parts
    assert layers.pieces_of(part) == wanted
    layers.check(group, problem)


def test_a_decode_is_cut_anew_once_its_keys_have_changed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, split_keys = [], schedule.split_keys
    monkeypatch.setattr(schedule, "split_keys", lambda *a, **k: cuts.append(len(a[0])) or split_keys(*a, **k))
    group = layers.many_sms(layers.made(device, layers.layer_config()), 4)

    def step(requests: Any) -> int:
        layers.check(group, layers.problem_of(group, requests))
        return len(cuts)

    # As steps follow one another; then twice as many keys; then fewer requests, and fewer keys.
    assert [step([(1, seq_len + more) for _, seq_len in layers.UNEVEN]) for more in (0, 1, 9)] == [1, 1, 1]
    assert step([(1, 2 * seq_len) for _, seq_len in layers.UNEVEN]) == 2
    assert step(layers.UNEVEN[:3]) == 3
    assert step([(1, 600), *layers.UNEVEN[1:3]]) == 4


def test_pieces_that_have_no_room_are_cut_anew(device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config()), 4)
    builder = layers.builder_of(group)
    layers.check(group, layers.problem_of(group, [(1, 512)] * 4))
    # Of pieces of 64 keys a list holds 36: 4 requests have so many at most with 2,048 keys, one more with 2,112.
    builder._last_cut = dataclasses.replace(builder._last_cut, each=64, splits=8, most=36)
    layers.check(group, layers.problem_of(group, [(1, 512)] * 4))
    assert builder._last_cut.each == 64
    layers.check(group, layers.problem_of(group, [(1, 528)] * 4))
    assert builder._last_cut.each > 64


def test_speculative_queries_and_prefills_in_one_batch(device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config(num_speculative_tokens=3)))
    assert group.reorder_batch_threshold == 4
    problem = layers.problem_of(group, ((4, 600), (1, 30), (3, 3), (4, 0), (0, 5), (40, 60), (5, 5)))
    parts = group.build(common_of(problem)).parts[0].metadata.parts
    assert [part.decode is not None for part in parts] == [True, False]
    layers.check(group, problem)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("sms", [1, 10, 100])
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 70}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow(guard="seed 0")) for seed in (1, 2))])
def test_lengths_on_the_host_may_be_bounds(
    seed: int, fields: dict[str, Any], sms: int, cuda_graphs: bool, device: torch.device
) -> None:
    """As an engine has them that speculates: bounds above of decodes, with every draft accepted; exact of prefills."""
    config, draw = layers.layer_config(num_speculative_tokens=3, **fields), np.random.default_rng(seed)
    group = layers.many_sms(layers.made(device, config, cuda_graphs=cuda_graphs), sms)
    assert layers.builder_of(group).takes_length_bounds
    decodes = [(4, int(draw.choice([4, 9, 60, 300, 900]))) for _ in range(4)]
    prefills = [(40, 60)] if seed else []
    problem = layers.problem_of(group, (*decodes, *prefills), seed)
    common = common_of(problem)
    bounds = common.seq_lens_cpu + torch.tensor([*draw.integers(0, 5, 4).tolist(), *[0] * len(prefills)])
    common = dataclasses.replace(common, seq_lens_cpu=bounds.int())
    output, lse = layers.run(group, problem, group.build(common))
    layers.compare(group, problem, output, lse)


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
    group = layers.many_sms(layers.made(device, config), sms)
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
