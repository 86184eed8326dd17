"""What a generative model of sparse causes is, what the engine gives it, and what it returns.

Shapes: N points, D numbers of a point, H components, H' candidates of a point, B points of a batch,
m values of a cause beside 0, K combinations of two and more causes, M = 1 + m H + K states.

A model says how likely a point and a state of its causes are together, adds up over points what its
parameters are estimated from, and estimates them. It keeps no state. Which states are looked at, at
which temperature, and where the points are, is the engine's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.config import Value
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.fields.data.sparse_coding.states import StateSpace
    from shoal.ir import Estimate, Machine

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

CodingParams: TypeAlias = dict[str, Floats]
"""Parameters of a model: always ``W`` [H, D], ``prior`` and ``sigma2``."""

CodingSums: TypeAlias = dict[str, Floats]
"""What the parameters are estimated from: sums over points, so those of shards are added."""


class SparseCodeError(ConfigError, ValueError):
    """Points that a model cannot explain, or a number of causes that cannot be used."""


class CauseTree(NamedTuple):
    """Combinations of candidates, each one of fewer causes and a last one; rows padded with 0.

    Args:
        sizes: int32 [K], active causes of each.
        which: int32 [K, gamma], which candidates they are, ascending.
        worth: int32 [K, gamma], which of the values each has.
        parents: int32 [K], the combination without the last cause: m H' + its place, or, of a
            single cause, number of its value * H' + its candidate.
    """

    sizes: npt.NDArray[np.int32]
    which: npt.NDArray[np.int32]
    worth: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]


class JointBatch(NamedTuple):
    """A batch of points beside their states.

    Args:
        logp: float64 [B, M], log of the joint probability of point and state.
        candidates: int64 [B, H'], causes that are combined, ascending.
        extra: what the model computed on the way and :meth:`Superposition.sums` needs.
    """

    logp: Floats
    candidates: Ids
    extra: Any


class CodingRates(Value):
    """How fast a machine does what the models do, with one thread.

    Args:
        flop_s: seconds of a floating-point operation in a product of matrices, float64.
        state_s: seconds of one state of one point: exponential, sum and division.
        cell_s: seconds of one number of one point in one state of a maximum.
        subset_s: seconds of one combination of one point with continuous causes.
        call_s: seconds of a batch beside its numbers.
        spread: half-width of the 90 % interval of a sum of them, as a share.
        measured: on this machine, or derived from its description.
    """

    flop_s: float
    state_s: float
    cell_s: float
    subset_s: float
    call_s: float
    spread: float
    measured: bool


class CodingWork(Value):
    """What is explained, as the estimates of the models see it.

    Args:
        points: N.
        dim: D.
        components: H.
        candidates: H'.
        active: most causes that are active at a time.
        iterations: of expectation and maximization.
        workers: processes that share the points.
        restarts: starts, each learned on a sample of the points.
        negative: share of the energy of the data that lies in values below zero.
    """

    points: int
    dim: int
    components: int
    candidates: int
    active: int
    iterations: int
    workers: int = 1
    restarts: int = 1
    negative: float = 0.0
    rates: CodingRates


class Superposition(Protocol):
    """A part of kind ``superposition``: prior, combination rule and noise of sparse causes.

    Attributes:
        values: that a cause can have beside 0; (1.0,) where it is on or off.
        signed: whether the data determine the sign of a component.
        non_negative: whether components and data are at least 0.
        hot: temperature at which learning usually begins.
    """

    signed: ClassVar[bool]
    non_negative: ClassVar[bool]
    hot: ClassVar[float]

    @property
    def values(self) -> tuple[float, ...]:
        """Values of a cause beside 0."""

    def estimate(self, work: CodingWork, machine: Machine) -> Estimate:
        """Seconds of all iterations, and bytes by cause."""

    def candidates(self, work: CodingWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying on such data; nothing, if it is not."""

    def check(self, data: Floats) -> None:
        """Refuse data that the model cannot explain.

        Args:
            data: [N, D].

        Raises:
            SparseCodeError: says why, and which model would do.
        """

    def start(self, mean: Floats, variance: Floats, components: int, seed: int) -> CodingParams:
        """Parameters to begin with.

        Args:
            mean: [D], of the data.
            variance: [D], of the data.
            components: H.
            seed: of what is random.
        """

    def truth(self, components: Floats, rate: float, sigma: float) -> CodingParams:
        """Parameters for :meth:`sample`.

        Args:
            components: [H, D].
            rate: probability that a cause is active.
            sigma: standard deviation of the noise.
        """

    def rates(self, params: CodingParams) -> Floats:
        """[H]: probability that each cause is active."""

    def ready(self, params: CodingParams, space: StateSpace, temperature: float) -> Any:
        """What :meth:`joint` and :meth:`sums` need of the parameters, computed once a pass."""

    def joint(self, data: Floats, ready: Any, space: StateSpace) -> JointBatch:
        """Log joint probabilities of points and their states.

        Args:
            data: [B, D].
            ready: of :meth:`ready`.
            space: the states.
        """

    def sums(
        self, data: Floats, posterior: Floats, joint: JointBatch, ready: Any, space: StateSpace
    ) -> tuple[CodingSums, Floats]:
        """Sums over the points of a batch, and the posterior mean [B, H] of each point's causes.

        Args:
            data: [B, D].
            posterior: [B, M], probabilities of the states; 0 everywhere for a point that does not
                count.
            joint: of :meth:`joint`, of the same points.
            ready: of :meth:`ready`.
            space: the states.
        """

    def maximize(
        self, sums: CodingSums, params: CodingParams, space: StateSpace, temperature: float
    ) -> CodingParams:
        """Parameters under which the points are likelier.

        Args:
            sums: over all points.
            params: those under which they were computed.
            space: the states.
            temperature: of the posterior under which they were computed.
        """

    def sample(
        self, params: CodingParams, num: int, draw: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Points [num, D] and the causes [num, H] that they were made of."""
