"""What the native functions count, held against the same in Python, character by character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.fields.data.filters import reference, statistics
from shoal.fields.data.filters.statistics import COUNTS, REPEATS, columns_of

PIECES = [
    *(
        "the",
        "of",
        "and",
        "be",
        "word",
        "naïve",
        "Straße",
        "中文",
        "a1",
        "#",
        "##",
        "...",
        "…",
        "•",
    ),
    *("-", "- item", "{", "}", "[1]", "[edit]", "[citation needed]", "[12", "JavaScript", "lorem"),
    *("Lorem Ipsum", "terms of use", "Use Cookies", ".", "?", "!", '."', "?)", "”", "。", "3.14"),
    *(" ", "  ", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "\u2028", "\x85", "\xa0", "\x1c", "\u3000"),
    *("same words again and again", "same words again and again\n", "\U0001f600", "\U000e0100"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=60).map("".join)
RULES = (3, 20, 2, 1, 1, 1, 1, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The library, so that no drawn test waits for its compiler."""
    statistics.describe(columns_of(arrow(["text"])))


def arrow(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), brief=st.integers(-1, 40))
def test_counts(texts: list[str], brief: int) -> None:
    rows = statistics.describe(columns_of(arrow(texts)), brief)
    for text, row in zip(texts, rows.tolist(), strict=True):
        assert dict(zip(COUNTS, row, strict=True)) == dict(
            zip(COUNTS, reference.describe(text, brief), strict=True)
        )


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_repeats(texts: list[str]) -> None:
    for text, row in zip(texts, statistics.repeats(columns_of(arrow(texts))).tolist(), strict=True):
        assert dict(zip(REPEATS, row, strict=True)) == dict(
            zip(REPEATS, reference.repeats(text), strict=True)
        )


@settings(deadline=None)
@given(words=st.lists(st.sampled_from("abcd"), max_size=80))
def test_repeats_of_few_words(words: list[str]) -> None:
    """Sequences that are repeated in many ways, where numbers of n-grams build on each other."""
    text = " ".join(words)
    assert statistics.repeats(columns_of(arrow([text])))[0].tolist() == reference.repeats(text)


@settings(deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    switches=st.lists(st.integers(0, 1), min_size=6, max_size=6),
)
def test_c4(texts: list[str], switches: list[int]) -> None:
    rules = (*RULES[:3], *switches)
    verdicts, left, dropped = statistics.c4(columns_of(arrow(texts)), rules)
    expected = [reference.c4(text, rules) for text in texts]
    assert verdicts.tolist() == [one[0] for one in expected]
    assert left.to_pylist() == [one[1] if one[0] < 0 else "" for one in expected]
    assert dropped.tolist() == np.sum([one[2] for one in expected], axis=0).tolist()
    left.validate(full=True)


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), others=st.lists(TEXTS, max_size=3))
def test_words_in_a_row(texts: list[str], others: list[str]) -> None:
    n = 2
    hashes = statistics.gram_hashes(columns_of(arrow(texts)), n)
    grams = [gram for text in texts for gram in reference.grams_of(text, n)]
    assert len(hashes) == len(grams)
    found = statistics.contains(columns_of(arrow(others)), n, statistics.hash_table(hashes))
    for text, may in zip(others, found.tolist(), strict=True):
        shares = not set(grams).isdisjoint(reference.grams_of(text, n))
        # Characters beyond ASCII may share a hash; such documents are compared word by word.
        assert may >= shares
        assert may == shares or not "".join([text, *texts]).isascii()


def test_rows_that_are_out_and_slices() -> None:
    texts = arrow(["not this", "the end of it and so on", "nor this", "the end"]).slice(1, 3)
    columns = columns_of(texts, np.array([True, False, True]))
    rows = statistics.describe(columns)
    assert rows[1].tolist() == [0] * len(COUNTS)
    assert rows[[0, 2], COUNTS.index("words")].tolist() == [7, 2]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-DSHOAL_SCALAR"])
def test_other_processors(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512, and without any instructions for vectors."""
    drawn = [PIECES[(7 * at * at + at) % len(PIECES)] for at in range(3000)]
    texts = ["".join(drawn[at : at + at % 97]) for at in range(0, 2900, 13)]
    columns, build = columns_of(arrow(texts)), statistics.native
    expected = [statistics.describe(columns), statistics.repeats(columns)]
    hashes = statistics.gram_hashes(columns, 3)
    if build() is None or build(flag) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(statistics, "native", lambda: build(flag))
    assert statistics.describe(columns).tolist() == expected[0].tolist()
    assert statistics.repeats(columns).tolist() == expected[1].tolist()
    assert statistics.gram_hashes(columns, 3).tolist() == hashes.tolist()
    assert [reference.describe(text, -1) for text in texts] == expected[0].tolist()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Some words. " * 12, "[1] Another line, that ends.\nand one\n" * 3, ""]
    columns = columns_of(arrow(texts))
    native = [statistics.describe(columns), statistics.repeats(columns)]
    left = statistics.c4(columns, RULES)
    monkeypatch.setattr(statistics, "native", lambda: None)
    for with_it, without in zip(
        native, (statistics.describe(columns), statistics.repeats(columns)), strict=True
    ):
        assert with_it.tolist() == without.tolist()
    again = statistics.c4(columns, RULES)
    assert left[0].tolist() == again[0].tolist()
    assert left[1].to_pylist() == again[1].to_pylist()
    assert left[2].tolist() == again[2].tolist()


def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    statistics.native.cache_clear()
    with pytest.warns(UserWarning, match="hundred times slower"):
        assert statistics.native() is None
    statistics.native.cache_clear()
