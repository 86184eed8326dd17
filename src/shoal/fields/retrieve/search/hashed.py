"""The embedder ``hashed_words``: words and pieces of words, hashed into a vector; no model."""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.retrieve.grank.text import terms
from shoal.fields.retrieve.search.protocols import SearchError


@part
class HashedWords:
    """Add the hashed words of a text and their pieces of three letters, each with a sign.

    Texts are near that share words, or words that are spelled alike; it knows no meaning.

    Source: Weinberger et al., Feature Hashing for Large Scale Multitask Learning, 2009.

    Args:
        dim: numbers of a vector.
    """

    dim: Annotated[int, Ge(8), Le(65_536)] = 384

    def embed(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """Vectors of length 1."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word, count in Counter(terms(text)).items():
                places, signs = _pieces(word, self.dim)
                np.add.at(row, places, signs * (1 + math.log(count)))
            length = float(np.linalg.norm(row))
            if not length:
                raise SearchError(f"text = {text[:40]!r}: expected words")
            row /= length
        return vectors

    def dim_of(self, job_dim: int) -> int:
        return self.dim


@functools.lru_cache(maxsize=65_536)
def _pieces(word: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of a word and of its pieces, and signs; the word counts as much as all pieces."""
    around = f"<{word}>"
    pieces = [around[at : at + 3] for at in range(len(around) - 2)]
    hashes = [zlib.crc32(one.encode()) for one in (word, *pieces)]
    signs = np.array([1.0 if one & 1 else -1.0 for one in hashes], np.float32)
    signs[1:] /= math.sqrt(len(pieces))
    return np.array([(one >> 1) % dim for one in hashes]), signs
