"""Terms of a text, and BM25 over an inverted index.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009; terms
that most documents have get a small positive weight, as in ``rank_bm25.BM25Okapi``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from shoal.fields.retrieve.grank.protocols import Tokens

_WORD = re.compile(r"\w+")
_K1, _B, _EPSILON = 1.5, 0.75, 0.25


def terms(text: str) -> list[str]:
    """Words in lower case."""
    return _WORD.findall(text.lower())


class BM25:
    """Scores of documents for a query.

    Args:
        documents: name -> text.
        tokens: makes terms of a text.
    """

    def __init__(self, documents: Mapping[str, str], tokens: Tokens = terms) -> None:
        self.postings: dict[str, dict[str, int]] = {}
        self._tokens = tokens
        lengths = {}
        for name, text in documents.items():
            words = Counter(tokens(text))
            lengths[name] = words.total()
            for word, count in words.items():
                self.postings.setdefault(word, {})[name] = count
        mean = sum(lengths.values()) / max(len(lengths), 1) or 1.0
        self._norm = {name: _K1 * (1 - _B + _B * length / mean) for name, length in lengths.items()}
        n = len(lengths)
        weights = {
            word: math.log(n - len(found) + 0.5) - math.log(len(found) + 0.5)
            for word, found in self.postings.items()
        }
        # Positive even if most documents have most terms, so that a match is never a fault.
        least = abs(_EPSILON * sum(weights.values()) / max(len(weights), 1))
        self._weights = {word: one if one >= 0 else least for word, one in weights.items()}

    def scores(self, query: str) -> dict[str, float]:
        """Document -> score, of those that have a term of the query."""
        result: dict[str, float] = {}
        for word in self._tokens(query):
            weight = self._weights.get(word, 0.0)
            for name, count in self.postings.get(word, {}).items():
                part = weight * count * (_K1 + 1) / (count + self._norm[name])
                result[name] = result.get(name, 0.0) + part
        return result
