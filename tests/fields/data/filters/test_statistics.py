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
from shoal.fields.data.filters.statistics import QUALITY, REPEATS, columns_of

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
    statistics.sizes(columns_of(arrow(["text"])))


def arrow(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


def counted(texts: list[str], brief: int = 20) -> list[list[int]]:
    """All that the library counts of each document, by turns of the functions."""
    columns = columns_of(arrow(texts))
    enough = np.full(len(texts), 10**9)
    rows = (
        statistics.sizes(columns),
        statistics.quality(columns),
        statistics.lines(columns, brief),
        statistics.repeated_lines(columns, enough)[:, None],
        statistics.repeats(columns),
    )
    return [[part[at].tolist() for part in rows] for at in range(len(texts))]


def expected(text: str, brief: int = 20) -> list[list[int]]:
    """The same of one document, in Python."""
    return [
        reference.sizes(text),
        reference.quality(text),
        reference.lines(text, brief),
        [reference.repeated_lines(text)],
        reference.repeats(text),
    ]


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), brief=st.integers(0, 40))
def test_counts(texts: list[str], brief: int) -> None:
    assert counted(texts, brief) == [expected(text, brief) for text in texts]


@settings(deadline=None)
@given(
    piece=st.sampled_from(PIECES),
    shift=st.integers(50, 70),
    filling=st.sampled_from(["a", " ", "\n", ".", "a b", "é", "\u2028", "a a\n"]),
    tail=TEXTS,
)
def test_borders_of_blocks(piece: str, shift: int, filling: str, tail: str) -> None:
    """Each piece at the end of a block of 64 bytes, which most of them then cross."""
    room = (filling * 200).encode()[: 64 + shift].decode("utf-8", "ignore")
    texts = [room + piece, room + piece + tail, piece + room + piece]
    assert counted(texts) == [expected(text) for text in texts]
    for text in texts:
        verdict, left, dropped = statistics.c4(columns_of(arrow([text])), RULES)
        one = reference.c4(text, RULES)
        assert verdict[0] == one[0] and dropped.tolist() == one[2]
        assert left[0].as_py() == (one[1] if one[0] < 0 else "")


@settings(deadline=None)
@given(words=st.lists(st.sampled_from("abcd"), max_size=80))
def test_repeats_of_few_words(words: list[str]) -> None:
    """Sequences that are repeated in many ways."""
    text = " ".join(words)
    assert statistics.repeats(columns_of(arrow([text])))[0].tolist() == reference.repeats(text)


def over(row: list[int], limits: tuple[float, ...]) -> int:
    """The first share that is over its limit; -1 if none is."""
    has = dict(zip(REPEATS, row, strict=True))
    wholes = {"repeated_paragraphs": has["paragraphs"], "repeated_lines": has["lines"]}
    names = [name for name in REPEATS if name not in ("chars", "paragraphs", "lines")]
    shares = [has[name] / max(wholes.get(name, has["chars"]), 1) for name in names]
    return next((at for at, most in enumerate(limits) if shares[at] > most), -1)


@settings(deadline=None)
@given(
    words=st.lists(
        st.sampled_from(
            [*"abcdefghijkl", "é", "a longer one", "another line\n", "中文", "\n", "\n\n"]
        ),
        max_size=60,
    ),
    limits=st.lists(
        st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.4, 1.0, 9.0]), min_size=13, max_size=13
    ),
)
def test_limits_decide_the_same(words: list[str], limits: list[float]) -> None:
    """With limits less is counted; which limit is the first to be exceeded stays."""
    text, most = " ".join(words), tuple(limits)
    (quick,) = statistics.repeats(columns_of(arrow([text])), most).tolist()
    exact = reference.repeats(text)
    assert over(quick, most) == over(exact, most)
    assert all(0 <= one <= count for one, count in zip(quick, exact, strict=True))


@settings(deadline=None)
@given(text=TEXTS, enough=st.integers(0, 8))
def test_enough_stop_words(text: str, enough: int) -> None:
    at = QUALITY.index("stop_words")
    few = statistics.quality(columns_of(arrow([text])), enough)[0, at]
    assert min(few, enough) == min(reference.quality(text)[at], enough)


@settings(deadline=None)
@given(
    lines=st.lists(st.sampled_from(["a line", "é", " ", "another", ""])), enough=st.integers(0, 40)
)
def test_counting_stops_when_it_is_enough(lines: list[str], enough: int) -> None:
    text = "\n".join(lines)
    (chars,) = statistics.repeated_lines(columns_of(arrow([text])), np.array([enough])).tolist()
    exact = reference.repeated_lines(text)
    assert chars == exact or enough < chars < exact


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


@pytest.mark.parametrize(
    "ends", ["Then stop! (So?) Yes.", "A [1]. B [edit]", "C. D...", "use Cookies."]
)
def test_c4_at_every_place_of_a_block(ends: str) -> None:
    texts = [f"{'né ab. cd ' * 16}"[:at] + " and so on. " + ends for at in range(140)]
    verdicts, left, _ = statistics.c4(columns_of(arrow(texts)), RULES)
    expected = [reference.c4(text, RULES) for text in texts]
    assert verdicts.tolist() == [one[0] for one in expected]
    assert left.to_pylist() == [one[1] if one[0] < 0 else "" for one in expected]
    for rules in ((0, 20, 6), (3, 20, 7), (3, 20, 8), (3, 20, 9)):  # as many sentences, or not
        verdicts, _, _ = statistics.c4(columns_of(arrow(texts)), rules + RULES[3:])
        assert verdicts.tolist() == [reference.c4(text, rules + RULES[3:])[0] for text in texts]


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
    rows = statistics.quality(columns)
    assert rows[1].tolist() == [0] * len(QUALITY)
    assert rows[[0, 2], QUALITY.index("words")].tolist() == [7, 2]
    assert statistics.repeats(columns)[1].tolist() == [0] * len(REPEATS)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx512vbmi2", "-DSHOAL_SCALAR"])
def test_other_processors(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 or a part of it, and without any instructions for vectors."""
    drawn = [PIECES[(7 * at * at + at) % len(PIECES)] for at in range(3000)]
    texts = ["".join(drawn[at : at + at % 97]) for at in range(0, 2900, 13)]
    texts += [" ".join(drawn[at : at + 90]) for at in range(0, 2900, 101)]
    texts += ["x" * at + " +44 20 7946 0958, 8.8.8.8 a@b.org 1:2:3::4" for at in range(70)]
    columns, build = columns_of(arrow(texts)), statistics.native
    counts, hashes = counted(texts), statistics.gram_hashes(columns, 3)
    left = statistics.c4(columns, RULES)
    spans = statistics.spans(columns)
    if build() is None or build(flag) is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(statistics, "native", lambda: build(flag))
    assert counted(texts) == counts == [expected(text) for text in texts]
    assert statistics.gram_hashes(columns, 3).tolist() == hashes.tolist()
    assert len(spans) and statistics.spans(columns).tolist() == spans.tolist()
    for one, other in zip(statistics.c4(columns, RULES), left, strict=True):
        assert one.tolist() == other.tolist()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Some words. " * 12, "[1] Another line, that ends.\nand one\n" * 3, ""]
    columns = columns_of(arrow(texts))
    native, left = counted(texts), statistics.c4(columns, RULES)
    monkeypatch.setattr(statistics, "native", lambda: None)
    assert counted(texts) == native
    assert statistics.repeats(columns, [1.0] * 13).any()
    for one, other in zip(statistics.c4(columns, RULES), left, strict=True):
        assert one.tolist() == other.tolist()


def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    statistics.native.cache_clear()
    with pytest.warns(UserWarning, match="hundred times slower"):
        assert statistics.native() is None
    statistics.native.cache_clear()
