"""Several corpora as one, each with its share of the bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar

from shoal.core.errors import require
from shoal.core.parts import Choice, part
from shoal.core.traits import check_beside
from shoal.corpora.protocols import Corpus, Document, Split
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work


@part
class MixedCorpus:
    """The documents of several sources, one source after the other; training shuffles windows.

    A document is named ``source/name`` and keeps the split of its source, so held-out documents can
    be scored by source. Documents of a limited source are sampled evenly from it.

    Args:
        sources: name -> corpus.
        limit_bytes: name -> largest number of bytes of that source, both splits together; no limit
            for sources without an entry.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"several_sources"})
    sources: dict[str, Choice]
    limit_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            bool(self.sources), "data.mixed.sources", self.sources, expected="at least one corpus"
        )
        for name in self.sources:
            require(
                bool(name) and "/" not in name,
                "data.mixed.sources",
                name,
                expected="names without /",
            )
            check_beside(
                f"data.mixed.sources.{name}",
                self.sources[name],
                "learns_answers",
                has=False,
                beside="others",
                why="a mixture has a loss on all of its text",
                kind="corpus",
            )
        for name, limit in self.limit_bytes.items():
            require(
                name in self.sources and limit >= 1,
                f"data.mixed.limit_bytes.{name}",
                limit,
                expected=f"at least 1 byte of one of {', '.join(self.sources)}",
            )

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both, source by source.

        Raises:
            DataError: a source cannot be read.
        """
        for source, corpus in self._built().items():
            limit = self.limit_bytes.get(source)
            share = 1.0 if limit is None else min(1.0, limit / max(1, corpus.num_bytes()))
            seen = kept = 0.0
            # Both splits pass through the same rule, so that each is the same for every caller.
            for document in corpus.documents():
                size = len(document.text.encode())
                seen += size
                if share < 1 and kept + size / 2 > share * seen:
                    continue
                kept += size
                if split in (None, document.split):
                    yield document._replace(name=f"{source}/{document.name}")

    def fingerprint(self) -> str:
        """Digest of the fingerprints of all sources and of what is taken of them."""
        parts = [f"{name} {corpus.fingerprint()}" for name, corpus in self._built().items()]
        return hashlib.sha256(f"{parts} {sorted(self.limit_bytes.items())}".encode()).hexdigest()

    def num_bytes(self) -> int:
        """Bytes of what is taken, about."""
        return sum(
            min(corpus.num_bytes(), self.limit_bytes.get(name, corpus.num_bytes()))
            for name, corpus in self._built().items()
        )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """What the slowest source says: all are read from one set of tokens."""
        results = [corpus.estimate(work, machine) for corpus in self._built().values()]
        return max(results, key=lambda one: one.step_s.value)

    def _built(self) -> dict[str, Corpus]:
        from shoal.corpora import CORPORA

        made: dict[str, Any] = {
            name: CORPORA.build(choice, where=f"data.sources.{name}")
            for name, choice in self.sources.items()
        }
        return made
