"""The conformance suite passes a right backend and finds every kind of wrong one, and says where."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import gate
from attn_select.config import AttentionConfig, Phase
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.errors import RuntimeMissingError
from attn_select.features import FEATURES
from attn_select.gate import check
from attn_select.layouts import FP8_DS_MLA, LAYOUTS, MLA, cache_shape
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch
from attn_select.runtime.kv_cache import key_value_views
from attn_select.spec import BackendPlan, BackendSpec, ComputeCapabilities, Fact, Reason
from attn_select.testing import (
    BackendConformance,
    conformance,
    error_bound,
    gather_reference,
    random_problem,
    same_bits,
)
from attn_select.testing import conformance_run as run
from attn_select.testing.conformance_configs import config_text, draw_case
from attn_select.testing.running import reblocked
from attn_select.testing.toolkit import selection_for

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_attention"
HEADS = ((1, 1), (4, 2), (8, 1))
YES: Fact[bool] = Fact(True, "this test")
ACCEPTED, REJECTED = 23, 17
"""Of the 40 configurations that seed 0 draws for the example. A new feature draws others."""


@pytest.fixture(scope="module")
def acme() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The documented example plugin: facts and runtime."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield importlib.import_module("acme_attention"), importlib.import_module("acme_runtime")
        for name in ("acme_attention", "acme_runtime"):
            del sys.modules[name]


@dataclass
class Variant:
    """A backend made of the example's: what it declares beside, its plan, and its parts."""

    spec: BackendSpec
    runtime: ModuleType

    def declaring(self, **facts: Any) -> Variant:
        served = {phase: replace(capabilities, **facts) for phase, capabilities in self.spec.capabilities.items()}
        return replace(self, spec=replace(self.spec, capabilities=served))

    def planning(self, **changes: Any) -> Variant:
        def plan(*arguments: Any) -> Any:
            outcome = self.spec.plan(*arguments)
            return replace(outcome, **changes) if isinstance(outcome, BackendPlan) else outcome

        return replace(self, spec=replace(self.spec, plan=plan))

    def running(self, impl: Any = None, builder: Any = None) -> Variant:
        members = {"impl_cls": impl, "builder_cls": builder}
        given = {name: part for name, part in members.items() if part is not None}
        backend = type("Backend", (self.spec.load(),), given)
        return replace(self, spec=replace(self.spec, load=lambda: backend))

    def suite(self, **attributes: Any) -> type[BackendConformance]:
        settings = {"spec": self.spec, "num_configs": 40, "heads": HEADS, **attributes}
        return type("TestVariant", (BackendConformance,), settings)


@pytest.fixture
def right(acme: tuple[ModuleType, ModuleType]) -> Variant:
    """The example, and what is easily added to it: sinks, batch invariance and requests of their own size."""
    facts, runtime = acme

    class WithSinks(runtime.AcmeImpl):  # type: ignore[name-defined, misc]
        def attend(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
            output, lse = super().attend(query, keys, values, window)
            if self.sinks is None:
                return output, lse
            whole = torch.logaddexp(lse, self.sinks.float())
            return output * torch.exp(lse - whole).unsqueeze(-1), whole

    return Variant(facts.ACME_ATTN, runtime).declaring(sinks=YES, batch_invariant=YES).running(WithSinks)


def ids_of(suite: type[BackendConformance]) -> list[Any]:
    """Return the configurations that pytest would make tests of their own, or the reason of their one skip."""
    found: list[Any] = []
    plugins = SimpleNamespace(get_plugin=lambda name: SimpleNamespace(suites={}))
    metafunc: Any = SimpleNamespace(
        fixturenames=["index"],
        parametrize=lambda name, values: found.extend(values),
        config=SimpleNamespace(pluginmanager=plugins),
    )
    suite().pytest_generate_tests(metafunc)
    return [mark.kwargs["reason"] for each in found for mark in each.marks] if found[0] not in range(1000) else found


def failures(suite: type[BackendConformance], until: str | None = None) -> list[str]:
    """Run a suite as pytest would, to its end or to a failure that says ``until``; return what each failing test says,
    notes included."""
    suite.setup_class()
    try:
        found = []
        tests = [partial(suite().test_config, index) for index in ids_of(suite) if type(index) is int]
        for test in (*tests, suite().test_configs_that_are_not_run):
            try:
                test()
            except pytest.skip.Exception:
                continue
            except Exception as error:
                found.append("\n".join([f"{type(error).__name__}: {error}", *error.__notes__]))
                if until is not None and until in found[-1]:
                    break
        return found
    finally:
        suite.teardown_class()


def test_a_right_backend_passes(right: Variant) -> None:
    suite = right.suite()
    assert failures(suite) == []
    first = suite.summary()[0]
    judged = f"{ACCEPTED} accepted, {REJECTED} rejected, {ACCEPTED} run ("
    assert first.startswith(f"TestVariant (ACME_ATTN): 40 configurations of seed 0: {judged}")
    assert first.endswith("0 not run")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_backend_of_one_phase_gets_only_such_requests(right: Variant, phase: Phase) -> None:
    lengths: set[int] = set()

    class Seen(right.spec.load().impl_cls):  # type: ignore[misc]
        def forward(self, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
            if self.context.config.attention_chunk_size is None:  # a request may have one token in a chunk
                lengths.update(b - a for a, b in pairwise(batch.query_start_loc))
            return super().forward(layer, query, key, value, cache, batch, *rest)

    variant = right.running(Seen)
    capabilities = {phase: variant.spec.capabilities[phase]}
    assert failures(replace(variant, spec=replace(variant.spec, capabilities=capabilities)).suite(num_configs=10)) == []
    assert (lengths == {1}) if phase == "decode" else (min(lengths) > 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_in_other_blocks_hold_the_same_tokens(layout: str) -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "head_size": 32, "v_head_size": 16}
    if layout in (MLA, FP8_DS_MLA):
        sizes = {"num_heads": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8}
    if layout == FP8_DS_MLA:
        sizes |= {"sparse_top_k": 4, "kv_cache_dtype": "fp8_ds_mla"}
    config = AttentionConfig(**sizes)
    problem = random_problem(0, config, layout, block_size=48, requests=[(1, 70), (5, 30)])
    cache = problem.written_cache()
    small = reblocked(cache, layout, config, 16)
    assert small.shape != cache.shape
    assert same_bits(reblocked(small, layout, config, 48), cache)
    slots = torch.arange(16 * small.shape[cache_shape(layout, config, 16).index("num_blocks")])
    for one, other in zip(*(gather_reference(c, layout, slots, config) for c in (cache, small)), strict=True):
        assert same_bits(one, other)


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


def test_refusing_takes_a_reason(right: Variant) -> None:
    def refuse(answer: Any) -> Variant:
        def plan(config: AttentionConfig, *rest: Any) -> Any:
            outcome = right.spec.plan(config, *rest)
            return answer if isinstance(outcome, BackendPlan) and config.sinks else outcome

        return replace(right, spec=replace(right.spec, plan=plan))

    for answer in ([], [Reason("No Sinks", "no sinks today")], [Reason("acme-sinks", "")]):
        found = failures(refuse(answer).suite(), until="sinks=True")
        assert found
        assert all("is refused for no stated reason" in text and "sinks=True" in text for text in found)
    assert failures(refuse([Reason("acme-sinks", "no sinks today")]).suite()) == []


def test_a_plan_that_raises_is_found(right: Variant) -> None:
    def plan(config: AttentionConfig, *rest: Any) -> Any:
        return {}[config.head_size]

    assert "plan() raised KeyError" in failures(replace(right, spec=replace(right.spec, plan=plan)).suite())[0]


def test_the_gate_is_compared_with_the_kernel(right: Variant) -> None:
    class Asked(right.suite()):  # type: ignore[misc]
        def kernel_accepts(self, config: AttentionConfig, phase: str) -> bool | None:
            if config.sinks:
                return False
            return True if config.alibi or phase == "prefill" else None

    found = failures(Asked)
    assert any("the gate accepts what the kernel refuses" in text and "sinks=True" in text for text in found)
    assert any("the gate refuses what the kernel accepts" in text and "outside in" in text for text in found)
    by_plan = "attention-chunk-size"  # blocks that no chunk is a multiple of
    assert not [text for text in found if not any(each in text for each in ("sinks=True", "outside", by_plan))]


def test_what_this_machine_lacks_is_skipped_in_the_gates_words(right: Variant) -> None:
    hopper: Fact[ComputeCapabilities] = Fact(ComputeCapabilities((((9, 0), (9, 0)),)), "this test")
    suite = right.declaring(compute_capabilities=hopper).suite(device="cpu")
    assert failures(suite) == []
    line, *reasons = suite.summary()
    counts = f"{ACCEPTED} accepted, {REJECTED} rejected, 0 run (0 batches, 0 graph replays), 0 failed"
    assert f"{counts}, {ACCEPTED} not run" in line
    assert reasons == [f"  {ACCEPTED} not run: device cpu (supported: 9.0)"]
    assert ids_of(suite) == ["none of 40 configurations can be run: device cpu (supported: 9.0)"]
    # The gate is held to its word all the same, and an emulated kernel runs.
    assert failures(right.declaring(compute_capabilities=hopper).suite(device="cpu", gate_device="h100")) == []


def test_a_plugin_without_runtime_is_skipped(right: Variant) -> None:
    def load() -> Any:
        raise RuntimeMissingError("ACME_ATTN: facts alone")

    suite = replace(right, spec=replace(right.spec, load=load)).suite()
    assert failures(suite) == []
    assert suite.summary()[1:] == [f"  {ACCEPTED} not run: ACME_ATTN: facts alone"]


def test_a_backend_that_masks_other_ranks_contexts_is_found(right: Variant) -> None:
    """The example's kernel is causal whatever the batch says, so it hides a share's keys from longer queries."""
    found = failures(right.declaring(decode_context_parallel=YES).suite(num_configs=120))
    assert found
    assert all("decode_context_parallel_size=2" in text for text in found)


def test_what_no_machine_can_run_is_no_test_and_is_marked(right: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    # A plan that nothing can run and that is not marked is found.
    monkeypatch.setattr(conformance, "NEVER_RUN", {lambda config: config.sinks: "of sinks"})
    found = failures(right.suite())
    assert found
    assert all("is not marked unverified, but of sinks" in text and "sinks=True" in text for text in found)
    marked = right.planning(unverified=("nobody ran it",)).suite()
    assert failures(marked) == []
    assert [text.split(":")[1] for text in marked.summary()[1:]] == [" of sinks"]


def test_phases_that_do_not_share_a_plan_as_declared_are_found(right: Variant) -> None:
    def by_phase(*arguments: Any) -> Any:
        outcome = right.spec.plan(*arguments)
        return replace(outcome, path=arguments[-1]) if isinstance(outcome, BackendPlan) else outcome

    differing = replace(right, spec=replace(right.spec, plan=by_phase, phases_share_plan=True))
    found = failures(differing.suite())
    assert found
    assert all("phases_share_plan" in text for text in found)


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


def test_compilations_are_capped(right: Variant) -> None:
    ran: set[object] = set()

    def compile_key(config: AttentionConfig) -> object:
        return config.num_heads, config.head_size, config.dtype, config.sliding_window is None

    class Seen(right.spec.load().impl_cls):  # type: ignore[misc]
        def forward(self, *arguments: Any) -> Any:
            ran.add(compile_key(self.context.config))
            return super().forward(*arguments)

    variant = right.running(Seen)
    suite = replace(variant, spec=replace(variant.spec, compile_key=compile_key)).suite(max_compile_keys=2)
    assert failures(suite) == []
    assert len(ran) == 2
    line, reason = suite.summary()
    assert reason.endswith("not run: its compile key is beyond max_compile_keys = 2")
    # Most of what is beyond is brought to a known key.
    run_at_all, left_out = int(line.split(" run (")[0].rsplit(" ", 1)[1]), int(line.split()[-3])
    assert run_at_all >= 16
    assert run_at_all + left_out == ACCEPTED


def test_configurations_come_from_the_seed_and_can_be_pasted(right: Variant) -> None:
    drawn = [draw_case(right.spec, 3, index, HEADS) for index in range(60)]
    assert drawn == [draw_case(right.spec, 3, index, HEADS) for index in range(60)]
    assert drawn != [draw_case(right.spec, 4, index, HEADS) for index in range(60)]
    for case in drawn:
        assert eval(config_text(case.config), {"AttentionConfig": AttentionConfig}) == case.config
    assert sum(case.changed is not None for case in drawn) == 24
    changed = {draw_case(right.spec, 3, index, HEADS).changed for index in range(300)} - {None}
    assert changed == {
        *("head_size", "v_head_size", "kv_lora_rank", "dtype", "kv_cache_dtype", "block_size", "attn_type", "alibi"),
        *("logits_soft_cap", "mm_prefix", "non_causal", "output_quantization", "decode_context_parallel_size"),
        "draft_tree",
    }


def test_what_is_drawn_from_inside_is_refused_by_no_capability(right: Variant) -> None:
    """Some features exclude each other: chunks, windows and ALiBi are not measured across ranks."""
    facts = {feature.fact: Fact(True, "a test") for feature in FEATURES if feature.fact not in NOT_YES_OR_NO}
    able = {phase: replace(served, **facts) for phase, served in right.spec.capabilities.items()}
    for index in range(0, 1000, 5):
        case = draw_case(replace(right.spec, capabilities=able), 3, index, HEADS)
        compared = gate.CapabilityGate(able[case.phase], Device("h100", (9, 0)), ())
        found = {reason.code for reason in compared.reasons(gate.Demands(case.config))}
        assert found <= {"compute-capability"}, config_text(case.config)


NOT_YES_OR_NO = ("output_quantizations", "speculative_tokens")


@dataclass
class Replay:
    """A captured step."""

    function: Any
    views: Mapping[str, Tensor]
    metadata: Any
    output: Tensor

    def replay(self) -> None:
        self.output.copy_(self.function(self.views, self.metadata))


class EagerRunner(CudaGraphRunner[Any]):
    """Replays on a CPU: what was captured runs again on the memory that batches, inputs and builders keep."""

    def __init__(
        self,
        function: Any,
        groups: Sequence[Any],
        inputs: Mapping[str, Tensor],
        sizes: Sequence[int],
        *,
        query_len: int = 1,
        mixed: bool = False,
    ) -> None:
        self.function, self.groups, self.sizes = function, tuple(groups), sorted(sizes)
        self.query_len = None if mixed else query_len
        self.batches = {group: StaticBatch(group, self.query_len) for group in groups}
        most = next(iter(self.batches.values())).padded_tokens(self.sizes[-1])
        self.inputs = {name: tensor.new_zeros(most, *tensor.shape[1:]) for name, tensor in inputs.items()}
        self._graphs = {}

    def capture(self) -> None:
        for size in reversed(self.sizes):
            views, metadata = self._views(size), self._capture_metadata(size)
            output = self.function(views, metadata)
            self._graphs[size] = Replay(self.function, views, metadata, output), output  # type: ignore[assignment]


@pytest.mark.parametrize("level", ["UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"])
def test_graph_replays_are_compared(right: Variant, monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
    monkeypatch.setattr(run, "CudaGraphRunner", EagerRunner)
    runtime = right.runtime

    class OnDevice(runtime.AcmeMetadataBuilder):  # type: ignore[name-defined, misc]
        def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
            return runtime.AcmeMetadata(common.query_start_loc, common.seq_lens, common.block_table_tensor)

    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, sinks=True, num_speculative_tokens=2)

    def replays(variant: Variant) -> int:
        spec, options = variant.spec, variant.spec.options()
        judged = {phase: check(spec, config, CPU, Environment(), options, phase) for phase in config.phases}
        plans = {phase: plan for phase, plan in judged.items() if isinstance(plan, BackendPlan)}
        selection = selection_for(spec, plans, config, CPU, Environment(), options)
        assert selection is not None
        terms = run.Terms(error_bound)
        return run.Rig(selection, torch.device("cpu"), 0, terms, cuda_graphs=True).check_graphs()

    variant = right.planning(cuda_graph=level)
    assert replays(variant.running(builder=OnDevice)) == (7 if level == "ALWAYS" else 4)
    with pytest.raises(AssertionError, match=r"is off by|holds NaN|LSE of request"):
        replays(variant)  # keeps the lengths that it was captured with, on the host


def test_the_oracle_needs_no_pytest() -> None:
    code = (
        "import sys, attn_select.testing as t\n"
        "assert 'pytest' not in sys.modules and 'attn_select.runtime' not in sys.modules\n"
        "from attn_select.testing import BackendConformance\n"
        "assert 'pytest' in sys.modules and BackendConformance is t.BackendConformance\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
