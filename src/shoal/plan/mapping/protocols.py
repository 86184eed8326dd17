"""What a mapper promises."""

from __future__ import annotations

from typing import Protocol

from shoal.plan.mapping.layout import Mapping
from shoal.plan.mapping.program import MappingProgram, TierSpec


class Mapper(Protocol):
    """A part of kind ``mapper``."""

    def map(self, program: MappingProgram, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """Say what is in fast memory when, at which address, and what is copied.

        No two buffers are in one place at one time, every copy fits into idle time of the slow
        memory, and the time is that of :func:`shoal.plan.mapping.layout.verify`.

        Raises:
            PlanError: this mapper cannot map this program.
        """
