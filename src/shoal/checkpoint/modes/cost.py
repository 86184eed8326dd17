"""What a save costs by bytes and rates; the modes differ in which of it training waits for."""

from __future__ import annotations

from shoal.cost.arithmetic import parameters
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.ir import Estimate, Interval, Machine, Work

# fp32 weights and two fp32 moments, which AdamW keeps; others keep less.
_BYTES_OF_PARAMETER = 12.0
_DISK_RATE = 1e9
_SPREAD = 0.5


def saved_bytes(work: Work) -> float:
    """Bytes that one rank writes: copies are written once, and shares are equal."""
    return _BYTES_OF_PARAMETER * parameters(work.shape) / work.job.parallel.world


def seconds_of(work: Work, machine: Machine) -> tuple[float, float]:
    """Seconds in which a rank copies what it writes to host memory, and writes it to disk.

    The ranks of a node share its disk.
    """
    size = saved_bytes(work)
    disk = next((t for t in machine.device.memory if t.name == "disk"), None)
    rate = (disk.write_bandwidth if disk is not None else None) or _DISK_RATE
    ranks = min(work.job.parallel.world, max(1, machine.devices_per_node))
    return size / copy_bytes_per_s(machine), ranks * size / rate


def estimate(seconds: float, host_bytes: float) -> Estimate:
    """A save that holds training up for so long, with so much memory of the host."""
    return Estimate(
        step_s=Interval.around(seconds, _SPREAD),
        terms_s={"memory": seconds},
        memory_bytes={"runtime": host_bytes},
    )
