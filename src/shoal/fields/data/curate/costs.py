"""What a pass over the rows of a data set costs."""

from __future__ import annotations

from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.sources import SHARD_BYTES
from shoal.ir import Estimate, Interval, Machine

# Bytes of text, as stored, that one process parses into Arrow and writes as Parquet in a second.
_READ, _WRITE = 0.35e9, 0.12e9
# The rows of a shard in Arrow, decompressed, a few copies of a batch beside it.
_COPIES = 3.0


def streaming(
    work: CurateWork, machine: Machine, *, write: float, rate: float = 0.0, fixed_s: float = 0.0
) -> Estimate:
    """One pass that reads every shard, computes, and writes a share of the rows.

    Args:
        work: the data.
        machine: whose processes do it.
        write: share of the bytes that is written.
        rate: bytes of text that one process computes on in a second; 0 where that is nothing.
        fixed_s: seconds that do not depend on the data.
    """
    workers = max(1, min(work.workers, machine.device.num_cores or work.workers))
    terms = {
        "read": work.num_bytes / _READ / workers,
        "write": write * work.num_bytes / _WRITE / workers,
        "compute": work.num_bytes / rate / workers if rate else 0.0,
        "fixed": fixed_s,
    }
    held = min(work.num_bytes, SHARD_BYTES) * _COPIES * workers
    return Estimate(
        step_s=Interval.around(sum(terms.values()), 0.6),
        terms_s={name: seconds for name, seconds in terms.items() if seconds},
        memory_bytes={"shards": held},
    )
