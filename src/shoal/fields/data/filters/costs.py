"""What a filter of text costs where it cannot be timed on the rows themselves."""

from __future__ import annotations

from shoal.fields.data.curate.costs import workers_of
from shoal.fields.data.curate.protocols import CurateWork
from shoal.ir import Estimate, Interval, Machine


def filter_estimate(
    work: CurateWork, machine: Machine, per_byte: float, *, held: float = 0.0
) -> Estimate:
    """One pass over all texts.

    Args:
        work: the data.
        machine: whose processes do it.
        per_byte: seconds for each byte of text, of one core of a server.
        held: bytes of what each process holds.
    """
    workers = workers_of(work, machine)
    seconds = work.num_bytes * work.rates.inflate * per_byte / workers
    return Estimate(
        step_s=Interval.around(seconds, 1.0),
        terms_s={"compute": seconds},
        memory_bytes={"filters": held * workers},
    )
