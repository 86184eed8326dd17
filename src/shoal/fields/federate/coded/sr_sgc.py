"""Sequential gradient coding that repeats tasks selectively.

Source: Krishnan, Ram, Ebrahimi, Khisti, Sequential Gradient Coding for Straggler Mitigation, 2023
(SR-SGC).
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
class SrSgc:
    """A weaker code, whose missing results are made up for B rounds later.

    Tolerates bursts: in each window of W rounds at most ``lambda_`` workers straggle, each within B
    rounds. Gradients are up to B rounds late.

    Args:
        B: rounds of a burst; divides W - 1.
        W: rounds of a window.
        lambda_: workers that straggle in a window.
    """

    B: Annotated[int, Ge(1)] = 1
    W: Annotated[int, Ge(2)] = 2
    lambda_: Annotated[int, Ge(1)] = 2

    @classmethod
    def candidates(cls, work: CodedWork, machine: Machine) -> Iterator[Self]:
        """Every window whose delay the models allow."""
        for burst in range(1, work.models):
            for times in range(1, work.models):
                for count in range(1, min(work.most, work.workers) + 1):
                    one = cls(B=burst, W=1 + times * burst, lambda_=count)
                    if one.stragglers < work.workers:
                        yield one

    @property
    def stragglers(self) -> int:
        """Those of a round that the code tolerates, s; further ones are made up for later."""
        return -(-self.B * self.lambda_ // (self.W - 1 + self.B))

    def start(self, workers: int, jobs: int) -> SrSgcCoding:
        """No job has been tried."""
        if (self.W - 1) % self.B:
            raise CodedError(
                f"scheme.sr_sgc: B = {self.B} does not divide W - 1 = {self.W - 1}; give W = "
                f"{1 + self.B * -(-(self.W - 1) // self.B)}"
            )
        if self.lambda_ > workers or self.stragglers >= workers:
            raise CodedError(
                f"scheme.sr_sgc: lambda_ = {self.lambda_} and s = {self.stragglers} of {workers} "
                "workers; give a smaller lambda_"
            )
        return SrSgcCoding(self, workers, jobs)


class SrSgcCoding:
    """Codes of all jobs, and who has delivered what.

    Args:
        scheme: its options.
        workers: n.
        jobs: that there are.
    """

    def __init__(self, scheme: SrSgc, workers: int, jobs: int) -> None:
        s = scheme.stragglers
        self.load, self.delay, self.chunks = (s + 1) / workers, scheme.B, shares(workers)
        self._code, self._workers, self._jobs = GradientCode(workers, s), workers, jobs
        # Job -> worker -> round in which it delivered.
        self._there: dict[int, dict[int, int]] = {}
        self._repeating: tuple[int, frozenset[int]] = (0, frozenset())

    def tasks(self, number: int, worker: int) -> tuple[MiniTask, ...]:
        """One: of the newest job, or again of the job that is due."""
        job = number - self.delay if worker in self._repeats(number) else number
        return (MiniTask(job=job, parts=self._code.parts(worker)),) if job <= self._jobs else ()

    def enough(self, arrived: Set[int]) -> bool:
        """Each more makes repeating less likely."""
        return len(arrived) == self._workers

    def recoverable(self, number: int, arrived: Set[int]) -> bool:
        """The job that is due has enough; a later one can still be repeated as a whole."""
        due = number - self.delay
        if due < 1:
            return True
        repeated = len(self._repeats(number) & arrived)
        return len(self._there.get(due, {})) + repeated >= self._code.needed

    def close(self, number: int, arrived: Set[int]) -> None:
        """Note who has delivered, of which job."""
        repeats = self._repeats(number)
        for worker in arrived:
            job = number - self.delay if worker in repeats else number
            if job <= self._jobs:
                self._there.setdefault(job, {})[worker] = number

    def decode(self, job: int) -> tuple[Delivered, ...] | None:
        """From the round of the job and the one B later."""
        there = self._there.get(job, {})
        if len(there) < self._code.needed:
            return None
        workers = sorted(there)
        return tuple(
            Delivered(round=there[worker], worker=worker, weight=weight)
            for worker, weight in zip(workers, self._code.decode(workers).tolist(), strict=True)
            if weight
        )

    def _repeats(self, number: int) -> frozenset[int]:
        """As many workers as are missing of the job that is due, of those that did not deliver."""
        if self._repeating[0] != number:
            due = number - self.delay
            there = self._there.get(due, {})
            missing = self._code.needed - len(there) if due >= 1 else 0
            others = [worker for worker in range(self._workers) if worker not in there]
            self._repeating = number, frozenset(others[: max(0, missing)])
        return self._repeating[1]
