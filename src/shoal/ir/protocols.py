"""What every part can do, whatever its kind."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work


@runtime_checkable
class Part(Protocol):
    """One technique that a job can choose.

    ``estimate`` says what choosing the part adds to one step: time by cause, memory
    by cause and bytes on the wire. It allocates nothing, needs no torch and has no
    side effects. A part that costs nothing returns an estimate of zero.
    """

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """What this part adds to one step of ``work`` on ``machine``."""
