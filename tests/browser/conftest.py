"""A headless Chromium, pages with everything that they said or asked for, and what axe says of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="`make test-browser` installs it")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

PATIENCE = 600_000.0
"""Milliseconds after which nothing comes any more. Pages take long on a busy machine, and no test says how long."""
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "no chromium: `apt-get install chromium`, or name it in CHROMIUM"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=PATIENCE)
        yield started
        started.close()


class Visit:
    """A page that was opened, with everything that it said or asked for."""

    def __init__(self, browser: Browser, address: str, width: int = 1024, colours: Any = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
        self.context.set_default_timeout(PATIENCE)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="session")
def serious() -> Callable[[Page], list[str]]:
    """Return what gives axe's serious and critical findings on a page."""

    def found(page: Page) -> list[str]:
        violations = Axe().run(page).response["violations"]
        return [json.dumps(each)[:500] for each in violations if each["impact"] in ("serious", "critical")]

    return found


@pytest.fixture(scope="session")
def open_page(browser: Browser) -> Any:
    """Return ``open_page(address, width, colours)``, a ``Visit``; a path is a file's address."""

    def opened(address: str | Path, width: int = 1024, colours: str = "light") -> Visit:
        return Visit(browser, address.as_uri() if isinstance(address, Path) else address, width, colours)

    return opened
