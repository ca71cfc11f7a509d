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
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select_triton.runtime import schedule, triton_attn_metadata
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


def test_equal_requests_keep_their_pieces_as_they_grow(device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config()), 10)

    def step(requests: Any) -> list[int]:
        common = common_of(layers.problem_of(group, requests))
        (part,) = group.build(common).parts[0].metadata.parts
        return layers.pieces_of(part)

    for requests, tokens in ((1, 900), (2, 512), (8, 512)):
        first = step([(1, tokens)] * requests)
        assert [step([(1, tokens + more)] * requests) for more in (1, 2, 30)] == [first] * 3


def grown(lens: list[int], longest: int, draw: np.random.Generator) -> list[int]:
    """Return the lengths of the step after: mostly a few tokens more, at times one request less, more, or a longer."""
    lens = [min(longest, seq_len + int(draw.integers(1, 5))) for seq_len in lens]
    event = draw.random()
    if event < 0.1 and len(lens) > 1:
        lens.pop(int(draw.integers(len(lens))))
    elif event < 0.2 and len(lens) < 8:
        lens.append(int(draw.choice([4, 60, 500, 1500])))
    elif event < 0.3:
        request = int(draw.integers(len(lens)))
        lens[request] = min(longest, lens[request] + lens[request] // 3)
    return lens


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("room", [12, 40, 2000])
@pytest.mark.parametrize(
    "fields", [{}, {"num_speculative_tokens": 3}, {"sliding_window": 700, "num_speculative_tokens": 3}], ids=str
)
def test_steps_that_follow_one_another_lose_no_keys(
    fields: dict[str, Any], room: int, cuda_graphs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of all steps fit the list, which a graph reads at one place, and the workspace; drafts may be refused."""
    config, draw = layers.layer_config(**fields), np.random.default_rng(room)
    group = layers.made(device, config, capacity=Capacity(8, 64, 2048), cuda_graphs=cuda_graphs)
    builder, query_len = layers.builder_of(layers.many_sms(group, 30)), config.max_decode_query_len
    builder._workspace = builder._workspace[: room * query_len * builder._row]
    lists: list[tuple[int, ...]] = []
    partials: list[int] = []

    def listed(bounds: torch.Tensor, seq_lens: torch.Tensor, **given: Any) -> torch.Tensor:
        """As ``list_pieces``, which tests of its own have, but count alone: no step takes the interpreter long."""
        keys = seq_lens.cpu().numpy()
        if given["reach"]:
            keys = np.minimum(keys, min(query_len, given["tile_tokens"]) - 1 + given["reach"])
        shares = np.clip(-(-keys // given["split_tokens"]), 1, given["most_splits"])
        assert int((keys - shares * given["split_tokens"]).max()) <= 0  # else pieces are larger than they are to be
        assert int(shares.sum()) <= given["capacity"]
        partials.append(int(shares[shares > 1].sum()))
        pieces = torch.empty(given["capacity"] + given["merges"], 8) if given["pieces"] is None else given["pieces"]
        lists.append((pieces.data_ptr(), len(pieces), given["capacity"]))
        return pieces

    monkeypatch.setattr(triton_attn_metadata, "list_pieces", listed)
    batch, lens = StaticBatch(group, query_len), [300, 4, 700, 90]
    if cuda_graphs:
        group.build_for_cudagraph_capture(batch.dummy(8))
    for _ in range(400):
        lens = grown(lens, 2048, draw)
        bounds, host = torch.arange(len(lens) + 1, dtype=torch.int32) * query_len, torch.tensor(lens, dtype=torch.int32)
        refused = torch.from_numpy(draw.integers(0, query_len, len(lens))).int()
        common = CommonAttentionMetadata(
            query_start_loc=bounds.to(device),
            query_start_loc_cpu=bounds,
            seq_lens=(host - refused).to(device),
            seq_lens_cpu=host,
            num_reqs=len(lens),
            num_actual_tokens=len(lens) * query_len,
            max_query_len=query_len,
            max_seq_len=max(lens),
            block_table_tensor=torch.zeros(len(lens), 128, dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(len(lens) * query_len, dtype=torch.int64, device=device),
        )
        (part,) = group.build(batch.load(common, 8) if cuda_graphs else common).parts[0].metadata.parts
        if part.decode.pieces is not None:
            slots = part.decode._tensors[0].numel() // (query_len * config.num_heads * config.value_head_size)
            assert partials[-1] <= slots <= room
    assert len(set(partials)) > 2
    assert not cuda_graphs or len(set(lists)) == 1


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
