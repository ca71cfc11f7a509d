"""Write docs/gpu-results.md from docs/results/*.jsonl, a file for each run, in the order of their names.

    python docs/results_page.py    # `make docs` does so too

The first line of a file says what the run is: `title`, `date`, `commit`, `machine`, `driver`, `versions`, `command`
(null: not noted), and `text` where there is more to say. Each other line is a row, `{"case": …, COLUMN: VALUE, …}`,
or a `note` behind the tables. Rows with another `table` than those before begin a table. A newer run replaces its
file.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "gpu-results.md"
RUN = ("title", "date", "commit", "machine", "driver", "versions", "command")
"""What the first line of each file has."""
BEGIN = """The newest figures of each subject, times in microseconds where nothing else is said. Each section is a
file of `docs/results`, which `docs/results_page.py` writes here. A command is of the tree of its commit; scripts in
`research/` and `engines/vllm/bench/compare.py` went on 2026-11-28, and `git log -- PATH` has them. CI has no GPU.
Nothing was run on Blackwell: emulated kernels and tests of signatures hold what only it can run, and upstream's own
builds of FlashAttention and FlashMLA, and SGLang's."""

Line = dict[str, Any]


def runs() -> list[tuple[Line, list[Line]]]:
    """Return the first line of each file and the lines behind it."""
    files = sorted((HERE / "results").glob("*.jsonl"), key=lambda file: file.stem)
    found = [[json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files]
    return [(first, rest) for first, *rest in found]


def page() -> str:
    """Return the document."""
    lines = ["# Results", "", *_paragraph(_releases()), *_paragraph(BEGIN)]
    for run, rest in runs():
        lines += _section(run, rest)
    return "\n".join(lines[:-1]) + "\n"


def _releases() -> str:
    """Return which torch and Triton most figures are of, and the sections of other ones."""
    minor = [{k: ".".join(v.split(".")[:2]) for k, v in run["versions"].items()} for run, _ in runs()]
    most = {name: Counter(v[name] for v in minor if name in v).most_common(1)[0][0] for name in ("torch", "triton")}
    versions = [(run["title"], v) for (run, _), v in zip(runs(), minor, strict=True)]
    others = [f"*{title}*" for title, v in versions if any(v.get(name, own) != own for name, own in most.items())]
    text = f"These figures are of torch {most['torch']} and Triton {most['triton']}"
    return f"{text}, but for the sections {', '.join(others)}." if others else f"{text}."


def _section(run: Line, lines: Sequence[Line]) -> Iterator[str]:
    yield from [f"## {run['title']}", ""]
    marks = (("", run["machine"]), ("", run["date"]), ("commit ", run["commit"]), ("driver ", run["driver"]))
    facts = [mark + value for mark, value in marks if value]
    facts += [f"{name} {version}" for name, version in run["versions"].items()]
    text = f"{run['text']} " if "text" in run else ""
    command = f" The command: `{run['command']}`" if run["command"] else ""
    yield from _paragraph(f"{text}{', '.join(facts)}.{command}")
    tables: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if "note" not in line:
            tables[line.get("table", "case")].append(line)
    for first, rows in tables.items():
        columns = dict.fromkeys(key for row in rows for key in row if key not in ("case", "table"))
        yield f"| {' | '.join([first, *columns])} |"
        yield f"|{' --- |' * (len(columns) + 1)}"
        yield from (f"| {' | '.join(str(row.get(key, '')) for key in ('case', *columns))} |" for row in rows)
        yield ""
    for line in lines:
        yield from _paragraph(line.get("note", ""))


def _paragraph(text: str) -> list[str]:
    """Return wrapped lines and an empty one; nothing of an empty text."""
    before, mark, command = text.partition("The command: ")
    lines = textwrap.wrap(before + mark.rstrip(), 100, break_on_hyphens=False, break_long_words=False)
    return [*lines, *([command] if command else []), ""] if text else []


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
