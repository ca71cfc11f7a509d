"""Priority, prefer, avoid and deny over layers, against a slow model that is written from the documentation alone."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
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
from attn_select.rules.rule import Rule, RuleError, parse_rule

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
    ranking = Ranker(rules, H100, NOTHING_KNOWN).rank(PLAIN, PHASES, REGISTERED)[phase]
    return ranking.order, set(ranking.denied)


def test_without_rules_the_registered_order_stands() -> None:
    ranking = Ranker([], H100, NOTHING_KNOWN).rank(PLAIN, PHASES, REGISTERED)["decode"]
    assert (ranking.order, ranking.denied, ranking.rules, ranking.by_rule) == (REGISTERED, {}, [], False)


def test_the_first_matching_priority_wins() -> None:
    never = {"priority": ["E"], "when": {"mla": True}}
    assert rank(never, {"priority": ["C", "A"]}, {"priority": ["B"]}) == (["C", "A"], set())


def test_the_last_layer_is_asked_first_for_a_priority() -> None:
    assert rank({"priority": ["A"]}, {"priority": ["B"]}, {"priority": ["C"]}, layers=[0, 1, 1]) == (["B"], set())
    later = {"priority": ["B"], "when": {"mla": True}}
    assert rank({"priority": ["A"]}, later, layers=[0, 1]) == (["A"], set())


def test_what_a_priority_does_not_list_follows_in_the_registered_order() -> None:
    assert rank({"priority": ["C", "A"], "only": False})[0] == ["C", "A", "B", "D", "E"]
    assert rank({"priority": ["X"], "only": False}, {"avoid": ["B"]})[0] == ["X", "A", "C", "D", "E", "B"]
    packaged, mine = {"priority": ["B"], "only": True}, {"priority": ["D"], "only": False}
    assert rank(packaged, mine, layers=[0, 1])[0] == ["D", "A", "B", "C", "E"]  # the user's alone counts


def test_only_backends_of_the_layers_kind_follow() -> None:
    rule = parse_rule({"name": "r", "priority": ["C"]}, file="f", line=1, layer=0)
    ranker = Ranker([rule], H100, NOTHING_KNOWN)
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


def test_phases_are_ranked_apart() -> None:
    tables = [{"priority": ["A"], "phase": "prefill"}, {"priority": ["B"]}, {"avoid": ["B"], "phase": "prefill"}]
    assert rank(*tables, phase="prefill") == (["A", "B"], set())
    assert rank(*tables, phase="decode") == (["B"], set())
    assert rank({"deny": ["A"], "phase": "decode"}, phase="decode")[1] == {"A"}
    assert rank({"deny": ["A"], "phase": "decode"}, phase="prefill")[1] == set()


def test_prefer_puts_its_list_in_front_and_inserts_what_is_missing() -> None:
    assert rank({"priority": ["A", "B"]}, {"prefer": ["E", "B"]})[0] == ["E", "B", "A"]


def test_the_last_applied_prefer_leads() -> None:
    tables = [{"priority": ["A", "B", "C"]}, {"prefer": ["B"]}, {"prefer": ["C"]}]
    assert rank(*tables)[0] == ["C", "B", "A"]
    assert rank(*tables, layers=[0, 0, 1])[0] == ["C", "B", "A"]


def test_avoid_puts_its_list_at_the_end_and_inserts_what_is_missing() -> None:
    assert rank({"priority": ["A", "B", "C"]}, {"avoid": ["E", "A"]})[0] == ["B", "C", "A", "E"]
    assert rank({"priority": ["A", "B", "C"]}, {"avoid": ["A"]}, {"avoid": ["B"]})[0] == ["C", "A", "B"]
    assert rank({"priority": ["A", "B", "C"]}, {"avoid": ["C"]}, {"prefer": ["C"]})[0] == ["C", "A", "B"]
    assert rank({"priority": ["A", "B", "C"]}, {"prefer": ["C"]}, {"avoid": ["C"]})[0] == ["A", "B", "C"]


def test_deny_holds_whatever_prefers() -> None:
    tables = [{"deny": ["A"]}, {"prefer": ["A"]}, {"priority": ["A", "B"]}]
    assert rank(*tables, layers=[0, 1, 1])[1] == {"A"}


@pytest.mark.parametrize("layers", [[0, 0], [0, 1]])
def test_of_two_deny_rules_the_last_one_is_shown(layers: list[int]) -> None:
    """It is the one that a user can change last, and the one whose reason is nearest to the user."""
    first, last = (
        parse_rule({"name": name, "deny": ["A"]}, file="f", line=line, layer=layer)
        for name, line, layer in zip(["first", "last"], [1, 2], layers, strict=True)
    )
    ranking = Ranker([first, last], H100, NOTHING_KNOWN).rank(PLAIN, ["decode"], REGISTERED)["decode"]
    assert ranking.denied == {"A": last}
    assert ranking.rules == [first, last]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_rule_for_auto_holds_for_a_cache_that_names_the_compute_dtype(dtype: str) -> None:
    rule = parse_rule({"name": "r", "prefer": ["E"], "when": {"kv_cache_dtype": "auto"}}, file="f", line=1, layer=0)
    ranker = Ranker([rule], H100, NOTHING_KNOWN)
    for stored in ("auto", "bfloat16", "float16", "fp8_e4m3"):
        config = PLAIN.model_copy(update={"dtype": dtype, "kv_cache_dtype": stored})
        leads = ranker.rank(config, ["decode"], REGISTERED)["decode"].order[0] == "E"
        assert leads == (stored in ("auto", dtype))


def behind(tables: list[dict[str, Any]], layers: list[int], *unverified: str) -> list[str]:
    """Return the order of decode after ``unverified`` backends were put behind."""
    rules = [
        parse_rule({"name": f"r{index}", **alone(table), **table}, file="f", line=index + 1, layer=layer)
        for index, (table, layer) in enumerate(zip(tables, layers, strict=True))
    ]
    ranking = Ranker(rules, H100, NOTHING_KNOWN).rank(PLAIN, PHASES, REGISTERED)["decode"]
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


def test_the_rules_that_took_part_are_listed() -> None:
    rules = [
        parse_rule(table, file="f", line=1, layer=0)
        for table in (
            {"name": "out", "priority": ["A"], "when": {"mla": True}},
            {"name": "order", "priority": ["A"]},
            {"name": "beaten", "priority": ["B"]},
            {"name": "other phase", "deny": ["B"], "phase": "prefill"},
            {"name": "no", "deny": ["B"], "when": {"gpu": "t4"}},
            {"name": "yes", "deny": ["B"], "when": {"gpu": "h100"}},
        )
    ]
    ranking = Ranker(rules, H100, NOTHING_KNOWN).rank(PLAIN, ["decode"], REGISTERED)
    assert list(ranking) == ["decode"]
    assert [rule.name for rule in ranking["decode"].rules] == ["order", "yes"]
    assert ranking["decode"].denied["B"].name == "yes"
    assert ranking["decode"].by_rule


# --- The model ---


def facts(config: AttentionConfig, device: Device, versions: dict[str, str], cuda: str | None) -> dict[str, Any]:
    """All that a ``when`` may ask for; None where unset or unknown."""
    return {
        "mla": config.kv_lora_rank is not None,
        "sparse": config.sparse_top_k is not None,
        "sinks": config.sinks,
        "num_heads": config.num_heads,
        "sliding_window": config.sliding_window,
        "kv_cache_dtype": config.kv_cache_dtype,
        "dtype": config.dtype,
        "gpu": device.name,
        "compute_capability": device.compute_capability,
        "cuda": cuda,
        "library": versions,
    }


def holds(field: str, written: Any, known: dict[str, Any], layer_dtype: str) -> bool:
    """One field of ``when``, spelled out."""
    if isinstance(written, list):
        return any(holds(field, each, known, layer_dtype) for each in written)
    if field == "library":
        return all(
            holds("version", value, {"version": known["library"].get(name)}, "") for name, value in written.items()
        )
    value = known[field]
    if value is None:
        return False
    if isinstance(value, bool):
        return value == written
    if field == "kv_cache_dtype":
        pattern = {"fp8": "fp8_e4m3", "bf16": "bfloat16"}.get(written, written)
        names = {value} if value not in ("auto", layer_dtype) else {"auto", layer_dtype}
        return any(fnmatch.fnmatch(name, pattern) for name in names)
    if field == "dtype":
        return fnmatch.fnmatch(value, {"bf16": "bfloat16", "half": "float16"}.get(written, written))
    if field == "gpu":
        return fnmatch.fnmatch(value, written.lower())
    if field == "compute_capability" and written.endswith(".x"):
        return value[0] == int(written[:-2])

    def number(text: Any) -> Any:
        if field == "compute_capability" or "." in str(text):
            return tuple(int(part) for part in str(text).split("."))
        return int(text)

    mine = number(value) if isinstance(value, str) else value
    for part in str(written).split(","):
        sign = part.rstrip("0123456789.")
        bound = number(part[len(sign) :])
        results = {"<": mine < bound, "<=": mine <= bound, ">": mine > bound, ">=": mine >= bound}
        if not {**results, "": mine == bound, "==": mine == bound, "!=": mine != bound}[sign]:
            return False
    return True


def model(
    layers: list[list[dict[str, Any]]], known: dict[str, Any], layer_dtype: str, phase: str
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
        and all(holds(field, written, known, layer_dtype) for field, written in rule.get("when", {}).items())
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


NUMBERS = st.builds(
    lambda sign, n: f"{sign}{n}", st.sampled_from(["<", "<=", ">", ">=", "==", "!=", ""]), st.integers(14, 33)
)
WHEN: dict[str, st.SearchStrategy[Any]] = {
    "mla": st.booleans(),
    "sparse": st.booleans(),
    "sinks": st.booleans(),
    "num_heads": st.one_of(st.sampled_from([16, 32]), NUMBERS, st.builds("{},{}".format, NUMBERS, NUMBERS)),
    "sliding_window": st.one_of(st.just(128), NUMBERS),
    "kv_cache_dtype": st.sampled_from(["auto", "fp8", "fp8*", "bf16", "float16", "nvfp4"]),
    "dtype": st.sampled_from(["bf16", "half", "*float16", "float32"]),
    "gpu": st.sampled_from(["h100", "b200", "H*", "cpu", "*"]),
    "compute_capability": st.sampled_from(["9.x", "10.0", ">=9.0", "<10.0", ">=8.9,<10.0", "!=9.0"]),
    "cuda": st.sampled_from(["<13.0", ">=12.8", "13.0"]),
}
LIBRARIES = st.dictionaries(
    st.sampled_from(["one", "two"]), st.sampled_from(["<0.6.3", ">=0.6.10", "0.6.9"]), max_size=2
)


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
    when: dict[str, Any] = {}
    for field in draw(st.lists(st.sampled_from(list(WHEN)), max_size=2, unique=True)):
        values = draw(st.lists(WHEN[field], min_size=1, max_size=2))
        when[field] = values if len(values) > 1 or draw(st.booleans()) else values[0]
    if libraries := draw(LIBRARIES) if draw(st.integers(0, 4)) == 0 else {}:
        when["library"] = libraries
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


SHAPES = [
    {"num_heads": 32, "num_kv_heads": 8, "head_size": 128},
    {"num_heads": 16, "head_size": 64, "sinks": True, "sliding_window": 128, "kv_cache_dtype": "fp8"},
    {"num_heads": 24, "head_size": 64, "dtype": "float16", "kv_cache_dtype": "nvfp4", "sliding_window": 20},
    {"num_heads": 32, "head_size": 64, "dtype": "float16", "kv_cache_dtype": "bfloat16"},
    {"num_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
]
MLA = SHAPES[-1]
CONFIGS = [*map(lambda shape: AttentionConfig(**shape), SHAPES), AttentionConfig(**MLA, sparse_top_k=2048)]
DEVICES = [H100, Device("b200", (10, 0)), Device("cpu", None)]


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


@given(
    layers=layered_rules(),
    device=st.sampled_from(DEVICES),
    versions=st.dictionaries(st.sampled_from(["one", "two"]), st.sampled_from(["0.6.2", "0.6.9", "0.6.10"])),
    cuda=st.sampled_from([None, "12.4", "12.8", "13.0"]),
)
def test_ranking_agrees_with_the_model(
    folder: Path, layers: list[list[dict[str, Any]]], device: Device, versions: dict[str, str], cuda: str | None
) -> None:
    files = []
    for number, layer in enumerate(layers):
        tables = ["[[rules]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in rule.items()) for rule in layer]
        files.append(folder / f"{number}.toml")
        files[-1].write_text("version = 1\n" + "".join(tables))
    loaded = load_rules(files)
    environment = Environment(assume_installed=True, pins=versions, cuda=cuda)
    ranker = Ranker(loaded.rules, device, environment)
    for config in CONFIGS:
        found = ranker.rank(config, PHASES, REGISTERED)
        for phase in PHASES:
            known = facts(config, device, versions, cuda)
            order, denied, taken = model(layers, known, config.dtype, phase)
            ranking = found[phase]
            assert ranking.order == order
            assert {name: rule.name for name, rule in ranking.denied.items()} == denied
            assert [rule.name for rule in ranking.rules] == taken
            assert ranking.by_rule == any(rule.effect == "priority" for rule in ranking.rules)
    assert REGISTERED == ["A", "B", "C", "D", "E"]  # shared with every ranking, changed by none


def test_ranking_depends_on_nothing_but_its_arguments(rules_file: Callable[..., Path]) -> None:
    """The same question twice, and in another order, gets the same answer: nothing is remembered in between."""
    path = rules_file('[[rules]]\nname = "p"\nprefer = ["E"]\nwhen = { num_heads = 16 }\n')
    ranker = Ranker(load_rules([path]).rules, H100, NOTHING_KNOWN)

    def answers(configs: list[AttentionConfig]) -> dict[AttentionConfig, tuple[list[str], list[Rule]]]:
        found = [(config, ranker.rank(config, ["decode"], REGISTERED)["decode"]) for config in configs]
        return {config: (ranking.order, ranking.rules) for config, ranking in found}

    assert answers(CONFIGS) == answers(CONFIGS[::-1]) == answers(CONFIGS)


def test_an_auto_cache_follows_the_dtype_of_each_layer(rules_file: Callable[..., Path]) -> None:
    path = rules_file('[[rules]]\nname = "p"\nprefer = ["E"]\nwhen = { kv_cache_dtype = "float16" }\n')
    ranker = Ranker(load_rules([path]).rules, H100, NOTHING_KNOWN)
    for dtype, first in (("bfloat16", "A"), ("float16", "E"), ("bfloat16", "A")):
        config = AttentionConfig(num_heads=8, head_size=64, dtype=dtype)
        assert ranker.rank(config, PHASES, REGISTERED)["decode"].order[0] == first
