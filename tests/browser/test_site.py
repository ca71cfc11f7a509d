"""The site that ``make site`` built, served from this machine: its pages, and its search, ask for nothing elsewhere."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[2] / "build" / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert (SITE / "index.html").is_file(), "`make test-browser` builds the site first"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("index.html", "attn-select explain --model"),
        ("tutorials/author.html", "as without a cache"),
        ("reference/python.html", "Pick the backend (or the prefill and decode pair) for one attention layer"),
        ("reference/backends.html", "compute_capabilities"),
        ("reference/rules-schema.html", "additionalProperties"),
    ],
)
def test_a_page_opens(open_page: Any, address: str, page: str, said: str) -> None:
    visit = open_page(address + page)
    assert said in visit.page.locator("article").inner_text()
    assert all(url.startswith(address) for url in visit.requests)
    assert visit.complaints == []
    visit.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize(
    "page",
    [
        "index.html",
        "runtime.html",
        "reference/cli.html",
    ],
)
def test_a_page_is_accessible(open_page: Any, serious: Any, address: str, page: str, colours: str) -> None:
    visit = open_page(address + page, colours=colours)
    if page.startswith("reference/"):  # axe takes a minute for the whole, and the rest looks like its first part
        rest = "article h2 ~ h2 ~ *, .doc-module ~ .doc-module"
        visit.page.evaluate("rest => document.querySelectorAll(rest).forEach(each => each.remove())", rest)
        assert visit.page.locator("article table").count() > 0
    assert serious(visit.page) == []
    visit.close()


def test_the_search_finds_what_is_on_a_page(open_page: Any, address: str) -> None:
    visit = open_page(address + "index.html")
    visit.page.locator("input[name=query]").click()
    visit.page.locator("input[name=query]").press_sequentially("clear_row")
    found = visit.page.locator(".md-search-result__link", has_text="clear_row")
    found.first.click()
    visit.page.wait_for_url("**?h=*")
    assert "clear_row" in visit.page.locator("article").inner_text()
    assert all(url.startswith((address, "blob:", "data:")) for url in visit.requests)
    visit.close()
