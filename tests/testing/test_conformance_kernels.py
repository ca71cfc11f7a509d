"""The conformance suite finds every kind of wrong kernel, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conformance_variants import ACCEPTED, HEADS, YES, Variant, failures
from torch import Tensor

from attn_select.backends.spec import BackendPlan, Fact, Reason
from attn_select.runtime.kv_cache import key_value_views

pytestmark = pytest.mark.long

Break = Callable[[Variant], Any]


def overriding(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Break:
    """Return what replaces one method of the right impl by ``make(its method)``."""

    def broken(variant: Variant) -> Any:
        impl = variant.spec.get_class().impl_cls
        return type("Broken", (impl,), {name: make(getattr(impl, name))})

    return broken


def one_too_far(attend: Any) -> Any:
    return lambda self, query, keys, values, window: attend(self, query, keys, values, window and window + 1)


def no_sink_in_lse(attend: Any) -> Any:
    def method(self: Any, *rest: Any) -> Any:
        output, lse = attend(self, *rest)
        terms, self.terms = self.terms, self.terms.without_sinks()
        lse = attend(self, *rest)[1]
        self.terms = terms
        return output, lse

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
    def method(self: Any, query: Tensor, *rest: Any) -> Any:
        rest[4].output[len(query) - 1] = 0
        return forward(self, query, *rest)

    return method


def by_batch(forward: Any) -> Any:
    """Round differently where there is more than one request, far within the bound."""

    def method(self: Any, query: Tensor, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        output = forward(self, query, key, value, cache, batch, *rest)
        tokens = batch.query_start_loc[-1]
        if len(batch.seq_lens) > 1:
            output[:tokens] *= 1 + torch.finfo(output.dtype).eps
        return output

    return method


def no_lse_again(forward: Any) -> Any:
    """Write the LSE in a layer's first call alone."""

    def method(self: Any, *rest: Any) -> Any:
        self.called = getattr(self, "called", 0) + 1
        return forward(self, *rest[:5], rest[5] if self.called == 1 else replace(rest[5], lse=None))

    return method


def first_cache(forward: Any) -> Any:
    """Read the cache of the layer's first call."""

    def method(self: Any, query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> Any:
        self.cache = getattr(self, "cache", cache)
        return forward(self, query, key, value, self.cache, *rest)

    return method


def sinks_of_the_first_layer(forward: Any) -> Any:
    """Share the sinks of the first layer that is called with the other layers of its group."""
    kept: dict[int, Any] = {}

    def method(self: Any, *rest: Any) -> Any:
        own = self.terms
        self.terms = replace(own, sinks=kept.setdefault(id(self.context), own.sinks))
        try:
            return forward(self, *rest)
        finally:
            self.terms = own

    return method


def into_the_cache(forward: Any) -> Any:
    def method(self: Any, query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> Any:
        output = forward(self, query, key, value, cache, *rest)
        key_value_views(cache, self.context.kv_layout, self.context.config)[0][0].zero_()
        return output

    return method


def tiled_heads(attend: Any) -> Any:
    """Give query head h the KV head h % num_kv_heads."""

    def method(self: Any, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Any:
        times = query.shape[1] // keys.shape[1]
        return attend(self, query, keys.repeat(1, times, 1), values.repeat(1, times, 1), window)

    return method


def half_as_exact(attend: Any) -> Any:
    """Round the weighted values to bfloat16, whatever the layer's dtype."""

    def method(self: Any, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Any:
        output, lse = attend(self, query, keys.bfloat16().to(keys.dtype), values, window)
        return output, lse

    return method


def keys_of(limit: int) -> Callable[[Any], Any]:
    """Drop the first keys where there are more than ``limit``."""

    def few_keys(attend: Any) -> Any:
        return lambda self, query, keys, values, window: attend(self, query, keys[-limit:], values[-limit:], window)

    return few_keys


def multiples_of_64(attend: Any) -> Any:
    """Leave out 16 keys where there are whole tiles of 64."""

    def method(self: Any, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Any:
        lost = 16 * (len(keys) > 64 and len(keys) % 64 == 0)
        return attend(self, query, keys[lost:], values[lost:], window)

    return method


def first_requests(forward: Any) -> Any:
    """Leave out the requests behind 64."""

    def method(self: Any, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        few = replace(batch, seq_lens=batch.seq_lens[:64])
        return forward(self, query, key, value, cache, few, *rest)

    return method


def small_ids(forward: Any) -> Any:
    def method(self: Any, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        return forward(self, query, key, value, cache, replace(batch, block_table=batch.block_table % 256), *rest)

    return method


def not_shifted(attend: Any) -> Any:
    """Take exponentials of the scores as they are: the sum overflows, or is 0."""

    def method(self: Any, *rest: Any) -> Any:
        output, lse = attend(self, *rest)
        total = lse.exp()
        return output * (total / total).nan_to_num(nan=torch.nan)[..., None].masked_fill(
            lse.isneginf()[..., None], 1
        ), lse

    return method


def clamped(attend: Any) -> Any:
    def method(self: Any, *rest: Any) -> Any:
        output, lse = attend(self, *rest)
        return output, lse.clamp(-80, 80).masked_fill(lse.isneginf(), -torch.inf)

    return method


def usual_scale(attend: Any) -> Any:
    def method(self: Any, query: Tensor, *rest: Any) -> Any:
        return attend(self, query * (query.shape[-1] ** -0.5 / self.terms.scale), *rest)

    return method


def scaled_query(forward: Any) -> Any:
    """Change the query in place, and back as far as its dtype allows."""

    def method(self: Any, query: Tensor, *rest: Any) -> Any:
        query *= 1 + torch.finfo(query.dtype).eps
        return forward(self, query, *rest)

    return method


def cleared_table(forward: Any) -> Any:
    def method(self: Any, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        for row, length in zip(batch.block_table, batch.seq_lens, strict=True):
            row[-(-length // self.context.block_size) :] = 0
        return forward(self, query, key, value, cache, batch, *rest)

    return method


def kept_slots(update: Any) -> Any:
    """Write to the slots of the first step of as many tokens."""

    def method(self: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        self.slots = getattr(self, "slots", {})
        update(self, key, value, cache, self.slots.setdefault(len(slots), slots.clone()))

    return method


def swapped(update: Any) -> Any:
    return lambda self, key, value, cache, slots: update(self, value, key, cache, slots)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (overriding("attend", one_too_far), "output is off by"),
        (overriding("attend", no_sink_in_lse), "LSE of request"),
        (overriding("attend", nan_without_keys), "0 keys), token 0, head 0 holds NaN or infinity"),
        (overriding("attend", whole_blocks), "holds NaN or infinity"),
        (overriding("forward", over_padding), "output rows behind num_actual_tokens"),
        (overriding("forward", by_batch), "batch_invariant: request 0"),
        (overriding("do_kv_cache_update", swapped), "differs from the token's number"),
        (overriding("attend", tiled_heads), "output"),
        (overriding("attend", half_as_exact), "output is off by"),
        (overriding("forward", no_lse_again), "LSE of request"),
        (overriding("forward", first_cache), "output"),
        (overriding("forward", sinks_of_the_first_layer), "output is off by"),
        (overriding("forward", into_the_cache), "bytes of kv_cache"),
        (overriding("attend", keys_of(512)), "output is off by"),
        (overriding("attend", multiples_of_64), "AssertionError"),
        (overriding("forward", first_requests), "output of request 64"),
        (overriding("forward", small_ids), "output"),
        (overriding("attend", not_shifted), "holds NaN or infinity"),
        (overriding("attend", clamped), "LSE of request"),
        (overriding("attend", usual_scale), "output is off by"),
        (overriding("forward", scaled_query), "query was changed"),
        (overriding("forward", cleared_table), "block_table_tensor was changed"),
        (overriding("do_kv_cache_update", kept_slots), "bytes of kv_cache"),
    ],
    ids=lambda value: value.__closure__[0].cell_contents.__name__ if callable(value) else "",
)
def test_a_wrong_kernel_is_found(right: Variant, broken: Break, said: str) -> None:
    found = failures(right.running(broken(right)).suite(), until=said)
    assert found
    assert all("AssertionError" in text or said in text for text in found)
    assert said in found[-1], found[0]
    assert "ACME_ATTN, seed 0, index " in found[0]
    assert "AttentionConfig(num_heads=" in found[0]


def first_metadata(built: Any, common: Any) -> Any:
    """Return the metadata of the builder's first step."""
    return built[0]


def table_of_this_memory(built: Any, common: Any) -> Any:
    """Return this step's metadata with what the table's memory held when it was seen first."""
    built[-1].kept = common.block_table_tensor.long()
    same = [each for each in built if each.block_table.data_ptr() == common.block_table_tensor.data_ptr()]
    return replace(built[-1], block_table=next(each.kept for each in same if each.kept.shape == built[-1].kept.shape))


def lengths_of_equal_queries(built: Any, common: Any) -> Any:
    """Return this step's metadata with the lengths of the step before, if its queries were as long."""
    same = built[-2:][0].query_start_loc == built[-1].query_start_loc
    return replace(built[-1], seq_lens=(built[-2:][0] if same else built[-1]).seq_lens)


KEPT = [first_metadata, table_of_this_memory, lengths_of_equal_queries]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.__name__)
def test_a_builder_that_keeps_an_earlier_step_is_found(right: Variant, kept: Any) -> None:
    class Keeps(right.spec.get_class().builder_cls):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            self.built = [*getattr(self, "built", []), super().build(common_prefix_len, common_attn_metadata)]
            return kept(self.built, common_attn_metadata)

    assert failures(right.running(builder=Keeps).suite(), until="AssertionError")


def plan_that(answer: Callable[[Any, BackendPlan], Any]) -> Callable[[Variant], Variant]:
    """Return what replaces the plans of a variant by ``answer(config, plan)``."""

    def changed(variant: Variant) -> Variant:
        def plan(*arguments: Any) -> Any:
            outcome = variant.spec.plan(*arguments)
            return answer(arguments[0], outcome) if isinstance(outcome, BackendPlan) else outcome

        return replace(variant, spec=replace(variant.spec, plan=plan))

    return changed


def with_fields(**fields: Any) -> Callable[[Variant], Variant]:
    return plan_that(lambda config, plan: replace(plan, **fields))


def refusing(refuses: Callable[[Any], bool], outcome: Any) -> Callable[[Variant], Variant]:
    return plan_that(lambda config, plan: outcome if refuses(config) else plan)


def raising(config: Any, plan: BackendPlan) -> BackendPlan:
    if config.head_size == 128:
        raise KeyError("x")
    return plan


def on_hopper_alone(variant: Variant) -> Variant:
    """Refuse what is declared on every device but one."""

    def plan(config: Any, device: Any, *rest: Any) -> Any:
        taken = device.is_cpu or device.compute_capability == (9, 0)
        return variant.spec.plan(config, device, *rest) if taken else NO

    return replace(variant, spec=replace(variant.spec, plan=plan))


def test_a_plan_without_the_declared_block_sizes_is_named(right: Variant) -> None:
    """The kernel's own blocks are of 16 tokens, and 24 is declared."""
    found = failures(right.declaring(block_sizes=Fact((16, 24), "this test")).suite())
    assert "block_sizes declares that blocks of 24 are read, and plan().kernel_block_sizes = (16,)" in found[0], found


NO = [Reason("acme-x", "no", 1, 2)]
WRONG_FACTS: dict[str, tuple[Callable[[Variant], Variant], str]] = {
    "a plan that refuses everything": (
        refusing(lambda c: True, NO),
        "head_size = 64 (no); head_size = 128 (no); attn_type = 'decoder'",
    ),
    "a plan that refuses a declared size": (
        refusing(lambda c: c.head_size == 128, NO),
        "every plan: head_size = 128 (",
    ),
    "a plan that raises": (plan_that(raising), "every plan: head_size = 128 ("),
    "a plan that returns nothing": (refusing(lambda c: c.num_heads == 16, []), "is refused for no stated reason"),
    "another query dtype": (with_fields(query_dtype="float16"), "query_dtype = 'float16' (accepted: "),
    "no layout": (with_fields(kv_layouts=()), "kernel_block_sizes = (16,) (accepted: some, if it has KV layouts)"),
    "a level that is none": (with_fields(cuda_graph="SOMETIMES"), "refused by every plan"),
    "a source that says nothing": (lambda v: v.declaring(dtypes=Fact(("float32",), " ")), "dtypes has no source"),
    "a device that no plan takes": (on_hopper_alone, "refused by every plan: device "),
}


@pytest.mark.parametrize("kind", WRONG_FACTS)
def test_a_wrong_declaration_is_found(right: Variant, kind: str) -> None:
    change, said = WRONG_FACTS[kind]
    found = failures(change(right).suite(heads=(*HEADS, (16, 4))), until=said)
    assert found
    assert said in found[-1], found[0]


def test_what_the_kernel_ignores_must_not_be_declared(right: Variant) -> None:
    found = failures(right.declaring(alibi=YES, logits_soft_cap=YES).suite())
    assert any("alibi=True" in text for text in found)
    assert any("logits_soft_cap=" in text for text in found)
    assert not [text for text in found if "alibi" not in text and "logits_soft_cap" not in text]


def reads_whole_blocks(impl_cls: Any) -> Any:
    """Return an impl that weighs what lies behind a sequence's end in its last block with 0, as careless kernels do."""

    class WholeBlocks(impl_cls):  # type: ignore[misc]
        def forward(self, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
            output = super().forward(query, key, value, cache, batch, *rest)
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
        class Clears(right.spec.get_class().impl_cls):  # type: ignore[misc]
            def forward(self, query: Any, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
                for half in key_value_views(cache, self.context.kv_layout, self.context.config):
                    size = half.shape[1]
                    for row, length in zip(batch.block_table, batch.seq_lens, strict=True):
                        if int(length) % size:
                            half[int(row[length // size]), max(0, length % size + first) :] = number
                return super().forward(query, key, value, cache, batch, *rest)

        return right.running(Clears)

    assert failures(clearing(0.0, 0).suite()) == []
    assert "was changed, but belongs to no token of the step" in failures(clearing(1.0, 0).suite())[0]
    assert failures(clearing(0.0, -1).suite())  # the last key as well


def test_no_request_is_exposed_to_nan_behind_another_ones_end(right: Variant) -> None:
    exposed = right.running(reads_whole_blocks(right.spec.get_class().impl_cls))
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
