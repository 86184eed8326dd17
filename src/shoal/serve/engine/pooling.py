"""Vectors of texts: the final hidden states of a prompt, as they come in chunks.

Shapes: N tokens of a chunk, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import ServeError
from shoal.ir import Chunk, Request
from shoal.serve.engine.adjust import Book

__all__ = ["Pooler"]


class _Sum:
    """What has been added of a prompt."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.added = 0
        self.total_D: Tensor | None = None

    def add(self, start: int, hidden_ND: Tensor) -> None:
        if start > self.added:
            raise ServeError(
                f"tokens {self.added} to {start} of it were found in the cache; give it a salt "
                "that no other request has"
            )
        # What is computed again, after its blocks were taken away, was added already.
        new_ND = hidden_ND[self.added - start :].float()
        total_D = new_ND.sum(0)
        self.total_D = total_D if self.total_D is None else self.total_D + total_D
        self.added = max(self.added, start + len(hidden_ND))


class Pooler:
    """Collects the hidden states of requests that want a vector of their prompt."""

    def __init__(self) -> None:
        self._sums: Book[_Sum] = Book(_Sum)

    @staticmethod
    def rows(chunk: Chunk, last: int) -> range:
        """Which tokens of a step are wanted of a chunk whose last one lies at ``last``."""
        if chunk.request.params.pooling == "mean":
            return range(last + 1 - chunk.length, last + 1)
        return range(last, last + 1) if chunk.yields else range(0)

    def add(self, chunk: Chunk, hidden_ND: Tensor) -> list[float] | None:
        """Take in the states of :meth:`rows`; the vector, when the prompt is whole.

        Raises:
            ServeError: tokens of it were never computed.
        """
        if chunk.request.params.pooling == "last":
            return hidden_ND[-1].float().tolist() if chunk.yields else None
        (collected,) = self._sums.of([chunk.request])
        collected.add(chunk.start, hidden_ND)
        if not chunk.yields:
            return None
        assert isinstance(collected.total_D, torch.Tensor)
        vector: list[float] = (collected.total_D / collected.added).tolist()
        return vector
