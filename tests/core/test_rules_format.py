"""One rules file: what is accepted, and one clear message with file and line for all that is not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select.errors import RulesError
from attn_select.rules import load_rules
from attn_select.rules.rule import Rule, RuleError, parse_rule

WriteRules = Callable[..., Path]


def mine(path: Path) -> list[Rule]:
    """The rules of one file."""
    return [rule for rule in load_rules([path]).rules if rule.file == str(path)]


def problems(path: Path) -> list[tuple[int | None, str]]:
    """What is wrong with one file: line and message."""
    with pytest.raises(RulesError) as caught:
        load_rules([path])
    assert all(file == str(path) for file, _, _ in caught.value.problems)
    assert str(path) in str(caught.value)
    return [(line, text) for _, line, text in caught.value.problems]


def test_a_full_rule(rules_file: WriteRules) -> None:
    path = rules_file(
        """
[[rules]]
name = " few-heads "
phase = "decode"
prefer = ["FLASHINFER_MLA_SPARSE", " FLASHMLA "]
because = '''
two
    lines'''
[rules.when]
sparse = true
num_heads = "<=16"
library.flashinfer-python = ">=0.6"
""",
    )
    (rule,) = mine(path)
    assert rule.name == "few-heads"
    assert (rule.effect, rule.backends) == ("prefer", ("FLASHINFER_MLA_SPARSE", "FLASHMLA"))
    assert (rule.phase, rule.because, rule.enabled) == ("decode", "two lines", True)
    assert rule.origin == f"{path}:3"
    assert [str(condition) for condition in rule.when] == [
        "sparse true",
        "num_heads <=16",
        "library.flashinfer-python >=0.6",
    ]


@pytest.mark.parametrize("effect", ["priority", "prefer", "avoid", "deny"])
def test_every_effect(rules_file: WriteRules, effect: str) -> None:
    (rule,) = mine(rules_file(f'[[rules]]\nname = "r"\n{effect} = ["A", "B"]\n'))
    assert (rule.effect, rule.backends, rule.phase, rule.when, rule.because) == (effect, ("A", "B"), None, (), None)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, ["needs a name"]),
        ({"name": 3}, ["name = 3", "string"]),
        ({"name": "  "}, ["name = '  '"]),
        ({"name": "a\x1b[31m"}, ["name = 'a\\x1b[31m'", "printable"]),
        ({"name": "a\nb"}, ["name = 'a\\nb'"]),
        ({"name": "x" * 101}, ["name = 'xxx", "100"]),
        ({"name": "r"}, ["'r'", "exactly one of priority, prefer, avoid, deny", "found none"]),
        ({"name": "r", "prefer": ["A"], "deny": ["B"]}, ["found prefer and deny"]),
        ({"name": "r", "prefers": ["A"]}, ["unknown key 'prefers'", "prefer"]),
        ({"name": "r", "prefer": "A"}, ["prefer = 'A'", "list of backend names"]),
        ({"name": "r", "prefer": []}, ["prefer = []"]),
        ({"name": "r", "prefer": ["A", 3]}, ["prefer = ['A', 3]"]),
        ({"name": "r", "prefer": ["A", " "]}, ["prefer = ['A', ' ']"]),
        ({"name": "r", "prefer": ["A\x07"]}, ["prefer = ['A\\x07']"]),
        ({"name": "r", "prefer": ["A", "B", "A "]}, ["prefer lists A twice"]),
        ({"name": "r", "prefer": ["A"], "phase": "both"}, ["phase = 'both'", "prefill or decode", "leave it out"]),
        ({"name": "r", "prefer": ["A"], "phase": ["decode"]}, ["phase = ['decode']"]),
        ({"name": "r", "prefer": ["A"], "because": 3}, ["because = 3", "string"]),
        ({"name": "r", "prefer": ["A"], "enabled": "no"}, ["enabled = 'no'", "true or false"]),
        ({"name": "r", "prefer": ["A"], "enabled": 1}, ["enabled = 1"]),
        ({"name": "r", "prefer": ["A"], "when": {"num_head": 3}}, ["'r'", "unknown field 'num_head'", "num_heads"]),
    ],
)
def test_a_rule_that_breaks_the_format(table: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rule(table, file="f", line=1, layer=0)
    assert all(text in str(caught.value) for text in named), str(caught.value)
    assert str(caught.value).isprintable()


def test_a_long_reason_is_cut_and_made_printable() -> None:
    rule = parse_rule({"name": "r", "deny": ["A"], "because": "\x1b[31m" + "x" * 9999}, file="f", line=1, layer=0)
    assert rule.because is not None
    assert rule.because.isprintable()
    assert len(rule.because) == 1000
    assert parse_rule({"name": "r", "deny": ["A"], "because": ""}, file="f", line=1, layer=0).because is None


def test_every_broken_rule_is_reported_with_its_line(rules_file: WriteRules) -> None:
    path = rules_file(
        '[[rules]]\nname = "one"\nprefer = "A"\n\n[[rules]]\nname = "two"\ndeny = ["A"]\n\n[[rules]]\ndeny = ["A"]\n'
    )
    assert [line for line, _ in problems(path)] == [4, 10]


BROKEN_EVERYWHERE = """
[[rules]]
nam = "first"
prefer = ["A"]
phase = "both"
deny = [
  "B",
  3,
]

[[rules]]
name = "second"
enabled = 1
prefer = ["A"]
when = { num_head = 3, mla = "yes", gpu = ["h100",
  ""] }

[[rules]]
name = "third"
deny = ["A"]
because = 3
[rules.when]
"num_heads" = "many"
library.torch = "new"
library."a b" = "1"

[backends.FLASHINFER]
use_trtllm = 1979-05-27
workspace.bytes = nan
"""


def test_all_errors_of_a_file_come_at_once_each_with_the_line_of_its_key(rules_file: WriteRules) -> None:
    path = rules_file(BROKEN_EVERYWHERE)
    found = problems(path)
    lines = path.read_text().splitlines()
    keys = [None if line is None else lines[line - 1].split("=")[0].strip() for line, _ in found]
    assert [(key, text.split(":")[0]) for key, (_, text) in zip(keys, found, strict=True)] == [
        ("[[rules]]", "a rule needs a name, so that later files can replace or disable it"),
        ("nam", "unknown key 'nam'; did you mean name?"),
        ("phase", "phase = 'both'"),
        ("deny", "expected exactly one of priority, prefer, avoid, deny, evidence; found prefer and deny"),
        ("deny", "deny = ['B', 3]"),
        ("enabled", "rule 'second'"),
        ("when", "rule 'second'"),
        ("when", "rule 'second'"),
        ("when", "rule 'second'"),
        ("because", "rule 'third'"),
        ('"num_heads"', "rule 'third'"),
        ("library.torch", "rule 'third'"),
        ('library."a b"', "rule 'third'"),
        ("use_trtllm", "backends.FLASHINFER.use_trtllm = datetime.date(1979, 5, 27)"),
        ("workspace.bytes", "backends.FLASHINFER.workspace = {'bytes'"),
    ]


def test_duplicates_within_a_file_are_errors(rules_file: WriteRules) -> None:
    path = rules_file('[[rules]]\nname = "r"\ndeny = ["A"]\n[[rules]]\nname = "r "\navoid = ["B"]\n')
    assert problems(path) == [(6, "rule 'r' is already defined at line 2 of this file")]


def test_a_duplicate_of_a_rule_that_is_broken_is_an_error_too(rules_file: WriteRules) -> None:
    path = rules_file('[[rules]]\nname = "r"\ndeny = [7]\n[[rules]]\nname = "r"\navoid = ["B"]\n')
    (first, _), (second, text) = problems(path)
    assert (first, second) == (4, 6)
    assert text == "rule 'r' is already defined at line 2 of this file"


@pytest.mark.parametrize(
    ("content", "line", "named"),
    [
        ("", None, ["version is missing", "version = 1"]),
        ("# nothing\n", None, ["version is missing"]),
        ("version = 2\n", None, ["version = 2 is not supported", "version = 1"]),
        ("version = true\n", None, ["version = True"]),
        ("version = 1.0\n", None, ["version = 1.0"]),
        ("version = 0x" + "f" * 6000, None, ["version = <int that cannot be shown>"]),
        ("version = " + "1" * 5000, None, ["not valid TOML"]),
        ("version = 1\nrules = 3\n", 2, ["[[rules]] tables"]),
        ("version = 1\nrules = [{ name = 'r' }]\n", 2, ["[[rules]] tables"]),
        ("version = 1\n\n[rules]\nname = 'r'\n", 3, ["[[rules]] tables"]),
        ("version = 1\n[[rules.when]]\n", 2, ["[[rules]] tables"]),
        ("version = 1\nbackends = 3\n", 2, ["[backends.NAME] tables"]),
        ("version = 1\n[[backends]]\nx = 1\n", 2, ["[backends.NAME] tables"]),
        ("version = 1\n[backends]\nFLASHINFER = 3\n", 3, ["backends.FLASHINFER = 3", "table"]),
        ("version = 1\n[backends.A]\nx = 1979-05-27\n", 3, ["backends.A.x = datetime.date", "strings, numbers"]),
        ("version = 1\n[backends.A]\nx = [inf]\n", 3, ["backends.A.x = [inf]"]),
        ("version = 1\n[backends.A]\nx = nan\n", 3, ["backends.A.x = nan"]),
        ("version = 1\n[backends.A]\nx = 0xfffffffffffffffff\n", 3, ["backends.A.x = "]),
        ("version = 1\n[backends.A]\nx = [[[[[[[[1]]]]]]]]\n", 3, ["backends.A.x = [[", "8 deep"]),
        ("version = 1\nrule = 1\n", 2, ["unknown key 'rule'", "rules"]),
        ("version = 1\n[[rule]]\n", 2, ["unknown key 'rule'", "rules"]),
        ("version = 1\n[backend.FLASHINFER]\n", 2, ["unknown key 'backend'", "backends"]),
        ("version = 1\nx = \n", 2, ["not valid TOML"]),
        ("version = 1\nversion = 1\n", 2, ["not valid TOML"]),
        ('version = 1\nx = """\n\n', 4, ["not valid TOML"]),
        ("version = 1\n[[rules]]\nname = 'a'\nname = 'b'\n", 4, ["not valid TOML"]),
        ("version = 1\nx = " + "[" * 5000 + "]" * 5000, None, ["nested too deeply"]),
        ("version = 1\nx = " + "{a=" * 5000, None, ["nested too deeply"]),
        ("version = 1\n" + "a." * 100 + "b.a = 1\n", 2, ["100 dots"]),
        ("version = 1\n[" + "a." * 50_000 + "a]\n", 2, ["100 dots"]),
        ("version = 1\n" + "[[rules]]\n" * 2000, None, ["2000 rules", "1000"]),
    ],
)
def test_a_broken_file(tmp_path: Path, content: str, line: int | None, named: list[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(content)
    (found,) = problems(path)
    assert found[0] == line, found
    assert all(text in found[1] for text in named), found
    assert len(found[1]) < 500
    assert found[1].isprintable()


@pytest.mark.parametrize(
    ("content", "line", "named"),
    [
        ("version = 1\n".encode("utf-16"), 1, ["not UTF-8", "0xff"]),
        ("version = 1\n".encode("utf-32-le"), 1, ["not valid TOML"]),
        ("version = 1\n# é\n".encode("latin-1"), 2, ["not UTF-8", "0xe9"]),
        ("\ufeffversion = 1\n# ".encode() + b"\xff", 2, ["not UTF-8", "0xff"]),
        (b"version = 1\n\x00", 2, ["not valid TOML"]),
        (b"version = 1\n# \x00\n", 2, ["not valid TOML"]),
        (b"version = 1\rrules = 1", 1, ["not valid TOML"]),
        (b"\x7fELF\x02\x01", 1, ["not valid TOML"]),
    ],
)
def test_a_file_in_the_wrong_encoding(tmp_path: Path, content: bytes, line: int, named: list[str]) -> None:
    path = tmp_path / "encoded.toml"
    path.write_bytes(content)
    (found,) = problems(path)
    assert found[0] == line, found
    assert all(text in found[1] for text in named), found


def test_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b'\xef\xbb\xbfversion = 1\r\n\r\n[[rules]]\r\nname = "r"\r\ndeny = ["A"]\r\n')
    (rule,) = mine(path)
    assert (rule.name, rule.line) == ("r", 3)


def test_size_is_capped(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    body = b"version = 1\n#"
    path.write_bytes(body + b"x" * ((1 << 18) - len(body)))
    assert mine(path) == []
    path.write_bytes(body + b"x" * ((1 << 18) - len(body) + 1))
    assert problems(path) == [(None, "cannot be read: is larger than 262144 bytes, the most that is read")]


@pytest.mark.parametrize(
    "content",
    [
        'version = 1\n[[rules]]\nname = "r"\ndeny = [' + ",".join(f'"B{i}"' for i in range(30_000)) + "]\n",
        "version = 1\n" + "".join(f"x{i} = 1\n" for i in range(20_000)),
        "version = 1\n" + "".join(f"[backends.B{i}]\n" for i in range(14_000)),
        'version = 1\n[[rules]]\nname = "r"\ndeny = ["A"]\nwhen = { num_heads = "' + " " * 250_000 + '" }\n',
        'version = 1\n[[rules]]\nname = "r"\ndeny = ["A"]\nwhen = { gpu = "' + "*a" * 120_000 + '" }\n',
        "version = 1\n" + "".join(f"[x{i}]\n{'a.' * 99}a = 1\n" for i in range(1200)),
    ],
    ids=["names", "keys", "tables", "blanks", "pattern", "dots"],
)
def test_the_largest_files_are_read_or_refused_in_few_words(tmp_path: Path, content: str) -> None:
    assert (1 << 17) < len(content) <= (1 << 18)
    path = tmp_path / "large.toml"
    path.write_text(content)
    error = None
    try:
        load_rules([path])
    except RulesError as caught:
        error = caught
    assert error is None or (len(str(error)) < 20_000 and len(error.problems) <= 100)


def test_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    assert problems(tmp_path) == [(None, "cannot be read: is not a regular file")]
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert problems(pipe) == [(None, "cannot be read: is not a regular file")]
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    assert "cannot be read: " in problems(tmp_path / "loop.toml")[0][1]
    (tmp_path / "dangling.toml").symlink_to("nowhere.toml")
    assert "no such file" in problems(tmp_path / "dangling.toml")[0][1]
    assert "no such file" in problems(pipe / "below-a-file.toml")[0][1]


def test_an_unreadable_file(rules_file: WriteRules, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rules_file("")

    def refuse(file: object, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("attn_select.machine.files.open", refuse, raising=False)
    with pytest.raises(RulesError) as caught:
        load_rules([path])
    assert (str(path), None, "cannot be read: Permission denied") in caught.value.problems


def test_a_path_that_cannot_exist() -> None:
    with pytest.raises(RulesError, match="null"):
        load_rules(["a\0b"])


def test_nothing_in_a_rules_file_runs(rules_file: WriteRules, tmp_path: Path) -> None:
    """Values that look like code stay text: no evaluation, no interpolation, no import, no include."""
    witness = tmp_path / "witness"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    bodies = [
        f'[[rules]]\nname = "{{{code}}}"\ndeny = ["{code}"]\nbecause = "$({code})"\n',
        f'[[rules]]\nname = "r"\ndeny = ["A"]\nwhen = {{ gpu = "{code}" }}\n',
        f'[[rules]]\nname = "r"\ndeny = ["A"]\nwhen = {{ num_heads = "{code}" }}\n',
        f'[[rules]]\nname = "r"\ndeny = ["A"]\nwhen = {{ cuda = "{code}" }}\n',
        f'[[rules]]\nname = "r"\ndeny = ["A"]\nwhen = {{ library = {{ "{code}" = "1" }} }}\n',
        f'[backends.FLASHINFER]\n"{code}" = "!!python/object/apply:os.system"\n',
        f'include = "{code}"\n',
    ]
    for body in bodies:
        with contextlib.suppress(RulesError):
            load_rules([rules_file(body)])
    assert not witness.exists()
