"""Layers: where rules files are looked for, and how a later one changes an earlier one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from attn_select.backends.registry import load_plugins
from attn_select.errors import RulesError
from attn_select.rules import RuleSet, load_rules
from attn_select.rules.layers import candidate_layers, inspect_layers, packaged_rules_path
from attn_select.rules.lint import doubts, known_names, rule_warnings

PACKAGED = packaged_rules_path()
RULE = '[[rules]]\nname = "{}"\n{} = ["{}"]\n'


def effects(rules: RuleSet) -> dict[str, tuple[str | None, tuple[str, ...], str]]:
    """Name → effect, backends and file of every rule that is not a packaged one."""
    return {r.name: (r.effect, r.backends, r.file) for r in rules.rules if r.file != str(PACKAGED)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty working directory and an empty configuration home."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def user_file(world: Path) -> Path:
    return world / "config" / "attn-select" / "selector_rules.toml"


def write(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"version = 1\n{body}")
    return str(path)


def states(*extra: str | Path) -> list[tuple[str, str]]:
    return [(layer.kind, layer.state) for layer in inspect_layers(extra)]


def test_only_the_packaged_rules_in_an_empty_world(world: Path) -> None:
    assert states() == [("packaged", "read"), ("user", "not found"), ("working directory", "not found")]
    rules = load_rules()
    assert {rule.file for rule in rules.rules} == {str(PACKAGED)}
    assert len(rules.rules) >= 5
    lines = PACKAGED.read_text().splitlines()
    for rule in rules.rules:
        assert lines[rule.line - 1] == "[[rules]]"
        assert lines[rule.line] == f'name = "{rule.name}"'
        assert rule.because
        assert not rule.warnings


def test_the_order_of_layers(world: Path, user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three, four = (write(world / f"{n}.toml", RULE.format(n, "deny", n)) for n in "ABCD")
    write(user_file, RULE.format("user", "deny", "U"))
    write(world / "cwd" / "selector_rules.toml", RULE.format("cwd", "deny", "W"))
    monkeypatch.setenv("ATTN_SELECT_RULES", os.pathsep.join([one, "", two]))
    expected = [
        ("packaged", str(PACKAGED)),
        ("user", str(user_file)),
        ("working directory", "selector_rules.toml"),
        ("ATTN_SELECT_RULES", one),
        ("ATTN_SELECT_RULES", two),
        ("--rules", three),
        ("--rules", four),
    ]
    assert [(layer.kind, str(layer.path)) for layer in candidate_layers([three, Path(four)])] == expected
    rules = load_rules([three, Path(four)])
    assert [(layer.kind, str(layer.path)) for layer in rules.layers] == expected
    assert {layer.state for layer in rules.layers} == {"read"}
    assert list(effects(rules)) == ["user", "cwd", "A", "B", "C", "D"]
    assert [rule.layer for rule in rules.rules] == sorted(rule.layer for rule in rules.rules)


def test_a_later_rule_of_the_same_name_replaces(world: Path) -> None:
    first = write(world / "a.toml", RULE.format("r", "deny", "A") + RULE.format("s", "avoid", "S"))
    second = write(world / "b.toml", RULE.format("r", "prefer", "B"))
    assert effects(load_rules([first, second])) == {
        "s": ("avoid", ("S",), first),
        "r": ("prefer", ("B",), second),
    }
    assert effects(load_rules([second, first])) == {"r": ("deny", ("A",), first), "s": ("avoid", ("S",), first)}


def test_a_packaged_rule_can_be_replaced_and_disabled(world: Path) -> None:
    names = [rule.name for rule in load_rules().rules]
    path = write(world / "a.toml", RULE.format(names[0], "prefer", "A"))
    replaced = load_rules([path])
    assert [rule.name for rule in replaced.rules] == [*names[1:], names[0]]
    assert effects(replaced) == {names[0]: ("prefer", ("A",), path)}
    path = write(world / "b.toml", f'[[rules]]\nname = "{names[1]}"\nenabled = false\n')
    removed = load_rules([path])
    assert [rule.name for rule in removed.rules] == [names[0], *names[2:]]
    assert removed.idle == []


def test_options_merge_by_key(world: Path) -> None:
    first = write(world / "a.toml", "[backends.X]\nkeep = 1\nchange = [1, 2]\n[backends.Y]\n")
    second = write(world / "b.toml", "\n[backends.X]\nchange = [3]\nnew = 'n'\n")
    options = load_rules([first, second]).options
    assert options["X"].values == {"keep": 1, "change": [3], "new": "n"}
    assert options["X"].origins == {"keep": (first, 3), "change": (second, 4), "new": (second, 5)}
    assert options["X"].origin == (second, 3)
    assert options["Y"].values == {}
    assert options["Y"].origin == (first, 5)


def test_a_copy_of_the_packaged_rules_in_the_working_directory_is_skipped(world: Path) -> None:
    here = world / "cwd" / "selector_rules.toml"
    shutil.copyfile(PACKAGED, here)
    assert states()[2] == ("working directory", "skipped: identical to the packaged rules")
    rules = load_rules()
    assert {rule.file for rule in rules.rules} == {str(PACKAGED)}
    assert rules.layers[2].state == "skipped: identical to the packaged rules"
    here.write_bytes(PACKAGED.read_bytes() + b"\n")
    assert states()[2] == ("working directory", "read")
    assert {rule.file for rule in load_rules().rules} == {"selector_rules.toml"}


def test_one_file_in_two_layers_is_read_once(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(world / "cwd" / "selector_rules.toml", RULE.format("r", "deni", "A"))
    monkeypatch.setenv("ATTN_SELECT_RULES", path)
    with pytest.raises(RulesError) as caught:
        load_rules(["selector_rules.toml"])
    assert [(file, line) for file, line, _ in caught.value.problems] == [
        ("selector_rules.toml", 4),
        ("selector_rules.toml", 2),
    ]
    assert states("selector_rules.toml")[2:] == [
        ("working directory", "skipped: read as ATTN_SELECT_RULES"),
        ("ATTN_SELECT_RULES", "skipped: read as --rules"),
        ("--rules", "read"),
    ]


@pytest.mark.parametrize("kind", ["ATTN_SELECT_RULES", "--rules"])
def test_a_file_that_was_asked_for_must_exist(world: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(world / "missing.toml")
    extra = [missing] if kind == "--rules" else []
    if not extra:
        monkeypatch.setenv("ATTN_SELECT_RULES", missing)
    with pytest.raises(RulesError, match="no such file") as caught:
        load_rules(extra)
    origin = "" if extra else f" (given by {kind})"  # who gives a file by name knows it
    assert caught.value.problems == ((missing, None, f"cannot be read: no such file{origin}"),)
    assert states(*extra)[-1] == (kind, "no such file")


def test_a_broken_user_file_is_an_error_and_an_absent_one_is_not(world: Path, user_file: Path) -> None:
    user_file.mkdir(parents=True)
    with pytest.raises(RulesError, match="regular file") as caught:
        load_rules()
    assert caught.value.problems[0][0] == str(user_file)
    user_file.rmdir()
    assert load_rules().layers[1].state == "not found"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no such owner here")
@pytest.mark.parametrize("body", [RULE.format("theirs", "avoid", "FLASHINFER"), "[backends.FLASH_ATTN]\nversion = 2\n"])
def test_another_users_rules_in_the_working_directory_are_followed_and_named(
    world: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    path = world / "cwd" / "selector_rules.toml"
    write(path, body)
    known = known_names(load_plugins())
    assert rule_warnings(load_rules(), known) == []
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    rules = load_rules()
    assert bool(effects(rules)) or "FLASH_ATTN" in rules.options
    said = f"belongs to another user: uid {owner}, where this process has uid {owner + 1}"
    (warning,) = rule_warnings(rules, known)
    assert warning.startswith("selector_rules.toml: its rules are followed")
    assert said in warning
    assert [file for file, line, text in doubts(rules, load_plugins()) if said in text] == ["selector_rules.toml"]
