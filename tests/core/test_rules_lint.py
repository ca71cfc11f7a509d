"""Doubtful rules: unknown names, rules that are never reached. No false alarm, and no alarm missed where it is sure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select import select
from attn_select.backends import distributions
from attn_select.backends.registry import Registry, load_plugins
from attn_select.backends.spec import BackendSpec, Library
from attn_select.decide.selector import environment_for
from attn_select.layer.config import PHASES, AttentionConfig
from attn_select.machine.device import Device, lookup
from attn_select.machine.environment import Environment
from attn_select.rules import RuleSet, load_rules
from attn_select.rules.lint import doubts, known_names, rule_warnings, unknown_names, unreachable
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import parse_rule

RulesFile = Callable[..., Path]


def never_reached(*whens: dict[str, Any], phases: tuple[str | None, ...] = ()) -> list[str]:
    """Return the names (r0, r1, …) of those priority rules of one file that are reported."""
    rules = []
    for index, when in enumerate(whens):
        table: dict[str, Any] = {"name": f"r{index}", "priority": ["A"], "when": when}
        if index < len(phases) and phases[index]:
            table["phase"] = phases[index]
        rules.append(parse_rule(table, file="f", line=index + 1, layer=0))
    return [text.split("'")[1] for _, _, text in unreachable(RuleSet(rules=rules))]


def test_known_names_are_those_registered_and_those_of_the_packaged_rules(spec: Callable[..., BackendSpec]) -> None:
    registry = Registry(specs={"MINE": spec("MINE")}, conflicts={"TWICE": ("a", "b")})
    names = known_names(registry)
    assert names[:2] == ["MINE", "TWICE"]
    assert set(names[2:]) == set(distributions.known_backends())
    assert len(names) == len(set(names))
    assert known_names(Registry()) == list(distributions.known_backends())


def test_unknown_names_come_with_line_and_nearest_name(rules_file: RulesFile) -> None:
    path = rules_file(
        '[[rules]]\nname = "r"\ndeny = ["FLASH_ATTN", "FLASHATTN"]\n[backends.FLASHINFR]\nx = 1\n[backends.FLASHMLA]\n'
    )
    rules = load_rules([path])
    known = known_names(Registry())
    (first, second) = unknown_names(rules, known)
    assert first[:2] == (str(path), 2)
    assert "rule 'r': unknown backend 'FLASHATTN'; did you mean FLASH_ATTN" in first[2]
    assert second[:2] == (str(path), 5)
    assert "options for unknown backend 'FLASHINFR'; did you mean FLASHINFER" in second[2]
    warnings = rule_warnings(rules, known)
    assert warnings == [f"{path}:2: {first[2]}", f"{path}:5: {second[2]}"]
    assert unknown_names(rules, [*known, "FLASHATTN", "FLASHINFR"]) == []


def test_the_packaged_rules_are_beyond_doubt() -> None:
    rules = load_rules()
    assert rule_warnings(rules, known_names(Registry())) == []
    assert unreachable(rules) == []


def test_doubts_about_conditions_and_idle_rules_are_warnings(rules_file: RulesFile) -> None:
    path = rules_file(
        '[[rules]]\nname = "r"\ndeny = ["FLASHMLA"]\nwhen = { gpu = "h1000" }\n[[rules]]\nname = "x"\nenabled = false\n'
    )
    idle, doubtful = rule_warnings(load_rules([path]), known_names(Registry()))
    assert idle == f"{path}:6: rule 'x' disables nothing: no earlier file has a rule of this name"
    assert doubtful.startswith(f"{path}:2: rule 'r': gpu = 'h1000' is not a GPU")


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({}, {}),
        ({}, {"mla": True}),
        ({"mla": True}, {"mla": True, "num_heads": 16}),
        ({"mla": [True, False]}, {"mla": True}),
        ({"sliding_window": ["none", "<128"]}, {"sliding_window": "none"}),
        ({"cuda": ["<13", ">=13.1"]}, {"cuda": "<13"}),
        ({"library": {"a": "<1"}}, {"library": {"a": "<1", "b": "<2"}}),
    ],
)
def test_a_rule_that_an_earlier_one_always_beats(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    assert never_reached(earlier, later) == ["r1"]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({"mla": True}, {}),
        ({"mla": False}, {"sparse": True}),
        ({"num_heads": "<=16"}, {"num_heads": "<=17"}),
        ({"gpu": ["h100", "h20", "b200"]}, {"gpu": "h*"}),  # other GPUs may be named so
        ({"gpu": "h100"}, {"compute_capability": "9.0"}),
        ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "bfloat16"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8*"}),
        ({"cuda": "<13"}, {"cuda": "<12"}),  # versions are not compared
        ({"library": {"a": "<1"}}, {"library": {"b": "<1"}}),
        ({"sliding_window": ">0"}, {}),  # an unset field matches "none" alone
        ({"sliding_window": ">0"}, {"sliding_window": "none"}),
    ],
)
def test_a_rule_that_is_reached_or_may_be(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    assert never_reached(earlier, later) == []


def test_libraries_that_nobody_knows_are_doubted(spec: Callable[..., BackendSpec], rules_file: RulesFile) -> None:
    library = Library("flashinfer-python", "flashinfer", "pip install flashinfer-python")
    registry = Registry(specs={"MINE": spec("MINE", libraries=[[library]])})
    body = '[[rules]]\nname = "{0}"\ndeny = ["MINE"]\nwhen = {{ library = {{ {0} = "<1" }} }}\n'
    names = ("flashinfer", "FlashInfer", "flashinfer-python", "flashinfer_python", "pytest", "flashinfr", "zzz")
    rules = load_rules([rules_file("".join(map(body.format, names)))])
    flashinfr, zzz = (each for each in doubts(rules, registry) if "no registered backend" in each[2])
    assert flashinfr[1] == 2 + 4 * 5
    assert "rule 'flashinfr': no registered backend uses a library 'flashinfr'" in flashinfr[2]
    assert "did you mean flashinfer" in flashinfr[2]
    assert zzz[2].endswith("it is not installed here; they use flashinfer-python")


def test_only_rules_of_one_file_beat_each_other(rules_file: RulesFile) -> None:
    body = '[[rules]]\nname = "{}"\npriority = ["FLASHMLA"]\nwhen = {{ mla = true }}\n'
    one = rules_file(body.format("one"), "one.toml")
    two = rules_file(body.format("two") + body.format("three"), "two.toml")
    (found,) = unreachable(load_rules([one, two]))
    assert found == (str(two), 6, "rule 'three' is never reached: 'two' (line 2) matched first")


WHENS = st.fixed_dictionaries(
    {},
    optional={
        "mla": st.sampled_from([True, False, [True, False]]),
        "sparse": st.booleans(),
        "num_heads": st.sampled_from([16, "<16", "<=16", ">16", ">=16", "!=16", ["<16", ">=17"]]),
        "sliding_window": st.sampled_from([7, ">0", "<7", "!=7"]),
        "compute_capability": st.sampled_from(["9.x", ">=9.0", "<10.0", "9.0", "!=9.x"]),
        "gpu": st.sampled_from(["h100", "h*", "*", ["h20", "b200"]]),
        "kv_cache_dtype": st.sampled_from(["fp8", "fp8*", "auto", "bf16", "*16", "*"]),
    },
)
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CONFIGS = [
    AttentionConfig(num_heads=heads, sliding_window=window, kv_cache_dtype=dtype, **shape)
    for heads, window, dtype, shape in product(
        (8, 16, 17), (None, 6, 7, 8), ("auto", "bfloat16", "float16", "fp8", "fp8_e5m2"), ({"head_size": 64}, MLA)
    )
] + [AttentionConfig(num_heads=16, sparse_top_k=2048, **MLA)]
DEVICES = [Device("h100", (9, 0)), Device("h20", (9, 0)), Device("b200", (10, 0)), Device("l40s", (8, 9))]
DEVICES += [Device("x", (9, 5)), Device("h1", (8, 0)), Device("cpu", None)]


@given(st.lists(st.tuples(WHENS, st.sampled_from([None, *PHASES])), min_size=2, max_size=4))
def test_what_is_called_unreachable_never_wins(whens: list[tuple[dict[str, Any], str | None]]) -> None:
    tables = [
        {"name": f"r{i}", "priority": ["A"], "when": when, "phase": phase} for i, (when, phase) in enumerate(whens)
    ]
    rules = [
        parse_rule({k: v for k, v in table.items() if v is not None}, file="f", line=i + 1, layer=0)
        for i, table in enumerate(tables)
    ]
    reported = {text.split("'")[1] for _, _, text in unreachable(RuleSet(rules=rules))}
    winners = {
        rule.name
        for device in DEVICES
        for ranker in [Ranker(rules, device, Environment(assume_installed=True))]
        for config in CONFIGS
        for ranking in ranker.rank(config, PHASES, []).values()
        for rule in ranking.rules
    }
    assert not reported & winners


VERSIONED = """
[[rules]]
name = "old"
when = { library.flashinfer-python = "<0.7", gpu = "h100" }
deny = ["FLASHINFER"]
"""


def test_a_rule_about_a_version_that_nobody_knows_says_so(rules_file: RulesFile) -> None:
    path, config = rules_file(VERSIONED), AttentionConfig(num_heads=8, head_size=128)
    said = "rule 'old' is not applied: it asks for library.flashinfer-python <0.7, and the version of flashinfer-python"
    assert [text for text in select(config, "h100", path).warnings if said in text]
    assert not [text for text in select(config, "a100", path).warnings if "is not applied" in text]
    pinned = environment_for(lookup("h100"), {"flashinfer-python": "0.6.14"})
    known = select(config, "h100", path, environment=pinned)
    assert not [text for text in known.warnings if "is not applied" in text]
    assert "FLASHINFER" not in [each.backend for each in known.ranked(("decode",))]
    problems = [text for *_, text in doubts(load_rules([path]), load_plugins())]
    assert [text for text in problems if "holds nowhere on this machine: flashinfer-python is not installed" in text]
