"""Whatever is thrown at the loader, only the documented error comes out, and it names the file.

What does load must also survive all that follows: linting, ranking, printing.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.registry import Registry
from attn_select.errors import RulesError
from attn_select.layer.config import PHASES, AttentionConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules import RuleSet, load_rules
from attn_select.rules.conditions import FIELDS
from attn_select.rules.lint import known_names, rule_warnings, unreachable
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import EFFECTS

CONFIGS = [
    AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=128),
    AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
]
ENVIRONMENT = Environment(assume_installed=True, pins={"a": "1.0"}, cuda="13.0")
KNOWN = known_names(Registry())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "rules.toml"


def check_load(file: Path, content: bytes) -> RuleSet | None:
    """Load a file of this content; None where the documented error says what is wrong with it."""
    file.write_bytes(content)
    try:
        rules = load_rules([file])
    except RulesError as error:
        is_about(error, file, content.count(b"\n") + 1)
        return None
    use(rules)
    return rules


def is_about(error: RulesError, file: Path, lines: int) -> None:
    """Whether the error says what is wrong where."""
    assert error.problems
    assert str(file) in str(error)
    for name, line, text in error.problems:
        assert name == str(file)
        assert line is None or 1 <= line <= lines
        assert text
        assert text.isprintable()
        assert len(text) < 1000


def use(rules: RuleSet) -> None:
    for device in (Device("h100", (9, 0)), Device("cpu", None)):
        ranker = Ranker(rules.rules, device, ENVIRONMENT, KNOWN)
        for config in CONFIGS:
            assert set(ranker.rank(config, PHASES)) == set(PHASES)
    assert all(line.isprintable() for line in rule_warnings(rules, KNOWN))
    assert all(text.isprintable() for _, _, text in unreachable(rules))
    for rule in rules.rules:
        shown = [rule.name, *rule.backends, *map(str, rule.when), rule.because or ""]
        assert all(len(text) < 5000 for text in shown)
        json.dumps([condition.written for condition in rule.when], allow_nan=False)
    json.dumps({name: table.values for name, table in rules.options.items()}, allow_nan=False)


@given(st.text(max_size=200), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"]))
def test_any_text(file: Path, text: str, encoding: str) -> None:
    check_load(file, f"version = 1\n{text}".encode(encoding, errors="replace"))


# Documents of the right structure with values of any type in any place.

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["FLASHMLA", "9.x", ">=8.0,<10.0", "<=16", "fp8*", "h100", "decode", "<0.6", "auto", "[", "!=9.x", "\x1b"]
    ),
)
SCALARS = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.datetimes(),
    st.dates(),
    st.times(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
NAMES = st.lists(st.sampled_from(["FLASHMLA", "FLASH_ATTN", "A", "é"]), min_size=1, max_size=3)
WHENS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)


@st.composite
def rule_tables(draw: st.DrawFn) -> dict[str, Any]:
    """A rule in which most things are right."""
    table: dict[str, Any] = {"name": draw(st.text(min_size=1, max_size=3))}
    table[draw(st.sampled_from(EFFECTS))] = draw(NAMES)
    if draw(st.booleans()):
        table["when"] = draw(WHENS)
    if draw(st.booleans()):
        key = st.sampled_from(["name", "phase", "when", "because", "enabled", *EFFECTS, "else"])
        table[draw(key)] = draw(st.one_of(VALUES, NAMES, WHENS))
    return table


DOCUMENTS = st.fixed_dictionaries(
    {"version": st.sampled_from([1, 1, 1, 1, 1, 2, True, "1"])},
    optional={
        "rules": st.lists(rule_tables(), max_size=4),
        "backends": st.dictionaries(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=2), max_size=2),
    },
)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\U{ord(c):08x}" if not c.isalnum() or ord(c) > 126 else c for c in text) + '"'


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value) if "." in repr(value) or "e" in repr(value) else f"{value}.0"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)


def toml_document(document: dict[str, Any]) -> str:
    rules = document.get("rules", [])
    text = "".join(f"{quoted(key)} = {toml(value)}\n" for key, value in document.items() if key != "rules")
    for rule in rules:
        text += "[[rules]]\n" + "".join(f"{quoted(key)} = {toml(value)}\n" for key, value in rule.items())
    return text


@given(DOCUMENTS)
def test_any_document(file: Path, document: dict[str, Any]) -> None:
    loaded = check_load(file, toml_document(document).encode())
    if loaded is not None:
        names = {rule["name"].strip() for rule in document.get("rules", []) if rule.get("enabled", True)}
        assert {rule.name for rule in loaded.rules if rule.file == str(file)} == names
