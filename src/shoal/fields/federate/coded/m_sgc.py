"""Sequential gradient coding that multiplexes jobs in each round.

Source: Krishnan, Ram, Ebrahimi, Khisti, Sequential Gradient Coding for Straggler Mitigation, 2023
(M-SGC).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
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

# What a worker does for a job in a slot.
_PLAIN, _CODED = 0, 1


@part
class MSgc:
    """Most of the data is not coded but tried again; a coded rest fills the rounds of retries.

    Tolerates bursts: in each window of W rounds at most ``lambda_`` workers straggle, each within B
    rounds. Gradients are up to W - 2 + B rounds late.

    Args:
        B: rounds of a burst.
        W: rounds of a window, more than B.
        lambda_: workers that straggle in a window.
    """

    B: Annotated[int, Ge(1)] = 1
    W: Annotated[int, Ge(2)] = 2
    lambda_: Annotated[int, Ge(1)] = 2

    @classmethod
    def candidates(cls, work: CodedWork, machine: Machine) -> Iterator[Self]:
        """Every window whose delay the models allow."""
        for burst in range(1, work.models):
            for window in range(burst + 1, work.models - burst + 2):
                counts = {*range(1, min(work.most, work.workers) + 1), work.workers}
                yield from (cls(B=burst, W=window, lambda_=count) for count in sorted(counts))

    def start(self, workers: int, jobs: int) -> MSgcCoding:
        """No job has been tried."""
        if self.B >= self.W:
            raise CodedError(
                f"scheme.m_sgc: B = {self.B} and W = {self.W}; a burst is shorter than a window"
            )
        if self.lambda_ > workers:
            raise CodedError(
                f"scheme.m_sgc: lambda_ = {self.lambda_} of {workers} workers; give at most so many"
            )
        return MSgcCoding(self, workers, jobs)


@dataclass
class _Progress:
    """What has been delivered of one job: the round, or 0.

    Args:
        plain: of each worker's uncoded tasks, int [n, W - 1].
        coded: of each group's coded tasks, int [B, n].
    """

    plain: np.ndarray
    coded: np.ndarray


class MSgcCoding:
    """Tasks of T + 1 jobs in each round.

    In slot k = round - job, a worker tries its uncoded task k while k < W - 1. In the B slots after
    that it tries again what is not delivered, and has the coded task of the slot's group if all is.

    Args:
        scheme: its options.
        workers: n.
        jobs: that there are.
    """

    def __init__(self, scheme: MSgc, workers: int, jobs: int) -> None:
        self._n, self._jobs = workers, jobs
        self._own, self._burst = scheme.W - 1, scheme.B
        self.delay = scheme.W - 2 + scheme.B
        slots = self._own + self._burst
        # With as many stragglers as workers there is no code: the slots are for retries only.
        self._coded = scheme.lambda_ < workers
        # All mini-tasks weigh the same: one uncoded chunk, or lambda + 1 coded ones.
        width = scheme.lambda_ + 1
        weight = width * self._own + (self._burst if self._coded else 0)
        size = (width if self._coded else 1) / (workers * (weight if self._coded else self._own))
        self.load = slots * size
        plain, groups = workers * self._own, self._burst if self._coded else 0
        self.chunks = (size,) * plain + shares(workers, workers * size / width) * groups
        self._code = GradientCode(workers, scheme.lambda_ if self._coded else 0)
        self._most = scheme.lambda_
        self._progress = {
            job: _Progress(
                np.zeros((workers, self._own), np.int64), np.zeros((self._burst, workers), np.int64)
            )
            for job in range(1, jobs + 1)
        }

    def tasks(self, number: int, worker: int) -> tuple[MiniTask, ...]:
        """One for each job that is open, the newest first, if anything is left to do for it."""
        found = []
        for job in self._open(number):
            kind, at = self._of(number, job)
            place = int(at[worker])
            if kind[worker] == _PLAIN:
                parts: tuple[tuple[int, float], ...] = ((worker * self._own + place, 1.0),)
            elif self._coded:
                first = self._n * self._own + place * self._n
                parts = tuple((first + chunk, weight) for chunk, weight in self._code.parts(worker))
            else:
                continue
            found.append(MiniTask(job=job, parts=parts))
        return tuple(found)

    def enough(self, arrived: Set[int]) -> bool:
        """Every result is of use."""
        return len(arrived) == self._n

    def recoverable(self, number: int, arrived: Set[int]) -> bool:
        """With no straggler from now on, would every open job be decoded in time?"""
        there = np.zeros(self._n, bool)
        there[list(arrived)] = True
        return all(self._ends(number, job, there) for job in self._open(number))

    def _ends(self, number: int, job: int, there: np.ndarray) -> bool:
        one, slot = self._progress[job], number - job
        kind, _ = self._of(number, job)
        tried = min(slot + 1, self._own)
        missing = (one.plain[:, :tried] == 0).sum(1) - (there & (kind == _PLAIN))
        # Coded groups whose slot is still to come, and those before them.
        begun = max(0, slot + 1 - self._own)
        if missing.max() > self._burst - begun:
            return False
        if not self._coded:
            return True
        given = (one.coded[:begun] > 0).sum(1)
        if begun:
            given[-1] += (there & (kind == _CODED)).sum()
        retrying = [(missing > after).sum() for after in range(self._burst - begun)]
        return (
            bool((given >= self._n - self._most).all()) and max(retrying, default=0) <= self._most
        )

    def close(self, number: int, arrived: Set[int]) -> None:
        """Note what was delivered."""
        there = np.fromiter(arrived, np.int64, len(arrived))
        for job in self._open(number):
            one = self._progress[job]
            kind, at = self._of(number, job)
            plain, coded = there[kind[there] == _PLAIN], there[kind[there] == _CODED]
            one.plain[plain, at[plain]] = number
            one.coded[at[coded], coded] = number

    def decode(self, job: int) -> tuple[Delivered, ...] | None:
        """All uncoded results, and enough of each group."""
        one = self._progress[job]
        if (one.plain == 0).any():
            return None
        found = [
            (int(number), worker, 1.0) for worker in range(self._n) for number in one.plain[worker]
        ]
        for group in one.coded if self._coded else ():
            workers = np.flatnonzero(group).tolist()
            if len(workers) < self._code.needed:
                return None
            weights = self._code.decode(workers).tolist()
            found += [
                (int(group[worker]), worker, weight)
                for worker, weight in zip(workers, weights, strict=True)
                if weight
            ]
        return tuple(
            Delivered(round=number, worker=worker, weight=weight)
            for number, worker, weight in found
        )

    def _open(self, number: int) -> list[int]:
        """Jobs that have a slot in a round, the newest first."""
        newest, oldest = min(number, self._jobs), max(1, number - self.delay)
        return list(range(newest, oldest - 1, -1))

    def _of(self, number: int, job: int) -> tuple[np.ndarray, np.ndarray]:
        """What each worker does for a job in a round: the kind, and which of that kind."""
        slot, one = number - job, self._progress[job]
        if slot < self._own:
            return np.full(self._n, _PLAIN), np.full(self._n, slot)
        missing = one.plain == 0
        again = missing.any(1)
        at = np.where(again, missing.argmax(1), slot - self._own)
        return np.where(again, _PLAIN, _CODED), at
