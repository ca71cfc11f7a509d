"""Priority, prefer, avoid and deny over layers, against a slow model that is written from the documentation alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.layer.config import PHASES, AttentionConfig, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules import load_rules
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import RuleError, parse_rule

REGISTERED = ["A", "B", "C", "D", "E"]
PLAIN = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
H100 = Device("h100", (9, 0))
NOTHING_KNOWN = Environment(assume_installed=True)


def alone(table: dict[str, Any]) -> dict[str, Any]:
    return {"only": True} if "priority" in table else {}


def rank(
    *tables: dict[str, Any], layers: list[int] | None = None, phase: Phase = "decode"
) -> tuple[list[str], set[str]]:
    """Return the order and the denied names that these rules give to a plain layer on an H100.

    A priority shuts out what it does not list, unless its table says otherwise.
    """
    numbers = layers or [0] * len(tables)
    rules = [
        parse_rule({"name": f"r{index}", **alone(table), **table}, file="f", line=index + 1, layer=layer)
        for index, (table, layer) in enumerate(zip(tables, numbers, strict=True))
    ]
    ranking = Ranker(rules, H100, NOTHING_KNOWN, REGISTERED).rank(PLAIN, PHASES)[phase]
    return ranking.order, set(ranking.denied)


def test_only_backends_of_the_layers_kind_follow() -> None:
    rule = parse_rule({"name": "r", "priority": ["C"]}, file="f", line=1, layer=0)
    ranker = Ranker([rule], H100, NOTHING_KNOWN, REGISTERED)
    assert ranker.rank(PLAIN, ["decode"], ["A", "C", "E"])["decode"].order == ["C", "A", "E"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"priority": ["A"], "only": "yes"}, "only = 'yes': expected true or false"),
        ({"prefer": ["A"], "only": True}, "only = True: expected it beside priority alone"),
    ],
)
def test_only_stands_beside_a_priority_and_is_a_boolean(table: dict[str, Any], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        parse_rule({"name": "r", **table}, file="f", line=1, layer=0)


def behind(tables: list[dict[str, Any]], layers: list[int], *unverified: str) -> list[str]:
    """Return the order of decode after ``unverified`` backends were put behind."""
    rules = [
        parse_rule({"name": f"r{index}", **alone(table), **table}, file="f", line=index + 1, layer=layer)
        for index, (table, layer) in enumerate(zip(tables, layers, strict=True))
    ]
    ranking = Ranker(rules, H100, NOTHING_KNOWN, REGISTERED).rank(PLAIN, PHASES)["decode"]
    return ranking.with_unverified_last(unverified).order


@pytest.mark.parametrize(
    ("tables", "layers", "expected"),
    [
        ([], [], ["B", "D", "E", "A", "C"]),  # the registered order
        ([{"priority": ["A", "B", "C"]}], [0], ["B", "A", "C"]),  # the packaged one
        ([{"priority": ["A", "B", "C"]}, {"prefer": ["C"]}], [0, 0], ["B", "C", "A"]),
        ([{"priority": ["A", "B", "C"]}], [1], ["A", "B", "C"]),  # a user's own
        ([{"priority": ["A", "B", "C"]}, {"prefer": ["C"]}], [0, 1], ["C", "B", "A"]),
        ([{"priority": ["A", "B", "C"]}, {"avoid": ["B"]}], [0, 1], ["A", "C", "B"]),
        ([{"prefer": ["C"]}], [1], ["C", "B", "D", "E", "A"]),
    ],
)
def test_unverified_backends_go_behind_unless_a_user_placed_them(
    tables: list[dict[str, Any]], layers: list[int], expected: list[str]
) -> None:
    assert behind(tables, layers, "A", "C") == expected


def test_a_fragment_ranks_its_backend_and_every_later_layer_beats_it() -> None:
    packaged = {"priority": ["A", "B"]}
    assert rank({"prefer": ["E"]}, packaged, layers=[-1, 0])[0] == ["E", "A", "B"]
    assert rank({"avoid": ["E"]}, packaged, layers=[-1, 0])[0] == ["A", "B", "E"]
    assert rank({"prefer": ["E"]}, packaged, {"prefer": ["B"]}, layers=[-1, 0, 0])[0] == ["B", "E", "A"]
    assert rank({"prefer": ["E"]}, packaged, {"prefer": ["B"]}, layers=[-1, 0, 1])[0] == ["B", "E", "A"]
    assert rank({"prefer": ["E"]}, packaged, {"avoid": ["E"]}, layers=[-1, 0, 1])[0] == ["A", "B", "E"]
    for effect in ("prefer", "avoid"):
        assert rank({effect: ["E"]}, packaged, {"priority": ["B", "A"]}, layers=[-1, 0, 1])[0] == ["B", "A"]
    assert rank({"prefer": ["D"]}, {"prefer": ["E"]}, packaged, layers=[-2, -1, 0])[0] == ["E", "D", "A", "B"]
    assert rank({"deny": ["E"]}, {"priority": ["E"]}, layers=[-1, 1]) == (["E"], {"E"})


# --- The model ---


def model(
    layers: list[list[dict[str, Any]]], config: AttentionConfig, phase: str
) -> tuple[list[str], dict[str, str], list[str]]:
    """Return order, denied names with the rule that denies each, and the names of the rules that took part."""
    effective: list[tuple[int, dict[str, Any]]] = []
    for number, layer in enumerate(layers):
        for rule in layer:  # a later layer's rule of the same name replaces, enabled = false removes
            effective = [entry for entry in effective if entry[1]["name"] != rule["name"]]
            if rule.get("enabled", True):
                effective.append((number, rule))
    matching = [
        (number, rule)
        for number, rule in effective
        if rule.get("phase") in (None, phase)
        and all(getattr(config, field) == value for field, value in rule.get("when", {}).items())
    ]
    order, taken = list(REGISTERED), []
    for number in reversed(range(len(layers))):  # last layer to first, top-down within one; the first match wins
        first = next((rule for at, rule in matching if at == number and "priority" in rule), None)
        if first is not None:
            rest = [] if first.get("only") else [name for name in REGISTERED if name not in first["priority"]]
            order, taken = [*first["priority"], *rest], [first["name"]]
            break
    denied: dict[str, str] = {}
    for _, rule in matching:  # the other effects, first layer to last
        if "prefer" in rule:
            order = rule["prefer"] + [name for name in order if name not in rule["prefer"]]
        elif "avoid" in rule:
            moved = [name for name in order if name in rule["avoid"]]
            missing = [name for name in rule["avoid"] if name not in order]
            order = [name for name in order if name not in moved] + moved + missing
        elif "deny" in rule:
            denied.update(dict.fromkeys(rule["deny"], rule["name"]))  # of several, the last is shown
        else:
            continue
        taken.append(rule["name"])
    return order, denied, taken


@st.composite
def rules(draw: st.DrawFn, name: str) -> dict[str, Any]:
    if draw(st.integers(0, 9)) == 0:
        return {"name": name, "enabled": False}
    effect = draw(st.sampled_from(["priority", "priority", "prefer", "avoid", "deny"]))
    rule: dict[str, Any] = {
        "name": name,
        effect: draw(st.lists(st.sampled_from("ABCDEF"), min_size=1, max_size=4, unique=True)),
    }
    if draw(st.integers(0, 3)) == 0:
        rule["phase"] = draw(st.sampled_from(PHASES))
    when = draw(st.fixed_dictionaries({}, optional={"mla": st.booleans(), "num_heads": st.sampled_from([16, 32])}))
    if when:
        rule["when"] = when
    return rule


@st.composite
def layered_rules(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    return [
        [
            draw(rules(name))
            for name in draw(st.lists(st.sampled_from(["r1", "r2", "r3", "r4", "r5", "r6"]), max_size=5, unique=True))
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CONFIGS = [PLAIN, AttentionConfig(num_heads=16, head_size=64), AttentionConfig(num_heads=16, **MLA)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


@pytest.fixture(scope="module", autouse=True)
def no_packaged_rules(folder: Path) -> Any:
    empty = folder / "packaged.toml"
    empty.write_text("version = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_select.rules.layers.packaged_rules_path", lambda: empty)
        yield


@given(layered_rules())
def test_ranking_agrees_with_the_model(folder: Path, layers: list[list[dict[str, Any]]]) -> None:
    files = []
    for number, layer in enumerate(layers):
        tables = ["[[rules]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in rule.items()) for rule in layer]
        files.append(folder / f"{number}.toml")
        files[-1].write_text("version = 1\n" + "".join(tables))
    loaded = load_rules(files)
    ranker = Ranker(loaded.rules, H100, NOTHING_KNOWN, REGISTERED)
    for config in CONFIGS:
        found = ranker.rank(config, PHASES)
        for phase in PHASES:
            order, denied, taken = model(layers, config, phase)
            ranking = found[phase]
            assert ranking.order == order
            assert {name: rule.name for name, rule in ranking.denied.items()} == denied
            assert [rule.name for rule in ranking.rules] == taken
            assert ranking.by_rule == any(rule.effect == "priority" for rule in ranking.rules)
    assert REGISTERED == ["A", "B", "C", "D", "E"]  # shared with every ranking, changed by none
