"""What predicted times say in a decision, and who has the last word: rules of every layer, an explicit choice."""

from __future__ import annotations

from typing import Any

import pytest
from timed_kernels import LAYER, decide, ranks, why

from attn_select.decide.text import selection_text
from attn_select.layer.config import AttentionConfig
from attn_select.times.workload import default_mix

ABC = {"*": {"A": 125.0, "B": 113.0, "C": 140.0}}


def test_predicted_times_beat_the_packaged_rules(decider: Any) -> None:
    selection = decide(decider(), ABC)
    assert selection.selected["decode"] == "B"
    assert ranks(selection) == ["B", "A", "C"]
    assert selection.evidence is not None
    assert selection.evidence.phases["decode"].by_times
    assert selection.evidence.time_us == pytest.approx(113)
    assert selection.selected["prefill"] == "A"  # no prefill in the workload: what the rules chose stays
    assert why(selection, "prefill") == "the workload has no prefill"


def test_without_times_of_such_layers_the_rules_rank_and_say_so(decider: Any) -> None:
    selection = decide(decider(), {})
    assert selection.selected == {"prefill": "A", "decode": "A"}
    assert why(selection) == "A was not surveyed on such layers"
    assert "has no such layers, rules rank the backends" in selection_text(selection)


def test_without_a_workload_the_default_mix_decides_and_is_said(decider: Any) -> None:
    selection = decide(decider(), ABC, workload=None)
    assert selection.selected == {"prefill": "B", "decode": "B"}
    assert selection.workload is None
    assert "over the default mix" in selection_text(selection)


def test_in_the_default_mix_each_step_counts_alike(decider: Any) -> None:
    """Where A is half as fast in one long prompt and twice as fast in all decodes, its decodes count."""
    times = {"*": {"A": 20.0, "B": 40.0}, "q256s64k": {"A": 40_000.0, "B": 20_000.0}}
    assert decide(decider(), times, workload=None).selected == {"prefill": "A", "decode": "A"}
    named = ",".join(str(shape.batch) for shape in default_mix(LAYER).shapes)
    assert decide(decider(), times, named).selected == {"prefill": "B", "decode": "A"}


def test_without_a_workload_small_gains_do_not_leave_the_favourite(decider: Any) -> None:
    near, far = {"*": {"A": 125.0, "B": 120.0, "C": 140.0}}, {"*": {"A": 125.0, "B": 113.0, "C": 140.0}}
    stays = decide(decider(), near, workload=None, favourite="A")
    assert stays.selected == {"prefill": "A", "decode": "A"}
    assert ranks(stays) == ["A", "B", "C"]
    assert stays.runners_up["decode"].lost_by == "times"
    assert "B by times: it would take 0.96 times as long" in selection_text(stays)
    assert "too little to leave the fastest of most surveyed layers" in selection_text(stays)
    assert decide(decider(), far, workload=None, favourite="A").selected == {"prefill": "B", "decode": "B"}
    assert decide(decider(), near, favourite="A").selected["decode"] == "B"  # a named workload says what counts


@pytest.mark.parametrize(
    ("rule", "order"),
    [
        ({"prefer": ["C"]}, ["C", "B", "A"]),
        ({"prefer": ["C", "A"]}, ["C", "A", "B"]),
        ({"avoid": ["B"]}, ["A", "C", "B"]),
        ({"priority": ["A", "B", "C"]}, ["A", "B", "C"]),
        ({"priority": ["C", "A"]}, ["C", "A", "B"]),
        ({"priority": ["C", "A"], "only": True}, ["C", "A"]),
        ({"deny": ["B"]}, ["A", "B", "C"]),
        ({"evidence": False}, ["A", "B", "C"]),
        ({"evidence": False, "when": {"seq_len": "<=1024"}}, ["B", "A", "C"]),  # does not match this workload
        ({"prefer": ["C"], "when": {"batch": ">=64"}}, ["C", "B", "A"]),
    ],
)
def test_users_rules_beat_times_which_order_the_rest(decider: Any, rule: dict[str, Any], order: list[str]) -> None:
    selection = decide(decider({"name": "mine", **rule}), {"*": {"A": 125, "B": 100, "C": 140}})
    assert ranks(selection) == order
    denied = rule.get("deny", [])
    assert selection.selected["decode"] == next(name for name in order if name not in denied)


def test_packaged_rules_of_every_effect_yield_to_times(decider: Any) -> None:
    for effect in ("prefer", "avoid"):
        rule = {"name": "packaged-effect", "layer": 0, effect: ["C"]}
        assert ranks(decide(decider(rule), ABC)) == ["B", "A", "C"]
    off = {"name": "packaged-off", "layer": 0, "evidence": False}
    assert ranks(decide(decider(off), ABC)) == ["A", "B", "C"]


def test_an_explicit_choice_beats_everything(decider: Any) -> None:
    selection = decide(decider(), ABC, backend="C")
    assert selection.selected == {"prefill": "C", "decode": "C"}
    by_name = {c.backend: c.phases["decode"] for c in selection.candidates}
    assert by_name["B"].timing is not None
    assert by_name["B"].relative_time == pytest.approx(113 / 140)


def test_a_candidate_without_times_stands_behind_what_the_rules_prefer(decider: Any) -> None:
    assert ranks(decide(decider(), {"*": {"A": 125, "C": 100}})) == ["C", "A", "B"]
    assert ranks(decide(decider(), {"*": {"A": 100, "C": 125}})) == ["A", "B", "C"]
    assert ranks(decide(decider(), {"*": {"A": 125, "B": 100}})) == ["B", "A", "C"]
    first = decide(decider(), {"*": {"B": 125, "C": 100}})
    assert (ranks(first), first.selected["decode"]) == (["A", "C", "B"], "A")
    assert why(first) == "A was not surveyed on such layers"
    assert why(decide(decider(), {"*": {"A": 125}})) == "A alone was surveyed on such layers"


def test_a_named_workload_is_the_sum_of_its_steps(decider: Any) -> None:
    times = {"64q1s4k": {"A": 10.0, "B": 30.0}, "q1s1k": {"A": 9.0, "B": 3.0}}
    assert decide(decider(), times, "64q1s4k*0.2,q1s1k*0.8").selected["decode"] == "B"
    assert decide(decider(), times, "64q1s4k*0.5,q1s1k*0.5").selected["decode"] == "A"


def test_a_pair_shares_a_mixed_step_where_that_takes_less(decider: Any) -> None:
    """A mixed step by two backends takes the sum of its parts."""
    mixed = "q1k_64q1s2k"
    parts = {"q1k": {"A": 50.0, "B": 90.0}, "64q1s2k": {"A": 80.0, "B": 20.0}}
    shared = decide(decider(), {mixed: {"A": 120.0, "B": 110.0}, **parts}, f"{mixed},64q1s2k")
    assert shared.selected == {"prefill": "A", "decode": "B"}
    whole = decide(decider(), {mixed: {"A": 120.0, "B": 60.0}, **parts}, f"{mixed},64q1s2k")
    assert whole.selected == {"prefill": "B", "decode": "B"}


def test_a_stale_time_counts_longer_and_is_said(decider: Any) -> None:
    times = {"*": {"A": 104.0, "B": 100.0, "C": 140.0}}
    assert ranks(decide(decider(), times)) == ["B", "A", "C"]
    selection = decide(decider(), times, B="acme 1.0, now 2.0")
    assert ranks(selection) == ["A", "B", "C"]
    timing = next(c.phases["decode"].timing for c in selection.candidates if c.backend == "B")
    assert timing is not None
    assert timing.stale == "acme 1.0, now 2.0"
    assert selection.to_dict()["evidence"]["stale"] == {"B": "acme 1.0, now 2.0"}


def test_host_time_counts_where_it_is_asked_for(decider: Any) -> None:
    times = {"*": {"A": 20.0, "B": 10.0}}
    assert decide(decider(), times).selected["decode"] == "B"
    selection = decide(decider(), times, host_time=True)
    assert selection.selected["decode"] == "A"  # both take the host's 90 us: the rules' order stays
    assert selection.evidence is not None
    assert selection.evidence.time_us == 90


def test_an_unverified_candidate_that_was_surveyed_moves_up(decider: Any, spec: Any) -> None:
    specs = [spec("A", unverified=("never executed",)), spec("B"), spec("C")]
    assert ranks(decide(decider(specs=specs), {})) == ["B", "C", "A"]
    assert ranks(decide(decider(specs=specs), {"*": {"A": 100, "B": 120, "C": 140}})) == ["A", "B", "C"]


def test_prefills_of_mla_compare_by_their_part_of_mixed_steps(decider: Any, spec: Any, mla: AttentionConfig) -> None:
    """B serves prefills alone: it is not faster because its mixed steps lack the decodes."""
    specs = [spec("A", mla=True), spec("B", phases=("prefill",), mla=True)]
    times = {
        "q1k_64q1s2k": {"A": 120.0, "B": 1.0},
        "q1k": {"A": 50.0, "B": 60.0},
        "64q1s2k": {"A": 70.0, "B": 1.0},
    }
    selection = decide(decider(specs=specs), times, "q1k_64q1s2k", config=mla)
    assert selection.selected == {"prefill": "A", "decode": "A"}
    assert ranks(selection, "prefill")[:2] == ["A", "B"]
    behind = {c.backend: c.phases["prefill"].relative_time for c in selection.candidates}
    assert behind["B"] == pytest.approx(60 / 50)


def test_a_mixed_step_that_no_one_serves_alone_counts_like_the_others(decider: Any, spec: Any) -> None:
    """In the default mix a pair's mixed steps are in units of its parts, not of microseconds."""
    specs = [
        spec("A", phases=("prefill",)),
        spec("B", phases=("decode",)),
        spec("C", phases=("decode",)),
    ]
    small = {"A": 10.0, "B": 100.0, "C": 110.0}
    mixed = {str(shape.batch): small for shape in default_mix(LAYER).shapes if "_" in str(shape.batch)}
    times = {"*": {"A": 10.0, "B": 100.0, "C": 60.0}, "63q1s2k": small, "8q1s8k": small, **mixed}
    assert decide(decider(specs=specs), times, workload=None).selected == {"prefill": "A", "decode": "C"}
