"""Each filter's rules on documents that are just within them, and just beyond."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import table
from shoal.fields.data.filters.pii import PersonalData, luhn
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict

PROSE = "The cat sat down with the dog, and that was the end of it for them both today."


def judged(name: str, texts: list[str | None], **options: Any) -> tuple[list[str], FilterVerdict]:
    """Why each text is dropped, empty for those that are kept."""
    part = table("text_filter").build({"name": name, **options})
    verdict = part.judge(FilterBatch(pa.array(texts, pa.string())))
    return [part.reasons[at] if at >= 0 else "" for at in verdict.broken.tolist()], verdict


def why(name: str, text: str | None, **options: Any) -> str:
    (reason,), _ = judged(name, [text], **options)
    return reason


def test_gopher_quality() -> None:
    prose = f"{PROSE}\n" * 4
    assert why("gopher_quality", prose) == ""
    assert why("gopher_quality", " ".join(PROSE.split() * 2)) == "too few words"
    assert why("gopher_quality", prose, max_words=60) == "too many words"
    assert why("gopher_quality", "a of the " * 50) == "words too short"
    assert why("gopher_quality", "incomprehensibilities of the " * 50) == ""
    assert why("gopher_quality", "incomprehensibilities " * 50) == "words too long"
    assert why("gopher_quality", prose + "# " * 12) == "too many hashes"
    assert why("gopher_quality", prose + "and so ... " * 14) == "too many ellipses"
    assert why("gopher_quality", f"• {PROSE}\n" * 10) == "lines are bullet points"
    assert why("gopher_quality", f"• {PROSE}\n" * 9 + PROSE) == ""
    assert why("gopher_quality", f"{PROSE}...\n{PROSE}\n{PROSE}...") == "lines end with an ellipsis"
    assert why("gopher_quality", prose + "12345 " * 25) == "words without a letter"
    assert why("gopher_quality", "nice words alone " * 20) == "too few stop words"
    assert why("gopher_quality", "nice words alone the of " * 20) == ""
    for nothing in ("", None, " \n\t", "!!! ??? ..."):
        assert why("gopher_quality", nothing) == "too few words"


def test_gopher_repetition() -> None:
    different = "\n".join(
        f"Line {n} says {n * n} and then {n * 7919} in words {n}." for n in range(40)
    )
    assert why("gopher_repetition", different, max_top_grams=[1, 1, 1]) == ""
    lines = "\n".join([*(f"number {n} {n * n}" for n in range(20)), *(["again"] * 12)])
    assert why("gopher_repetition", lines) == "repeated lines"
    long = "\n".join([*(f"n{n}" for n in range(40)), *(["a long line, again"] * 10)])
    assert why("gopher_repetition", long) == "characters in repeated lines"
    paragraphs = "\n\n".join([*(f"p{n}" for n in range(20)), *(["q"] * 12)])
    assert why("gopher_repetition", paragraphs) == "repeated paragraphs"
    assert why("gopher_repetition", "so it " * 30) == "one 2-gram is most of it"
    chorus = " ".join(f"w{n} x{n} y{n} z{n} v{n}" for n in range(20))
    assert why("gopher_repetition", f"{chorus} {chorus}") == "repeated 5-grams"
    assert why("gopher_repetition", "") == ""


def test_fineweb() -> None:
    lines = [f"This is line {n} of a text, and it is long enough for a sentence." for n in range(9)]
    assert why("fineweb", "\n".join(lines)) == ""
    assert why("fineweb", "\n \n") == why("fineweb", "") == "empty"
    bare = [line.removesuffix(".") for line in lines]
    assert why("fineweb", "\n".join([*bare[1:], lines[0]])) == "lines without a terminal mark"
    assert why("fineweb", "\n".join([*bare[2:], *lines[:2]])) == ""
    assert why("fineweb", "\n".join([*lines[:3], *("Short.",) * 7])) == "brief lines"
    assert why("fineweb", "\n".join([*lines, lines[0]])) == "characters in repeated lines"
    assert why("fineweb", "\n".join("abc."[: 1 + n] + "x" * 40 + "." for n in range(4))) == "a list"


def test_c4() -> None:
    lines = [
        "A title",
        "This is a sentence. And this is another one!",
        "Please enable JavaScript to see it.",
        "Wikipedia says so.[1] It is true.",
        "By this you agree to our privacy policy.",
        "Too short.",
        "This one trails off...",
        "Is that all? It is.",
    ]
    reasons, verdict = judged("c4", ["\n".join(lines), "Only one sentence here.", "{" + lines[1]])
    assert reasons == ["", "too few sentences", "curly bracket"]
    assert verdict.texts[0].as_py().split("\n") == [
        lines[1],
        "Wikipedia says so. It is true.",
        lines[-1],
    ]
    assert verdict.counts == {
        "lines removed: no terminal mark": 2,
        "lines removed: too few words": 1,
        "lines removed: javascript": 1,
        "lines removed: policies": 1,
    }
    assert why("c4", "Lorem ipsum dolor sit amet.") == "lorem ipsum"
    assert why("c4", "One two three.", min_sentences=1) == ""


def test_length() -> None:
    assert why("length", "é" * 200) == ""
    assert why("length", "é" * 199) == why("length", None) == "too few characters"
    assert why("length", "ab", min_chars=0, max_chars=1) == "too many characters"
    assert why("length", "a b", min_chars=0, max_words=1) == "too many words"
    assert why("length", "a b", min_chars=0, min_words=3) == "too few words"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("write to Ann.Lee+news@mail.example.co.uk, now", "write to <EMAIL>, now"),
        ("see @property and a@b", "see @property and a@b"),
        ("ping 8.8.8.8.", "ping <IP>."),
        ("version 1.2.3.4.5, 300.1.1.1 and local 192.168.0.1", None),
        ("at 2001:4860:4860::8888 or std::vector", "at <IP> or std::vector"),
        ("card 4111 1111 1111 1111!", "card <CARD>!"),
        ("no card 4111 1111 1111 1112!", None),
        ("call +44 20 7946 0958 or (212) 555-0173", "call <PHONE> or <PHONE>"),
        ("on 2024-01-31 at 12:34:56, 1234567 of them", None),
    ],
)
def test_personal_data(before: str, after: str | None) -> None:
    reasons, verdict = judged("pii", ["nothing here", before])
    assert reasons == ["", ""]
    result = before if verdict.texts is None else verdict.texts[1].as_py()
    assert result == (after or before)
    assert (verdict.counts == {}) == (after is None or after == before)


PARTS = [
    *"0123456789 +-.()@:abé\n",
    *("::", "+44", "212-555-0173", "(212) 555-0173", "8.8.8.8", "a@b.org", "2001:db8::1"),
    *("4111 1111 1111 1111", "5500-0000-0000-0004", "x" * 60, " " * 62),
]


@given(pieces=st.lists(st.sampled_from(PARTS), max_size=40))
@settings(deadline=None)
def test_parts_overlook_nothing(pieces: list[str]) -> None:
    """What is replaced is what the patterns find in the whole text, one after the other."""
    text, counts = "".join(pieces), Counter[str]()
    _, verdict = judged("pii", [text, "nothing"])
    now = text
    for pattern, valid in PersonalData()._patterns():

        def put(match: re.Match[bytes], kind: str = pattern.kind, valid: Any = valid) -> bytes:
            if not valid(match[0].decode()):
                return match[0]
            counts[kind] += 1
            return f"<{kind.upper()}>".encode()

        now = pattern.exact().sub(put, now.encode()).decode()
    assert (text if verdict.texts is None else verdict.texts[0].as_py()) == now
    assert verdict.counts == dict(counts)


def test_personal_data_at_every_place_of_a_block() -> None:
    for kind, data in {"IP": "8.8.8.8", "EMAIL": "a@b.org", "PHONE": "+44 20 7946 0958"}.items():
        texts: list[str | None] = [f"{'x ' * 70}"[:at] + " " + data for at in range(140)]
        _, verdict = judged("pii", texts)
        assert all(text.endswith(f" <{kind}>") for text in verdict.texts.to_pylist())


def test_personal_data_takes_time_in_proportion() -> None:
    """Long runs of what could begin a match are passed over once."""
    for text in (
        "a" * 200_000 + "@",
        "1 " * 100_000,
        "1." * 100_000,
        "a@b." * 50_000,
        "+1" * 90_000,
    ):
        judged("pii", [text])


def test_check_digits() -> None:
    assert luhn("79927398713") and not luhn("79927398710")
    assert why("pii", "x") == ""


def test_decontaminate(tmp_path: Path) -> None:
    words = [f"word{n}" for n in range(30)]
    jsonl = tmp_path / "a.jsonl.gz"
    rows = [{"q": " ".join(words), "n": 1, "more": {"choices": ["Thirteen " * 13, "x"]}}]
    jsonl.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    parquet = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": ["Étude " + "one two three four five six " * 2]}), parquet)
    given = {"against": [str(jsonl), str(parquet)]}
    shares = "shares words in a row with a benchmark"
    assert why("decontaminate", "so, WORD3; " + ", ".join(words[4:17]) + " end", **given) == shares
    assert why("decontaminate", " ".join(words[3:15]), **given) == ""
    assert why("decontaminate", " ".join(reversed(words)), **given) == ""
    assert why("decontaminate", "thirteen " * 13, **given) == shares
    assert why("decontaminate", "étude one two three four five six", n=7, **given) == ""
    assert why("decontaminate", "Étude one two three four five six", n=7, **given) == shares
    with pytest.raises(ConfigError, match="no benchmark; give files"):
        judged("decontaminate", ["text"])
    short = tmp_path / "c.jsonl"
    short.write_text('{"q": "few words"}\n')
    with pytest.raises(DataError, match="no text with 13 words"):
        judged("decontaminate", ["text"], against=[str(short)])
    with pytest.raises(DataError):
        judged("decontaminate", ["text"], against=[str(tmp_path / "missing.jsonl")])


def test_language() -> None:
    pytest.importorskip("lingua")
    german = "Der Hund läuft über die Straße, und die Katze sieht ihm dabei zu."
    texts = [PROSE, german, "", "12345"]
    among = {"among": ["en", "de", "fr"]}
    reasons, _ = judged("language", texts, **among)
    assert reasons == ["", *["another language"] * 3]
    reasons, _ = judged("language", texts[:2], languages=["de", "en"], **among)
    assert reasons == ["", ""]
    assert why("language", "so", min_confidence=0.99, **among) != ""
    with pytest.raises(ConfigError, match="'xx': expected ISO 639-1 codes"):
        judged("language", texts, languages=["xx"])
