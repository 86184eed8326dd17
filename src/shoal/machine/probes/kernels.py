"""What Shoal's kernels reach on this host, and the peers that they compete with.

From these numbers :mod:`shoal.kernel.dispatch` tells which kernel is fastest for a call.
"""

from __future__ import annotations

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.protocols import Context

__all__ = ["Kernels"]


@part
class Kernels:
    """Bytes a second of each kernel at several numbers of rows, weights in main memory.

    Args:
        repeats: passes over a quarter of a gibibyte of weights; 0 for 2 (fast) or 6.
    """

    repeats: int = 0

    def __post_init__(self) -> None:
        require(self.repeats >= 0, "probe.kernels.repeats", self.repeats, expected="0 or more")

    def run(self, context: Context) -> list[Measurement]:
        """Quantity ``OP.BACKEND`` (B/s) at a number of rows; the note is the type."""
        repeats = self.repeats or (2 if context.fast else 6)
        try:
            found = context.worker().call("kernels", timeout_s=300.0, repeats=repeats)
        except (MissingExtraError, MachineError) as cause:
            context.skip("kernels", str(cause))
            return []
        return [
            context.measured(
                "kernels", one["name"], "B/s", one["rates"], at=one["at"], note=one["dtype"]
            )
            for one in found
        ]
