"""The conformance suite passes a right backend, and holds the gate and the declarations to what they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from conformance_variants import ACCEPTED, REJECTED, YES, Variant, failures, ids_of, params_of
from torch import Tensor

from attn_select.backends.spec import BackendPlan, ComputeCapabilities, Fact, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.testing import conformance

pytestmark = pytest.mark.long


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

    class Seen(right.spec.get_class().impl_cls):  # type: ignore[misc]
        def forward(self, query: Tensor, key: Any, value: Any, cache: Any, batch: Any, *rest: Any) -> Any:
            if self.context.config.attention_chunk_size is None:  # a request may have one token in a chunk
                lengths.update(b - a for a, b in pairwise(batch.query_start_loc))
            return super().forward(query, key, value, cache, batch, *rest)

    variant = right.running(Seen)
    capabilities = {phase: variant.spec.capabilities[phase]}
    assert failures(replace(variant, spec=replace(variant.spec, capabilities=capabilities)).suite(num_configs=10)) == []
    assert (lengths == {0, 1}) if phase == "decode" else (min(lengths) > 1)


def test_refusing_takes_a_reason(right: Variant) -> None:
    def refuse(answer: Any) -> Variant:
        def plan(config: AttentionConfig, *rest: Any) -> Any:
            outcome = right.spec.plan(config, *rest)
            return answer if isinstance(outcome, BackendPlan) and config.sinks and config.num_heads > 1 else outcome

        return replace(right, spec=replace(right.spec, plan=plan))

    for answer in ([], [Reason("No Sinks", "no sinks today")], [Reason("acme-sinks", "")]):
        found = failures(refuse(answer).suite(), until="sinks=True")
        assert found
        assert all("is refused for no stated reason" in text and "sinks=True" in text for text in found)
    assert failures(refuse([Reason("acme-sinks", "no sinks today")]).suite()) == []


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


def test_configurations_of_one_compile_key_go_to_one_process(right: Variant) -> None:
    keyed = replace(right, spec=replace(right.spec, compile_key=lambda config: config.head_size)).suite()
    groups: dict[str, set[int | None]] = {}
    for param in params_of(keyed, grouped=True):
        (mark,) = param.marks
        groups.setdefault(mark.args[0], set()).add(keyed()._cases()[param.values[0]].config.head_size)
    assert len(groups) > 2
    assert all(len(sizes) == 1 for sizes in groups.values())
    assert not any(hasattr(param, "marks") for param in params_of(keyed, grouped=False))  # where xdist is missing


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


def test_compilations_are_capped(right: Variant) -> None:
    ran: set[object] = set()

    def compile_key(config: AttentionConfig) -> object:
        return config.num_heads, config.head_size, config.dtype, config.sliding_window is None

    class Seen(right.spec.get_class().impl_cls):  # type: ignore[misc]
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
