"""What decided against the first other backend that could run a phase."""

from __future__ import annotations

from typing import Any

import pytest
from timed_kernels import decide

from attn_select import select
from attn_select.decide.explicit import Choice
from attn_select.decide.lines import plain
from attn_select.decide.selection import Selection
from attn_select.decide.text import plan_lines
from attn_select.layer.config import AttentionConfig

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)


def lost(selection: Selection, phase: str = "decode") -> tuple[str, str, str | None]:
    found = selection.runners_up[phase].to_dict()  # type: ignore[index]
    return found["backend"], found["lost_by"], found["rule"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], ("B", "rule", "packaged-order")),
        ([{"name": "mine", "prefer": ["C"]}], ("A", "rule", "mine")),
        ([{"name": "mine", "avoid": ["A"]}], ("C", "rule", "packaged-order")),
        ([{"name": "mine", "avoid": ["A", "C"]}], ("A", "rule", "mine")),
        ([{"name": "first", "prefer": ["C"]}, {"name": "last", "prefer": ["B"]}], ("C", "rule", "last")),
        ([{"name": "other", "prefer": ["C"], "phase": "prefill"}], ("B", "rule", "packaged-order")),
        ([{"name": "mine", "priority": ["B"], "only": True}], ("A", "rule", "mine")),
        ([{"name": "mine", "deny": ["B"]}], ("C", "rule", "packaged-order")),
    ],
)
def test_the_rule_that_put_the_chosen_one_first_is_named(
    decider: Any, rules: list[dict[str, Any]], expected: tuple[str, str, str]
) -> None:
    assert lost(decider(*rules).decide(GQA, Choice())) == expected


def test_what_is_unproved_loses_to_what_is_proved_unless_a_user_places_it(spec: Any, decider: Any) -> None:
    specs = [spec("A", unverified=("never run",)), spec("B")]
    assert lost(decider(specs=specs).decide(GQA, Choice())) == ("A", "unverified", None)
    preferred = decider({"name": "mine", "prefer": ["A"]}, specs=specs).decide(GQA, Choice())
    assert lost(preferred) == ("B", "rule", "mine")


def test_one_backend_for_both_phases_and_one_that_shares_a_cache_come_first(spec: Any, decider: Any) -> None:
    decodes = [spec("A", phases=["decode"]), spec("B")]
    assert lost(decider(specs=decodes).decide(GQA, Choice())) == ("A", "phases", None)
    apart = [spec("A", phases=["decode"], layouts=["FLASHINFER_NHD"]), spec("B")]
    assert lost(decider(specs=apart).decide(GQA, Choice())) == ("A", "cache", None)


def test_times_name_the_ratio_and_what_it_rests_on(decider: Any) -> None:
    selection = decide(decider(), {"*": {"A": 125.0, "B": 100.0, "C": 140.0}})
    assert lost(selection) == ("A", "times", None)
    text = plain(plan_lines(selection))
    assert (
        "A in decode by times: it would take 1.25 times as long (predicted, 1.25 in the nearest measured layer)" in text
    )
    stale = plain(plan_lines(decide(decider(), {"*": {"A": 125.0, "B": 100.0}}, A="another release")))
    assert "1.31 times as long (predicted, 1.25 in the nearest measured layer, stale)" in stale


def test_what_was_not_timed_loses_to_times_or_to_the_rules(decider: Any) -> None:
    assert lost(decide(decider(), {"*": {"A": 125, "C": 100}})) == ("A", "times", None)
    assert lost(decide(decider(), {"*": {"A": 100, "C": 125}})) == ("B", "rule", "packaged-order")
    assert lost(decide(decider(), {"*": {"B": 125, "C": 100}})) == ("C", "rule", "packaged-order")


def test_of_real_layers_a_runner_up_is_valid_and_not_the_chosen_one() -> None:
    for gpu in ("h200", "a100", "b200", "cpu", "t4"):
        selection = select(GQA, gpu)
        for phase, found in selection.runners_up.items():
            by_name = {each.backend: each.phases[phase] for each in selection.candidates}
            assert by_name[found.backend].verdict == "valid"
            assert (found.rule is not None) is (found.lost_by == "rule")
            assert (found.lost_by == "times") <= (by_name[found.backend].relative_time is not None)
