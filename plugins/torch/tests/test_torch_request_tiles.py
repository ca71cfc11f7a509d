"""How TORCH_SDPA groups the requests of a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from attn_select.runtime import prepare_batch
from attn_select_torch.runtime.request_tiles import Group, Limits, equal_queries

LIMITS = Limits(tile_rows=256, group_keys=4096, few_keys=512)


def groups_of(seq_lens: Sequence[int], window: int | None = None) -> list[Group]:
    """Return the groups of a decode."""
    common = prepare_batch([1] * len(seq_lens), seq_lens)
    found = equal_queries(common, window, LIMITS, alone=True)
    assert found is not None
    return found


def test_equal_lengths_are_cut_into_runs() -> None:
    found = groups_of([100] * 100)
    assert [(group.index[0], group.index[-1], len(group.index)) for group in found] == [
        (0, 39, 40),
        (40, 79, 40),
        (80, 99, 20),
    ]
    assert not any(group.padded for group in found)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("longest", [20, 200, 2000])
@pytest.mark.parametrize("number", [1, 2, 50, 200])
def test_every_request_is_in_one_group_that_fits(number: int, longest: int, window: int | None) -> None:
    draw = random.Random(number + longest)
    seq_lens = [draw.randint(1, longest) for _ in range(number)]
    found = groups_of(seq_lens, window)
    assert sorted(request for group in found for request in group.index) == [*range(number)]
    for group in found:
        keys = [min(seq_lens[request], window or longest) for request in group.index]
        assert list(group.index) == sorted(group.index)
        assert (group.keys, group.padded) == (max(keys), min(keys) < max(keys))
        taken = len(keys) * max(keys)
        assert len(keys) == 1 or taken <= LIMITS.group_keys
        assert len(keys) == 1 or taken <= max(LIMITS.few_keys, 1.5 * sum(keys))
