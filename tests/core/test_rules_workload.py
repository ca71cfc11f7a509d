"""Rules about batches: ``batch``, ``seq_len`` and ``query_len`` in ``when``, and ``evidence = false``."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.layer.config import PHASES, AttentionConfig, Phase
from attn_select.machine.device import lookup
from attn_select.machine.environment import Environment
from attn_select.rules.ranking import Ranker, Ranking
from attn_select.rules.rule import parse_rule
from attn_select.times.workload import parse_workload

PLAIN = AttentionConfig(num_heads=8, head_size=128)
ORDER = {"name": "order", "priority": ["A", "B"]}
H100 = lookup("h100")


def ranker(*tables: dict[str, Any]) -> Ranker:
    rules = [parse_rule(table, file="mine.toml", line=n, layer=1) for n, table in enumerate(tables, 1)]
    return Ranker(rules, H100, Environment(assume_installed=True))


def rank(workload: str, *tables: dict[str, Any], config: AttentionConfig = PLAIN) -> dict[Phase, Ranking]:
    asked = parse_workload(workload)
    batches = {phase: [shape.batch for shape in asked.of_phase(phase, config)] for phase in PHASES}
    return ranker(*tables).rank(config, PHASES, ["A", "B"], batches)


@pytest.mark.parametrize(
    ("when", "workload", "matches"),
    [
        ({"batch": ">=32"}, "32q1s1k", True),
        ({"batch": ">=32"}, "31q1s1k", False),
        ({"batch": ">=32"}, "16q1s1k_16q1s2k", True),
        ({"batch": ">=32"}, "64q1s1k,8q1s1k", False),  # every shape
        ({"batch": ">=32"}, "64q1s1k,q2k", True),  # of the phase
        ({"batch": [64, 128]}, "64q1s1k,128q1s1k", True),
        ({"effective_batch": ">=1.5"}, "2q1s1k", True),
        ({"effective_batch": ">=1.5"}, "q1s1k", False),
        ({"seq_len": "<=1024"}, "8q1s1k", True),
        ({"seq_len": "<=1024"}, "8q1s1k_q1s1025", False),  # the longest request
        ({"seq_len": ">=1024,<2048"}, "8q1s1k,8q1s2047", True),
        ({"query_len": 1}, "8q1s1k", True),
        ({"query_len": ">1"}, "8q1s1k", False),
        ({"batch": ">=32", "seq_len": "<=1024"}, "64q1s2k", False),
        ({"batch": ">=32", "num_heads": 8}, "64q1s2k", True),
        ({"batch": ">=32", "num_heads": 16}, "64q1s2k", False),
        ({"batch": ">=32", "gpu": "b200"}, "64q1s2k", False),
        ({"batch": ">=1"}, "q2k", False),  # no decode in the workload
    ],
)
def test_a_condition_holds_for_every_shape_of_the_phase(when: dict[str, Any], workload: str, matches: bool) -> None:
    rule = {"name": "mine", "phase": "decode", "when": when, "prefer": ["B"]}
    assert rank(workload, ORDER, rule)["decode"].order == (["B", "A"] if matches else ["A", "B"])


def test_a_rule_without_a_phase_is_asked_for_each_phase() -> None:
    rule = {"name": "mine", "when": {"batch": ">=32"}, "prefer": ["B"]}
    both = rank("64q1s1k,32q1k", ORDER, rule)
    assert both["prefill"].order == both["decode"].order == ["B", "A"]
    decode = rank("64q1s1k,q1k", ORDER, rule)
    assert decode["decode"].order == ["B", "A"]
    assert decode["prefill"].order == ["A", "B"]


def test_speculative_decodes_are_decode() -> None:
    rule = {"name": "mine", "phase": "decode", "when": {"query_len": 4}, "prefer": ["B"]}
    drafts = AttentionConfig(num_heads=8, head_size=128, num_speculative_tokens=3)
    assert rank("8q4s1k", ORDER, rule, config=drafts)["decode"].order == ["B", "A"]
    assert rank("8q4s1k", ORDER, rule)["decode"].order == ["A", "B"]


@pytest.mark.parametrize("effect", ["priority", "prefer", "avoid", "deny"])
def test_without_a_workload_no_such_rule_matches(effect: str) -> None:
    rule = {"name": "mine", "when": {"batch": ">=1"}, effect: ["A"]}
    rankings = ranker({**rule, "when": {**rule["when"], "mla": False}}, ORDER).rank(PLAIN, PHASES, ["A", "B"])
    for ranking in rankings.values():
        assert ranking.order == ["A", "B"]
        assert not ranking.denied
        assert [used.name for used in ranking.rules] == ["order"]


def test_evidence_is_switched_off_where_the_rule_matches() -> None:
    off = {"name": "off", "phase": "decode", "when": {"seq_len": "<=1024"}, "evidence": False, "because": "we doubt it"}

    def said(ranking: Ranking) -> str | None:
        return None if ranking.evidence is None else ranking.evidence.name

    found = rank("8q1s1k,q1k", ORDER, off)
    assert (said(found["decode"]), said(found["prefill"])) == ("off", None)
    assert [rule.name for rule in found["decode"].rules] == ["order"]  # it ranks nothing
    assert said(rank("8q1s2k,q1k", ORDER, off)["decode"]) is None
    everywhere = {"name": "never", "evidence": False}
    found = rank("8q1s1k,q1k", ORDER, everywhere, off)
    assert (said(found["decode"]), said(found["prefill"])) == ("off", "never")  # the last rule counts
    assert said(ranker(ORDER, off).rank(PLAIN, PHASES, ["A", "B"])["decode"]) is None  # its condition is about batches
