"""Seconds of collectives among accelerators, by where the ranks of a group stand.

Ranks are numbered so that a group's neighbours are ``stride`` devices apart. Those of a
group that share a domain (a node, or a rack joined by one switch) each bring their own
port: a ring over several domains moves as many bytes at a time as the domain has members
in the group. Latency counts a hop for each member of the ring, as rings do.

Source: Thakur et al., 2005; NVIDIA NCCL documentation, ring algorithm.
"""

from __future__ import annotations

from shoal.cost.gpu.device import Accelerator, GpuCalibration

# Hops of a ring are pipelined: the latency of one is this share of a small message's.
HOP = 0.35


def _members(gpu: Accelerator, ranks: int, stride: int) -> int:
    """Members of one group that share a domain."""
    return max(1, min(ranks, gpu.domain // max(1, stride)))


def ring_s(size: float, ranks: int, stride: int, gpu: Accelerator, k: GpuCalibration) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, ``size`` bytes; half an all-reduce."""
    if ranks <= 1 or size <= 0:
        return 0.0
    local = _members(gpu, ranks, stride)
    rate = gpu.inside
    hops = (local - 1) * gpu.near_s
    if local < ranks:
        rate = min(rate, local * gpu.outside)
        hops += (ranks // local - 1) * gpu.far_s
    return size * (ranks - 1) / ranks / (k.wire * rate) + HOP * hops + gpu.near_s
