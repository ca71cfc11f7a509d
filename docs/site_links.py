"""Links of the site: those to files outside of ``docs`` become plain text, since the site has no copy of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of one page. The overview is the README, whose links begin at the root."""
    overview = page.file.src_uri == "index.md"
    folder = ROOT if overview else (ROOT / "docs" / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        file = (folder / target).resolve()
        if not file.is_relative_to(ROOT / "docs"):
            return match.group() if not file.exists() else f"`{text}`"
        shown = str(file.relative_to(ROOT / "docs")) if overview else target
        return f"{image}[{text}]({shown}{anchor or ''})"

    return _LINK.sub(link, markdown)
