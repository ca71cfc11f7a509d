"""Lines of headers and keys: as many as tomllib finds, whatever stands between them."""

from __future__ import annotations

import json
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
        ("  \t[[rules]]  # [[rules]]\n", [1]),
        ("[[ rules ]]\n", [1]),
        ('[["rules"]]\n', [1]),
        ("[['rules']]\n", [1]),
        ('[["\\u0072ules"]]\n', [1]),
        ("[[\trules\t]]\n[rules.when]\n[[rules]]\n", [1, 3]),
        ("# [[rules]]\n[[rules]]\n", [2]),
        ('a = """\n[[rules]]\n"""\n[[rules]]\n', [4]),
        ("a = '''\n[[rules]]\n'''\n[[rules]]\n", [4]),
        ('a = """\\\n  [[rules]]\n  \\"""\n[[rules]]"""\n[[rules]]\n', [5]),
        ('a = """"""\n[[rules]]\n', [2]),
        ('a = """x"""""\n[[rules]]\n', [2]),
        ("a = '''x'''''\n[[rules]]\n", [2]),
        ("a = [\n[1],\n[[2]],\n]\n[[rules]]\n", [5]),
        ("a = [ # ]\n\"]\",\n']',\n]\n[[rules]]\n", [5]),
        ("a = { b = [ [ ] ] }\n[[rules]]\n", [2]),
        ('a = "#"\n[[rules]]\n', [2]),
        ("a = 'it\"s'\n[[rules]]\n", [2]),
        ("# it's\n[[rules]]\n", [2]),
        ("[[rules]]\r\nname = '''a\r\n[[rules]]'''\r\n[[rules]]\r\n", [1, 4]),
        ("[[rules.steps]]\n", []),
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

CHARACTERS = st.sampled_from(["[", "]", "{", "}", '"', "'", "#", "=", ",", ".", "\\", " ", "a", "[[rules]]"])
CONTENT = st.lists(st.one_of(CHARACTERS, st.just("\n")), max_size=12).map("".join)


def basic(content: str) -> str:
    return '"' + content.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def multiline_basic(content: str) -> str:
    """Escape only what must be: every third quote of a run, and backslashes."""
    out, run = "", 0
    for character in content.replace("\\", "\\\\"):
        run = run + 1 if character == '"' else 0
        out += '\\"' if run == 3 else character
        run %= 3
    return f'"""\n{out}"""'


def literal(content: str) -> str:
    return "'" + content.replace("'", '"').replace("\n", "") + "'"


def multiline_literal(content: str) -> str:
    while "'''" in content:
        content = content.replace("'''", "''")
    return f"'''\n{content}'''"


STRINGS = st.builds(
    lambda write, content: write(content),
    st.sampled_from([basic, multiline_basic, literal, multiline_literal]),
    CONTENT,
)
SCALARS = st.one_of(STRINGS, st.sampled_from(["1", "-2.5", "true", "inf", "1979-05-27", "07:32:00", "0x1F"]))
GAPS = st.sampled_from(["", " ", "\n", "\n\n  ", " # [[rules]]\n", " # ' \" ''' [\n"])


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    text = "["
    for item in draw(st.lists(items, max_size=4)):
        text += draw(GAPS) + item + draw(GAPS) + ","
    return text + draw(GAPS) + "]"


@st.composite
def inline_tables(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    values = draw(st.lists(items, max_size=3))
    return "{ " + ", ".join(f"k{index} = {value}" for index, value in enumerate(values)) + " }"


VALUES = st.recursive(SCALARS, lambda inner: st.one_of(arrays(inner), inline_tables(inner)), max_leaves=8)
BLANKS = st.sampled_from(["", " ", "\t", " \t "])
WORDS = {
    "rules": ["rules", '"rules"', "'rules'", '"\\u0072ules"', '"r\\U00000075les"'],
    "when": ["when", '"when"', "'when'"],
    "steps": ["steps", '"steps"'],
}


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, list[tuple[int, tuple[str, ...], bool]]]:
    """Return TOML text and its headers."""
    text = ""
    headers: list[tuple[int, tuple[str, ...], bool]] = []

    def body() -> None:
        nonlocal text
        for index, value in enumerate(draw(st.lists(VALUES, max_size=3))):
            text += draw(BLANKS) + f"key{index} = {value}" + draw(st.sampled_from(["\n", " # [[rules]]\n", "\n\n"]))

    def header(*key: str, is_array: bool) -> None:
        nonlocal text
        parts = [draw(st.sampled_from(WORDS.get(part, [part, f'"{part}"', f"'{part}'"]))) for part in key]
        between = draw(BLANKS) + "." + draw(BLANKS)
        opening, closing = ("[[", "]]") if is_array else ("[", "]")
        text += draw(BLANKS)
        headers.append((text.count("\n") + 1, key, is_array))
        text += opening + draw(BLANKS) + between.join(parts) + draw(BLANKS) + closing
        text += draw(st.sampled_from(["\n", ' # ]] [[rules]] \' """\n', "  \n\n"]))
        body()

    body()
    for index in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            header("rules", is_array=True)
            if draw(st.booleans()):
                header("rules", "when", is_array=False)
            for _ in range(draw(st.integers(0, 2))):
                header("rules", "steps", is_array=True)
        else:
            header(f"other{index}", draw(st.sampled_from(["x", "y-z"])), is_array=draw(st.booleans()))
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return text, headers


@given(documents())
def test_headers_of_generated_documents(document: tuple[str, list[tuple[int, tuple[str, ...], bool]]]) -> None:
    text, headers = document
    table = tomllib.loads(text)
    assert [tuple(header) for header in header_lines(text)] == headers
    assert len(rule_lines(text)) == len(table.get("rules", []))


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


def test_a_long_string_costs_no_more_than_its_length() -> None:
    text = 'a = """' + '\\\\ "" \'' * 60_000 + '"""\nb = [' + "[],\n" * 60_000 + "]\n[[rules]]\n"
    assert rule_lines(text) == [60_003]


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


NESTED = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.text("ab=[]{}#,\n .", max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("ab =.[#", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(as_toml, value)) + "\n]"
    return json.dumps(value)


@given(st.lists(st.dictionaries(st.text("ab =.[#", max_size=3), NESTED, max_size=4), max_size=4))
def test_no_key_is_missed_and_none_invented(tables: list[dict[str, Any]]) -> None:
    text = "".join(
        "[[t]]\n" + "".join(f"{json.dumps(key)} = {as_toml(value)}\n" for key, value in table.items())
        for table in tables
    )
    document = tomllib.loads(text)
    found = key_lines(text)
    keys = {path for path in found if isinstance(path[-1], str)}
    assert keys == set(paths_of(document))
    assert sorted(found[("t", index)] for index in range(len(tables))) == [
        number for number, line in enumerate(text.split("\n"), 1) if line == "[[t]]"
    ]
