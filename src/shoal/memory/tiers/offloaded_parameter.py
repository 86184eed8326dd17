"""Where a parameter lives while it is not used: this rank's part of it, and all that belongs to it.

A parameter is cut along its first dimension into as many parts as there are ranks, of
ceil(rows / ranks) rows, the last ones padded, so that every rank's slow tiers carry the same.
With ``owner`` one rank has all of it instead: what ZeRO-Infinity is measured against.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 6.1 (bandwidth-centric partitioning).
Differs: cut by rows and not by elements, so that a part is a box that a checkpoint can name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.ir.comm import LocalParameter, Pending
from shoal.kernel.squares import ROW, row_norms

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.places import TierRow


class ParameterShard:
    """What one rank has of a parameter.

    Args:
        shape: of the whole parameter.
        owner: the rank that has all of it; None where all have a part.

    Attributes:
        first: row at which this rank's part begins.
        rows: its rows.
        numel: its elements.
        padded: elements of every rank's part as they are gathered; all where one rank owns it.
    """

    def __init__(
        self, shape: tuple[int, ...], rank: int, world: int, owner: int | None = None
    ) -> None:
        self.shape, self.owner = shape, owner
        total = shape[0] if shape else 1
        self.width = 1
        for size in shape[1:]:
            self.width *= size
        self.whole = total * self.width
        if owner is not None:
            self.first, self.rows = 0, total if owner == rank else 0
            self.padded = self.whole
        else:
            each = -(-total // world)
            self.first = min(each * rank, total)
            self.rows = min(each, total - self.first)
            self.padded = each * self.width
        self.numel = self.rows * self.width

    def __eq__(self, other: object) -> bool:
        """The same part of a parameter of the same shape."""
        mine = (self.shape, self.owner, self.first, self.rows)
        return isinstance(other, ParameterShard) and mine == (
            other.shape,
            other.owner,
            other.first,
            other.rows,
        )

    __hash__ = None  # type: ignore[assignment]

    def of(self, whole: Tensor) -> Tensor:
        """This rank's elements of the whole parameter, flat."""
        start = self.first * self.width
        return whole.reshape(-1)[start : start + self.numel]

    def held(self, values: Tensor) -> LocalParameter:
        """This rank's elements as a box of the whole."""
        if not self.shape:
            return LocalParameter(values.view(() if self.rows else (0,)), (), ())
        box = values.view(self.rows, *self.shape[1:])
        return LocalParameter(box, (self.first, *(0,) * (len(self.shape) - 1)), self.shape)


class OffloadedParameter:
    """One parameter away from the device.

    Args:
        parameter: itself; while it is not on the device, what it has now: nothing, in its shape.
        cut: this rank's part.
        weight: its elements.
        gradient: the sum of its gradients.
        states: state of the optimizer -> its elements.

    Attributes:
        flat: all of it on the device, while it is there.
        ticket: of what brings this rank's part there.
        part: this rank's shard on the device, until the all-gather.
        gathering: what brings the other ranks' parts.
        uses: passes under way that need it.
        kept: stays until its gradient is computed, or until it is released.
        fresh: no gradient has come yet in this step.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        cut: ParameterShard,
        weight: TierRow,
        gradient: TierRow | None,
        states: dict[str, TierRow],
    ) -> None:
        self.name, self.parameter, self.cut = name, parameter, cut
        self.dtype: torch.dtype = parameter.dtype
        self.empty: Tensor = parameter.data
        self.weight, self.gradient, self.states = weight, gradient, states
        self.flat: Tensor | None = None
        self.ticket: Ticket | None = None
        self.part: Tensor | None = None
        self.gathering: Pending | None = None
        self.uses = 0
        self.kept = False
        self.fresh = True
        self.steps = 0
        self._norms = torch.zeros(-(-cut.numel // ROW), dtype=torch.float64)

    def measure(self, first: int, values: Tensor) -> None:
        """Take note of the norms of these elements of the gradient, from a row's beginning."""
        norms = row_norms(values)
        self._norms[first // ROW : first // ROW + len(norms)] = norms

    @property
    def weight_bytes(self) -> int:
        """Of this rank's elements."""
        return self.cut.numel * self.dtype.itemsize

    @property
    def squares(self) -> Tensor:
        """Sum of the squares of this rank's elements of the gradient, fp64."""
        if self.fresh:
            return self._norms.new_zeros(())
        return self._norms.square().sum()
