"""Links and paths in the documentation lead somewhere, and its words keep the house's manner."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, ROOT, prose

from shoal.claims.gallery.publish import gallery_names

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} (.+?)(?: \{#([\w-]+)\})?$", re.M)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@functools.cache
def gallery() -> frozenset[str]:
    """What docs/hooks.py writes into the site."""
    return frozenset(gallery_names(ROOT / "results"))


def _slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())


@functools.cache
def _anchors(page: Path) -> frozenset[str]:
    return frozenset(anchor or _slug(title) for title, anchor in HEADING.findall(prose(page)))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", prose(page))) + LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if place.parent == DOCS / "gallery":
            assert place.name in gallery(), f"{target}: the gallery has no such page"
            continue
        assert place.exists(), f"{target}: no such file"
        if DOCS in page.parents:
            assert DOCS in place.parents, f"{target}: outside of docs/, so the site lacks it"
        if anchor and place.suffix == ".md":
            assert anchor in _anchors(place), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:src|scripts|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{name} is named and does not exist"
    for name in re.findall(r"`((?:core|ir|machine|cost|plan|train|claims)/[\w/]+\.py)`", text):
        assert (ROOT / "src" / "shoal" / name).exists(), f"{name} is named and does not exist"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_manner_of_the_house(page: Path) -> None:
    text = CODE.sub("", prose(page))
    named = text.replace("Hogwild!", "Hogwild")  # a paper is called so
    assert not re.search(r"\w!(\s|$)", named), "an exclamation mark"
    match = re.search(r"\b(TODO|FIXME|TBD|XXX|lorem)\b", text)
    assert not match, f"unfinished: {match}"
