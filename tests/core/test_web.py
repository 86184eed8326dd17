from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.svg import Chart, Series
from shoal.core.web import NavigationLink, WebSite, asset, render
from shoal.core.web.site import number, seconds, size

ASSETS = Path("src/shoal/core/web/assets")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    root = tmp_path / "pages_of_a_test"
    (root / "templates").mkdir(parents=True)
    (root / "assets").mkdir()
    (root / "__init__.py").write_text("")
    (root / "templates" / "hello.html").write_text(
        '{% extends "base.html" %}{% block title %}Hello{% endblock %}'
        '{% block main %}<h1 title="{{ name }}">{{ name }}</h1>{% endblock %}'
    )
    (root / "templates" / "chart.html").write_text("{{ chart | draw }}")
    (root / "assets" / "own.css").write_text("b{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "pages_of_a_test"


def test_a_page_extends_the_base_and_escapes_every_value(package: str) -> None:
    page = render("hello.html", package=package, name="<script>alert('\"x\"')</script>")
    assert "<title>Hello</title>" in page
    assert "&lt;script&gt;" in page
    assert "<script>alert" not in page
    assert '"x"' not in page  # not even inside an attribute


def test_the_base_page_has_what_everybody_needs(package: str) -> None:
    page = render("hello.html", package=package, name="x")
    assert '<html lang="en">' in page
    assert '<a class="skip" href="#main">' in page
    assert '<main id="main"' in page
    assert '<nav aria-label="Main">' in page
    assert "data-theme-toggle hidden" in page  # no dead button without scripts


def test_navigation_marks_the_page_one_is_on(package: str) -> None:
    site = WebSite(
        package,
        assets="/assets/",
        nav=(NavigationLink("A & B", "/a"), NavigationLink("C", "/c")),
        home="/",
    )
    page = site.render("hello.html", name="x", here="/c")
    assert '<a href="/a">A &amp; B</a>' in page
    assert '<a href="/c" aria-current="page">C</a>' in page
    assert 'href="/assets/style.css"' in page
    assert '<a class="brand" href="/">' in page


def test_nothing_is_fetched_from_elsewhere(package: str) -> None:
    page = render("hello.html", package=package, name="x")
    texts = [page, *(path.read_text() for path in ASSETS.iterdir())]
    for text in texts:
        outside = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\"' )]*", text))
        assert outside <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in (ASSETS / "style.css").read_text()
    assert "url(" not in (ASSETS / "style.css").read_text()


def test_a_chart_is_drawn_and_its_texts_are_escaped(package: str) -> None:
    chart = Chart(title="<b>t</b>", x_label="x", y_label="y", series=[Series("a", [0, 1], [1, 2])])
    assert "&lt;b&gt;" in render("chart.html", package=package, chart=chart)
    assert render("chart.html", package=package, chart=[chart, chart]).count("<svg") == 2


def test_badges_tell_by_sign_and_word() -> None:
    from shoal.core.web.site import _site

    badge = _site(None)._environment.get_template("macros.html").module.badge  # type: ignore[attr-defined]
    names = (
        "works",
        "modelled",
        "falls_short",
        "noisy",
        "planned",
        "skipped",
        "edited",
        "outdated",
        "unreadable",
    )
    signs = {re.search(r'hidden="true">(.)<', str(badge(name))).group(1) for name in names}  # type: ignore[union-attr]
    assert len(signs) == len(names)
    assert "falls short" in badge("falls_short")


def test_assets_of_packages_are_layered(package: str) -> None:
    site = WebSite(package)
    assert site.asset("own.css") == b"b{}"
    assert site.asset("style.css") == asset("style.css")
    assert {"own.css", "style.css", "theme.js", "favicon.svg"} <= set(site.assets())
    assert site.media_type("own.css").startswith("text/css")
    assert site.media_type("a.bin") == "application/octet-stream"


@pytest.mark.parametrize(
    "name", ["../templates/base.html", "/etc/passwd", "", "..", "a/../style.css", "style", ".css"]
)
def test_only_plain_names_of_assets_are_read(name: str) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        asset(name)


def test_bad_templates_values_and_packages(package: str) -> None:
    with pytest.raises(ConfigError, match=r"base\.html"):
        render("nothing.html")
    with pytest.raises(ConfigError, match="'name' is undefined"):
        render("hello.html", package=package)
    with pytest.raises(ConfigError, match="importable package"):
        WebSite("shoal_has_no_such_package")


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.0, "1,234"), (0.0123456, "0.01235"), (12345.6, "12,346"), (None, "–"), (3, "3")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text
    assert number(float("nan")) == "nan"


def test_durations_and_sizes() -> None:
    assert [seconds(v) for v in (0.0032, 41.0, 600.0, 7500.0, 200000.0, None)] == [
        "3.2 ms",
        "41 s",
        "10 min",
        "2 h 05 min",
        "2 d 7 h",
        "–",
    ]
    assert [size(v) for v in (812, 1.5e9, 2**45, None)] == [
        "812 B",
        "1.50 GB",
        "35.2 TB",
        "–",
    ]


def test_the_base_page_is_well_formed(package: str) -> None:
    open_tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link", "br", "input", "path", "circle"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert tag in ("path", "circle") or open_tags.pop() == tag

    Parser().feed(render("hello.html", package=package, name="x"))
    assert open_tags == []


def test_it_needs_no_torch() -> None:
    code = "import sys, shoal.core.web; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
