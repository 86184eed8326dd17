"""Variational inequalities whose operator is a mean over workers; numpy only.

Find z* with <F(z*), z - z*> + h(z) - h(z*) >= 0 for all z, where F = (1/M) sum F_m and worker m
evaluates F_m. A saddle point min over x, max over y of f has z = (x, y) and
F = (grad_x f, -grad_y f). Vectors are float64 [n] where they are computed with, and float32 on
their way.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

import numpy as np

from shoal.core.random import generator, seed64
from shoal.fields.federate.protocols import FederationError, UpdateCompressor
from shoal.ir import Machine

# Iterations whose coins are drawn at a time.
_BLOCK = 1024


class ViError(FederationError):
    """A method does not fit a problem, or has diverged."""


@dataclass(frozen=True, kw_only=True)
class ViConstants:
    """What is known of an operator.

    Args:
        lipschitz: L_m of each worker.
        mean_lipschitz: L of the mean.
        monotone: mu, of strong monotonicity.
    """

    lipschitz: tuple[float, ...]
    mean_lipschitz: float
    monotone: float


class ViOperator(Protocol):
    """A problem with its data, in one process.

    Attributes:
        size: numbers of z, n.
        workers: M.
        constrained: whether h is not zero.
        constants: None where they are not known.
        flops: of one evaluation of F_m.
    """

    size: int
    workers: int
    constrained: bool
    constants: ViConstants | None
    flops: float

    def start(self) -> np.ndarray:
        """Where methods begin, float64 [n]."""

    def value(self, worker: int, z: np.ndarray, sample: np.random.Generator | None) -> np.ndarray:
        """F_m(z), float64 [n]; an unbiased estimate from drawn data if there is a sample."""

    def prox(self, z: np.ndarray, step: float) -> np.ndarray:
        """The proximal step of h; z itself without one."""

    def error(self, z: np.ndarray) -> float | None:
        """How far z is from a solution: 1 at the start, 0 at a solution; None if nobody knows."""

    def judge(self, z: np.ndarray) -> dict[str, float]:
        """Anything else that a report says of z."""


@runtime_checkable
class ViProblem(Protocol):
    """A variational inequality that is divided over workers."""

    def build(self, workers: int, seed: int) -> ViOperator:
        """With its data; imports no torch before an operator is evaluated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeanExchange:
    """A mean over workers, through the server: what one worker gives, and how it travels.

    Args:
        vector: of this worker, float64 [n].
        up: how workers compress.
        down: how the server compresses the mean.
        feedback: what compression leaves out is added to the next vector, at both ends.
        members: workers that send; all without it.
    """

    vector: np.ndarray
    up: UpdateCompressor
    down: UpdateCompressor
    feedback: bool = False
    members: tuple[int, ...] | None = None


Steps = Generator[MeanExchange, np.ndarray, None]
"""A method at work in one place: it yields what it wants the mean of, and is sent that mean."""

SERVER = -1
"""Number of the place that evaluates nothing and follows all others."""


@dataclass(kw_only=True)
class Place:
    """Where a method runs: at a worker, or at the server, which computes the same without data.

    Args:
        operator: of the problem.
        worker: number of the worker, or SERVER.
        step: gamma.
        up: compressor of the workers.
        down: of the server.
        exact: compressor of what is sent whole.
        seed: of everything that all places draw alike.

    Attributes:
        point: z after the last iteration.
        iterations: that are done.
    """

    operator: ViOperator
    worker: int
    step: float
    up: UpdateCompressor
    down: UpdateCompressor
    exact: UpdateCompressor
    seed: int
    point: np.ndarray = field(init=False)
    iterations: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.point = self.operator.start()

    def value(self, z: np.ndarray, sample: int = 0) -> np.ndarray:
        """F_m(z), of some of the worker's data if ``sample`` is not 0; zeros at the server."""
        if self.worker == SERVER:
            return np.zeros(self.operator.size)
        if not sample:
            return self.operator.value(self.worker, z, None)
        draw = generator(sample, purpose="samples of an operator", index=self.worker)
        return self.operator.value(self.worker, z, draw)

    def prox(self, z: np.ndarray) -> np.ndarray:
        """The proximal step for this gamma."""
        return self.operator.prox(z, self.step)

    def whole(self, vector: np.ndarray) -> MeanExchange:
        """Its mean, not compressed."""
        return MeanExchange(vector=vector, up=self.exact, down=self.exact)

    def sample(self, stochastic: bool) -> int:
        """Key of the data of this iteration; 0 for all data."""
        return seed64(self.seed, purpose="data", step=self.iterations) if stochastic else 0

    def coin(self, probability: float) -> bool:
        """A shared coin of this iteration, which costs no message."""
        block, at = divmod(self.iterations, _BLOCK)
        return bool(_dice(self.seed, block)[at] < probability)

    def members(self, count: int) -> tuple[int, ...] | None:
        """Workers that take part in this iteration; all if ``count`` is 0."""
        if not count:
            return None
        draw = generator(self.seed, purpose="partial participation", step=self.iterations)
        return tuple(sorted(draw.choice(self.operator.workers, count, replace=False).tolist()))

    def done(self, z: np.ndarray) -> None:
        """An iteration has ended at a point."""
        self.point, self.iterations = z, self.iterations + 1


@dataclass(frozen=True, kw_only=True)
class ViWork:
    """What the planner knows of a problem.

    Args:
        size: of z.
        workers: M.
        constrained: whether h is not zero.
        constants: None where they are not known.
        up: compressor of the workers.
        down: of the server.
        step: gamma that is asked for; None for the method's own.
        log_error: ln(1 / tolerance).
    """

    size: int
    workers: int
    constrained: bool
    constants: ViConstants | None
    up: UpdateCompressor
    down: UpdateCompressor
    step: float | None
    log_error: float


@dataclass(frozen=True, kw_only=True)
class ViCosts:
    """What an iteration of a method costs in the mean, and how many there are.

    Args:
        iterations: to the tolerance, by the theory of the method; None where it has none.
        up_bits: of a worker, in an iteration.
        down_bits: to a worker.
        exchanges: means through the server.
        evaluations: of F_m by a worker.
    """

    iterations: float | None
    up_bits: float
    down_bits: float
    exchanges: float
    evaluations: float


@runtime_checkable
class ViMethod(Protocol):
    """How workers and a server find a solution."""

    @classmethod
    def candidates(cls, work: ViWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing where :meth:`check` refuses."""

    def check(self, work: ViWork) -> None:
        """Compare it with a problem and compressors.

        Raises:
            ViError: it cannot be used with them.
        """

    def bound(self, work: ViWork) -> float | None:
        """The largest step gamma that the theory allows; None where constants are not known."""

    def costs(self, work: ViWork, step: float) -> ViCosts:
        """What it costs with a step."""

    def steps(self, place: Place) -> Steps:
        """Run in one place, until it is closed."""


@functools.lru_cache(maxsize=4)
def _dice(seed: int, block: int) -> np.ndarray:
    """Numbers in [0, 1) for the coins of a block of iterations."""
    return generator(seed, purpose="refresh of the reference", step=block).random(_BLOCK)


def measured_constants(matrices: np.ndarray) -> ViConstants:
    """Constants of F_m(z) = A_m z + b_m from the matrices [M, n, n]."""
    mean = matrices.mean(0)
    return ViConstants(
        lipschitz=tuple(float(np.linalg.norm(one, 2)) for one in matrices),
        mean_lipschitz=float(np.linalg.norm(mean, 2)),
        monotone=float(np.linalg.eigvalsh((mean + mean.T) / 2)[0]),
    )
