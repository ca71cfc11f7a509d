"""The balanced schedule of fa3's MLA decodes: who attends to what, and that the lists say it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_mla_groups as layers
import numpy as np
from flashinfer_emulated.mla06 import BatchMLAPagedAttentionWrapper
from flashinfer_emulated.mla_lists import Lists

from attn_select.errors import KernelMismatchError
from attn_select_flashinfer.runtime.mla_schedule import PIECE_TILES, TILE_KEYS, Pieces, balanced

Emulate = Callable[..., Any]


def cost(start: Any, end: Any) -> int:
    """Return what a piece takes, in tiles."""
    return -(-int(end - start) // TILE_KEYS) + PIECE_TILES


def costs(pieces: Pieces) -> list[int]:
    """Return what each cluster takes."""
    return [
        sum(cost(pieces.start[piece], pieces.end[piece]) for piece in range(first, last))
        for first, last in zip(pieces.first[:-1], pieces.first[1:], strict=True)
    ]


def drawn(seed: int) -> tuple[list[int], int]:
    """Return lengths of requests, and a number of clusters."""
    draw = random.Random(seed)
    lens = [draw.choice((0, 1, 64, 65, draw.randint(1, 9000))) for _ in range(draw.randint(1, 300))]
    return lens, draw.choice((1, 2, 66, 132))


@pytest.mark.parametrize("seed", range(40))
def test_each_request_is_attended_once_and_clusters_are_equally_busy(seed: int) -> None:
    keys, clusters = drawn(seed)
    pieces = balanced(np.array(keys), clusters)
    assert pieces.first[0] == 0
    assert pieces.first[-1] == len(pieces.request)
    assert len(pieces.first) == clusters + 1
    assert (np.diff(pieces.first) >= 0).all()
    behind = [0] * len(keys)
    for request, start, end in zip(*pieces[:3], strict=True):
        assert start == behind[request]
        assert start % TILE_KEYS == 0
        assert start < end or keys[request] == 0
        behind[request] = end
    assert behind == keys
    assert sorted(set(pieces.request.tolist())) == list(range(len(keys)))
    share = sum(cost(0, length) for length in keys) / clusters
    assert max(costs(pieces)) <= share + PIECE_TILES + 1  # another piece, and what is left of a tile


@pytest.mark.parametrize(
    ("count", "length", "clusters", "pieces", "longest"),
    [
        (128, 2100, 132, 128, 33 + PIECE_TILES),  # whole requests: cuts would only add pieces
        (256, 1000, 132, 256, 2 * (16 + PIECE_TILES)),
        (64, 6200, 132, 128, 49 + PIECE_TILES),  # halves
        (80, 6200, 132, 204, 64),  # equal parts of all keys; whole requests would take 100
        (66, 6200, 132, 132, 49 + PIECE_TILES),
        (1, 640, 132, 10, 1 + PIECE_TILES),
        (1, 5000, 132, 27, 3 + PIECE_TILES),  # not 79 pieces: they are merged one after the other
        (8, 4000, 132, 128, 4 + PIECE_TILES),
        (2, 0, 4, 2, PIECE_TILES),
    ],
)
def test_requests_of_one_length(count: int, length: int, clusters: int, pieces: int, longest: int) -> None:
    found = balanced(np.full(count, length), clusters)
    assert len(found.request) == pieces
    assert max(costs(found)) == longest


def lists_of(group: Any, problem: Any) -> Lists | None:
    """Return the lists that a batch's wrapper gets in the place of those that it planned, if any."""
    made = group.backends["decode"].builder.build(0, layers.common_of(problem)).wrapper.made
    return None if made._plan_info == made._own else Lists(made._int_workspace_buffer, tuple(made._plan_info))


@pytest.mark.parametrize("heads", [4, 16, 64, 65, 128])
def test_decodes_that_are_cut_between_clusters(heads: int, emulate: Emulate) -> None:
    emulate()
    group = layers.group_for("h100", layers.mla_config(num_heads=heads), phases=["decode"])
    problem = layers.problem_for(group, [(1, 500), (1, 0), (1, 64), (1, 129), (1, 1)])
    layers.run(group, problem, wants_lse=True)
    lists = lists_of(group, problem)
    assert lists is not None
    clusters = 132 if heads <= 64 else 66
    assert lists.info[:2] == (132 // clusters, clusters)
    works = lists.named("work_indptr", clusters + 1)
    assert works[-1] == 8 + 1 + 1 + 3 + 1  # a tile each, and a piece without keys
    assert max(last - first for first, last in pairwise(works)) == 1


@pytest.mark.parametrize(
    ("fields", "options", "requests", "own"),
    [
        ({}, {}, [(1, 200), (1, 3)], True),
        ({"kv_cache_dtype": "fp8"}, {}, [(1, 200), (1, 3)], True),
        ({"num_heads": 128}, {}, [(1, 200), (0, 3), (1, 70)], True),
        ({"num_heads": 128}, {}, [(1, 200), (0, 3)], False),  # half a query of 128 heads: clusters of one CTA
        ({"num_heads": 136}, {}, [(1, 200)], False),  # more rows than a cluster has
        ({"non_causal": True}, {}, [(1, 200)], True),
        ({"num_speculative_tokens": 1}, {}, [(2, 200), (1, 3)], False),
        ({"num_heads": 40, "num_speculative_tokens": 7}, {}, [(8, 200), (1, 3)], True),  # each query is a request
        ({}, {"decode_kernel": "fa2"}, [(1, 200), (1, 3)], False),
    ],
)
def test_which_batches_get_a_schedule_of_our_own(
    fields: Any, options: Any, requests: list[tuple[int, int]], own: bool, emulate: Emulate
) -> None:
    emulate()
    group = layers.group_for("h100", layers.mla_config(**fields), phases=["decode"], **options)
    problem = layers.problem_for(group, requests)
    layers.run(group, problem)
    assert (lists_of(group, problem) is not None) == own


def test_a_wrapper_that_serves_both_schedules(emulate: Emulate) -> None:
    world = emulate()
    group = layers.group_for("h100", layers.mla_config(num_speculative_tokens=2), phases=["decode"])
    drafts, single = [(3, 200), (2, 65)], [(1, 300), (1, 3)]
    for requests in (single, drafts, single, single, drafts):
        layers.run(group, layers.problem_for(group, requests))
    assert len(world.named("BatchMLAPagedAttentionWrapper.plan")) == 3  # of our own schedules the first alone


def test_releases_from_07_keep_flashinfers_schedule(emulate: Emulate) -> None:
    emulate(release="0.7.2.post1")
    group = layers.group_for("h100", layers.mla_config(), phases=["decode"])
    problem = layers.problem_for(group, [(1, 200), (1, 3)])
    layers.run(group, problem)
    wrapper = group.backends["decode"].builder.build(0, layers.common_of(problem)).wrapper.made
    assert not hasattr(wrapper, "_plan_info")


def test_a_plan_of_another_form_is_refused(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate()
    group = layers.group_for("h100", layers.mla_config(), phases=["decode"])
    problem = layers.problem_for(group, [(1, 200)])
    plan = BatchMLAPagedAttentionWrapper.plan

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        plan(self, *args, **kwargs)
        self._plan_info = self._plan_info[:-1]

    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "plan", changed)
    with pytest.raises(KernelMismatchError, match=r"a plan of BatchMLAPagedAttentionWrapper .* with 18 numbers"):
        group.backends["decode"].builder.build(0, layers.common_of(problem))
