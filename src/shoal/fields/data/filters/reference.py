"""What the native functions count in a document, in Python: the oracle, and the fallback."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
BULLETS = ("•", "-")
TERMINAL = tuple(".!?\"'”’…。！？؟۔।")
POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_CITATION = re.compile(r"\[[0-9]*\]|\[edit\]|\[citation needed\]")
_SENTENCE = re.compile(r"""[.?!]+["')\]]*(?:\s+|\Z)""")


def is_symbol(character: str) -> bool:
    """A sign, of punctuation or otherwise, or a control character."""
    return unicodedata.category(character)[0] in "PSC"


def sizes(text: str) -> list[int]:
    """The columns of :data:`~shoal.fields.data.filters.statistics.SIZES`."""
    return [len(text), len(text.split())]


def quality(text: str) -> list[int]:
    """The columns of :data:`~shoal.fields.data.filters.statistics.QUALITY`."""
    words, lines = text.split(), text.splitlines()
    solid = [word for word in words if not all(map(is_symbol, word))]
    return [
        len(words),
        len(solid),
        sum(map(len, solid)),
        sum(any(map(str.isalpha, word)) for word in words),
        text.count("#"),
        text.count("...") + text.count("…"),
        len(STOP_WORDS.intersection(words)),
        len(lines),
        sum(line.lstrip().startswith(BULLETS) for line in lines),
        sum(line.rstrip().endswith(("...", "…")) for line in lines),
    ]


def lines(text: str, brief: int) -> list[int]:
    """The columns of :data:`~shoal.fields.data.filters.statistics.LINES`."""
    full = [line for line in text.split("\n") if line.strip()]
    return [
        len(text),
        len(text.split()),
        text.count("\n"),
        len(full),
        sum(line.endswith(TERMINAL) for line in full),
        sum(len(line) <= brief for line in full),
        len(text.encode()),
    ]


def repeated_lines(text: str) -> int:
    """Characters of full lines that came before."""
    return _repeated([line for line in text.split("\n") if line.strip()])[1]


def repeats(text: str) -> list[int]:
    """The columns of :data:`~shoal.fields.data.filters.statistics.REPEATS`."""
    paragraphs, lines = re.split(r"\n{2,}", text.strip()), re.split(r"\n+", text)
    words = text.split()
    return [
        len(text),
        len(paragraphs),
        *_repeated(paragraphs),
        len(lines),
        *_repeated(lines),
        *(_most_frequent(words, n) for n in (2, 3, 4)),
        *(_repeated_grams(words, n) for n in range(5, 11)),
    ]


def _repeated(pieces: Sequence[str]) -> tuple[int, int]:
    """Pieces that came before, and their characters."""
    seen: set[str] = set()
    count = chars = 0
    for piece in pieces:
        if piece in seen:
            count, chars = count + 1, chars + len(piece)
        seen.add(piece)
    return count, chars


def _most_frequent(words: Sequence[str], n: int) -> int:
    """Characters of all occurrences of the most frequent n-gram, the first of several."""
    grams = Counter(" ".join(words[at : at + n]) for at in range(len(words) - n + 1))
    if not grams:
        return 0
    gram, count = grams.most_common(1)[0]
    return len(gram) * count


def _repeated_grams(words: Sequence[str], n: int) -> int:
    """Characters of n-grams that came before; none is counted twice."""
    seen: set[tuple[str, ...]] = set()
    chars = at = 0
    while at <= len(words) - n:
        gram = tuple(words[at : at + n])
        if gram in seen:
            chars, at = chars + sum(map(len, gram)), at + n
        else:
            seen.add(gram)
            at += 1
    return chars


def c4(text: str, rules: Sequence[int]) -> tuple[int, str, list[int]]:
    """A document as the rules of C4 leave it.

    Args:
        text: the document.
        rules: words of a line, characters of a word, sentences; then 1 for each rule in force, in
            the order of the fields of :class:`~shoal.fields.data.filters.c4.CleanCrawl`.

    Returns:
        -1, or 0 for lorem ipsum, 1 for a curly bracket, 2 for too few sentences; what is left;
        lines that each rule dropped.
    """
    min_words, max_word, min_sentences, terminal, javascript, curly, lorem, policy, cite = rules
    dropped, kept, sentences = [0] * 5, [], 0
    for raw in text.splitlines():
        line = raw.strip()
        words = line.split()
        if any(len(word) > max_word for word in words):
            dropped[0] += 1
            continue
        line = _CITATION.sub("", line) if cite else line
        lower = line.encode().lower()  # of ASCII alone
        if terminal and (not line.endswith(tuple(".?!\"'")) or line.endswith("...")):
            dropped[1] += 1
        elif len(words) < min_words:
            dropped[2] += 1
        elif lorem and b"lorem ipsum" in lower:
            return 0, "", dropped
        elif javascript and b"javascript" in lower:
            dropped[3] += 1
        elif curly and "{" in line:
            return 1, "", dropped
        elif policy and any(phrase.encode() in lower for phrase in POLICIES):
            dropped[4] += 1
        else:
            sentences += sum(bool(piece.strip()) for piece in _SENTENCE.split(line))
            kept.append(line)
    return (2 if sentences < min_sentences else -1), "\n".join(kept).strip(), dropped


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, in lower case where they are ASCII."""
    plain = "".join(c if c.isalnum() else " " for c in text)
    return plain.encode().lower().decode().split(" ")


def grams_of(text: str, n: int) -> Iterator[str]:
    """All n words in a row, with one space between them."""
    words = [word for word in words_of(text) if word]
    for at in range(len(words) - n + 1):
        yield " ".join(words[at : at + n])
