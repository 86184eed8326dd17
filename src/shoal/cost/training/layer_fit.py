"""Measured costs of layers, links and overlap, and the lines that are fitted to them.

A pass of a layer takes ``constant + per_token b T + per_pair b T^2`` seconds for b sequences of T
tokens; a collective takes its latency and its bytes over its bandwidth, by kind, number of ranks
and how far these stand apart; what overlaps is slower by factors of its own. Nothing here measures.

Source: Miao et al., Galvatron, 2023, section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.core.errors import MachineError, require


class PassFit(Value):
    """Seconds of one direction of one layer.

    Args:
        constant: of every pass.
        per_token: of every token.
        per_pair: of every pair of tokens of a sequence.
    """

    constant: NonNegativeFloat = 0.0
    per_token: NonNegativeFloat = 0.0
    per_pair: NonNegativeFloat = 0.0

    def seconds(self, sequences: float, seq_len: float) -> float:
        """Of ``sequences`` of ``seq_len`` tokens."""
        tokens = sequences * seq_len
        return self.constant + self.per_token * tokens + self.per_pair * tokens * seq_len


class LinkFit(Value):
    """Seconds of one kind of communication among some ranks.

    Args:
        op: all_reduce, gather, scatter (a reduce-scatter) or send.
        group: ranks that take part.
        stride: how far apart they are, by number; neighbours are 1.
        latency_s: of every call.
        bandwidth: byte/s, for the bytes per rank by the ring formulas.
    """

    op: Literal["all_reduce", "gather", "scatter", "send"]
    group: PositiveInt
    stride: PositiveInt = 1
    latency_s: NonNegativeFloat
    bandwidth: PositiveFloat

    def seconds(self, sent: float) -> float:
        """Of ``sent`` bytes."""
        return self.latency_s + sent / self.bandwidth if sent > 0 else 0.0


class Overlap(Value):
    """How much longer computation and communication take while both are under way.

    Args:
        compute: factor of computation, at least 1.
        communication: factor of communication, at least 1.
        source: where the factors come from.
    """

    compute: float = 1.3
    communication: float = 1.3
    source: str = "Miao et al., Galvatron, 2023, section 3.4: up to 1.3 times slower on GPUs"

    def seconds(self, compute: float, communication: float) -> float:
        """Time in which both are done: side by side slowed down, what is left alone at full rate.

        Args:
            compute: seconds of the computation alone.
            communication: seconds of the communication alone.
        """
        slow, late = compute * self.compute, communication * self.communication
        if slow >= late:
            return late + (compute - late / self.compute)
        return slow + (communication - slow / self.communication)


class LayerProfile(Value):
    """Measurements of the layers of one model on one machine.

    Args:
        forward: ``layer/tp`` -> fit of the forward pass, such as ``block/2``; ``embed`` and
            ``head`` are the ends.
        backward: the same of the backward pass.
        links: fits of communication.
        overlap: slowdown where both are under way.
        step_s: seconds of a step outside the layers: reading rows, counting, the loop.
        per_parameter_s: seconds of the update of one parameter, its norm included.
    """

    forward: dict[str, PassFit] = {}
    backward: dict[str, PassFit] = {}
    links: tuple[LinkFit, ...] = ()
    overlap: Overlap = Overlap()
    step_s: NonNegativeFloat = 0.0
    per_parameter_s: NonNegativeFloat | None = None

    def link(self, op: str, group: int, stride: int) -> LinkFit | None:
        """The fit for these ranks; of another stride if there is none of this one."""
        fits = [fit for fit in self.links if fit.op == op and fit.group == group]
        if not fits and op == "scatter":
            return self.link("gather", group, stride)
        return min(fits, key=lambda fit: abs(fit.stride - stride), default=None)


def fit_pass(points: Sequence[tuple[float, float, float]]) -> PassFit:
    """The fit of (sequences, tokens of a sequence, seconds) with the least relative errors.

    What the points cannot separate is put on the earlier term: of one length there is no
    quadratic term.

    Raises:
        MachineError: no points, or a time that is not positive.
    """
    _positive([seconds for *_, seconds in points])
    lengths = {length for _, length, _ in points}
    sizes = {sequences * length for sequences, length, _ in points}
    columns = [[1.0, b * t, b * t * t] for b, t, _ in points]
    # Of one size alone a rate is as good as a constant, and serves other sizes better.
    used = [0, 1, 2] if len(lengths) > 1 else ([0, 1] if len(sizes) > 1 else [1])
    seconds = np.array([s for *_, s in points])
    design = np.array(columns)[:, used] / seconds[:, None]
    values = dict(zip(used, _least_squares(design), strict=True))
    return PassFit(
        constant=values.get(0, 0.0), per_token=values.get(1, 0.0), per_pair=values.get(2, 0.0)
    )


def fit_link(
    op: Literal["all_reduce", "gather", "scatter", "send"],
    points: Sequence[tuple[float, float]],
    *,
    group: int,
    stride: int = 1,
) -> LinkFit:
    """The fit of (bytes that a rank sends, seconds) with the least relative errors.

    Raises:
        MachineError: fewer than two sizes, or a time that is not positive.
    """
    _positive([seconds for _, seconds in points])
    require(
        len({sent for sent, _ in points}) >= 2,
        f"{op} among {group} ranks",
        points,
        expected="times of at least two sizes",
        error=MachineError,
    )
    seconds = np.array([s for _, s in points])
    design = np.array([[1.0, sent] for sent, _ in points]) / seconds[:, None]
    latency, rate = _least_squares(design)
    require(
        rate > 0,
        f"{op} among {group} ranks",
        points,
        expected="larger messages that take longer",
        error=MachineError,
    )
    return LinkFit(op=op, group=group, stride=stride, latency_s=latency, bandwidth=1.0 / rate)


def _least_squares(design: NDArray[np.float64]) -> list[float]:
    """Values of 0 or more under which every row is as near to 1 as can be."""
    # Imported late: it takes longer than all else here, and a rank seldom fits anything.
    from scipy.optimize import nnls

    scale = design.max(axis=0)
    result, _ = nnls(design / scale, np.ones(len(design)))
    fitted: list[float] = (result / scale).tolist()
    return fitted


def _positive(seconds: Sequence[float]) -> None:
    require(
        bool(seconds) and min(seconds) > 0,
        "measured times",
        list(seconds),
        expected="at least one, all above 0 s",
        error=MachineError,
    )
