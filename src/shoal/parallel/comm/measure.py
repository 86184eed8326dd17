"""The probe of collectives: all-reduce between two processes, by the collectives of training.

A ring all-reduce of n ranks takes ``2 (n-1) (latency + bytes / (n bandwidth))``; with
two ranks and two sizes both unknowns follow.
"""

from __future__ import annotations

import time
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.ir.machine import Measurement
from shoal.machine.protocols import ProbeContext
from shoal.machine.worker import TorchWorker

# What the child processes of the probe call.
_ALL_REDUCE = "shoal.parallel.comm.measure:all_reduce"


@part
class CollectiveProbe:
    """Latency and bandwidth of an all-reduce between two local ranks.

    Args:
        small_bytes: message size for the latency.
        large_bytes: message size for the bandwidth.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    small_bytes: int = 1024
    large_bytes: int = 16 * 2**20
    repeats: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require(
            4 <= self.small_bytes < self.large_bytes,
            "probe.collective.small_bytes",
            self.small_bytes,
            expected="at least 4, and below large_bytes",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``all_reduce`` (s, at bytes), ``latency`` (s), ``bandwidth`` (byte/s)."""
        repeats = self.repeats or (5 if context.fast else 15)
        sizes = [self.small_bytes, self.large_bytes]
        try:
            first = context.worker()
            first.call("hello")
            second = TorchWorker()
        except (MissingExtraError, MachineError) as cause:
            context.skip("collective", str(cause))
            return []
        try:
            with scratch_directory("probe") as place:
                store = str(place / "store")
                options = {"world": 2, "store": store, "sizes": sizes, "repeats": repeats}
                first.send(_ALL_REDUCE, rank=0, **options)
                second.send(_ALL_REDUCE, rank=1, **options)
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


def all_reduce(
    rank: int, world: int, store: str, sizes: list[int], repeats: int
) -> dict[str, list[float]]:
    """Seconds of one all-reduce between CPU ranks, by bytes; every rank calls it.

    Args:
        rank: this rank.
        world: number of ranks, all on this host.
        store: path of a file where they meet; it does not exist yet.
        sizes: bytes to sum.
        repeats: samples of each size.
    """
    import torch

    from shoal.core.meter import Meter
    from shoal.parallel.comm.collectives import TorchComm

    torch.set_num_threads(1)
    with Meter([]) as meter:
        comm = TorchComm(
            meter, rank=rank, world=world, rendezvous=f"file://{store}", timeout_s=30.0
        )
        result = {}
        try:
            for size in sizes:
                data = torch.zeros(max(1, size // 4))
                batch = 200 if size <= 65536 else 3
                samples = []
                for _ in range(3):
                    comm.all_reduce(data, tag="probe").wait()
                for _ in range(repeats):
                    comm.barrier()
                    begin = time.perf_counter()
                    for _ in range(batch):
                        comm.all_reduce(data, tag="probe").wait()
                    samples.append((time.perf_counter() - begin) / batch)
                result[str(size)] = samples
        finally:
            comm.close()
    return result
