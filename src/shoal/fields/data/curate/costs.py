"""What a pass over the rows of a data set costs."""

from __future__ import annotations

from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.sources import SHARD_BYTES
from shoal.ir import Estimate, Interval, Machine

# The rows of a shard in Arrow, decompressed, a few copies of a batch beside it.
_COPIES = 3.0
# Opening a shard's files, and writing them durably.
_SHARD_S = 0.01
# Starting a process that imports numpy and Arrow.
_WORKER_S = 1.0
# Half-widths of a sum of timed rates, and of others.
_SPREAD_TIMED, _SPREAD_DERIVED = 0.3, 1.0


def workers_of(work: CurateWork, machine: Machine) -> int:
    """Shards that are in work at a time, on cores of their own."""
    return max(1, min(work.workers, machine.device.num_cores or work.workers))


def streaming(
    work: CurateWork, machine: Machine, *, write: float, rate: float = 0.0, fixed_s: float = 0.0
) -> Estimate:
    """One pass that reads every shard, computes, and writes a share of the rows.

    Args:
        work: the data.
        machine: whose processes do it.
        write: share of the bytes that is written.
        rate: bytes of rows that one process computes on in a second; 0 where that is nothing.
        fixed_s: seconds that do not depend on the data.
    """
    workers, rates = workers_of(work, machine), work.rates
    size = work.num_bytes * rates.inflate
    shards = max(1.0, work.num_bytes / SHARD_BYTES)
    terms = {
        "read": size * rates.read_s / workers,
        "write": write * size * rates.write_s / workers,
        "compute": size / rate / workers if rate else 0.0,
        "fixed": fixed_s + shards * _SHARD_S / workers + (_WORKER_S if work.workers > 1 else 0.0),
    }
    held = min(size, SHARD_BYTES * max(1.0, rates.inflate)) * _COPIES * workers
    spread = _SPREAD_TIMED if rates.measured else _SPREAD_DERIVED
    return Estimate(
        step_s=Interval.around(sum(terms.values()), spread),
        terms_s={name: seconds for name, seconds in terms.items() if seconds},
        memory_bytes={"shards": held},
    )
