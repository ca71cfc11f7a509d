"""Lines of headers and keys: as many as tomllib finds, whatever stands between them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.rules.lines import header_lines, key_lines

RULES = ("rules",)


def rule_lines(text: str) -> list[int]:
    return [header.line for header in header_lines(text) if header.is_array and header.key == RULES]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("[[rules]]", [1]),
        ("\n\n[[rules]]\n", [3]),
        ("[[ rules ]]\n", [1]),
        ('[["rules"]]\n', [1]),
        ('[["\\u0072ules"]]\n', [1]),
        ("[[\trules\t]]\n[rules.when]\n[[rules]]\n", [1, 3]),
        ('a = """\n[[rules]]\n"""\n[[rules]]\n', [4]),
        ('a = """\\\n  [[rules]]\n  \\"""\n[[rules]]"""\n[[rules]]\n', [5]),
        ('a = """"""\n[[rules]]\n', [2]),
        ("a = [\n[1],\n[[2]],\n]\n[[rules]]\n", [5]),
        ("a = [ # ]\n\"]\",\n']',\n]\n[[rules]]\n", [5]),
        ("a = { b = [ [ ] ] }\n[[rules]]\n", [2]),
        ('a = "#"\n[[rules]]\n', [2]),
        ("a = 'it\"s'\n[[rules]]\n", [2]),
        ("[[rules]]\r\nname = '''a\r\n[[rules]]'''\r\n[[rules]]\r\n", [1, 4]),
        ("[[other]]\n[[rules]]\n[[other]]\n", [2]),
        ('[["ru les"]]\n[["rules "]]\n[[rules]]\n', [3]),
        ('[["rules]]"]]\n[[rules]]\n', [2]),
        ('[rule."[[rules]]"]\n', []),
    ],
)
def test_lines_of_rules(text: str, lines: list[int]) -> None:
    tomllib.loads(text)
    assert rule_lines(text) == lines


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[a.b-c._1]", ("a", "b-c", "_1")),
        ('[ a . \'b.c\' . "d\\"]" ] # x', ("a", "b.c", 'd"]')),
        ('["#"]', ("#",)),
        ("['']", ("",)),
    ],
)
def test_keys(text: str, key: tuple[str, ...]) -> None:
    (header,) = header_lines(text)
    assert (header.line, header.key, header.is_array) == (1, key, False)


# Valid TOML from scratch. Each strategy yields text that tomllib must accept; headers are known because we wrote them.


SOUP = [
    *(
        "[[rules]]\n",
        "\n[[rules]]",
        '[["rules"]]\r\n',
        "[rules.when]\n",
        "[[b.c]]\n",
        "\n",
        " ",
        "# ' \"\n",
        "a = ",
        "b = ",
    ),
    *('"', "'", '"""', "'''", "[", "]", "{", "}", ",", "\\", "1", "1\n"),
]


@given(st.lists(st.sampled_from(SOUP), max_size=12).map("".join))
def test_whatever_tomllib_accepts_has_as_many_headers_as_tables(text: str) -> None:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    tables = table.get("rules")
    assert len(rule_lines(text)) == (len(tables) if isinstance(tables, list) else 0)
    for header in header_lines(text):
        assert text.split("\n")[header.line - 1].lstrip().startswith("[")


# --- Keys ---


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every key of a document, below its tables; members of arrays that are no tables have none."""
    found: list[tuple[str | int, ...]] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += [(*path, key), *paths_of(inner, (*path, key))]
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += paths_of(inner, (*path, index))
    return found


KEYS = """version = 1  # [not.a.table]

[[rules]]
name = "a = 1"
when = { mla = true, "num heads" = 3, gpu = [
  "h100", # = no key
  { deep = [[{ er = 1 }]] },
] }

[[rules]]
name = '''
when = 3
[no.header]
'''
"when".'sliding_window' = 1
[rules.when.library]
torch = "1"
[[rules.list]]
one = 1
[[rules.list]]
two.three = 2

[ backends . "X" ]
a = {}
b . c = "="
"""


def test_the_line_of_every_key() -> None:
    found = key_lines(KEYS)
    lines = KEYS.splitlines()
    for path in paths_of(tomllib.loads(KEYS)):
        last = next(part for part in reversed(path) if isinstance(part, str))
        assert last in lines[found[path] - 1], path
    assert found["rules", 0] == 3
    assert found["rules", 0, "when", "gpu", 1, "deep", 0, 0, "er"] == 7
    assert found["rules", 1, "when", "sliding_window"] == 15
    assert found["rules", 1, "list", 1, "two", "three"] == 21
