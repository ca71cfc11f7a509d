"""The conformance suite finds every kind of wrong kernel, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conformance_variants import ACCEPTED, YES, Variant, failures
from torch import Tensor

from attn_select.runtime.kv_cache import key_value_views
from attn_select.spec import Fact

pytestmark = pytest.mark.long

Break = Callable[[Variant], Any]


def overriding(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Break:
    """Return what replaces one method of the right impl by ``make(its method)``."""

    def broken(variant: Variant) -> Any:
        impl = variant.spec.load().impl_cls
        return type("Broken", (impl,), {name: make(getattr(impl, name))})

    return broken


def other_scale(attend: Any) -> Any:
    def method(self: Any, query: Tensor, *rest: Any) -> Any:
        return attend(self, query * 1.04, *rest)

    return method


def no_window(attend: Any) -> Any:
    return lambda self, query, keys, values, window: attend(self, query, keys, values, None)


def one_too_far(attend: Any) -> Any:
    return lambda self, query, keys, values, window: attend(self, query, keys, values, window and window + 1)


def swapped_heads(attend: Any) -> Any:
    return lambda self, query, keys, values, window: attend(self, query, keys.flip(1), values.flip(1), window)


def no_sink_in_lse(attend: Any) -> Any:
    def method(self: Any, *rest: Any) -> Any:
        output, lse = attend(self, *rest)
        sinks, self.sinks = self.sinks, None
        lse = attend(self, *rest)[1]
        self.sinks = sinks
        return output, lse

    return method


def base_2(attend: Any) -> Any:
    def method(self: Any, *rest: Any) -> Any:
        output, lse = attend(self, *rest)
        return output, lse * 1.4427

    return method


def nan_without_keys(attend: Any) -> Any:
    def method(self: Any, query: Tensor, keys: Tensor, *rest: Any) -> Any:
        output, lse = attend(self, query, keys, *rest)
        return (output, lse) if len(keys) else (output * torch.nan, lse)

    return method


def whole_blocks(attend: Any) -> Any:
    """Let poison of the tail in, with weight 0."""

    def method(self: Any, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Any:
        output, lse = attend(self, query, keys, values, window)
        tail = torch.full_like(values[:1].sum(1, keepdim=True), torch.nan) if len(keys) % 16 else 0.0
        return output + 0 * tail, lse

    return method


def over_padding(forward: Any) -> Any:
    def method(self: Any, layer: Any, query: Tensor, *rest: Any) -> Any:
        rest[4][len(query) - 1] = 0
        return forward(self, layer, query, *rest)

    return method


def by_batch(forward: Any) -> Any:
    """Round differently where there is more than one request, far within the bound."""

    def method(self: Any, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        output = forward(self, layer, query, key, value, cache, batch, *rest)
        tokens = batch.query_start_loc[-1]
        if len(batch.seq_lens) > 1:
            output[:tokens] *= 1 + torch.finfo(output.dtype).eps
        return output

    return method


def blocks_in_a_row(forward: Any) -> Any:
    def method(self: Any, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        columns = torch.arange(batch.block_table.shape[1], dtype=torch.int32)
        last = self.context.block_size and cache.shape[0 if cache.shape[1] == 2 else 1] - 1
        table = (batch.block_table[:, :1] + columns).clamp_max(last)
        return forward(self, layer, query, key, value, cache, replace(batch, block_table=table), *rest)

    return method


def next_slot(update: Any) -> Any:
    def method(self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        update(self, layer, key, value, cache, torch.where(slots < 0, slots, slots ^ 1))

    return method


def neighbour_too(update: Any) -> Any:
    def method(self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        update(
            self, layer, key[: len(slots)] * 0, value[: len(slots)] * 0, cache, torch.where(slots < 0, slots, slots ^ 1)
        )
        update(self, layer, key, value, cache, slots)

    return method


def swapped(update: Any) -> Any:
    return lambda self, layer, key, value, cache, slots: update(self, layer, value, key, cache, slots)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (overriding("attend", other_scale), "by einsum: output is off by"),
        (overriding("attend", no_window), "output is off by"),
        (overriding("attend", one_too_far), "output is off by"),
        (overriding("attend", swapped_heads), "output is off by"),
        (overriding("attend", no_sink_in_lse), "LSE of request"),
        (overriding("attend", base_2), "LSE of request"),
        (overriding("attend", nan_without_keys), "0 keys), token 0, head 0 holds NaN or infinity"),
        (overriding("attend", whole_blocks), "holds NaN or infinity"),
        (overriding("forward", over_padding), "output rows behind num_actual_tokens"),
        (overriding("forward", by_batch), "batch_invariant: request 0"),
        (overriding("forward", blocks_in_a_row), "output"),
        (overriding("do_kv_cache_update", next_slot), "bytes of kv_cache"),
        (overriding("do_kv_cache_update", neighbour_too), "was changed, but belongs to no token of the step"),
        (overriding("do_kv_cache_update", swapped), "differs from the token's number"),
    ],
    ids=lambda value: value.__closure__[0].cell_contents.__name__ if callable(value) else "",
)
def test_a_wrong_kernel_is_found(right: Variant, broken: Break, said: str) -> None:
    found = failures(right.running(broken(right)).suite(), until=said)
    assert found
    assert all("AssertionError" in text for text in found)
    assert said in found[-1], found[0]
    assert "ACME_ATTN, seed 0, index " in found[0]
    assert "AttentionConfig(num_heads=" in found[0]


def test_what_the_kernel_ignores_must_not_be_declared(right: Variant) -> None:
    found = failures(right.declaring(alibi=YES, logits_soft_cap=YES).suite(exact_alibi_lse=False))
    assert any("alibi=True" in text for text in found)
    assert any("logits_soft_cap=" in text for text in found)
    assert not [text for text in found if "alibi" not in text and "logits_soft_cap" not in text]


def reads_whole_blocks(impl_cls: Any) -> Any:
    """Return an impl that weighs what lies behind a sequence's end in its last block with 0, as careless kernels do."""

    class WholeBlocks(impl_cls):  # type: ignore[misc]
        def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
            output = super().forward(layer, query, key, value, cache, batch, *rest)
            values = key_value_views(cache, self.context.kv_layout, self.context.config)[1]
            for request, (first, last) in enumerate(pairwise(batch.query_start_loc)):
                length = batch.seq_lens[request]
                if length:
                    block = batch.block_table[request, (length - 1) // values.shape[1]]
                    output[first:last] += (values[int(block)].double() * 0).sum().to(output.dtype)
            return output

    return WholeBlocks


def test_a_backend_may_clear_the_tail_of_a_requests_own_last_block(right: Variant) -> None:
    def clearing(number: float, first: int) -> Variant:
        class Clears(right.spec.load().impl_cls):  # type: ignore[misc]
            def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
                for half in key_value_views(cache, self.context.kv_layout, self.context.config):
                    size = half.shape[1]
                    for row, length in zip(batch.block_table, batch.seq_lens, strict=True):
                        if int(length) % size:
                            half[int(row[length // size]), max(0, length % size + first) :] = number
                return super().forward(layer, query, key, value, cache, batch, *rest)

        return right.running(Clears)

    assert failures(clearing(0.0, 0).suite()) == []
    assert "was changed, but belongs to no token of the step" in failures(clearing(1.0, 0).suite())[0]
    assert failures(clearing(0.0, -1).suite())  # the last key as well


def test_no_request_is_exposed_to_nan_behind_another_ones_end(right: Variant) -> None:
    exposed = right.running(reads_whole_blocks(right.spec.load().impl_cls))
    found = failures(exposed.suite())
    assert len(found) == ACCEPTED
    assert all("holds NaN or infinity" in text for text in found)
    # Declared, it is shown and the tails hold large numbers; declared by the plan alone it would not be shown.
    declared = exposed.declaring(nan_tail_safe=Fact(False, "this test")).planning(nan_tail_safe=False)
    assert failures(declared.suite()) == []
    hidden = failures(exposed.planning(nan_tail_safe=False).suite())
    assert len(hidden) == ACCEPTED
    assert all("is not nan_tail_safe, but the capabilities say that it is" in text for text in hidden)
    # A path that is safe may say so where another one is not.
    some = exposed.declaring(nan_tail_safe=Fact(False, "this test"))
    assert len(failures(some.suite())) == ACCEPTED
