"""The gallery in a real Chromium, from the file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import chromium
from shoal.claims.gallery import write_gallery

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    page = write_gallery(Path("results"), tmp_path_factory.mktemp("site") / "gallery")
    return page.parent.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as result:
        yield result


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith("file:") or wrong.append(request.url),
    )
    yield page
    context.close()
    assert wrong == []


def _shown(page: Any) -> int:
    return int(page.locator("li.paper:visible").count())


def test_search_filters_and_order(page: Any, site: str) -> None:
    page.goto(f"{site}/index.html")
    assert _shown(page) == 146
    page.get_by_label("Search", exact=True).fill("gossip network")
    result = page.get_by_role("status")
    shown = _shown(page)
    assert 0 < shown < 10
    assert result.inner_text() == f"{shown} of 146 papers"
    page.get_by_label("Search", exact=True).fill("no paper says this")
    assert _shown(page) == 0
    assert page.get_by_text("No paper fits.").is_visible()
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelectorAll('li.paper[hidden]').length === 0")
    page.get_by_label("Room", exact=True).select_option("serve")
    page.get_by_label("Status", exact=True).select_option("planned")
    page.get_by_label("Sort", exact=True).select_option("year")
    years = page.locator("li.paper:visible").evaluate_all("all => all.map(a => a.dataset.year)")
    assert 0 < len(years) < 146
    assert years == sorted(years, reverse=True)
    # The address holds the view.
    address = page.url
    assert "room=serve" in address
    page.goto("about:blank")
    page.goto(address)
    assert _shown(page) == len(years)
    assert page.get_by_label("Room", exact=True).input_value() == "serve"


def test_counts_filter_in_place_and_lead_on_where_there_is_none(page: Any, site: str) -> None:
    page.goto(f"{site}/index.html")
    page.locator(".tally a", has_text="works").click()
    assert page.url.endswith("#status=works")
    assert _shown(page) >= 1
    page.locator("li.paper:visible h3 a").first.press("Enter")
    page.get_by_role("heading", name="Every sample").wait_for()  # the page may still be coming
    page.go_back()
    assert page.get_by_label("Status", exact=True).input_value() == "works"


def test_the_theme_is_kept_from_page_to_page(page: Any, site: str) -> None:
    page.goto(f"{site}/index.html")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    toggle = page.get_by_role("button", name="Theme")
    toggle.click()
    toggle.click()
    assert toggle.inner_text() == "Theme: dark"
    dark = page.evaluate(paper)
    assert dark != light
    page.goto(f"{site}/paper-48.html")
    assert page.evaluate(paper) == dark
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Theme").click()  # back to the system's
    assert page.evaluate(paper) == dark


def test_a_keyboard_reaches_the_content_first(page: Any, site: str) -> None:
    page.goto(f"{site}/index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.parametrize("name", ["index", "paper-48", "paper-77", "paper-12", "status-noisy"])
def test_nothing_sticks_out_of_a_phone(page: Any, site: str, name: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(f"{site}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_without_scripts_the_list_is_whole(browser: Any, site: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/index.html")
    assert _shown(page) == 146
    assert not page.get_by_label("Search", exact=True).is_visible()
    assert not page.get_by_role("button", name="Theme").is_visible()
    page.locator(".tally a", has_text="falls short").click()
    assert page.url.endswith("status-falls-short.html")
    context.close()
