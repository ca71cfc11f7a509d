"""Times that are too close to tell, and pairs of backends for the two phases."""

from __future__ import annotations

from typing import Any

import pytest
from timed_kernels import decide, decode, measured, prefill, ranks, why

from attn_select.layer.config import Phase
from attn_select.times.choice import fastest
from attn_select.times.timing import Timing


@pytest.mark.parametrize(("time_us", "first"), [(98.1, "A"), (97.9, "B"), (102, "A"), (100, "A")])
def test_two_percent_are_a_tie(decider: Any, time_us: float, first: str) -> None:
    for workload in ("64q1s4k", "64q1s4k*0.5,q2k*0.5"):
        selection = decide(decider(), decode({"A": 100, "B": time_us}), workload)
        assert selection.selected["decode"] == ranks(selection)[0] == first


@pytest.mark.parametrize(("spread", "first"), [(0.001, "B"), (0.2, "A")])
def test_the_combined_margin_is_a_tie(decider: Any, spread: float, first: str) -> None:
    rows = [
        measured(n, "64q1s4k", t, spread_us=(t * (1 - spread), t * (1 + spread))) for n, t in (("A", 110), ("B", 100))
    ]
    assert decide(decider(), rows).selected["decode"] == first


def test_a_tie_is_with_the_fastest_not_with_the_next(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 103, "B": 101.5, "C": 100}))
    assert ranks(selection) == ["B", "C", "A"]


@pytest.mark.parametrize(("time_us", "first"), [(94, "A"), (92, "B")])
def test_a_line_without_a_spread_has_a_margin_of_five_percent(decider: Any, time_us: float, first: str) -> None:
    rows = decode({"A": 100, "B": time_us}, method="table", source="tables 1.0", rounds=0, spread_us=None)
    assert decide(decider(), rows).selected["decode"] == first


def test_a_tie_goes_to_the_order_of_the_rules_not_of_the_names(decider: Any) -> None:
    rule = {"name": "packaged-prefer", "layer": 0, "prefer": ["C", "B"]}
    assert ranks(decide(decider(rule), decode({"A": 100, "B": 100, "C": 100}))) == ["C", "B", "A"]


def test_both_phases_are_chosen_together(decider: Any) -> None:
    rows = [*decode({"A": 125, "B": 100, "C": 300}), *prefill({"A": 500, "B": 900, "C": 2000})]
    assert decide(decider(), rows, "64q1s4k*0.9,q2k*0.1").selected == {"prefill": "A", "decode": "B"}
    assert decide(decider(), rows, "q2k").selected == {"prefill": "A", "decode": "A"}


def test_a_pair_must_share_a_cache(decider: Any, spec: Any) -> None:
    specs = [spec("A"), spec("B", layouts=["FLASHINFER_NHD"]), spec("C")]
    rows = [*decode({"A": 125, "B": 100, "C": 300}), *prefill({"A": 500, "B": 900, "C": 2000})]
    made = decider(specs=specs)
    # A for both takes 0.9 * 125 + 0.1 * 500 = 162.5, B for both 0.9 * 100 + 0.1 * 900 = 180.
    assert decide(made, rows, "64q1s4k*0.9,q2k*0.1").selected == {"prefill": "A", "decode": "A"}
    # 123.75 + 5 against 99 + 9.
    selection = decide(made, rows, "64q1s4k*0.99,q2k*0.01")
    assert selection.selected == {"prefill": "B", "decode": "B"}
    assert selection.kv_layout == "FLASHINFER_NHD"
    # No prefill in the workload: the rules' A stays, and B shares no cache with it.
    assert decide(made, rows, "64q1s4k").selected == {"prefill": "A", "decode": "A"}


def test_a_tie_of_pairs_goes_to_the_rules_then_to_one_backend(decider: Any) -> None:
    rows = [*decode({"A": 100, "B": 99.5, "C": 300}), *prefill({"A": 500, "B": 450, "C": 2000})]
    # A and B tie in decode, B is faster in prefill: B for both ties with A beside B.
    assert decide(decider(), rows, "64q1s4k*0.5,q2k*0.5").selected == {"prefill": "B", "decode": "B"}
    rows = [*decode({"A": 100, "B": 99.5, "C": 300}), *prefill({"A": 500, "B": 499, "C": 2000})]
    assert decide(decider(), rows, "64q1s4k*0.5,q2k*0.5").selected == {"prefill": "A", "decode": "A"}


def test_a_users_rule_about_one_phase_leaves_the_other_to_times(decider: Any) -> None:
    rows = [*decode({"A": 100, "B": 120, "C": 300}), *prefill({"A": 500, "B": 400, "C": 2000})]
    rule = {"name": "mine", "phase": "decode", "prefer": ["C"]}
    selection = decide(decider(rule), rows, "64q1s4k,q2k")
    assert selection.selected == {"prefill": "B", "decode": "C"}
    assert why(selection, "decode") == "rule 'mine' (rules.toml:2) places C"


def test_the_time_of_the_whole_workload_is_the_weighted_sum(decider: Any) -> None:
    rows = [*decode({"A": 125, "B": 100, "C": 300}), *prefill({"A": 500, "B": 900, "C": 2000})]
    selection = decide(decider(), rows, "64q1s4k*0.9,q2k*0.1")
    assert selection.evidence is not None
    assert selection.evidence.time_us == pytest.approx(0.9 * 100 + 0.1 * 500)
    assert {phase: used.share for phase, used in selection.evidence.phases.items()} == pytest.approx(
        {"decode": 0.9, "prefill": 0.1}
    )
    some = decide(decider(), decode({"A": 125, "B": 100}), "64q1s4k*0.9,q2k*0.1")
    assert some.evidence is not None
    assert some.evidence.time_us is None


def test_a_mixed_batch_counts_where_both_kernels_are_the_backends(decider: Any, spec: Any) -> None:
    both = [
        measured(name, "q512s1k_8q1s1k", time_us, kernel={"prefill": name.lower(), "decode": name.lower()})
        for name, time_us in (("A", 50), ("B", 40))
    ]
    assert decide(decider(), both, "q512s1k_8q1s1k").selected["prefill"] == "B"
    borrowed = [both[0], measured("B", "q512s1k_8q1s1k", 40, kernel={"prefill": "b", "decode": "a"})]
    assert decide(decider(), borrowed, "q512s1k_8q1s1k").selected["prefill"] == "A"


def test_what_two_pairs_have_in_common_blurs_no_difference() -> None:
    """The decode's wide margin is the same in both pairs, whose prefills differ by far more than theirs."""

    def timing(time_us: float, margin: float) -> Timing:
        return Timing(
            time_us=time_us,
            margin=margin,
            share=0.5,
            kind="measured here",
            source="measured",
            method=None,
            measured_shapes=1,
            shapes=1,
            kernel={},
            libraries={},
        )

    rivals: dict[Phase, dict[str, Timing]] = {
        "prefill": {"SLOW": timing(120.0, 0.01), "QUICK": timing(100.0, 0.01)},
        "decode": {"SLOW": timing(1000.0, 0.5)},
    }
    found = fastest({"prefill": "SLOW", "decode": "SLOW"}, rivals, lambda pair: True)
    assert found == {"prefill": "SLOW", "decode": "SLOW"}  # 20 of 1100 us are less than 2 %
    rivals["prefill"]["SLOW"] = timing(200.0, 0.01)
    found = fastest({"prefill": "SLOW", "decode": "SLOW"}, rivals, lambda pair: True)
    assert found == {"prefill": "QUICK", "decode": "SLOW"}
