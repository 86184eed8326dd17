"""Seconds of collectives among accelerators, by where the ranks of a group stand.

Ranks are numbered so that a group's neighbours are ``stride`` devices apart. Those of a
group that share a domain (a node, or a rack joined by one switch) each bring their own
port: a ring over several domains moves as many bytes at a time as the domain has members
in the group. Latency counts a hop for each member of the ring, as rings do.

Source: Thakur et al., 2005; NVIDIA NCCL documentation, ring algorithm; DeepSeek-V3, 2024,
section 3.2.2 (all-to-all across domains and inside).
"""

from __future__ import annotations

from shoal.cost.gpu.device import Accelerator, GpuCalibration

__all__ = ["all_to_all_s", "ring_s", "send_s"]

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


def all_to_all_s(
    size: float, ranks: int, stride: int, gpu: Accelerator, k: GpuCalibration
) -> float:
    """Seconds until every rank has sent ``size`` bytes, equally to all ranks."""
    if ranks <= 1 or size <= 0:
        return 0.0
    local = _members(gpu, ranks, stride)
    inside = size * (local - 1) / ranks / (k.wire * gpu.inside)
    outside = size * (ranks - local) / ranks / (k.wire * gpu.outside)
    return max(inside, outside) + (gpu.far_s if local < ranks else gpu.near_s)


def send_s(size: float, stride: int, gpu: Accelerator, k: GpuCalibration) -> float:
    """Seconds to send ``size`` bytes to the rank ``stride`` devices away."""
    near = stride < gpu.domain
    rate = gpu.inside if near else gpu.outside
    return size / (k.wire * rate) + (gpu.near_s if near else gpu.far_s)
