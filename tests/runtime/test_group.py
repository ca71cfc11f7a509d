"""Groups: which backend gets which requests, in which blocks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_select import select
from attn_select.backends.spec import BackendOptions
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import common_of
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BatchError,
    Capacity,
    CommonAttentionMetadata,
    attention_group,
)
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.testing import Problem, lse_error, random_problem, relative_error, same_bits

Factory = Callable[..., Any]
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
CONFIG = AttentionConfig(**SMALL)
LAYOUTS = ("FLASH_ATTN_NHD", "FLASHINFER_NHD", "FLASHINFER_HND", "PAGED_ATTENTION")
MIXED = ((1, 40), (1, 7), (1, 33), (5, 17), (30, 30), (9, 48))
"""Decodes first, then a chunk of a prefill, a whole one, and another chunk."""


def solved(group: AttentionGroup, problem: Problem, common: CommonAttentionMetadata, **scales: Any) -> Attention:
    """Run a problem through one layer and compare output, LSE and cache with the oracle."""
    layer = Attention(group, sinks=problem.sinks, alibi_slopes=problem.alibi_slopes, **scales)
    cache, lse = None, torch.full(problem.query.shape[:2], torch.nan)
    if problem.kv_cache is not None:
        cache = in_kernel_blocks(group, problem)
    output = layer(problem.query, problem.key, problem.value, cache, group.build(common), output_lse=lse)
    expected, expected_lse = problem.reference()
    assert relative_error(output, expected).row < 1e-5
    assert lse_error(lse, expected_lse) < 1e-5
    if cache is not None:
        written = replace(problem, kv_cache=problem.written_cache())
        assert same_bits(cache, in_kernel_blocks(group, written))
    return layer


def in_kernel_blocks(group: AttentionGroup, problem: Problem) -> torch.Tensor:
    """Return a copy of a problem's cache as the group allocates it, its tokens in the same slots."""
    assert problem.kv_cache is not None
    assert problem.block_size is not None
    if group.kernel_block_size == problem.block_size:
        return problem.kv_cache.clone()
    size, small = problem.block_size, group.kernel_block_size
    assert small is not None
    num_blocks = problem.kv_cache.shape[group.selection.cache_shape.index("num_blocks")]  # type: ignore[union-attr]
    cache = group.allocate_kv_cache(num_blocks)
    cache.view(torch.uint8).fill_(0xFF)
    for layout, token_axis in (("FLASH_ATTN_NHD", 2), ("FLASHINFER_NHD", 2), ("FLASHINFER_HND", 3)):
        if group.kv_layout == layout:
            blocks_axis = 1 if layout == "FLASH_ATTN_NHD" else 0
            parts = problem.kv_cache.unflatten(token_axis, (size // small, small))
            return parts.movedim(token_axis, blocks_axis + 1).flatten(blocks_axis, blocks_axis + 1).contiguous()
    x = 4  # PAGED_ATTENTION in float32: K (blocks, heads, size / x, tokens, x), V (blocks, heads, size, tokens)
    k, v = problem.kv_cache
    k = k.view(num_blocks, 2, 32 // x, size // small, small, x).movedim(3, 1)
    v = v.view(num_blocks, 2, 32, size // small, small).movedim(3, 1)
    shape = (num_blocks * size // small, 2, -1)
    return torch.stack([k.reshape(shape), v.reshape(shape)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reorder", [None, 1])
def test_one_backend_gets_the_whole_batch(
    make_toy: Factory, make_group: Factory, layout: str, reorder: int | None
) -> None:
    toy = make_toy(layouts=(layout,), reorder=reorder)
    group = make_group(CONFIG, toy)
    problem = random_problem(3, CONFIG, layout)
    common = common_of(problem)
    solved(group, problem, common)
    assert len(group.distinct) == 1
    assert group.backends["prefill"] is group.backends["decode"] is group.distinct[0]
    assert group.reorder_batch_threshold == reorder
    (built,) = toy.builds
    assert built.common is common
    assert toy.calls == ["update", "forward"]


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 9},
        {"alibi": True},
        {"sinks": True},
        {"logits_soft_cap": 4.0},
        {"non_causal": True},
        {"v_head_size": 16},
    ],
    ids=str,
)
def test_what_a_layer_asks_for_reaches_the_backend(make_group: Factory, fields: dict[str, Any]) -> None:
    config = AttentionConfig(**SMALL | fields)
    problem = random_problem(4, config, "FLASH_ATTN_NHD")
    solved(make_group(config), problem, common_of(problem))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_backends_share_a_batch_and_its_cache(make_toy: Factory, make_group: Factory, layout: str) -> None:
    decode = make_toy("DECODER", phases=("decode",), layouts=(layout,))
    prefill = make_toy("PREFILLER", phases=("prefill",), layouts=(layout,))
    group = make_group(CONFIG, decode, prefill)
    problem = random_problem(5, CONFIG, layout, requests=MIXED)
    solved(group, problem, common_of(problem))
    assert group.reorder_batch_threshold == 1
    assert [served.spec.name for served in group.distinct] == ["PREFILLER", "DECODER"]
    assert decode.builds[0].common.query_lens_cpu.tolist() == [1, 1, 1]
    assert prefill.builds[0].common.query_lens_cpu.tolist() == [5, 30, 9]
    assert prefill.calls == ["update", "forward"]  # one of them writes for both
    assert decode.calls == ["forward"]


def test_a_step_in_parts_is_not_cut_more_than_it_must(
    make_toy: Factory, make_group: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every view costs a layer a microsecond: kernels take the whole tensors where their rows come first."""
    toys = make_toy("DECODER", phases=("decode",)), make_toy("PREFILLER", phases=("prefill",))
    group = make_group(CONFIG, *toys)
    problem, seen = random_problem(5, CONFIG, "FLASH_ATTN_NHD", requests=MIXED), []
    layer = Attention(group)

    def note(query: Any, key: Any, value: Any, cache: Any, metadata: Any, outputs: Any) -> Any:
        seen.append((query, key, outputs.output))
        return query

    for impl in layer.impls.values():
        monkeypatch.setattr(impl, "forward", note)
    tensors = problem.query, problem.key, problem.value, problem.kv_cache
    output = layer(*tensors, group.build(common_of(problem)))
    (decode, *written), (prefill, *read) = seen
    assert decode is problem.query
    assert written[0] is read[0] is problem.key
    assert written[1] is output
    assert torch.equal(prefill, problem.query[3:])
    assert read[1].data_ptr() == output[3:].data_ptr()


def test_a_group_says_who_runs_and_what_they_reserve(make_toy: Factory, make_group: Factory) -> None:
    alone = make_group(CONFIG, make_toy("BOTH", workspace_bytes=3 << 20))
    assert alone.explain() == "prefill    BOTH\ndecode     BOTH\nworkspace  6 MiB (BOTH 6 MiB)\n"  # two kernels
    prefill = make_toy("PREFILLER", phases=("prefill",))
    for safe in (True, False):
        decode = make_toy("DECODER", phases=("decode",), workspace_bytes=3 << 20, nan_tail_safe=safe)
        group = make_group(CONFIG, decode, prefill)
        assert group.workspace_bytes == {"PREFILLER": 0, "DECODER": 3 << 20}
        assert group.explain().startswith("prefill    PREFILLER\ndecode     DECODER\nworkspace  3 MiB (")
        assert group.nan_tail_safe is safe


@pytest.mark.parametrize("backends", [1, 2])
def test_no_backend_is_asked_for_requests_without_tokens_alone(
    make_toy: Factory, make_group: Factory, make_batch: Factory, backends: int
) -> None:
    toys = (
        [make_toy("TOY")] if backends == 1 else [make_toy("D", phases=("decode",)), make_toy("P", phases=("prefill",))]
    )
    group = make_group(CONFIG, *toys)
    assert group.build(make_batch([(0, 9), (0, 0)])).parts == ()
    parts = group.build(make_batch([(0, 9), (30, 40)])).parts
    assert [part.rows for part in parts] == [slice(0, 30)]
    assert [len(toy.builds) for toy in toys] == ([1] if backends == 1 else [0, 1])


def test_decodes_must_come_first_where_the_batch_is_split(
    make_toy: Factory, make_group: Factory, make_batch: Factory
) -> None:
    batch = make_batch([(5, 17), (1, 9)])
    two = make_group(CONFIG, make_toy("DECODER", phases=("decode",)), make_toy("PREFILLER", phases=("prefill",)))
    with pytest.raises(BatchError, match=r"request 1 \(query of 1 tokens\) is a decode behind request 0"):
        two.build(batch)
    make_group(CONFIG).build(batch)  # one backend takes any order


def test_a_group_of_one_phase_refuses_the_other(make_toy: Factory, make_group: Factory, make_batch: Factory) -> None:
    toy = make_toy()
    group = make_group(CONFIG, toy, phases=["decode"])
    assert list(group.backends) == ["decode"]
    assert list(group.distinct[0].context.plans) == ["decode"]
    group.build(make_batch([(1, 17), (1, 9)]))
    text = "the batch has requests in prefill, but this group was made for decode only\n.*with prefill among them"
    with pytest.raises(BatchError, match=text):
        group.build(make_batch([(1, 17), (4, 9)]))
    other = make_group(CONFIG, toy, phases=["prefill"])
    with pytest.raises(BatchError, match="the batch has requests in decode, but this group was made for prefill only"):
        other.build(make_batch([(1, 17), (4, 9)]))


@pytest.mark.parametrize(
    ("requests", "capacity", "message"),
    [
        ([(1, 9)] * 3, {"max_num_seqs": 2}, "a batch of 3 requests and 3 tokens: .* max_num_seqs = 2 and"),
        ([(5, 9)] * 2, {"max_num_batched_tokens": 9}, "2 requests and 10 tokens: .*max_num_batched_tokens = 9"),
    ],
)
def test_a_batch_beyond_capacity(
    make_group: Factory, make_batch: Factory, requests: Any, capacity: dict[str, int], message: str
) -> None:
    group = make_group(CONFIG, capacity=Capacity(**capacity))
    for build in (group.build, group.build_for_cudagraph_capture):
        with pytest.raises(BatchError, match=message):
            build(make_batch(requests))
    group.build(make_batch(requests[:-1]))


def test_a_tree_mask_needs_layers_that_were_chosen_for_it(make_group: Factory, make_batch: Factory) -> None:
    batch = replace(make_batch([(3, 9), (1, 4)]), tree_mask=torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(BatchError, match="tree_mask given, but the layers were selected with draft_tree = False"):
        make_group(CONFIG).build(batch)
    group = make_group(AttentionConfig(**SMALL, num_speculative_tokens=2, draft_tree=True))
    group.build(batch)
    for changes, text in (
        ({"tree_mask": torch.ones(4, 2, dtype=torch.bool)}, r"shape \(4, 2\): accepted .* = 3\)"),
        ({"tree_mask": torch.ones(3, 3, dtype=torch.bool)}, r"accepted is torch.bool \(at least 4 tokens"),
        ({"tree_mask": torch.ones(4, 3)}, "tree_mask is torch.float32"),
        ({"causal": False}, "causal = False: drafts see their ancestors alone"),
    ):
        with pytest.raises(BatchError, match=text):
            group.build(replace(batch, **changes))


class ToyOptions(BackendOptions):
    """An option with a default."""

    chunk: int = 64


def test_what_a_builder_is_told(make_toy: Factory, make_group: Factory, make_batch: Factory) -> None:
    toy = make_toy(options=ToyOptions)
    capacity = Capacity(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=500)
    group = make_group(CONFIG, toy, capacity=capacity)
    context = group.distinct[0].context
    assert context.options.chunk == 64
    assert (context.config, context.kv_layout, context.block_size) == (CONFIG, "FLASH_ATTN_NHD", 16)
    assert (context.max_num_seqs, context.max_num_batched_tokens, context.max_model_len) == (8, 100, 500)
    assert (context.device, context.cuda_graphs) == (torch.device("cpu"), False)
    assert make_group(CONFIG, toy, cuda_graphs=True).distinct[0].context.cuda_graphs
    group.build(make_batch([(1, 9)]), fast_build=True)
    group.build(make_batch([(1, 9)]))
    assert [built.fast_build for built in toy.builds] == [True, False]


BLOCKS: Mapping[str, tuple[dict[str, Any], int, int | None]] = {
    "its own": ({"kernel_block_sizes": (16, 32)}, 32, 32),
    "the first that divides": ({"kernel_block_sizes": (64, 16, 8)}, 48, 16),
    "single tokens": ({"kernel_block_sizes": (16, 1)}, 7, 1),
}


@pytest.mark.parametrize(("toy", "size", "kernel"), BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_blocks(
    make_toy: Factory,
    make_group: Factory,
    layout: str,
    toy: dict[str, Any],
    size: int,
    kernel: int,
) -> None:
    config = AttentionConfig(**SMALL, block_size=size)
    made = make_toy(layouts=(layout,), **toy)
    group = make_group(config, made)
    assert (group.block_size, group.kernel_block_size, group.distinct[0].context.block_size) == (size, kernel, kernel)
    problem = random_problem(6, config, layout, block_size=size)
    common = common_of(problem)
    solved(group, problem, common)
    table = made.builds[0].common.block_table_tensor
    assert torch.equal(table, kernel_block_table(common.block_table_tensor, size // kernel))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("multiple", "columns"), [(1, 3), (4, 4), (8, 8)])
def test_tables_are_as_wide_as_the_kernel_wants(
    make_toy: Factory, make_group: Factory, make_batch: Factory, multiple: int, columns: int, graphs: bool
) -> None:
    toy = make_toy(width_multiple=multiple)
    group = make_group(CONFIG, toy, cuda_graphs=graphs)
    batch = make_batch([(1, 40), (1, 9)])
    group.build(batch)
    table = toy.builds[0].common.block_table_tensor
    assert table.shape == (2, columns)
    assert torch.equal(table[:, :3], batch.block_table_tensor)
    assert (table is batch.block_table_tensor) == (multiple == 1)


@pytest.mark.parametrize("requests", [MIXED, MIXED[:3], MIXED[3:]], ids=["mixed", "decodes", "prefills"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_kernels_of_different_blocks(
    make_toy: Factory, make_group: Factory, layout: str, requests: tuple[tuple[int, int], ...]
) -> None:
    """Where any block size is a view each has its own; else they agree on one that both run."""
    config = AttentionConfig(**SMALL, block_size=48)
    decode = make_toy("DECODER", phases=("decode",), layouts=(layout,), kernel_block_sizes=(24, 16))
    prefill = make_toy("PREFILLER", phases=("prefill",), layouts=(layout,), kernel_block_sizes=(16, 24))
    group = make_group(config, decode, prefill)
    sizes = {served.spec.name: served.context.block_size for served in group.distinct}
    own = layout == "FLASH_ATTN_NHD"
    assert sizes == {"DECODER": 24 if own else 16, "PREFILLER": 16}
    assert group.kernel_block_size == max(sizes.values())
    problem = random_problem(7, config, layout, requests=requests)
    solved(group, problem, common_of(problem))
    if own:
        assert group.allocate_kv_cache(5).shape[1] == 10
        assert all(shape[2] == 24 for shape in decode.caches)
        assert all(shape[2] == 16 for shape in prefill.caches)


def test_tables_of_captured_steps_keep_their_address(
    make_toy: Factory, make_group: Factory, make_batch: Factory
) -> None:
    """Whatever width a step has: also one that would do without padding."""
    toy = make_toy(width_multiple=4)
    group = make_group(CONFIG, toy, cuda_graphs=True, capacity=Capacity(max_num_seqs=4, max_model_len=200))
    group.build_for_cudagraph_capture(make_batch([(1, 16)] * 4))
    for length in (33, 64, 200, 1, 100):  # 3, 4, 13, 1 and 7 blocks
        batch = make_batch([(1, length), (1, 5)])
        group.build(batch)
        table = toy.builds[-1].common.block_table_tensor
        assert table.data_ptr() == toy.builds[0].common.block_table_tensor.data_ptr()
        assert table.stride() == (16, 1)
        assert torch.equal(table[:, : batch.block_table_tensor.shape[1]], batch.block_table_tensor)
    with pytest.raises(
        BatchError, match=r"block_table_tensor of 14 columns: max_model_len = 200 reserved 13\n.*larger max_model_len"
    ):
        group.build(make_batch([(1, 210)]))


def test_tables_of_captured_steps_hold_the_longest_request(
    make_toy: Factory, make_group: Factory, make_batch: Factory
) -> None:
    """40 tokens are 2 blocks of 32, and so 4 of 16, although 3 of 16 would do."""
    config = AttentionConfig(**SMALL, block_size=32)
    toy = make_toy()
    group = make_group(config, toy, cuda_graphs=True, capacity=Capacity(max_num_seqs=2, max_model_len=40))
    batch = make_batch([(1, 40), (1, 33)], block_size=32)
    group.build(make_batch([(1, 9)], block_size=32))
    group.build(batch)
    table = toy.builds[-1].common.block_table_tensor
    assert table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert table.data_ptr() == toy.builds[0].common.block_table_tensor.data_ptr()


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_encoders_have_no_cache(make_toy: Factory, make_group: Factory, attn_type: str) -> None:
    config = AttentionConfig(**SMALL, attn_type=attn_type)
    toy = make_toy(width_multiple=4)
    group = make_group(config, toy)
    assert (group.kv_layout, group.block_size, group.kernel_block_size) == (None, None, None)
    assert list(group.backends) == ["prefill"]
    context = group.distinct[0].context
    assert (context.kv_layout, context.block_size) == (None, None)
    problem = random_problem(8, config)
    solved(group, problem, common_of(problem))
    assert toy.calls == ["forward"]
    with pytest.raises(ConfigError, match=f"attn_type = '{attn_type}': its layers keep no KV cache"):
        group.allocate_kv_cache(4)


@pytest.mark.parametrize(
    ("decode", "prefill", "both"),
    [
        ("ALWAYS", "ALWAYS", "UNIFORM_BATCH"),
        ("UNIFORM_BATCH", "ALWAYS", "UNIFORM_BATCH"),
        ("ALWAYS", "NEVER", "UNIFORM_BATCH"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE"),
    ],
)
def test_two_backends_capture_decodes_alone(
    make_toy: Factory, make_group: Factory, decode: Any, prefill: Any, both: str
) -> None:
    """Where a mixed batch is split moves from step to step, so it cannot be captured."""
    toys = [
        make_toy("DECODER", phases=("decode",), level=decode),
        make_toy("PREFILLER", phases=("prefill",), level=prefill),
    ]
    assert make_group(CONFIG, *toys).cudagraph_support == both
    assert make_group(CONFIG, make_toy(level=decode)).cudagraph_support == decode


def test_cross_attention(make_toy: Factory, make_group: Factory) -> None:
    """The encoder's keys come in once; later steps only read them."""
    config = AttentionConfig(**SMALL, attn_type="encoder_decoder")
    toy = make_toy()
    group = make_group(config, toy)
    problem = random_problem(9, config, "FLASH_ATTN_NHD", requests=[(3, 20), (30, 5)])
    common = common_of(problem)
    layer = Attention(group)
    cache = group.allocate_kv_cache(problem.kv_cache.shape[1])  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 25, 2, 32, generator=generator)
    slots = [
        int(common.block_table_tensor[request, position // 16]) * 16 + position % 16
        for request, length in enumerate((20, 5))
        for position in range(length)
    ]
    first = replace(common, slot_mapping=torch.tensor(slots))
    output = layer(problem.query, key, value, cache, group.build(first))
    expected, _ = replace(problem, kv_cache=cache).reference(kv_cache=cache)
    assert relative_error(output, expected).row < 1e-5
    again = layer(problem.query, None, None, cache, group.build(common))
    assert same_bits(again, output)
    assert toy.calls == ["update", "forward", "forward"]


@pytest.mark.parametrize("build", ["build", "build_for_cudagraph_capture"])
def test_tables_of_another_block_size_are_refused(
    make_toy: Factory, make_group: Factory, make_batch: Factory, build: str
) -> None:
    toy = make_toy(kernel_block_sizes=(16, 32))
    group = make_group(AttentionConfig(**SMALL, block_size=32), toy)
    with pytest.raises(BatchError, match=r"block_size = 16: .* this group's cache has blocks of 32"):
        getattr(group, build)(make_batch([(1, 40), (3, 9)]))
    right = make_batch([(1, 40), (3, 9)], block_size=32)
    getattr(group, build)(right)
    assert right.block_size == 32
    getattr(group, build)(replace(make_batch([(1, 40), (3, 9)]), block_size=None))  # nothing is said, nothing compared
    assert len(toy.builds) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
@pytest.mark.parametrize("device", [None, "cuda", "cuda:1"])
def test_a_selection_for_another_device(device: str | None) -> None:
    selection = select(AttentionConfig(num_heads=8, head_size=64), "h100", backend="FLEX_ATTENTION")
    with pytest.raises(ConfigError, match="the selection was made for h100, but torch sees no CUDA device") as caught:
        attention_group(selection, device)
    assert caught.value.fields == ("device",)
    assert caught.value.hint is not None
    assert "select(config)" in caught.value.hint
