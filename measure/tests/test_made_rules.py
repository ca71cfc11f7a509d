"""Rules by the packaged models: which order a family of layers gets, and what is said for it."""

from __future__ import annotations

import sys
from pathlib import Path

import make_rules
import pytest
from make_rules import Family


def family(*times: dict[str, float], first: str = "OLD") -> Family:
    return Family("rule", "decode", first, 2, [*times])


def test_the_least_expected_time_leads() -> None:
    found = family({"OLD": 12.0, "NEW": 10.0}, {"OLD": 11.0, "NEW": 10.0})
    assert found.order() == ["NEW", "OLD"]
    assert found.because() == (
        "by the times of an H200 OLD takes 1.15 times NEW's time; NEW takes 1.00 times the best on average, 1.00 at "
        "worst (2 decodes, 2 kinds of layers)"
    )


def test_who_is_slow_at_worst_does_not_lead() -> None:
    assert family(*[{"OLD": 11.0, "NEW": 10.0}] * 9, {"OLD": 10.0, "NEW": 20.1}).order() == ["OLD", "NEW"]
    assert family(*[{"OLD": 11.0, "NEW": 10.0}] * 9, {"OLD": 10.0, "NEW": 15.0}).order() == ["NEW", "OLD"]


def test_the_present_one_stays_where_it_loses_little() -> None:
    assert family({"OLD": 10.1, "NEW": 10.0}).order() == ["OLD", "NEW"]
    assert family({"OLD": 10.3, "NEW": 10.0}).order() == ["NEW", "OLD"]


def test_who_has_few_times_does_not_lead() -> None:
    both = {"OLD": 11.0, "OTHER": 12.0}
    assert family({**both, "NEW": 10.0}, both).order() == ["OLD", "OTHER"]


def test_every_packaged_rule_is_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["make_rules.py"])
    make_rules.main()
    told = capsys.readouterr().out
    assert "hopper-mla-decode, decode: by the times of an H200 " in told
    assert "FLASHINFER_MLA takes 1.07 times the best" in told
    assert "hopper-sparse-mla-few-heads: no packaged times, kept as it is written" in told


def test_a_rule_is_written_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its order and its figure change; its conditions and the rest of the file stay."""
    copy = tmp_path / "selector_rules.toml"
    text = make_rules.RULES.read_text("utf-8")
    copy.write_text(text.replace('prefer = ["FLASHINFER_MLA"]\nmeasured', 'prefer = ["FLASHMLA"]\nmeasured'))
    assert copy.read_text() != text
    monkeypatch.setattr(make_rules, "RULES", copy)
    monkeypatch.setattr(sys, "argv", ["make_rules.py", "--write"])
    make_rules.main()
    assert "  the rule puts FLASHMLA first: " in capsys.readouterr().out
    before, after = make_rules.rules_in(text), make_rules.rules_in(copy.read_text())
    (rule,) = [each for each in after if each["name"] == "hopper-mla-decode"]
    assert rule["prefer"] == ["FLASHINFER_MLA"]
    assert rule["because"].startswith("by the times of an H200 ")
    assert [{**each, "because": ""} for each in after] == [{**each, "because": ""} for each in before]
