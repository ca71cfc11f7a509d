"""Ways to hold the runtime wrong, or in an odd but right way: each is refused by name, or its result is right.

Checked mode refuses all that is wrong. What ``ALWAYS`` names is refused without it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import AttentionConfig, StateConfig, select
from attn_select.errors import AttnSelectError
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BlockPool,
    BlockTable,
    Capacity,
    CommonAttentionMetadata,
    attention_group,
    common_prefix_len,
    num_blocks_for,
    prepare_batch,
)
from attn_select.testing import attention_reference, relative_error

CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
STATES = StateConfig(recurrence="kda", num_heads=2, head_size=16)
CAPACITY = Capacity(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
BLOCKS = 32
PROMPTS = (20, 7)


class Engine:
    """The least that an engine has: a group, a layer and its cache, a pool and a table; two prompts at first."""

    def __init__(self, **fields: Any) -> None:
        self.config = CONFIG.model_copy(update=fields)
        self.group: AttentionGroup = attention_group(select(self.config, "cpu"), "cpu", CAPACITY)
        self.size = self.group.block_size or 16
        self.cache = self.group.allocate_kv_cache(BLOCKS)
        self.table, self.pool = BlockTable(4, 8, self.size, "cpu"), BlockPool(BLOCKS, self.size)
        draw = torch.Generator().manual_seed(0)
        self.query = torch.randn(64, 4, 32, generator=draw)
        self.key, self.value = (torch.randn(64, 2, 32, generator=draw) for _ in range(2))

    def admit(self, *seq_lens: int) -> None:
        """Give each request a row and its blocks."""
        for row, length in enumerate(seq_lens):
            self.table.append_row(row, self.pool.allocate(row, length))

    def common(self, *query_lens: int, seq_lens: Sequence[int] | None = None, **options: Any) -> Any:
        """Return a batch of requests that the table knows."""
        return prepare_batch(list(query_lens), list(seq_lens or query_lens), self.table, **options)

    def prompts(self) -> CommonAttentionMetadata:
        """Return the batch of the two prompts."""
        self.admit(*PROMPTS)
        batch: CommonAttentionMetadata = self.common(*PROMPTS)
        return batch

    def run(self, common: CommonAttentionMetadata, *, prefix: int = 0, **changes: Any) -> Tensor:
        """Run a layer on a batch, with arguments of the call changed."""
        tokens = common.num_actual_tokens
        given: dict[str, Any] = {
            "query": self.query[:tokens],
            "key": self.key[:tokens],
            "value": self.value[:tokens],
            "kv_cache": self.cache,
            "attn_metadata": self.group.build(common, prefix),
        }
        output: Tensor = Attention(self.group)(**{**given, **changes})
        return output

    def right(self, output: Tensor, *, causal: bool = True) -> bool:
        """Whether ``output`` is that of the two prompts."""
        wanted = [
            attention_reference(
                self.query[start:end], self.key[start:end], self.value[start:end], scale=32**-0.5, causal=causal
            )[0]
            for start, end in ((0, 20), (20, 27))
        ]
        return relative_error(output[:27], torch.cat(wanted)).row < 1e-5


Case = Callable[[Engine], Any]


def called(**changes: Any) -> Case:
    """The two prompts in a call with other arguments; a function makes one of the engine."""

    def case(engine: Engine) -> Tensor:
        common = engine.prompts()
        made = {name: value(engine) if callable(value) else value for name, value in changes.items()}
        return engine.run(common, **made)

    return case


def batch(**changes: Any) -> Case:
    """The two prompts in a batch with other fields; a function makes one of the batch."""

    def case(engine: Engine) -> Tensor:
        common = engine.prompts()
        made = {name: value(common) if callable(value) else value for name, value in changes.items()}
        return engine.run(replace(common, **made))

    return case


def image(ranges: Any) -> Case:
    """The two prompts with ranges of image tokens, built for layers that have some."""
    return lambda _: asked(Engine(mm_prefix=True), mm_prefix_ranges=ranges)


def tree(mask: Any) -> Case:
    """The two prompts with a mask of drafts, built for layers that have trees."""
    return lambda _: asked(Engine(num_speculative_tokens=1, draft_tree=True), tree_mask=mask)


def asked(engine: Engine, **changes: Any) -> Any:
    """Build the two prompts in a batch with other fields."""
    return engine.group.build(replace(engine.prompts(), **changes))


def lens(query_lens: Sequence[Any], seq_lens: Sequence[Any], *rows: int) -> Case:
    """A batch of these lengths, built; ``rows`` hold room for so many tokens."""

    def case(engine: Engine) -> Any:
        engine.admit(*rows)
        return engine.group.build(prepare_batch(query_lens, seq_lens, engine.table))

    return case


def blocks(*rows: Sequence[Any], tokens: int = 20) -> Case:
    """Requests of so many tokens, whose rows hold these blocks."""

    def case(engine: Engine) -> Tensor:
        for row, ids in enumerate(rows):
            engine.table.append_row(row, ids)
        return engine.run(engine.common(*[tokens] * len(rows)))

    return case


def lengths(*values: int) -> Any:
    tensor = torch.tensor(values, dtype=torch.int32)
    return {"query_start_loc": tensor, "query_start_loc_cpu": tensor.clone()}


def layer_with(**options: Any) -> Case:
    return lambda engine: Attention(engine.group, **options)


def holds(name: str, value: float) -> Case:
    def change(engine: Engine) -> Tensor:
        tensor = getattr(engine, name)[:27].clone()
        tensor[23] = value
        return tensor

    return called(**{name: change})


def stale(engine: Engine) -> Tensor:
    engine.admit(20)
    engine.run(engine.common(20))
    engine.pool.free(0)
    engine.pool.allocate("next", 5)
    return engine.run(engine.common(5))


def a_gap(engine: Engine) -> Tensor:
    engine.admit(40)
    engine.run(engine.common(10))
    return engine.run(engine.common(1, seq_lens=[30]))


def into_a_shared_block(engine: Engine) -> Tensor:
    engine.admit(32)
    engine.run(engine.common(32))
    engine.table.set_row(0, engine.pool.blocks(0))
    engine.table.append_row(1, engine.pool.share_prefix(0, 1, 32))
    return engine.run(engine.common(1, 8, seq_lens=[32, 32]))


def an_earlier_step(engine: Engine) -> Tensor:
    metadata = engine.group.build(engine.prompts())
    engine.group.build(engine.common(1, 1, seq_lens=[21, 8]))
    return Attention(engine.group)(engine.query[:27], engine.key[:27], engine.value[:27], engine.cache, metadata)


def a_table_that_changed(engine: Engine) -> Tensor:
    metadata = engine.group.build(engine.prompts())
    engine.table.set_row(0, [30, 31])
    return Attention(engine.group)(engine.query[:27], engine.key[:27], engine.value[:27], engine.cache, metadata)


def group_of(selection: Any = None, device: str = "cpu", capacity: Any = CAPACITY, **options: Any) -> Case:
    return lambda engine: attention_group(selection or engine.group.selection, device, capacity, **options)


def without_queries(engine: Engine) -> bool:
    engine.admit(20, 7)
    output = engine.run(engine.common(20, 0, seq_lens=[20, 7]))
    return bool(output.isfinite().all())


def one_token(engine: Engine) -> bool:
    engine.admit(1)
    tokens: int = engine.common(True).num_actual_tokens
    return tokens == 1


def with_a_gradient(engine: Engine) -> bool:
    output = engine.run(engine.prompts(), query=engine.query[:27].requires_grad_())
    return engine.right(output) and not output.requires_grad


ARGUMENTS: dict[str, tuple[Case, str]] = {
    "the batch for its metadata": (called(attn_metadata=lambda e: e.common(*PROMPTS)), "is the step's CommonAttention"),
    "query as a list": (called(query=lambda e: e.query.tolist()), "query is a list: accepted is a tensor"),
    "NaN in a query": (holds("query", float("nan")), r"query\[23\] holds NaN or infinity \(token 3 of request 1\)"),
    "infinity in a key": (holds("key", float("inf")), r"key\[23\] holds NaN or infinity \(token 3 of request 1\)"),
    "an earlier step": (an_earlier_step, "attn_metadata is of an earlier step"),
    "a table that changed": (a_table_that_changed, r"slot_mapping\[0\] = .* of request 0 is read from slot"),
}
LENGTHS: dict[str, tuple[Case, str]] = {
    "a tensor for a table": (
        lambda _: prepare_batch([1], [1], torch.ones(1, 1)),  # type: ignore[arg-type]
        "block_table is a Tensor: accepted is a BlockTable",
    ),
    "huge": (lens([2**40], [2**40], 20), "request 0: query_lens = 1099511627776: accepted are integers below"),
    "a common prefix of a first step": (
        lambda e: e.group.build(e.prompts(), 16),
        "common_prefix_len = 16: request 0 had 0 tokens cached",
    ),
    "a prefix of negative blocks": (
        lambda _: common_prefix_len([(1, 2), (1, 2)], [0, 0], -16),
        "block_size = -16: accepted are integers from 1",
    ),
}
TABLES: dict[str, tuple[Case, str]] = {
    "one block twice in a row": (blocks([3, 3]), "slot_mapping holds slot 48 twice"),
    "a stale row": (stale, "row 0 of the block table is stale"),
    "tokens left out": (a_gap, "row 0 of the block table is stale"),
    "a write into a shared block": (into_a_shared_block, "slot_mapping holds slot .* twice"),
}
FIELDS: dict[str, tuple[Case, str]] = {
    "more requests": (batch(num_reqs=3), r"query_start_loc is torch.int32 \(3,\): .* since num_reqs \+ 1 = 4"),
    "a long bound of queries": (batch(max_query_len=10**6), "max_query_len = 1000000: accepted is at most"),
    "ranges of fewer requests": (image([[(0, 3)]]), "mm_prefix_ranges of 1 requests: accepted is a list .* each of 2"),
    "ranges of one request alone": (image([(0, 3), (4, 5)]), r"mm_prefix_ranges\[0\] = \(0, 3\): accepted are pairs"),
    "a range that runs backwards": (image([[(3, 0)], []]), r"mm_prefix_ranges\[0\] = \[\(3, 0\)\]: accepted are pairs"),
    "half a position": (image([[], [(0.5, 2)]]), r"mm_prefix_ranges\[1\] = \[\(0.5, 2\)\]: accepted are pairs"),
    "ranges in words": (image("none"), "mm_prefix_ranges of 4 requests"),
    "a mask in a list": (tree([[True]]), "tree_mask is a list: accepted is a tensor"),
    "more decodes than requests": (batch(num_decodes=5), "num_decodes = 5: accepted are 0 to num_reqs = 2"),
}
MADE: dict[str, tuple[Case, str]] = {
    "a huge cache": (lambda e: e.group.allocate_kv_cache(10**12), "num_blocks = 10{12}: one layer's cache takes"),
    "a named selection for an H100": (
        group_of(select(CONFIG, "h100", backend="FLEX_ATTENTION")),
        "the selection was made for h100, but device = 'cpu'",
    ),
    "a device that is not here": (group_of(device="cuda:7"), "selection was made for .*torch sees no CUDA device"),
    "no selection": (group_of("selection"), "selection = 'selection': accepted is what attn_select.select returns"),
    "a selection of states": (group_of(select(STATES, "cpu")), "its layers keep a state"),
    "slopes that nobody asked for": (layer_with(alibi_slopes=torch.ones(4)), "alibi_slopes given, but the layers"),
    "a scale of NaN": (layer_with(scale=float("nan")), "scale = nan: accepted are finite numbers above 0"),
    "a name for a layer": (layer_with(kv_sharing_target="x"), "kv_sharing_target = 'x': accepted is the Attention"),
    "a negative budget": (lambda _: num_blocks_for(-5, [100], 16), "budget_bytes = -5"),
    "a budget of half a byte": (
        lambda _: num_blocks_for(1e9, [100], 16),
        r"budget_bytes = 1000000000.0: accepted is an",
    ),
    "a budget in words": (lambda _: num_blocks_for("8GiB", [100], 16), "budget_bytes = '8GiB': accepted is an integer"),
    "one number for all layers": (lambda _: num_blocks_for(10**6, 100, 16), "bytes_per_token = 100: accepted is a seq"),
}
ODD: dict[str, Case] = {
    "two prompts": lambda e: e.right(e.run(e.prompts())),
    "more rows than tokens": lambda e: e.right(e.run(e.prompts(), query=e.query, key=e.key, value=e.value)),
    "a cache with gaps": lambda e: e.right(e.run(e.prompts(), kv_cache=torch.zeros(2, 64, e.size, 2, 32)[:, ::2])),
    "NaN in blocks of no request": lambda e: e.cache.fill_(torch.nan) is e.cache and e.right(e.run(e.prompts())),
    "a table of unknown blocks": lambda e: e.right(e.run(replace(e.prompts(), block_size=None))),
    "both directions": lambda e: e.right(e.run(replace(e.prompts(), causal=False)), causal=False),
    "a request without queries": without_queries,
    "True for one token": one_token,
    "graphs asked for on a CPU": lambda e: e.group.selection is group_of(cuda_graphs=True)(e).selection,
    "a dtype of torch": lambda _: AttentionConfig(num_heads=4, head_size=32, dtype=torch.float16).dtype == "float16",
    "a query with a gradient": with_a_gradient,
}
WRONG = {**ARGUMENTS, **LENGTHS, **TABLES, **FIELDS, **MADE}
CHECKED = {
    *("NaN in a query", "infinity in a key", "an earlier step", "a table that changed", "one block twice in a row"),
    *("a stale row", "tokens left out", "a write into a shared block", "a long bound of queries"),
}
"""What only checked mode refuses, since it must be read back or takes time."""


@pytest.mark.parametrize("name", WRONG)
def test_checked_mode_refuses_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    case, said = WRONG[name]
    with pytest.raises((AttnSelectError, ValueError), match=said):
        case(Engine())


@pytest.mark.parametrize("name", [name for name in WRONG if name not in CHECKED])
def test_it_is_refused_without_checks(name: str) -> None:
    case, said = WRONG[name]
    with pytest.raises((AttnSelectError, ValueError), match=said):
        case(Engine())


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_but_right(monkeypatch: pytest.MonkeyPatch, name: str, checked: str) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", checked)
    assert ODD[name](Engine()) is True
