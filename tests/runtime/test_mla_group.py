"""``MLAAttentionGroup``: how batches are parted, and how cached context is cut into chunks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from attn_select import AttentionConfig
from attn_select.backends.spec import BackendSpec
from attn_select.decide.selection import Selection
from attn_select.runtime import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BatchError,
    CommonAttentionMetadata,
    MLAAttentionGroup,
    VarlenMetadata,
)
from attn_select.runtime.mla_context import context_chunks, context_parts
from attn_select.testing import load_path_of
from attn_select_torch.facts.torch_mla import TORCH_MLA

MLA = {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
CONFIG = AttentionConfig(**MLA)
Choose = Callable[..., Selection]
MakeBatch = Callable[..., CommonAttentionMetadata]


def toy(name: str = "TOY", *, phases: Sequence[str] = ("prefill", "decode"), **changes: Any) -> SimpleNamespace:
    """Return a backend with ``spec`` and ``built``, what its builder was asked for.

    ``sparse`` and ``threshold`` are properties of the backend; other changes are the plan's.
    """
    sparse, threshold = changes.pop("sparse", False), changes.pop("threshold", None)
    built: list[tuple[str, Any]] = []

    class Builder(AttentionMetadataBuilder[Any]):
        reorder_batch_threshold = threshold

        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            built.append(("build", common_attn_metadata))
            return len(built)

        def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
            built.append(("capture", common_attn_metadata))
            return len(built)

        def build_prefill(self, varlen: VarlenMetadata) -> Any:
            built.append(("prefill", varlen))
            return len(built)

    class Backend(AttentionBackend):
        impl_cls = TORCH_MLA.get_class().impl_cls
        builder_cls = Builder

    facts = TORCH_MLA.capabilities["decode" if sparse else "prefill"]
    served = {phase: dataclasses.replace(TORCH_MLA.capabilities[phase], sparse=sparse) for phase in phases}
    if sparse:
        served = dict.fromkeys(phases, dataclasses.replace(facts, sparse=True))

    def plan(config: Any, device: Any, environment: Any, options: Any, phase: Any) -> Any:
        found = TORCH_MLA.plan(config, device, environment, options, "decode" if sparse else phase)
        return dataclasses.replace(found, **changes)

    spec: BackendSpec = dataclasses.replace(
        TORCH_MLA,
        name=name,
        capabilities=served,
        plan=plan,
        load=load_path_of(Backend),
        libraries=(),
    )
    return SimpleNamespace(spec=spec, built=built)


def cut(
    contexts: Sequence[int], workspace: int, query_lens: Sequence[int], make_batch: MakeBatch, **fields: Any
) -> list[tuple[Tensor, Tensor]]:
    requests = [(query_len, context + query_len) for query_len, context in zip(query_lens, contexts, strict=True)]
    return context_parts(make_batch(requests), AttentionConfig(**MLA, **fields), workspace)


@given(
    contexts=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    workspace=st.integers(1, 80),
    window=st.none() | st.integers(1, 50),
    invariant=st.booleans(),
)
@example(contexts=[32, 16, 0, 16], workspace=16, window=None, invariant=False)
@example(contexts=[0, 0], workspace=1, window=None, invariant=False)
def test_chunks_cover_every_context_once(
    contexts: list[int], workspace: int, window: int | None, invariant: bool, make_batch: MakeBatch
) -> None:
    parts = cut(contexts, workspace, [5] * len(contexts), make_batch, sliding_window=window, batch_invariant=invariant)
    seen: list[list[int]] = [[] for _ in contexts]
    for starts, lengths in parts:
        assert 0 < int(lengths.sum()) <= workspace
        assert not invariant or int((lengths > 0).sum()) == 1
        for request, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            seen[request] += range(start, start + length)
    # The first row of a request sees itself and window - 1 tokens before it.
    needed = [list(range(0 if window is None else max(0, context - window + 1), context)) for context in contexts]
    assert seen == needed
    sizes = [len(positions) for positions in needed]
    fewest = [math.ceil(size / workspace) for size in (sizes if invariant else [sum(sizes)])]
    assert len(parts) == sum(fewest)


def test_images_reach_behind_the_window(make_batch: MakeBatch) -> None:
    """Rows 50 to 59 of a request: the image that ends at 49 is out of reach, those that touch a row are not."""
    config = AttentionConfig(**MLA, mm_prefix=True, sliding_window=4)
    for ranges, first in (([], 47), ([(3, 49)], 47), ([(20, 50)], 20), ([(30, 90), (55, 58)], 30), ([(60, 70)], 47)):
        common = make_batch([(10, 60)], mm_prefix_ranges=[ranges])
        ((starts, lengths),) = context_parts(common, config, 100)
        assert (int(starts[0]), int(lengths[0])) == (first, 50 - first)


def test_a_chunk_is_a_batch_of_its_own(make_batch: MakeBatch) -> None:
    """Contexts of 40, 0, 70, 6 and 0 tokens in chunks of 64: 40 and 24 tokens, then 46 and 6."""
    requests = [(5, 45), (3, 3), (4, 74), (2, 8), (9, 9)]
    common = make_batch(requests, mm_prefix_ranges=[[(1, 2)], [], [(30, 60), (68, 72)], [], []])
    assert common.block_table_tensor is not None
    built: list[VarlenMetadata] = []
    parts = context_parts(common, CONFIG, 64)
    chunks = context_chunks(parts, common, CONFIG, common.block_table_tensor, lambda v: built.append(v) or len(built))
    first, second = chunks
    assert (first.rows, second.rows) == (slice(0, 12), slice(8, 14))
    assert (first.starts.tolist(), second.starts.tolist()) == ([0, 0, 0], [24, 0])
    assert (first.start_loc.tolist(), second.start_loc.tolist()) == ([0, 40, 40, 64], [0, 46, 52])
    assert (first.num_tokens, second.num_tokens) == (64, 52)
    assert torch.equal(second.block_table, common.block_table_tensor[2:4])
    assert (first.metadata, second.metadata) == (1, 2)
    assert not any(varlen.causal or varlen.counts_sinks for varlen in built)
    assert [varlen.query_start_loc.tolist() for varlen in built] == [[0, 5, 8, 12], [0, 4, 6]]
    assert [varlen.query_offsets_cpu.tolist() for varlen in built] == [[40, 0, 70], [46, 6]]
    assert [(varlen.max_query_len, varlen.max_key_len) for varlen in built] == [(5, 40), (4, 46)]
    assert built[1].mm_prefix_ranges == [[(6, 36), (44, 48)], []]
    for varlen in built:
        assert torch.equal(varlen.query_start_loc, varlen.query_start_loc_cpu)
        assert torch.equal(varlen.key_start_loc, varlen.key_start_loc_cpu)


def test_own_tokens_come_first(choose: Choose, make_batch: MakeBatch) -> None:
    backend = toy()
    group = MLAAttentionGroup(choose(CONFIG, backend), workspace_tokens=8)
    metadata = group.build(make_batch([(1, 9), (4, 12), (3, 3)]))
    kinds = [kind for kind, _ in backend.built]
    assert kinds == ["build", "prefill", "prefill"]
    own: VarlenMetadata = backend.built[1][1]
    assert (own.causal, own.counts_sinks, own.query_offsets_cpu.tolist()) == (True, True, [0, 0])
    assert own.query_start_loc.tolist() == own.key_start_loc.tolist() == [0, 4, 7]
    decode, prefill = metadata.parts
    assert (decode.rows, prefill.rows) == (slice(0, 1), slice(1, 8))
    assert (decode.metadata, prefill.metadata, [chunk.metadata for chunk in prefill.chunks]) == (1, 2, [3])
    assert backend.built[0][1].num_reqs == 1


@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_steps_in_both_directions(non_causal: bool, causal: bool, choose: Choose, make_batch: MakeBatch) -> None:
    backend = toy()
    group = MLAAttentionGroup(choose(AttentionConfig(**MLA, non_causal=non_causal), backend))
    group.build(make_batch([(4, 12)], causal=causal))
    assert [varlen.causal for _, varlen in backend.built] == [causal and not non_causal, False]


@pytest.mark.parametrize(
    ("backend", "fields", "threshold"),
    [
        ({}, {}, 1),
        ({}, {"num_speculative_tokens": 3}, 4),
        ({"threshold": 2}, {"num_speculative_tokens": 3}, 2),
        ({"sparse": True}, {"sparse_top_k": 8}, None),
        ({"sparse": True, "threshold": 1}, {"sparse_top_k": 8}, 1),
    ],
)
def test_what_counts_as_a_decode(
    backend: dict[str, Any], fields: dict[str, Any], threshold: int | None, choose: Choose, make_batch: MakeBatch
) -> None:
    group = MLAAttentionGroup(choose(AttentionConfig(**MLA, **fields), toy(**backend)))
    assert group.reorder_batch_threshold == threshold
    if threshold is None:
        assert group.build(make_batch([(9, 9), (1, 5)])).parts[0].rows == slice(0, 10)
        return
    decodes = group.build(make_batch([(threshold, 9), (threshold + 1, 9)])).parts[0]
    assert decodes.phase == "decode"
    assert decodes.rows.stop == (threshold if not backend.get("sparse") else 2 * threshold + 1)


def test_one_sparse_backend_builds_once(choose: Choose, make_batch: MakeBatch) -> None:
    """Its builder may keep persistent tensors, which a second build would overwrite."""
    config, batch = AttentionConfig(**MLA, sparse_top_k=8), make_batch([(1, 5), (9, 9), (2, 20)])
    alone = toy(sparse=True)
    metadata = MLAAttentionGroup(choose(config, alone)).build(batch)
    assert [(kind, common.num_reqs) for kind, common in alone.built] == [("build", 3)]
    assert [(part.phase, part.rows) for part in metadata.parts] == [("decode", slice(0, 12))]

    pair = toy("DECODES", sparse=True, phases=("decode",)), toy("PREFILLS", sparse=True, phases=("prefill",))
    metadata = MLAAttentionGroup(choose(config, *pair)).build(batch)
    assert [[(kind, common.num_reqs) for kind, common in backend.built] for backend in pair] == [
        [("build", 1)],
        [("build", 2)],
    ]
    assert [(part.phase, part.rows) for part in metadata.parts] == [("decode", slice(0, 1)), ("prefill", slice(1, 12))]


@pytest.mark.parametrize(
    ("backend", "fields", "longest"),
    [
        ({}, {}, 1),
        ({}, {"num_speculative_tokens": 3}, 4),
        ({"threshold": 2}, {"num_speculative_tokens": 3}, 2),
        ({"sparse": True, "threshold": 1}, {"sparse_top_k": 8}, 1),
        ({"sparse": True}, {"sparse_top_k": 8, "num_speculative_tokens": 2}, 3),
    ],
)
def test_prefills_are_not_captured(
    backend: dict[str, Any], fields: dict[str, Any], longest: int, choose: Choose, make_batch: MakeBatch
) -> None:
    made = toy(**backend)
    group = MLAAttentionGroup(choose(AttentionConfig(**MLA, **fields), made))
    group.build_for_cudagraph_capture(make_batch([(longest, 9)] * 2))
    assert [kind for kind, _ in made.built] == ["capture"]
    with pytest.raises(BatchError, match=f"queries of {longest + 1} tokens: .* here up to {longest} tokens"):
        group.build_for_cudagraph_capture(make_batch([(longest + 1, 9)] * 2))
    assert [kind for kind, _ in made.built] == ["capture"]


def test_prefills_of_a_sparse_pair_are_not_captured(choose: Choose, make_batch: MakeBatch) -> None:
    pair = toy("DECODES", sparse=True, phases=("decode",)), toy("PREFILLS", sparse=True, phases=("prefill",))
    group = MLAAttentionGroup(choose(AttentionConfig(**MLA, sparse_top_k=8), *pair))
    with pytest.raises(BatchError, match="captured in decode alone"):
        group.build_for_cudagraph_capture(make_batch([(9, 9)] * 2))


def test_batch_invariant_layers_project_request_by_request(choose: Choose, make_batch: MakeBatch) -> None:
    batch = make_batch([(1, 5), (1, 3), (3, 9), (4, 30)])
    spans = []
    for invariant in (False, True):
        config = AttentionConfig(**MLA, batch_invariant=invariant)
        parts = MLAAttentionGroup(choose(config, toy()), workspace_tokens=20).build(batch).parts
        spans.append([parts[0].spans, parts[1].spans, *(chunk.spans for chunk in parts[1].chunks)])
    assert spans[0] == [(slice(None),)] * 4
    one, two = slice(0, 1), slice(1, 2)
    assert spans[1] == [(one, two), (slice(0, 3), slice(3, 7)), (slice(0, 6),), (slice(0, 20),), (slice(0, 6),)]
