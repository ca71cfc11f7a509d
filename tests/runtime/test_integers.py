"""Block ids, slots, lengths and sizes in whatever a caller has them: taken for what they are, or refused by name."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from attn_select import AttentionConfig, select
from attn_select.errors import AttnSelectError, ConfigError
from attn_select.runtime import (
    BatchError,
    BlockPool,
    BlockTable,
    Capacity,
    attention_group,
    prepare_batch,
)

RIGHT: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": list,
    "range": lambda ids: range(ids[0], ids[0] + len(ids)),
    "array of 64 bits": lambda ids: array("q", ids),
    "numpy": np.array,
    "numpy's integers": lambda ids: [np.int64(number) for number in ids],
    "tensor": torch.tensor,
    "tensors": lambda ids: [torch.tensor(number) for number in ids],
}
WRONG: dict[str, Any] = {
    "bytes": b"\x01\0\0\0\x02\0\0\0",
    "text": "12",
    "floats": [1.0, 2.0],
    "tensor of floats": torch.tensor([1.0, 2.0]),
    "truths": [True, False],
    "two dimensions": np.array([[1], [2]]),
    "an iterator": iter([1, 2]),
    "nothing": None,
    "nothing among them": [1, None],
    "elsewhere": torch.empty(2, dtype=torch.int32, device="meta"),
    "33 bits": [1 << 31],
    "numpy's 64 bits": np.array([1, 1 << 40]),
}


def table() -> BlockTable:
    """Four rows of eight, the second and the third in use."""
    made = BlockTable(4, 8, 16, "cpu")
    made.append_row(1, [5, 6, 7])
    made.append_row(2, [9])
    return made


@pytest.mark.parametrize("kind", RIGHT)
def test_ids_of_any_kind_of_sequence(kind: str) -> None:
    made, before = table(), table()
    made.append_row(0, RIGHT[kind]([3, 4]))
    made.append_row(1, RIGHT[kind]([8]))
    made.set_row(2, RIGHT[kind]([10, 11, 12]))
    made.set_row(np.int64(3), RIGHT[kind]([13]))
    wanted = [[3, 4], [5, 6, 7, 8], [10, 11, 12], [13]]
    assert [row[:held].tolist() for row, held in zip(made.host, made.num_blocks_per_row, strict=True)] == wanted
    assert made.host.shape == before.host.shape
    assert made.commit(4).tolist() == [[*row, *[0] * (4 - len(row))] for row in wanted]


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("call", ["append_row", "set_row"])
@pytest.mark.parametrize("row", [0, 1])
def test_what_holds_no_ids_is_refused_and_nothing_is_written(kind: str, call: str, row: int) -> None:
    made, before = table(), table()
    with pytest.raises(BatchError, match=rf"block_ids = .* for row {row}: accepted are integers of 32 bits"):
        getattr(made, call)(row, WRONG[kind])
    assert torch.equal(made.host, before.host)
    assert torch.equal(made.num_blocks_per_row, before.num_blocks_per_row)
    made.append_row(1, [8])
    assert made.commit(3).tolist() == [[0] * 4, [5, 6, 7, 8], [9, 0, 0, 0]]


def test_a_row_that_is_set_beyond_its_room_keeps_what_it_has() -> None:
    made, before = table(), table()
    with pytest.raises(BatchError, match="row 1 of the block table: 9 blocks"):
        made.set_row(1, range(9))
    assert torch.equal(made.host, before.host)
    assert torch.equal(made.num_blocks_per_row, before.num_blocks_per_row)


@pytest.mark.parametrize("row", [1.0, True, "1", None, [1], np.float64(1)], ids=repr)
def test_a_row_is_an_integer(row: Any) -> None:
    made, before = table(), table()
    for call in (
        lambda: made.append_row(row, [1]),
        lambda: made.set_row(row, [1]),
        lambda: made.clear_row(row),
        lambda: made.swap_rows(row, 1),
    ):
        with pytest.raises(BatchError, match=r"row .*: the block table has rows 0 to 3"):
            call()
    assert torch.equal(made.host, before.host)


@pytest.mark.parametrize("kind", RIGHT)
def test_lengths_of_any_kind_of_sequence(kind: str) -> None:
    for query_lens, seq_lens in (([2, 3], [20, 21]), ([1, 1], [4, 5]), ([16, 17], [16, 17])):
        if kind == "range" and query_lens == [1, 1]:
            continue
        wanted, found = (
            prepare_batch(of(query_lens), of(seq_lens), filled, new_lens=of(query_lens) if new else None)
            for of, filled in ((list, rows()), (RIGHT[kind], rows()))
            for new in [kind != "list"]
        )
        assert found.query_lens_cpu.tolist() == wanted.query_lens_cpu.tolist() == query_lens
        assert found.seq_lens_cpu.tolist() == wanted.seq_lens_cpu.tolist() == seq_lens
        assert found.slot_mapping is not None
        assert wanted.slot_mapping is not None
        assert torch.equal(found.slot_mapping, wanted.slot_mapping)
        assert (found.max_query_len, found.max_seq_len) == (wanted.max_query_len, wanted.max_seq_len)


def rows() -> BlockTable:
    """Room for two requests."""
    made = BlockTable(2, 2, 16, "cpu")
    made.append_row(0, [3, 1])
    made.append_row(1, [0, 2])
    return made


@pytest.mark.parametrize("kind", [kind for kind in WRONG if kind != "truths"])
@pytest.mark.parametrize("name", ["query_lens", "seq_lens", "new_lens"])
def test_what_holds_no_lengths_is_refused(kind: str, name: str) -> None:
    given: dict[str, Any] = {"query_lens": [1, 2], "seq_lens": [3, 4], "new_lens": [1, 2], name: WRONG[kind]}
    if name == "new_lens" and kind == "nothing":  # as many as queries
        given["query_lens"] = [1, None]
    with pytest.raises(BatchError, match=r"_lens = .*: accepted (is|are)|[01] (query|seq|new)_lens"):
        prepare_batch(given["query_lens"], given["seq_lens"], rows(), new_lens=given["new_lens"])


NO_TOKENS = [1.0, 16.0, "16", None, True, np.float32(16), [16], -1]


@pytest.mark.parametrize("tokens", NO_TOKENS, ids=repr)
def test_pools_count_in_integers(tokens: Any) -> None:
    pool = BlockPool(4, 16)
    pool.allocate("a", 17)
    for call in (
        lambda: pool.allocate("b", tokens),
        lambda: pool.blocks_for(tokens),
        lambda: pool.share_prefix("a", "b", tokens),
    ):
        with pytest.raises(ConfigError, match=r"num_tokens = .*: accepted are integers from 0"):
            call()
    assert (pool.requests(), pool.num_free_blocks) == (("a",), 2)


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", None, True, [2]], ids=repr)
def test_sizes_are_integers(count: Any) -> None:
    group = attention_group(select(AttentionConfig(num_heads=4, head_size=32), "cpu"))
    makers: dict[str, Callable[[], object]] = {
        "num_blocks": lambda: BlockPool(count, 16),
        "block_size": lambda: BlockPool(4, count),
        "max_num_reqs": lambda: BlockTable(count, 8, 16, "cpu"),
        "max_num_blocks_per_req": lambda: BlockTable(4, count, 16, "cpu"),
        "max_num_seqs": lambda: Capacity(max_num_seqs=count),
        "max_model_len": lambda: Capacity(max_model_len=count),
    }
    for name, make in makers.items():
        with pytest.raises(ConfigError, match=f"{name} = .*: accepted are integers from 1") as caught:
            make()
        assert caught.value.fields == (name,)
    with pytest.raises(AttnSelectError, match=r"num_blocks = .*: accepted are integers from 1"):
        group.allocate_kv_cache(count)
