"""Gradient coding without delay, and no coding at all.

Source: Tandon, Lei, Dimakis, Karampatziakis, Gradient Coding: Avoiding Stragglers in Distributed
Learning, 2017.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Annotated, Self

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.federate.coded.codes import GradientCode
from shoal.fields.federate.coded.protocols import (
    CodedError,
    CodedWork,
    Delivered,
    MiniTask,
    shares,
)
from shoal.ir import Machine


@part
class Uncoded:
    """Every worker has a share of the data, and all are waited for."""

    @classmethod
    def candidates(cls, work: CodedWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

    def start(self, workers: int, jobs: int) -> GcCoding:
        """A code that tolerates no straggler."""
        return GcCoding(workers, 0, jobs)


@part
class Gc:
    """Every worker has s + 1 shares, so that any n - s workers are enough in each round.

    Args:
        s: stragglers of a round.
    """

    s: Annotated[int, Ge(1)] = 1

    @classmethod
    def candidates(cls, work: CodedWork, machine: Machine) -> Iterator[Self]:
        """Every number of stragglers."""
        yield from (cls(s=s) for s in range(1, min(work.most, work.workers - 1) + 1))

    def start(self, workers: int, jobs: int) -> GcCoding:
        """The same code in each round."""
        return GcCoding(workers, self.s, jobs)


class GcCoding:
    """One code for each job.

    Args:
        workers: n.
        stragglers: s.
        jobs: that there are.
    """

    delay = 0

    def __init__(self, workers: int, stragglers: int, jobs: int) -> None:
        if stragglers >= workers:
            raise CodedError(
                f"scheme.gc.s = {stragglers} of {workers} workers; at least one must not straggle"
            )
        self.load = (stragglers + 1) / workers
        self.chunks = shares(workers)
        self._code, self._jobs = GradientCode(workers, stragglers), jobs
        self._arrived: dict[int, tuple[int, ...]] = {}

    def tasks(self, number: int, worker: int) -> tuple[MiniTask, ...]:
        """One, of the job of the round."""
        if number > self._jobs:
            return ()
        return (MiniTask(job=number, parts=self._code.parts(worker)),)

    def enough(self, arrived: Set[int]) -> bool:
        """As soon as the gradient can be decoded."""
        return len(arrived) >= self._code.needed

    def recoverable(self, number: int, arrived: Set[int]) -> bool:
        """The same, since nothing is late."""
        return self.enough(arrived)

    def close(self, number: int, arrived: Set[int]) -> None:
        """Remember who was there."""
        self._arrived[number] = tuple(sorted(arrived))

    def decode(self, job: int) -> tuple[Delivered, ...] | None:
        """From the round of the job."""
        there = self._arrived.get(job, ())
        if len(there) < self._code.needed:
            return None
        return tuple(
            Delivered(round=job, worker=worker, weight=weight)
            for worker, weight in zip(there, self._code.decode(there).tolist(), strict=True)
            if weight
        )
