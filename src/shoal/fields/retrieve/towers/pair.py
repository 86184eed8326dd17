"""A query tower and a document tower with vectors of one space, in a directory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.core.files import write_dir_atomic
from shoal.fields.retrieve.towers.protocols import Precision, TowerError
from shoal.fields.retrieve.towers.tower import TextTower

_QUERY, _DOCUMENT, _TEACHER = "query", "document", "teacher"


class TowerPair:
    """Two towers.

    Source: Huang et al., ScalingNote: Scaling up Retrievers with Large Language Models for
    Real-World Dense Retrieval, 2024.

    Args:
        query: encodes queries.
        document: encodes documents.
        teacher: the query tower that ``query`` was distilled from, if it was.

    Raises:
        TowerError: vectors of unequal dimension.
    """

    def __init__(
        self, query: TextTower, document: TextTower, teacher: TextTower | None = None
    ) -> None:
        dims = [one.settings.dim for one in (query, document, *([teacher] if teacher else []))]
        if len(set(dims)) != 1:
            raise TowerError(
                f"towers of {' and '.join(map(str, dims))} numbers: expected equal dimensions; "
                "give the smaller a linear map to the larger"
            )
        self.query, self.document, self.teacher = query, document, teacher

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.query.settings.dim

    def encode_query(self, texts: Sequence[str], *, precision: Precision = "fp32") -> np.ndarray:
        """Vectors of length 1 of queries, float32 [N, dim].

        Args:
            texts: N queries.
            precision: of the products.

        Raises:
            TowerError: a text has no words.
        """
        return self.query.encode(texts, precision)

    def encode_document(self, texts: Sequence[str], *, precision: Precision = "fp32") -> np.ndarray:
        """Vectors of length 1 of documents, float32 [N, dim].

        Args:
            texts: N documents.
            precision: of the products.

        Raises:
            TowerError: a text has no words.
        """
        return self.document.encode(texts, precision)

    def save(self, directory: Path | str) -> None:
        """Write ``query``, ``document`` and ``teacher`` below a directory that is not there yet.

        Raises:
            TowerError: it is there, or cannot be written.
        """
        with write_dir_atomic(Path(directory), error=TowerError) as place:
            self.query.write(place / _QUERY)
            self.document.write(place / _DOCUMENT)
            if self.teacher is not None:
                self.teacher.write(place / _TEACHER)

    @classmethod
    def load(cls, directory: Path | str) -> TowerPair:
        """Read what :meth:`save` wrote.

        Raises:
            TowerError: no towers are there, or they do not go together.
            ModelError: a decoder cannot be read.
        """
        place = Path(directory)
        if not (place / _QUERY).is_dir() or not (place / _DOCUMENT).is_dir():
            raise TowerError(
                f"{place}: expected the towers {_QUERY} and {_DOCUMENT}; give the directory "
                "towers of a run of train_towers"
            )
        teacher = place / _TEACHER
        return cls(
            TextTower.read(place / _QUERY),
            TextTower.read(place / _DOCUMENT),
            TextTower.read(teacher) if teacher.is_dir() else None,
        )


def vectors_digest(vectors: np.ndarray) -> str:
    """SHA-256 of the bytes of vectors, to see whether an index has changed."""
    return hashlib.sha256(np.ascontiguousarray(vectors).tobytes()).hexdigest()
