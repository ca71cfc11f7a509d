"""Line numbers of a TOML file's headers.

Neither tomllib nor tomlkit gives line numbers. Headers stand at the start of a line, outside strings and arrays,
so one pass over strings, comments and brackets finds them all.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'  # multi-line basic string
    r"|'''.*?'{3,5}"  # multi-line literal string
    r'|"(?:[^"\\\n]|\\.)*"'  # basic string
    r"|'[^'\n]*'"  # literal string
    r"|#[^\n]*"  # comment
    r"|[\[\]{}\n]",
    re.DOTALL,
)


def header_lines(text: str) -> list[tuple[int, str]]:
    """Return ``(line number from 1, header with its brackets)`` for every table header of valid TOML text.

    The header's inner text is returned without white space and quotes: ``[[ "rules" ]]`` gives ``[[rules]]``.
    """
    headers: list[tuple[int, str]] = []
    line, depth, line_start = 1, 0, 0
    skip_to = 0
    for token in _TOKEN.finditer(text):
        kind = token.group()
        if token.start() < skip_to:
            pass  # inside a header already taken whole
        elif kind == "[" and depth == 0 and not text[line_start : token.start()].strip():
            end = text.find("\n", token.start())
            end = len(text) if end < 0 else end
            headers.append((line, _normalise(text[token.start() : end])))
            skip_to = end
        elif kind in "[{":
            depth += 1
        elif kind in "]}":
            depth -= 1
        if "\n" in kind:
            line += kind.count("\n")
            line_start = token.end()
    return headers


def _normalise(header: str) -> str:
    inner = re.match(r"""\[\[?(?:\s|[^\]"'#]|"[^"]*"|'[^']*')*\]?\]""", header)
    return re.sub(r"""[\s"']""", "", inner.group() if inner else header)
