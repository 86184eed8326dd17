"""What the documentation says that Shoal does not do is listed and true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from absences import ABSENCES, Absence
from docs_pages import DOCS, PAGES, ROOT, prose

# Written by scripts from results, docstrings or environments, or a record of the past.
LEFT_OUT = {
    "CHANGELOG.md", "docs/journal.md", "docs/licenses.md", "docs/scoreboard.md",
    "docs/how-wrong-are-we.md",
}  # fmt: skip
FOLDERS = (DOCS / "results", DOCS / "decisions", DOCS / "reference")
PATTERN = re.compile(
    r"\b(?:not|no|nothing|nobody|none|never|cannot)\b[^.;|]*\byet\b"
    r"|\b(?:is|are) not (?:supported|implemented|built)\b|\bnot been run\b",
    re.IGNORECASE,
)
_GENERATED = re.compile(r"<!-- (map|results|promises|predictors) -->.*?<!-- /\1 -->", re.S)
_SENTENCE = re.compile(r"(?<=[.;])\s|\s\|\s|:\s")


def flat(text: str) -> str:
    """Text without emphasis and line breaks."""
    return " ".join(text.replace("**", "").split())


def pages() -> list[Path]:
    extra = ROOT / "deploy" / "README.md"
    return [
        page
        for page in (*PAGES, extra)
        if page.relative_to(ROOT).as_posix() not in LEFT_OUT
        and not any(folder in page.parents for folder in FOLDERS)
    ]


def sentences(page: Path) -> list[str]:
    text = _GENERATED.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"^([ \t]*)```.*?^\1```\s*$", "", text, flags=re.M | re.S)
    return [flat(one) for block in text.split("\n\n") for one in _SENTENCE.split(flat(block))]


def found(page: Path) -> list[str]:
    return [one for one in sentences(page) if PATTERN.search(one)]


@pytest.mark.parametrize("absence", ABSENCES, ids=lambda one: f"{one.page}: {one.text[:40]}")
def test_an_absence_is_documented_and_true(absence: Absence) -> None:
    assert flat(absence.text) in flat((ROOT / absence.page).read_text(encoding="utf-8"))
    assert absence.holds(), f"{absence.page} says {absence.text!r}, and it is not so any more"


def test_every_documented_absence_is_listed() -> None:
    listed: dict[str, list[str]] = {}
    for one in ABSENCES:
        listed.setdefault(one.page, []).append(flat(one.text))
    missing = [
        f"{name}: {sentence}"
        for page in pages()
        for name in [page.relative_to(ROOT).as_posix()]
        for sentence in found(page)
        if not any(
            text in sentence or sentence.rstrip(".;:") in text for text in listed.get(name, [])
        )
    ]
    assert not missing, "\n".join(
        ["add to tests/docs/absences.py with a check, or say what is there:", *missing]
    )


def test_the_pattern_finds_absences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Serving has no adapters and no speculative decoding yet. It is fast.\n\n"
        "- **FP8 is not\n  supported** here; all else is.\n\n| nobody has tried it yet | 1 |\n\n"
        "```text\nnot yet\n```\n\nYet it is not slow.\n"
    )
    assert found(page) == [
        "Serving has no adapters and no speculative decoding yet.",
        "- FP8 is not supported here;",
        "| nobody has tried it yet",
    ]
    assert prose(page)  # the block is left out of both
