"""Vectors of texts: the final hidden states of a prompt, as they come in chunks.

Shapes: N tokens of a chunk, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shoal.core.errors import ServeError
from shoal.ir import Chunk, Request, StepResult
from shoal.serve.engine.adjust import RequestHistory
from shoal.serve.engine.hooks import EngineHook, ExecutedStep, ForwardPass
from shoal.serve.engine.token_choice import NOT_FINITE

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder


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


class PoolingHook(EngineHook):
    """Vectors for requests that want one of their prompt."""

    kind: ClassVar[str] = "pooling"

    def __init__(self) -> None:
        self._sums: RequestHistory[_Sum] = RequestHistory(_Sum)
        self._here = False  # whether the pass has such requests

    def executed(self, done: ExecutedStep) -> None:
        """Report vectors."""
        for request_id, values in done.result.vectors.items():
            self.engine.tell("vector", id=request_id, values=list(values))

    def before_pass(self, work: ForwardPass) -> None:
        """Recordings have no hidden states."""
        self._here = any(one.request.params.pooling for one in work.chunks)
        work.plain = work.plain and not self._here

    @staticmethod
    def _wanted(work: ForwardPass) -> Iterator[tuple[Chunk, range]]:
        """Chunks with the rows of the step that are wanted of each."""
        for chunk, last in zip(work.chunks, work.last, strict=True):
            if chunk.request.params.pooling == "mean":
                yield chunk, range(last + 1 - chunk.length, last + 1)
            elif chunk.request.params.pooling:
                yield chunk, range(last, last + 1) if chunk.yields else range(0)

    def lay_out(self, work: ForwardPass) -> None:
        """Ask for the rows behind those that are there."""
        if self._here:
            work.rows += [row for _, rows in self._wanted(work) for row in rows]

    def computed(self, work: ForwardPass, hidden_RD: Tensor, result: StepResult) -> StepResult:
        """The result with vectors of prompts that are whole."""
        if not self._here:
            return result
        stop = sum(chunk.yields for chunk in work.chunks)
        vectors, failed, errors = dict(result.vectors), dict(result.failed), dict(result.errors)
        for chunk, rows in self._wanted(work):
            name, start, stop = chunk.request.id, stop, stop + len(rows)
            try:
                vector = self._add(chunk, hidden_RD[start:stop])
            except ServeError as cause:
                failed.setdefault(name, str(cause))
                continue
            if vector is None:
                continue
            if all(map(math.isfinite, vector)):
                vectors[name] = vector
            else:
                errors[name] = NOT_FINITE
        return replace(result, vectors=vectors, failed=failed, errors=errors)

    def _add(self, chunk: Chunk, hidden_ND: Tensor) -> list[float] | None:
        """Take in the states of the wanted rows; the vector, when the prompt is whole.

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


def pooling_of(built: EngineBuilder) -> PoolingHook:
    """Of every engine: a request says whether it wants a vector."""
    return PoolingHook()
