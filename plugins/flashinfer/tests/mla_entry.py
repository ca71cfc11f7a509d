"""Write a table of the README: every argument of FlashInfer's MLA entry, who uses it, or why nobody does.

python plugins/flashinfer/tests/mla_entry.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "README.md"
MARKS = ("<!-- mla_entry.py writes what follows -->", "<!-- up to here -->")
USERS = ("trtllm-gen", "cute-dsl", "xqa", "sparse")
"""What stands behind the entry: ``FLASHINFER_MLA`` has the first and the third, ``FLASHINFER_MLA_CUTE_DSL`` the second,
``FLASHINFER_MLA_SPARSE`` the last (trtllm-gen on 10.x, FlashInfer's own kernel on 12.x)."""


def arguments() -> dict[str, dict[str, str]]:
    """Return what is known of each argument."""
    found: dict[str, dict[str, str]] = tomllib.loads((HERE / "mla_entry.toml").read_text("utf-8"))["arguments"]
    return found


def users(entry: dict[str, str]) -> set[str]:
    """Return which of ``USERS`` pass an argument."""
    used = entry.get("used", "")
    return set(USERS) if used == "all" else {each for each in used.split(", ") if each}


def table() -> str:
    """Return what stands between ``MARKS``."""
    rows = []
    for name, entry in arguments().items():
        used = entry.get("used", "nobody")
        option = f"`{entry['option']}`" if "option" in entry else ""
        how = entry.get("how", entry.get("unused", ""))
        rows.append(f"| `{name}` | {entry.get('since', '')} | {used} | {option} | {how} |")
    head = ["| argument | since | passed by | option | how, or why not |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(["", "", *head, *rows, "", ""])


def page() -> str:
    """Return the README with the table as it should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    return "".join([before, MARKS[0], table(), MARKS[1], rest.partition(MARKS[1])[2]])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
