"""One rules file: what is accepted, and one clear message with file and line for all that is not."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"name": 3},
        {"name": "a\x1b[31m"},
        {"name": "x" * 101},
        {"name": "r"},
        {"name": "r", "prefer": ["A"], "deny": ["B"]},
        {"name": "r", "prefers": ["A"]},
        {"name": "r", "prefer": "A"},
        {"name": "r", "prefer": ["A", 3]},
        {"name": "r", "prefer": ["A\x07"]},
        {"name": "r", "prefer": ["A", "B", "A "]},
        {"name": "r", "prefer": ["A"], "phase": "both"},
        {"name": "r", "prefer": ["A"], "because": 3},
        {"name": "r", "prefer": ["A"], "enabled": "no"},
        {"name": "r", "prefer": ["A"], "when": {"num_head": 3}},
    ],
)
def test_a_rule_that_breaks_the_format(
    table: dict[str, Any],
) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rule(table, file="f", line=1, layer=0)
    assert str(caught.value).isprintable()


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


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", None),
        ("version = 2\n", None),
        ("version = " + "1" * 5000, None),
        ("version = 1\nrules = 3\n", 2),
        ("version = 1\n\n[rules]\nname = 'r'\n", 3),
        ("version = 1\nbackends = 3\n", 2),
        ("version = 1\n[[backends]]\nx = 1\n", 2),
        ("version = 1\n[backends]\nFLASHINFER = 3\n", 3),
        ("version = 1\n[backends.A]\nx = 1979-05-27\n", 3),
        ("version = 1\n[backends.A]\nx = nan\n", 3),
        ("version = 1\n[backends.A]\nx = [[[[[[[[1]]]]]]]]\n", 3),
        ("version = 1\nrule = 1\n", 2),
        ("version = 1\n[backend.FLASHINFER]\n", 2),
        ("version = 1\nversion = 1\n", 2),
        ('version = 1\nx = """\n\n', 4),
        ("version = 1\nx = " + "[" * 5000 + "]" * 5000, None),
        ("version = 1\n" + "a." * 100 + "b.a = 1\n", 2),
        ("version = 1\n" + "[[rules]]\n" * 2000, None),
    ],
)
def test_a_broken_file(
    tmp_path: Path,
    content: str,
    line: int | None,
) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(content)
    (found,) = problems(path)
    assert found[0] == line, found
    assert len(found[1]) < 500
    assert found[1].isprintable()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("version = 1\n".encode("utf-16"), 1),
        ("version = 1\n# é\n".encode("latin-1"), 2),
        (b"version = 1\n# \x00\n", 2),
        (b"version = 1\rrules = 1", 1),
        (b"\x7fELF\x02\x01", 1),
    ],
)
def test_a_file_in_the_wrong_encoding(
    tmp_path: Path,
    content: bytes,
    line: int,
) -> None:
    path = tmp_path / "encoded.toml"
    path.write_bytes(content)
    (found,) = problems(path)
    assert found[0] == line, found


def test_size_is_capped(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    body = b"version = 1\n#"
    path.write_bytes(body + b"x" * ((1 << 18) - len(body)))
    assert mine(path) == []
    path.write_bytes(body + b"x" * ((1 << 18) - len(body) + 1))
    assert problems(path) == [(None, "cannot be read: is larger than 262144 bytes, the most that is read")]


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
