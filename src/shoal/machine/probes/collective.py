"""All-reduce between two processes of this host, by the collectives that training uses.

A ring all-reduce of n ranks takes ``2 (n-1) (latency + bytes / (n bandwidth))``; with
two ranks and two sizes both unknowns follow.
"""

from __future__ import annotations

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.ir.machine import Measurement
from shoal.machine.protocols import Context
from shoal.machine.worker import Worker

__all__ = ["Collective"]


@part
class Collective:
    """Latency and bandwidth of an all-reduce between two local ranks.

    Args:
        small_bytes: the size that shows the latency.
        large_bytes: the size that shows the bandwidth.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    small_bytes: int = 1024
    large_bytes: int = 16 * 2**20
    repeats: int = 0

    def __post_init__(self) -> None:
        require(
            4 <= self.small_bytes < self.large_bytes,
            "probe.collective.small_bytes",
            self.small_bytes,
            expected="at least 4, and below large_bytes",
        )
        require(self.repeats >= 0, "probe.collective.repeats", self.repeats, expected="0 or more")

    def run(self, context: Context) -> list[Measurement]:
        """Quantities ``all_reduce`` (s, at bytes), ``latency`` (s), ``bandwidth`` (byte/s)."""
        repeats = self.repeats or (5 if context.fast else 15)
        sizes = [self.small_bytes, self.large_bytes]
        try:
            first = context.worker()
            first.call("hello")
            second = Worker()
        except (MissingExtraError, MachineError) as cause:
            context.skip("collective", str(cause))
            return []
        try:
            with scratch_directory("probe") as place:
                store = str(place / "store")
                options = {"world": 2, "store": store, "sizes": sizes, "repeats": repeats}
                first.send("all_reduce", rank=0, **options)
                second.send("all_reduce", rank=1, **options)
                answers = [rank.receive() for rank in (first, second)]
        except MachineError as cause:
            context.skip("collective", str(cause))
            return []
        finally:
            second.close()
        # A collective is done when its last rank is done.
        small, large = (
            [max(both) for both in zip(*(a[str(s)] for a in answers), strict=True)] for s in sizes
        )
        rates = [
            (self.large_bytes - self.small_bytes) / max(slow - quick, 1e-9)
            for slow, quick in zip(large, small, strict=True)
        ]
        return [
            context.measured("collective", "all_reduce", "s", small, at=self.small_bytes),
            context.measured("collective", "all_reduce", "s", large, at=self.large_bytes),
            context.measured("collective", "latency", "s", [seconds / 2 for seconds in small]),
            context.measured("collective", "bandwidth", "B/s", rates),
        ]
