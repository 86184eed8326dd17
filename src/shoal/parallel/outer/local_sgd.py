"""Local SGD: workers step alone, and average their parameters once a round.

Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Lin et al., Don't Use
Large Mini-batches, Use Local SGD, ICLR 2020. The inner update may be any optimizer's; its state
stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from shoal.core.parts import part
from shoal.ir import Machine, Work
from shoal.parallel.outer.averaging import Averaging

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.outer.rule import Rule, Segments


@part
class LocalSGD(Averaging):
    """Average the parameters every ``tau`` steps, without overlap; the simplest method."""

    traits: ClassVar[frozenset[str]] = frozenset({"local_updates"})

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Between nodes or sites: in less memory than ``co2``, which keeps a momentum."""
        return cls.between_groups(work, machine)

    def rule(self, like: Tensor, segments: Segments) -> Rule:
        """The mean itself."""
        return _Mean()


class _Mean:
    """See :class:`~shoal.parallel.outer.rule.Rule`."""

    lr = 1.0

    def direction(self, mean: Tensor) -> Tensor:
        return mean

    def state(self) -> dict[str, Tensor]:
        return {}
