"""Gradients are summed over all data-parallel ranks in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine, Work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from shoal.parallel.protocols import Ranks


_NOTHING = Estimate(step_s=Interval.around(0.0, 0.3), terms_s={"collective": 0.0})


@part
class EveryStep:
    """Synchronize gradients in every step; choose it where the network is fast enough."""

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

    def workers(self, dp: int) -> None:
        """No rank makes an update alone."""

    def steps(self, work: Work, machine: Machine) -> None:
        """There are no rounds."""

    def kept_bytes(self, work: Work) -> float:
        """Nothing."""
        return 0.0

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Nothing: what sums the gradients is the part of kind ``shard``."""
        return _NOTHING

    def apply(self, model: nn.Module, owned: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Nothing is to be done after an update."""
