"""The page of ``attn-select report`` in a headless Chromium. ``make test-browser`` runs this, and nothing skips it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="`make test-browser` installs it")

MODELS = ("llama-3-8b", "gpt-oss-20b", "deepseek-v3", "bert-base")
GPUS = ("a100", "h200", "b200")
WIDTHS = (375, 1600)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    asked = [word for name in MODELS for word in ("--model", name)] + [word for gpu in GPUS for word in ("--gpu", gpu)]
    command = [sys.executable, "-m", "attn_select", "report", *asked, "--workload", "chat", "--output", str(path)]
    subprocess.run(command, check=True, cwd=path.parent)
    return path


@pytest.fixture
def visit(open_page: Any, report: Path) -> Iterator[Any]:
    opened = open_page(report)
    yield opened
    assert opened.complaints == []
    assert opened.requests == [opened.requests[0]]
    opened.close()


def test_every_cell_opens(visit: Any) -> None:
    buttons = visit.page.locator("[data-cell]")
    assert buttons.count() == len(GPUS) * (len(MODELS) + 1)  # gpt-oss has two kinds of layers
    for index in range(buttons.count()):
        button = buttons.nth(index)
        title, names = button.get_attribute("data-cell"), button.get_attribute("data-backends")
        button.click()
        dialog = visit.page.locator("dialog[open]")
        dialog.locator(".candidates").first.wait_for()
        assert dialog.locator("h2").inner_text() == title
        text = dialog.inner_text()
        for name in (names or "").split():
            assert name in text
        assert "Rules applied" in text
        visit.page.keyboard.press("Escape")
        assert visit.page.locator("dialog[open]").count() == 0


def test_the_keyboard_alone(visit: Any) -> None:
    visit.page.locator("#filter-backend").focus()
    for _ in range(2):  # the scrolled region, then the first cell
        visit.page.keyboard.press("Tab")
    focused = visit.page.evaluate("document.activeElement.dataset.cell")
    assert focused == "llama-3-8b on a100"
    visit.page.keyboard.press("Enter")
    visit.page.locator("dialog[open] .candidates").first.wait_for()
    visit.page.keyboard.press("Escape")
    assert visit.page.evaluate("document.activeElement.dataset.cell") == focused


def test_filters(visit: Any) -> None:
    page = visit.page
    page.fill("#filter-model", "gpt")
    assert page.locator("[data-cell]:visible").count() == 2 * len(GPUS)
    page.fill("#filter-gpu", "h2")
    assert page.locator("[data-cell]:visible").count() == 2
    assert page.locator("#shown").inner_text() == "2 of 15 cells"
    page.fill("#filter-model", "")
    page.select_option("#filter-backend", "FLASHINFER_MLA")
    shown = page.locator("[data-cell]:visible")
    assert shown.count() == 1
    assert "FLASHINFER_MLA" in shown.first.inner_text()
    page.fill("#filter-model", "no such model")
    assert page.locator("[data-cell]:visible").count() == 0


def test_a_link_opens_a_cell(open_page: Any, report: Path) -> None:
    first = open_page(report)
    first.page.locator("[data-cell='deepseek-v3 on b200']").click()
    first.page.locator("dialog[open] .candidates").first.wait_for()
    address = first.page.url
    first.page.goto("about:blank")
    first.page.goto(address)
    assert first.page.locator("dialog[open] h2").inner_text() == "deepseek-v3 on b200"
    first.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_is_accessible(
    open_page: Any, serious: Any, report: Path, width: int, colours: str, tmp_path: Path
) -> None:
    visit = open_page(report, width, colours)
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"report-{width}-{colours}.png")
    problems = serious(page)
    page.locator("[data-cell='gpt-oss-20b on h200']").first.click()
    page.locator("dialog[open] .candidates").first.wait_for()
    assert page.evaluate("document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth")
    page.screenshot(path=folder / f"report-{width}-{colours}-cell.png")
    assert problems + serious(page) == []
    assert visit.complaints == []
    visit.close()


def test_it_prints(visit: Any, tmp_path: Path) -> None:
    visit.page.emulate_media(media="print")
    assert not visit.page.locator(".filters").is_visible()
    assert visit.page.locator(".matrix").is_visible()
    rows = visit.page.locator(".matrix tr").evaluate_all("all => all.map(each => getComputedStyle(each).breakInside)")
    assert set(rows) == {"avoid"}, "a row may be torn apart"
    visit.page.pdf(path=tmp_path / "report.pdf", format="A4", landscape=True)
    assert (tmp_path / "report.pdf").stat().st_size > 10_000
