"""Seconds of collectives by the alpha-beta model of ring algorithms.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005; Patarasuk and Yuan, Bandwidth Optimal All-reduce, 2009.
"""

from __future__ import annotations

from shoal.ir import Link


def ring_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends in one pass of a ring over ``size`` bytes."""
    return size * (ranks - 1) / ranks


def all_reduce_s(size: float, ranks: int, link: Link | None) -> float:
    """Seconds to sum ``size`` bytes over ``ranks``: a reduce-scatter and an all-gather."""
    return 2 * gather_s(size, ranks, link)


def gather_s(size: float, ranks: int, link: Link | None) -> float:
    """Seconds of an all-gather to, or a reduce-scatter from, ``size`` bytes."""
    if ranks <= 1 or link is None or size <= 0:
        return 0.0
    return ring_bytes(size, ranks) / link.bandwidth + (ranks - 1) * link.latency_s


def send_s(size: float, link: Link | None) -> float:
    """Seconds to send ``size`` bytes to a neighbour."""
    return 0.0 if link is None else size / link.bandwidth + link.latency_s
