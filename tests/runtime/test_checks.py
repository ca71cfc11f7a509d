"""Checked mode: what would be an illegal memory access is an error that names argument, request and bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import common_of
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BatchError,
    BlockTable,
    Capacity,
    CommonAttentionMetadata,
    prepare_batch,
)
from attn_select.runtime.checks import checks_enabled
from attn_select.testing import Problem, random_problem, same_bits

Factory = Callable[..., Any]
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
CONFIG = AttentionConfig(**SMALL)
FLASH = "FLASH_ATTN_NHD"
REQUESTS = ((1, 20), (3, 33), (5, 5))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for checked mode."""
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, make_group: Factory, value: str | None, on: bool) -> None:
    if value is not None:
        monkeypatch.setenv("ATTN_SELECT_CHECK", value)
    assert checks_enabled() is on
    group: AttentionGroup = make_group(CONFIG)
    monkeypatch.setenv("ATTN_SELECT_CHECK", "0")
    assert group.checked is on  # it was read when the group was made


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("layout", ["FLASH_ATTN_NHD", "FLASHINFER_NHD", "FLASHINFER_HND", "PAGED_ATTENTION"])
@pytest.mark.parametrize("kernel", [16, 8])
def test_what_is_right_passes(make_toy: Factory, make_group: Factory, layout: str, kernel: int) -> None:
    config = AttentionConfig(**SMALL, block_size=16, mm_prefix=True)
    toy = make_toy(layouts=(layout,), kernel_block_sizes=(kernel,))
    group = make_group(config, toy)
    problem = random_problem(1, config, layout)
    cache = group.allocate_kv_cache(problem.kv_cache.numel() // group.allocate_kv_cache(1).numel())  # type: ignore[union-attr]
    layer = Attention(group)
    for build in (group.build, group.build_for_cudagraph_capture):
        layer(problem.query, problem.key, problem.value, cache, build(common_of(problem)))
    assert toy.calls == ["update", "forward"] * 2


@pytest.mark.usefixtures("checked")
def test_padding_of_graphs_passes(make_group: Factory, make_batch: Factory) -> None:
    """A request with a query and no keys, tokens of no request behind the last, and a loose bound."""
    common = make_batch([(1, 20), (1, 3)])
    padded = replace(
        common,
        query_start_loc=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor([20, 3, 0], dtype=torch.int32),
        seq_lens_cpu=torch.tensor([20, 3, 0], dtype=torch.int32),
        num_reqs=3,
        num_actual_tokens=6,
        max_seq_len=1000,
        block_table_tensor=torch.tensor([[0, 1], [2, -9], [-9, -9]], dtype=torch.int32),
        slot_mapping=torch.tensor([19, 34, -1, -1, -1, -1]),
    )
    group = make_group(CONFIG)
    cache = group.allocate_kv_cache(3)
    rows = torch.ones(6, 4, 32)
    output = Attention(group)(rows, rows[:, :2], rows[:, :2], cache, group.build(padded))
    assert output[:2].isfinite().all()
    assert cache.flatten(1, 2).any(-1).any(-1).nonzero().tolist() == [[0, 19], [0, 34], [1, 19], [1, 34]]


def changed(name: str, index: Any, value: int) -> Callable[[CommonAttentionMetadata], CommonAttentionMetadata]:
    def change(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        tensor = getattr(common, name).clone()
        tensor[index] = value
        return replace(common, **{name: tensor})

    return change


def both(name: str, values: list[int]) -> Callable[[CommonAttentionMetadata], CommonAttentionMetadata]:
    tensor = torch.tensor(values, dtype=torch.int32)
    return lambda common: replace(common, **{name: tensor, f"{name}_cpu": tensor})


def made(name: str, **arguments: Any) -> Callable[[CommonAttentionMetadata], CommonAttentionMetadata]:
    return lambda common: replace(common, **{name: getattr(common, name).to(**arguments)})


WRONG_BATCHES: dict[str, tuple[Callable[[CommonAttentionMetadata], CommonAttentionMetadata], str]] = {
    "lengths differ": (changed("seq_lens", 1, 34), r"seq_lens\[1\] is 34 on the device and 33 in seq_lens_cpu"),
    "bounds differ": (
        changed("query_start_loc_cpu", 2, 5),
        r"query_start_loc\[2\] is 4 on the device and 5 in query_start_loc_cpu",
    ),
    "bounds do not begin at 0": (
        both("query_start_loc", [1, 1, 4, 9]),
        "query_start_loc runs from 1 to 9: accepted is 0 to at most num_actual_tokens = 9",
    ),
    "bounds fall": (both("query_start_loc", [0, 4, 3, 8]), "query of request 1 has -1 tokens: max_query_len is 5"),
    "a longer query": (lambda c: replace(c, max_query_len=4), "query of request 2 has 5 tokens: max_query_len is 4"),
    "a longer sequence": (
        lambda c: replace(c, max_seq_len=32),
        r"seq_lens\[1\] = 33: accepted is 0 to max_seq_len = 32",
    ),
    "a negative length": (both("seq_lens", [20, 33, -1]), r"seq_lens\[2\] = -1: accepted is 0 to"),
    "fewer keys than queries": (
        both("seq_lens", [20, 2, 5]),
        "request 1 has 3 query tokens but seq_lens = 2, which includes them",
    ),
    "beyond the table": (
        lambda c: replace(both("seq_lens", [20, 49, 5])(c), max_seq_len=49),
        r"seq_lens\[1\] = 49: block_table_tensor has 3 blocks of 16 tokens per request, 48 tokens",
    ),
    "beyond the model": (
        lambda c: replace(
            both("seq_lens", [20, 101, 5])(c), max_seq_len=200, block_table_tensor=c.block_table_tensor.repeat(1, 3)
        ),
        r"seq_lens\[1\] = 101: this group was made for max_model_len = 100",
    ),
    "int64 lengths": (made("seq_lens", dtype=torch.int64), r"seq_lens is torch.int64 \(3,\): accepted is torch"),
    "lengths elsewhere": (made("seq_lens", device="meta"), "seq_lens is on meta: accepted is cpu"),
    "int64 table": (
        made("block_table_tensor", dtype=torch.int64),
        r"block_table_tensor is torch.int64 \(3, 3\): accepted is torch.int32 \(num_reqs = 3, blocks\)",
    ),
    "a table of columns": (
        lambda c: replace(c, block_table_tensor=c.block_table_tensor.T.contiguous().T),  # type: ignore[union-attr]
        r"block_table_tensor has strides \(1, 3\): the last dimension must be contiguous",
    ),
    "int32 slots": (
        made("slot_mapping", dtype=torch.int32),
        r"slot_mapping is torch.int32 \(9,\): accepted is torch",
    ),
    "fewer slots": (
        lambda c: replace(c, slot_mapping=c.slot_mapping[1:]),  # type: ignore[index]
        r"slot_mapping is torch.int64 \(8,\): accepted is torch.int64, a slot for each of 9 tokens",
    ),
    "a range that runs backwards": (
        lambda c: replace(c, mm_prefix_ranges=[[], [(4, 3)], []]),
        r"mm_prefix_ranges\[1\] = \[\(4, 3\)\]: accepted are pairs of positions, 0 <= first <= last",
    ),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("kind", WRONG_BATCHES)
def test_a_wrong_batch_is_not_built(make_toy: Factory, make_group: Factory, make_batch: Factory, kind: str) -> None:
    change, message = WRONG_BATCHES[kind]
    toy = make_toy()
    group = make_group(AttentionConfig(**SMALL, mm_prefix=True), toy, capacity=Capacity(max_model_len=100))
    batch = make_batch(REQUESTS)
    group.build(batch)
    for build in (group.build, group.build_for_cudagraph_capture):
        with pytest.raises(BatchError, match=message):
            build(change(batch))
    assert len(toy.builds) == 1


WRONG_CONTENTS: dict[str, tuple[Callable[[CommonAttentionMetadata], CommonAttentionMetadata], str]] = {
    "a block beyond the pool": (
        changed("block_table_tensor", (1, 2), 7),
        r"block_table_tensor\[1, 2\] = 7: the pool has blocks 0 to 5 \(request 1, 33 tokens, kv_cache",
    ),
    "a negative block": (
        changed("block_table_tensor", (0, 1), -1),
        r"block_table_tensor\[0, 1\] = -1: the pool has blocks 0 to 5 \(request 0, 20 tokens",
    ),
    "a slot beyond the pool": (
        changed("slot_mapping", 6, 96),
        r"slot_mapping\[6\] = 96 \(a token of request 2\): accepted are 0 to 95, and -1 for none",
    ),
    "a slot below -1": (changed("slot_mapping", 1, -2), r"slot_mapping\[1\] = -2 \(a token of request 1\)"),
    "a slot of another block": (
        changed("slot_mapping", 0, 20),
        r"slot_mapping\[0\] = 20: token 19 of request 0 is read from slot 19, by its block table in blocks of 16\n"
        r"  hint: make slots and table of one block size",
    ),
    "a slot twice": (
        changed("slot_mapping", 4, 19),
        "slot_mapping holds slot 19 twice: two tokens would be written to one place",
    ),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("kernel", [16, 8])
@pytest.mark.parametrize("kind", WRONG_CONTENTS)
def test_wrong_ids_do_not_reach_a_kernel(
    make_toy: Factory, make_group: Factory, make_batch: Factory, kind: str, kernel: int
) -> None:
    """Bounds are the allocator's, whatever blocks the kernel has."""
    change, message = WRONG_CONTENTS[kind]
    toy = make_toy(kernel_block_sizes=(kernel,))
    group = make_group(AttentionConfig(**SMALL, block_size=16), toy)
    batch = make_batch(REQUESTS)  # blocks 0 and 1, 2 to 4, and 5
    cache = group.allocate_kv_cache(6)
    rows = torch.ones(9, 4, 32)
    with pytest.raises(BatchError, match=message):
        Attention(group)(rows, rows[:, :2], rows[:, :2], cache, group.build(change(batch)))
    assert toy.calls == []
    assert not cache.any()


class Call:
    """A right call of a checked layer, to be changed one argument at a time."""

    def __init__(self, toy: Any, group: AttentionGroup, problem: Problem, common: CommonAttentionMetadata) -> None:
        self.toy, self.problem = toy, problem
        self.layer, self.metadata = Attention(group), group.build(common)
        assert problem.kv_cache is not None
        self.cache = problem.kv_cache.clone()

    def __call__(self, **changes: Any) -> None:
        given = {"query": self.problem.query, "key": self.problem.key, "value": self.problem.value}
        self.layer(**{**given, "kv_cache": self.cache, "attn_metadata": self.metadata, **changes})


@pytest.fixture
def call(checked: None, make_toy: Factory, make_group: Factory) -> Call:
    toy, problem = make_toy(), random_problem(3, CONFIG, FLASH)
    return Call(toy, make_group(CONFIG, toy), problem, common_of(problem))


def columns(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last dimension not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


WRONG_TENSORS: dict[str, tuple[Callable[[Call], dict[str, Any]], str]] = {
    "query strides": (
        lambda c: {"query": columns(c.problem.query)},
        r"query has strides .*: the last dimension must be",
    ),
    "output strides": (lambda c: {"output": columns(c.problem.query)}, "output has strides"),
    "cache strides": (lambda c: {"kv_cache": columns(c.cache)}, "kv_cache has strides"),
    "query elsewhere": (lambda c: {"query": c.problem.query.to("meta")}, "query is on meta: accepted is cpu"),
    "output elsewhere": (lambda c: {"output": c.problem.query.to("meta")}, "output is on meta: accepted is cpu"),
    "cache elsewhere": (lambda c: {"kv_cache": c.cache.to("meta")}, r"kv_cache is torch.float32 on meta: accepted is"),
    "a cache of one block": (
        lambda c: {"kv_cache": c.cache[:, :1].expand_as(c.cache)},
        r"kv_cache of shape .* has strides \(\d+, 0, .*\): several elements share one address",
    ),
    "an LSE inside the output": (
        lambda c: {"output": (out := torch.zeros_like(c.problem.query)), "output_lse": out.view(-1, 4)[: len(out)]},
        "output and output_lse overlap in memory: the layer writes output",
    ),
    "an output over the query": (lambda c: {"output": c.problem.query}, "output and query overlap in memory"),
    "an output inside the cache": (
        lambda c: {"output": c.cache.view(-1, 4, 32)[: len(c.problem.query)]},
        "output and kv_cache overlap in memory",
    ),
    "too small a cache": (
        lambda c: {"kv_cache": c.cache[:, :3]},
        r"block_table_tensor\[\d, \d\] = \d+: the pool has blocks",
    ),
}


@pytest.mark.parametrize("kind", WRONG_TENSORS)
def test_wrong_tensors_do_not_reach_a_kernel(call: Call, kind: str) -> None:
    change, message = WRONG_TENSORS[kind]
    before = call.cache.clone()
    with pytest.raises((BatchError, ConfigError), match=message):
        call(**change(call))
    assert call.toy.calls == []
    assert same_bits(call.cache, before)
    call()
    with pytest.raises((BatchError, ConfigError), match=message):  # also after a call that was right
        call(**change(call))
    assert call.toy.calls == ["update", "forward"]


def test_a_new_cache_of_one_block_is_refused_without_checked_mode(make_toy: Factory, make_group: Factory) -> None:
    toy, problem = make_toy(), random_problem(3, CONFIG, FLASH)
    call = Call(toy, make_group(CONFIG, toy), problem, common_of(problem))
    with pytest.raises(BatchError, match=r"kv_cache of shape .*: several elements share one address"):
        call(kv_cache=call.cache[:, :1].expand_as(call.cache))
    assert toy.calls == []


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_scales_that_went_bad(make_toy: Factory, make_group: Factory, name: str, value: float) -> None:
    config = AttentionConfig(**SMALL, kv_cache_dtype="fp8_e4m3", per_head_quant_scales=name != "q")
    toy, problem = make_toy(), random_problem(4, config, FLASH)
    call = Call(toy, make_group(config, toy), problem, common_of(problem))
    call()
    getattr(call.layer.terms.scales, name).view(-1)[-1] = value
    with pytest.raises(BatchError, match=rf"{name}_scale = {value}: accepted are finite numbers above 0"):
        call()
    assert toy.calls == ["update", "forward"]


def test_without_checked_mode_nothing_is_read_back(make_toy: Factory, make_group: Factory, make_batch: Factory) -> None:
    """Wrong contents pass (a kernel may crash on them); wrong shapes and dtypes do not."""
    toy = make_toy()
    group, batch = make_group(CONFIG, toy), make_batch(REQUESTS)
    metadata = group.build(changed("slot_mapping", 4, 19)(changed("seq_lens", 1, 34)(batch)))
    rows, cache = torch.ones(9, 4, 32), group.allocate_kv_cache(6)
    layer = Attention(group)
    layer(rows, rows[:, :2], columns(rows[:, :2]), cache, metadata)
    assert toy.calls == ["update", "forward"]
    with pytest.raises(BatchError, match="query of shape"):
        layer(rows[:, :2], rows[:, :2], rows[:, :2], cache, metadata)


@pytest.mark.usefixtures("checked")
def test_a_prefix_that_the_tables_do_not_share(make_toy: Factory, make_group: Factory) -> None:
    toy = make_toy()
    group = make_group(CONFIG, toy)
    table = BlockTable(3, 4, 16, "cpu")
    for row, blocks in enumerate(([7, 3, 1], [7, 3, 2], [7, 4, 5])):
        table.append_row(row, blocks)
    common = prepare_batch([1, 1, 1], [48, 40, 39], table)
    group.build(common, common_prefix_len=16)
    said = "common_prefix_len = 32: request 2 has block 4 in column 1 .* request 0 has block 3: they share 16 tokens"
    with pytest.raises(BatchError, match=said):
        group.build(common, common_prefix_len=32)
    assert len(toy.builds) == 1
