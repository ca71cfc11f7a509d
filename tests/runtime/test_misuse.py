"""137 ways to hold the runtime wrong, or in an odd but right way: each is refused by name, or its result is right.

Checked mode refuses all that is wrong. What ``ALWAYS`` names is refused without it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import AttentionConfig, select
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


def sliced(name: str, *cut: Any) -> Case:
    return batch(**{name: lambda common: getattr(common, name)[cut if len(cut) > 1 else cut[0]]})


def converted(*names: str) -> Case:
    return batch(**{name: lambda common, name=name: getattr(common, name).long() for name in names})


def lengths(*values: int) -> Any:
    tensor = torch.tensor(values, dtype=torch.int32)
    return {"query_start_loc": tensor, "query_start_loc_cpu": tensor.clone()}


def made_with(**fields: Any) -> Case:
    return lambda _: AttentionConfig(**{"num_heads": 4, "head_size": 32, **fields})


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


def stale_and_longer(engine: Engine) -> Tensor:
    engine.admit(20)
    engine.run(engine.common(20))
    engine.pool.free(0)
    engine.table.append_row(0, engine.pool.allocate("next", 30)[:1])
    return engine.run(engine.common(30))


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


def beyond_the_model(engine: Engine) -> Any:
    table = BlockTable(4, 64, engine.size, "cpu")
    table.append_row(0, range(13))
    return engine.group.build(prepare_batch([1], [200], table))


def other_blocks(engine: Engine) -> Any:
    table = BlockTable(4, 16, 2 * engine.size, "cpu")
    table.append_row(0, [0])
    return engine.group.build(prepare_batch([20], [20], table))


def other_group(engine: Engine) -> Tensor:
    return engine.run(engine.prompts(), attn_metadata=Engine().group.build(engine.common(*PROMPTS)))


def shared(source: int, target: Any, tokens: int) -> Case:
    def case(engine: Engine) -> Any:
        engine.pool.allocate(source, 32 if tokens == 16 else 20)
        return engine.pool.share_prefix(source, target, tokens)

    return case


def group_of(selection: Any = None, device: str = "cpu", capacity: Any = CAPACITY, **options: Any) -> Case:
    return lambda engine: attention_group(selection or engine.group.selection, device, capacity, **options)


def sinks_of(make: Callable[[Engine], Any]) -> Case:
    return lambda _: make(Engine(sinks=True))


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


def freed_twice(engine: Engine) -> None:
    engine.pool.allocate("a", 5)
    engine.pool.free("a")
    engine.pool.free("a")


ARGUMENTS: dict[str, tuple[Case, str]] = {
    "metadata of another group": (other_group, "attn_metadata was built by another group"),
    "no metadata": (called(attn_metadata=None), "no attn_metadata was given"),
    "the batch for its metadata": (called(attn_metadata=lambda e: e.common(*PROMPTS)), "is the step's CommonAttention"),
    "fewer queries": (called(query=lambda e: e.query[:26]), r"query of shape \(26, 4, 32\): accepted is \(at least 27"),
    "fewer keys": (called(key=lambda e: e.key[:20]), r"key of shape \(20, 2, 32\): accepted is \(at least 27"),
    "fewer values": (called(value=lambda e: e.value[:20]), r"value of shape \(20, 2, 32\)"),
    "query dtype": (called(query=lambda e: e.query.double()), "query is torch.float64: accepted is torch.float32"),
    "key dtype": (called(key=lambda e: e.key.half()), "key is torch.float16: accepted is torch.float32"),
    "query heads": (called(query=lambda e: e.query.repeat(1, 2, 1)), r"query of shape \(64, 8, 32\)"),
    "head size": (called(query=lambda e: e.query.repeat(1, 1, 2)), r"query of shape \(64, 4, 64\)"),
    "a flat query": (called(query=lambda e: e.query.flatten(1)), r"query of shape \(64, 128\)"),
    "a batched query": (called(query=lambda e: e.query[None]), r"query of shape \(1, 64, 4, 32\)"),
    "query elsewhere": (called(query=lambda e: e.query.to("meta")), "query is on meta: accepted is cpu"),
    "query of columns": (called(query=lambda e: e.query.mT.contiguous().mT), r"query has strides \(128, 1, 4\)"),
    "query as a list": (called(query=lambda e: e.query.tolist()), "query is a list: accepted is a tensor"),
    "neither key nor value": (called(key=None, value=None), "key is None: layer .* needs the key and the value"),
    "no key": (called(key=None), "key is None: layer .* needs the key and the value"),
    "no cache": (called(kv_cache=None), "kv_cache is None: attn_type = 'decoder' keeps one"),
    "cache dtype": (called(kv_cache=lambda e: e.cache.half()), "kv_cache is torch.float16 on cpu: accepted is"),
    "cache shape": (called(kv_cache=torch.zeros(2, 32, 8, 2, 32)), "kv_cache of shape .* tokens per block|layout"),
    "a smaller cache": (
        called(kv_cache=lambda e: e.group.allocate_kv_cache(1)),
        r"block_table_tensor\[0, 1\] = 1: the pool has blocks 0 to 0 \(request 0, 20 tokens",
    ),
    "NaN in a query": (holds("query", float("nan")), r"query\[23\] holds NaN or infinity \(token 3 of request 1\)"),
    "infinity in a key": (holds("key", float("inf")), r"key\[23\] holds NaN or infinity \(token 3 of request 1\)"),
    "output shape": (called(output=torch.zeros(27, 4, 16)), r"output of shape \(27, 4, 16\)"),
    "output dtype": (called(output=torch.zeros(27, 4, 32).half()), "output is torch.float16: accepted is"),
    "LSE shape": (called(output_lse=torch.zeros(27, 2)), r"output_lse of shape \(27, 2\)"),
    "an earlier step": (an_earlier_step, "attn_metadata is of an earlier step"),
    "a table that changed": (a_table_that_changed, r"slot_mapping\[0\] = .* of request 0 is read from slot"),
}
LENGTHS: dict[str, tuple[Case, str]] = {
    "a negative query": (lens([20, -7], [20, 7], 20, 7), "request 1: query_lens = -7"),
    "a negative sequence": (lens([20], [-20], 20), "request 0: query_lens = 20 with seq_lens = -20"),
    "more queries than keys": (lens([20, 7], [20, 5], 20, 7), "request 1: query_lens = 7 with seq_lens = 5"),
    "other counts": (lens([20], [20, 3], 20), "1 query_lens, 2 seq_lens"),
    "fractions": (lens([20.5], [20.5], 20), "request 0: query_lens = 20.5: accepted are integers"),
    "texts": (lens(["20"], ["20"], 20), "request 0: query_lens = '20': accepted are integers"),
    "nothing": (lens([], []), "0 query_lens, 0 seq_lens"),
    "huge": (lens([2**40], [2**40], 20), "request 0: query_lens = 1099511627776: accepted are integers below"),
    "no room": (lens([20], [20], 16), "request 0: seq_lens = 20, but its row of the block table holds 1 blocks"),
    "an empty row": (lens([1], [1]), "request 0: seq_lens = 1, but its row of the block table holds 0 blocks"),
    "more requests than rows": (lens([1] * 5, [1] * 5), "5 requests: the block table has rows for 1 to 4"),
    "more tokens than the group": (lens([60, 60], [60, 60], 60, 60), "2 requests and 120 tokens: this group was made"),
    "beyond the model": (beyond_the_model, r"seq_lens\[0\] = 200: this group was made for max_model_len = 128"),
    "blocks of another size": (other_blocks, "block_size = 32: the batch's block table counts in blocks"),
    "a common prefix of a first step": (
        lambda e: e.group.build(e.prompts(), 16),
        "common_prefix_len = 16: request 0 had 0 tokens cached",
    ),
    "a negative prefix": (lambda e: e.group.build(e.prompts(), -16), "common_prefix_len = -16: accepted are"),
    "an odd prefix": (lambda e: e.group.build(e.prompts(), 3), "common_prefix_len = 3: accepted are multiples"),
    "a huge prefix": (lambda e: e.group.build(e.prompts(), 10**6), "common_prefix_len = 1000000: request 0 had 0"),
    "a prefix of negative blocks": (
        lambda _: common_prefix_len([(1, 2), (1, 2)], [0, 0], -16),
        "block_size = -16: accepted are integers from 1",
    ),
}
TABLES: dict[str, tuple[Case, str]] = {
    "ids beyond the pool": (blocks([999, 1]), r"block_table_tensor\[0, 0\] = 999: the pool has blocks 0 to 31 \(reque"),
    "negative ids": (blocks([-1, -2]), r"block_table_tensor\[0, 0\] = -1: the pool has blocks .*request 0"),
    "fractions of ids": (blocks([1.5]), r"block_ids = \[1.5\] for row 0: accepted are integers"),
    "huge ids": (blocks([2**40]), r"block_ids = \[1099511627776\] for row 0: accepted are integers of 32 bits"),
    "one block twice in a row": (blocks([3, 3]), "slot_mapping holds slot 48 twice"),
    "one new block in two rows": (blocks([3], [3], tokens=5), "slot_mapping holds slot 48 twice"),
    "a negative row": (lambda e: e.table.append_row(-1, [0]), "row -1: the block table has rows 0 to 3"),
    "a row that is not there": (lambda e: e.table.append_row(99, [0]), "row 99: the block table has rows 0 to 3"),
    "a row that is full": (lambda e: e.table.append_row(0, range(9)), "row 0 of the block table: 9 blocks"),
    "a stale row": (stale, "row 0 of the block table is stale"),
    "a stale row with more blocks": (stale_and_longer, "row 0 of the block table is stale"),
    "tokens left out": (a_gap, "row 0 of the block table is stale"),
    "a write into a shared block": (into_a_shared_block, "slot_mapping holds slot .* twice"),
    "freed twice": (freed_twice, "free: request 'a' holds no blocks"),
    "a negative pool": (lambda _: BlockPool(-1, 16), "num_blocks = -1: accepted are integers from 1"),
    "a negative request": (lambda e: e.pool.allocate("a", -3), "num_tokens = -3 for request 'a': accepted are integ"),
    "too large a request": (lambda e: e.pool.allocate("a", 10**6), "request 'a' needs 62500 more blocks"),
    "a fraction of a request": (lambda e: e.pool.allocate("a", 3.7), "num_tokens = 3.7 for request 'a': accepted"),
    "a part of a block shared": (shared(0, 1, 20), "num_tokens = 20 to share must be a positive multiple"),
    "more shared than there is": (shared(0, 1, 48), "request 0 holds 32 tokens, fewer than the 48 to share"),
    "shared with itself": (shared(0, 0, 16), "request 0 already holds 2 blocks"),
    "zeroed beyond the cache": (lambda e: e.group.zero_blocks(e.cache, [999]), "block_ids holds 999: accepted are"),
    "zeroed before the cache": (lambda e: e.group.zero_blocks(e.cache, [-1]), "block_ids holds -1: accepted are"),
}
FIELDS: dict[str, tuple[Case, str]] = {
    "slots below -1": (batch(slot_mapping=lambda c: c.slot_mapping - 100000), r"slot_mapping\[0\] = -\d+ .*request 0"),
    "slots beyond the pool": (batch(slot_mapping=lambda c: c.slot_mapping + 10**6), r"slot_mapping\[0\] = 1\d+ .*req"),
    "int32 slots": (batch(slot_mapping=lambda c: c.slot_mapping.int()), r"slot_mapping is torch.int32 \(27,\): accept"),
    "fewer slots": (sliced("slot_mapping", slice(5)), r"slot_mapping is torch.int64 \(5,\): .* each of 27 tokens"),
    "no slots": (batch(slot_mapping=None), "slot_mapping is None: layers with a KV cache need it"),
    "slots of another block": (batch(slot_mapping=lambda c: c.slot_mapping + 16), "token 0 of request 0 is read from"),
    "one slot for all": (batch(slot_mapping=lambda c: c.slot_mapping * 0), "slot_mapping holds slot 0 twice"),
    "no table": (batch(block_table_tensor=None), "block_table_tensor is None: layers with a KV cache need it"),
    "int64 table": (converted("block_table_tensor"), r"block_table_tensor is torch.int64 \(2, 2\): accepted is torch"),
    "a narrow table": (
        sliced("block_table_tensor", slice(None), slice(1)),
        r"seq_lens\[0\] = 20: block_table_tensor has 1 blocks of 16 tokens per request",
    ),
    "a flat table": (sliced("block_table_tensor", 0), r"block_table_tensor is torch.int32 \(2,\): accepted"),
    "a table of one request": (sliced("block_table_tensor", slice(1)), r"block_table_tensor is torch.int32 \(1, 2\)"),
    "another block size": (batch(block_size=32), "block_size = 32: the batch's block table counts"),
    "fewer requests": (batch(num_reqs=1), r"query_start_loc is torch.int32 \(3,\): .* since num_reqs \+ 1 = 2"),
    "more requests": (batch(num_reqs=3), r"query_start_loc is torch.int32 \(3,\): .* since num_reqs \+ 1 = 4"),
    "fewer tokens": (batch(num_actual_tokens=10), "query_start_loc runs from 0 to 27: accepted is 0 to at most"),
    "more tokens": (batch(num_actual_tokens=30), r"slot_mapping is torch.int64 \(27,\): .* each of 30 tokens"),
    "a short bound of queries": (batch(max_query_len=1), "query of request 0 has 20 tokens: max_query_len is 1"),
    "a long bound of queries": (batch(max_query_len=10**6), "max_query_len = 1000000: accepted is at most"),
    "a short bound of lengths": (batch(max_seq_len=1), r"seq_lens\[0\] = 20: accepted is 0 to max_seq_len = 1"),
    "lengths of the device differ": (
        batch(seq_lens=lambda c: c.seq_lens + 1),
        r"seq_lens\[0\] is 21 on the device and 20 in seq_lens_cpu",
    ),
    "one more key": (
        batch(seq_lens=lambda c: c.seq_lens + 1, seq_lens_cpu=lambda c: c.seq_lens_cpu + 1),
        r"seq_lens\[0\] = 21: accepted is 0 to max_seq_len = 20",
    ),
    "int64 lengths": (
        converted("seq_lens", "seq_lens_cpu"),
        r"seq_lens is torch.int64 \(2,\): accepted is torch.int32",
    ),
    "bounds that fall": (batch(**lengths(0, 27, 20)), "query_start_loc runs from 0 to 20|request 0 has 27 tokens"),
    "bounds from 5": (batch(**lengths(5, 20, 27)), "query_start_loc runs from 5 to 27"),
    "image ranges": (batch(mm_prefix_ranges=[[(0, 5)], []]), "mm_prefix_ranges given, but the layers were selected"),
    "a tree of drafts": (batch(tree_mask=torch.ones(27, 3, dtype=torch.bool)), "tree_mask given, but the layers were"),
    "more decodes than requests": (batch(num_decodes=5), "num_decodes = 5: accepted are 0 to num_reqs = 2"),
}
MADE: dict[str, tuple[Case, str]] = {
    "a cache of nothing": (lambda e: e.group.allocate_kv_cache(0), "num_blocks = 0: accepted are integers from 1"),
    "a negative cache": (lambda e: e.group.allocate_kv_cache(-1), "num_blocks = -1: accepted are integers from 1"),
    "a fraction of a cache": (lambda e: e.group.allocate_kv_cache(3.5), "num_blocks = 3.5: accepted are integers"),
    "a huge cache": (lambda e: e.group.allocate_kv_cache(10**12), "num_blocks = 10{12}: one layer's cache takes"),
    "no requests": (lambda _: Capacity(0, 64, 128), "max_num_seqs = 0: accepted are integers from 1"),
    "negative tokens": (lambda _: Capacity(4, -4, 128), "max_num_batched_tokens = -4: accepted are integers from 1"),
    "a selection for an H100": (group_of(select(CONFIG, "h100")), "made for h100, but device = 'cpu'|no backend for"),
    "a named selection for an H100": (
        group_of(select(CONFIG, "h100", backend="FLEX_ATTENTION")),
        "the selection was made for h100, but device = 'cpu'",
    ),
    "a device that is not here": (group_of(device="cuda:7"), "selection was made for .*torch sees no CUDA device"),
    "no selection": (group_of("selection"), "selection = 'selection': accepted is what attn_select.select returns"),
    "KV heads that do not divide": (made_with(num_kv_heads=3), "num_kv_heads"),
    "negative heads": (made_with(num_heads=-4), "num_heads"),
    "a misspelt field": (made_with(headsize=32), "headsize.*|did you mean head_size"),
    "heads as a truth": (made_with(num_heads=True), "num_heads"),
    "heads as a fraction": (made_with(num_heads=4.0), "num_heads"),
    "float64": (made_with(dtype="float64"), "dtype"),
    "a GPU that does not exist": (lambda _: select(CONFIG, "h1000"), "h1000.*\n.*did you mean h100"),
    "sinks without their numbers": (sinks_of(lambda e: Attention(e.group)), "sinks missing, but the layers were"),
    "sinks of other heads": (sinks_of(lambda e: Attention(e.group, sinks=torch.zeros(3))), r"sinks of shape \(3,\)"),
    "sinks that nobody asked for": (layer_with(sinks=torch.zeros(4)), "sinks given, but the layers were selected"),
    "slopes that nobody asked for": (layer_with(alibi_slopes=torch.ones(4)), "alibi_slopes given, but the layers"),
    "a scale of NaN": (layer_with(scale=float("nan")), "scale = nan: accepted are finite numbers above 0"),
    "a scale of 0": (layer_with(scale=0.0), "scale = 0.0: accepted are finite numbers above 0"),
    "a negative scale": (layer_with(scale=-1.0), "scale = -1.0: accepted are finite numbers above 0"),
    "a name for a layer": (layer_with(kv_sharing_target="x"), "kv_sharing_target = 'x': accepted is the Attention"),
    "a negative budget": (lambda _: num_blocks_for(-5, [100], 16), "budget_bytes = -5"),
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
    "FP8 on a CPU": lambda _: Engine(kv_cache_dtype="fp8").group.kv_layout is not None,
    "a query with a gradient": with_a_gradient,
}
WRONG = {**ARGUMENTS, **LENGTHS, **TABLES, **FIELDS, **MADE}
CHECKED = {
    *("query elsewhere", "query of columns", "a smaller cache", "NaN in a query", "infinity in a key"),
    *("an earlier step", "a table that changed", "beyond the model", "ids beyond the pool", "negative ids"),
    *("one block twice in a row", "one new block in two rows", "a stale row", "a stale row with more blocks"),
    *("tokens left out", "a write into a shared block", "slots below -1", "slots beyond the pool"),
    *("slots of another block", "one slot for all", "fewer tokens", "a short bound of queries"),
    *("a long bound of queries", "a short bound of lengths", "lengths of the device differ", "one more key"),
    *("bounds that fall", "bounds from 5"),
}
"""What only checked mode refuses, since it must be read back or takes time."""


def test_the_tables_are_whole() -> None:
    tables = (ARGUMENTS, LENGTHS, TABLES, FIELDS, MADE)
    assert len(WRONG) == sum(map(len, tables))
    assert len(WRONG) + len(ODD) == 137
    assert set(WRONG) > CHECKED


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
