"""Who has the last word: measured times, rules of every layer, an explicit choice."""

from __future__ import annotations

from typing import Any

import pytest
from timed_kernels import LAYER, decide, decode, known, ranks, why

from attn_select.decide.explicit import Choice
from attn_select.times.workload import parse_workload


def test_measured_order_beats_the_packaged_rules(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 125, "B": 113, "C": 140}))
    assert selection.selected["decode"] == "B"
    assert ranks(selection) == ["B", "A", "C"]
    assert selection.evidence is not None
    assert selection.evidence.phases["decode"].by_times
    assert ranks(selection, "prefill") == ["A", "B", "C"]
    assert selection.selected["prefill"] == "A"  # no prefill in the workload: what the rules chose stays
    assert why(selection, "prefill") == "the workload has no prefill"


def test_without_evidence_the_rules_rank_and_say_so(decider: Any) -> None:
    selection = decide(decider(), [])
    assert selection.selected == {"prefill": "A", "decode": "A"}
    assert why(selection) == "no times are known for this layer on this device"
    assert selection.evidence is not None
    assert selection.evidence.digest is None
    assert selection.evidence.time_us is None


def test_without_a_workload_no_time_counts(decider: Any) -> None:
    made = decider()
    evidence = known(decode({"A": 125, "B": 113}), made.environment)
    selection = made.decide(LAYER, Choice(), evidence=evidence)
    assert selection.selected["decode"] == "A"
    assert selection.evidence is None


def test_without_a_workload_rules_about_times_take_no_part(decider: Any) -> None:
    made = decider({"name": "by-rules", "evidence": False})
    assert [rule.name for rule in made.decide(LAYER, Choice()).rules] == ["packaged-order"]
    selection = made.decide(LAYER, Choice(), workload=parse_workload("64q1s4k"))
    assert [rule.name for rule in selection.rules] == ["packaged-order", "by-rules"]


def test_without_evidence_a_workload_meets_rules_alone(decider: Any) -> None:
    made = decider({"name": "many", "prefer": ["C"], "when": {"batch": ">=64"}})
    selection = made.decide(LAYER, Choice(), workload=parse_workload("64q1s4k"))
    assert selection.selected["decode"] == "C"
    assert selection.evidence is None


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
    selection = decide(decider({"name": "mine", **rule}), decode({"A": 125, "B": 100, "C": 140}))
    assert ranks(selection) == order
    denied = rule.get("deny", [])
    assert selection.selected["decode"] == next(name for name in order if name not in denied)


TUNED = {"name": "tuned", "measured": "2026-11-23"}
MINE = {"name": "mine"}


@pytest.mark.parametrize(
    ("rules", "times", "order"),
    [
        ([{**TUNED, "prefer": ["C"]}], {"A": 125, "B": 100, "C": 140}, ["B", "A", "C"]),
        ([{**TUNED, "prefer": ["C"], "when": {"batch": ">=64"}}], {"A": 125, "B": 100, "C": 140}, ["B", "A", "C"]),
        ([{**TUNED, "prefer": ["B"]}], {"A": 100, "B": 100.5, "C": 140}, ["B", "A", "C"]),  # a tie goes to the rule
        ([{**TUNED, "prefer": ["C"]}], {"A": 125, "B": 100}, ["C", "B", "A"]),  # without a time it keeps its place
        ([{**TUNED, "prefer": ["C", "A"]}, {**MINE, "prefer": ["A"]}], {"A": 3, "B": 2, "C": 1}, ["A", "C", "B"]),
        ([{**MINE, "prefer": ["A"]}, {**TUNED, "prefer": ["B"]}], {"A": 3, "B": 2, "C": 1}, ["B", "A", "C"]),
        ([{**TUNED, "priority": ["A", "B", "C"]}], {"A": 125, "B": 100, "C": 140}, ["A", "B", "C"]),
    ],
)
def test_rules_made_of_times_yield_to_times(
    decider: Any, rules: list[dict[str, Any]], times: dict[str, float], order: list[str]
) -> None:
    selection = decide(decider(*rules), decode(times))
    assert ranks(selection) == order
    assert selection.selected["decode"] == order[0]


def test_without_a_workload_rules_made_of_times_decide(decider: Any) -> None:
    assert decider({**TUNED, "prefer": ["C"]}).decide(LAYER, Choice()).selected["decode"] == "C"


def test_packaged_rules_of_every_effect_yield_to_times(decider: Any) -> None:
    for effect in ("prefer", "avoid"):
        rule = {"name": "packaged-effect", "layer": 0, effect: ["C"]}
        assert ranks(decide(decider(rule), decode({"A": 125, "B": 100, "C": 140}))) == ["B", "A", "C"]
    off = {"name": "packaged-off", "layer": 0, "evidence": False}
    assert ranks(decide(decider(off), decode({"A": 125, "B": 100, "C": 140}))) == ["A", "B", "C"]


def test_why_the_rules_decide_is_said(decider: Any) -> None:
    times = decode({"A": 125, "B": 100, "C": 140})
    priority = decide(decider({"name": "mine", "priority": ["A", "B"]}), times)
    assert why(priority) == "rule 'mine' (rules.toml:2) places A"
    prefer = decide(decider({"name": "mine", "prefer": ["C"]}), times)
    assert why(prefer) == "rule 'mine' (rules.toml:2) places C"
    off = decide(decider({"name": "mine", "evidence": False}), times)
    assert why(off) == "rule 'mine' (rules.toml:2) keeps times out"
    assert why(decide(decider(), times, backend="C")) == "C is asked for by name"


def test_an_explicit_choice_beats_everything(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 125, "B": 100, "C": 140}), backend="C")
    assert selection.selected == {"prefill": "C", "decode": "C"}
    by_name = {c.backend: c.phases["decode"] for c in selection.candidates}
    assert by_name["B"].timing is not None
    assert by_name["B"].behind == pytest.approx(100 / 140)


def test_an_unverified_candidate_that_was_measured_moves_up(decider: Any, spec: Any) -> None:
    specs = [spec("A", unverified=("never executed",)), spec("B"), spec("C")]
    without = decide(decider(specs=specs), [])
    assert ranks(without) == ["B", "C", "A"]
    assert ranks(decide(decider(specs=specs), decode({"A": 100, "B": 120, "C": 140}))) == ["A", "B", "C"]


def test_no_phase_without_a_backend_is_chosen_by_times(decider: Any, spec: Any) -> None:
    specs = [spec("A", phases=("decode",)), spec("B", phases=("decode",))]
    selection = decide(decider(specs=specs), decode({"A": 140, "B": 100}))
    assert selection.selected == {"prefill": None, "decode": "B"}
