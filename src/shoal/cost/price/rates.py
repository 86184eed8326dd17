"""What one rank gets of a machine: its rates, its links, its share of a shared host.

A GPU is one rank's own. The ranks of a CPU host share its cores, its memory bandwidth
and its memory. Rates that a probe measured at several sizes are interpolated on the
logarithm of the size; without such measurements the device's single numbers serve.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.errors import MachineError
from shoal.cost.gpu.device import CALIBRATED, Accelerator, GpuCalibration, gpu_of
from shoal.cost.gpu.kernels import GROUPED, attention_s, gemm_s
from shoal.cost.price.ops import OpGroup
from shoal.ir import Link, Machine, Measurement, MemoryTier, Parallel

# Share of a level's plain bandwidth that a framework's elementwise operator reaches on a CPU when
# it was not measured: it allocates its result, and it cannot prefetch across operators.
STREAM_SHARE = 0.5
# On a CPU, a product whose operands must be repacked (transposed bf16) runs at half rate.
REPACKED = {"bf16": 0.5}


@dataclass(frozen=True)
class Curve:
    """A measured rate over size, interpolated on log size and flat outside."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, size: float) -> float:
        """The rate at ``size``."""
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if size <= x1:
                share = math.log(size / x0) / math.log(x1 / x0)
                return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
        return points[-1][1]

    def scaled(self, factor: float) -> Curve:
        """Every rate times ``factor``."""
        return Curve(tuple((x, y * factor) for x, y in self.points))


@dataclass(frozen=True)
class KernelRates(Curve):
    """The same of an accelerator, whose products and attention are priced kernel by kernel.

    Args:
        gpu: the device.
        dtype: of the operands, where an operator does not say it.
        k: measured constants.
    """

    gpu: Accelerator
    dtype: str
    k: GpuCalibration = CALIBRATED

    def product_s(self, op: OpGroup, *, backward: bool) -> float:
        """Seconds of a product, or of the gradients of its input and of its weight."""
        share = 1.0 if op.groups == 1 else 1.0 / GROUPED

        def once(M: float, N: float, K: float, adds: float = 0.0) -> float:
            return share * gemm_s(
                M, N, K, self.gpu, self.k, op.dtype or self.dtype, op.groups, adds
            )

        if not backward:
            return once(op.M, op.N, op.K)
        inner = once(op.M, op.K, op.N)
        return inner if op.frozen else inner + once(op.N, op.K, op.M, op.adds)

    def attention_s(self, op: OpGroup, *, backward: bool) -> float:
        """Seconds of attention in one layer, on average over layers with and without a window."""

        def of(keys: float, causal: bool) -> float:
            return attention_s(
                heads=op.heads,
                queries=op.keys,
                keys=keys,
                head_dim=op.head_dim,
                value_dim=op.value_dim,
                kernel=op.kernel,
                gpu=self.gpu,
                k=self.k,
                backward=backward,
                causal=causal,
            )

        seen, layers = op.window
        whole = of(op.keys, causal=True)
        if not seen or seen >= op.keys:
            return whole
        return (1 - layers) * whole + layers * of(float(seen), causal=False)


def _mean_bandwidth(tier: MemoryTier) -> float:
    """Byte/s of traffic that is half reading and half writing."""
    assert tier.read_bandwidth is not None
    return 2 / (1 / tier.read_bandwidth + 1 / (tier.write_bandwidth or tier.read_bandwidth))


def ranks_per_host(machine: Machine, parallel: Parallel) -> int:
    """Ranks that share one host, filled evenly."""
    return max(1, math.ceil(parallel.world / machine.nodes))


def _threads_of(measurement: Measurement) -> int | None:
    match = re.search(r"threads?\s*[=:]?\s*(\d+)|(\d+)\s*threads?", measurement.note)
    return int(match.group(1) or match.group(2)) if match else None


def _curve(measurements: Iterable[Measurement], threads: int | None) -> Curve | None:
    points = sorted(
        {m.at: m.median for m in measurements if m.at and _threads_of(m) == threads}.items()
    )
    return Curve(tuple(points)) if points else None


def _tokens(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))


@dataclass(frozen=True)
class RankRates:
    """Rates of one rank.

    Args:
        threads: threads of one rank; 0 shares the cores among the ranks of a host.
        constants: of an accelerator.
    """

    machine: Machine
    parallel: Parallel
    threads: int = 0
    constants: GpuCalibration = CALIBRATED

    @property
    def cores(self) -> int:
        """Cores of a host, 1 for a GPU."""
        return (self.machine.device.num_cores or 1) if self.is_cpu else 1

    @property
    def is_cpu(self) -> bool:
        """The ranks of a host share one CPU."""
        return self.machine.device.kind == "cpu"

    @property
    def used(self) -> int:
        """Threads that one rank computes with."""
        if not self.is_cpu:
            return 1
        wanted = self.threads or max(1, self.cores // ranks_per_host(self.machine, self.parallel))
        return min(wanted, self.cores)

    @property
    def sharing(self) -> float:
        """Ranks that compete for one host's memory bandwidth, as a divisor of its whole."""
        return float(ranks_per_host(self.machine, self.parallel)) if self.is_cpu else 1.0

    @property
    def crowding(self) -> float:
        """How many threads want each core, at least 1."""
        if not self.is_cpu:
            return 1.0
        return max(1.0, self.used * self.sharing / self.cores)

    def _measured(self, probe: str, *words: str) -> list[Measurement]:
        wanted = set(words)
        return [
            m
            for m in self.machine.measurements
            if m.probe == probe and m.plausible and wanted <= _tokens(f"{m.quantity} {m.note}")
        ]

    def matmul_curve(self, dtype: str) -> Curve:
        """FLOP/s of this rank's matrix products over the edge of an equal cube.

        Raises:
            MachineError: the machine has no rate for this type, nor for fp32.
        """
        device = self.machine.device
        measured = self._measured("matmul", dtype)
        if self.is_cpu:
            many = _curve(measured, self.cores) or _curve(measured, None)
            one = _curve(measured, 1) or (many if self.cores == 1 else None)
            curve = self._between(one, many)
            if curve is not None:
                return curve.scaled(1 / self.crowding)
            whole, single = device.matmul_flops.get(dtype), device.matmul_flops_1core.get(dtype)
            if single is None and whole is not None:
                single = whole / self.cores
            if single is not None:
                rate = min(single * self.used, whole or math.inf)
                return Curve(((1.0, rate / self.crowding),))
        else:
            curve = _curve(measured, None)
            rate_or_none = device.matmul_flops.get(dtype) or device.peak_flops.get(dtype)
            if curve is None and rate_or_none is not None:
                # A declared rate is that of large products; small ones fill few tiles.
                curve = Curve(((256.0, 0.1 * rate_or_none), (2048.0, rate_or_none)))
            if curve is not None:
                return KernelRates(curve.points, gpu_of(self.machine), dtype, self.constants)
        if dtype != "fp32":
            return self.matmul_curve("fp32")
        raise MachineError(
            f"machine {self.machine.name}: device.matmul_flops has no rate for fp32 or bf16; "
            "probe the machine, or add the rate in FLOP/s"
        )

    def _between(self, one: Curve | None, many: Curve | None) -> Curve | None:
        """The curve for this rank's threads from those of one thread and of all."""
        if one is None and many is None:
            return None
        if many is None or (one is not None and self.used == 1):
            assert one is not None
            return one.scaled(float(self.used))
        if self.used >= self.cores:
            return many
        if one is None:
            return many.scaled(self.used / self.cores)
        share = (self.used - 1) / (self.cores - 1)
        return Curve(tuple((x, one(x) ** (1 - share) * many(x) ** share) for x, _ in many.points))

    def stream_curve(self) -> Curve:
        """Byte/s of this rank's elementwise operators over the bytes that one touches."""
        measured = [
            m
            for m in self.machine.measurements
            if m.probe == "framework" and m.quantity == "elementwise_bandwidth" and m.plausible
        ]
        if self.is_cpu:
            many = _curve(measured, self.cores) or _curve(measured, None)
            one = _curve(measured, 1) or (many if self.cores == 1 else None)
            curve = self._between(one, many)
            if curve is not None:
                return self._shared(curve)
            return self.memory_curve()
        curve = _curve(measured, None)
        return curve or self.memory_curve()

    def _shared(self, curve: Curve) -> Curve:
        """``curve`` while every rank of the host streams: beyond the caches they share DRAM."""
        device = self.machine.device
        caches = [t.capacity_bytes for t in device.memory if t.name in ("l2", "l3")]
        main = device.main_memory
        points = []
        for size, rate in curve.points:
            limit = math.inf
            beyond = size * self.sharing > max(caches, default=2**25)
            if self.sharing > 1 and beyond and main.read_bandwidth is not None:
                limit = _mean_bandwidth(main) / self.sharing
            points.append((size, min(rate / self.crowding, limit)))
        return Curve(tuple(points))

    def memory_curve(self) -> Curve:
        """Byte/s that this rank reads and writes by the memory levels, over bytes touched.

        Raises:
            MachineError: no level has a bandwidth.
        """
        device = self.machine.device
        share = STREAM_SHARE if self.is_cpu else self.constants.stream
        part = self.used / self.cores / self.crowding if self.is_cpu else 1.0
        points = []
        for tier in device.streamed_memory:
            points.append((float(tier.capacity_bytes), share * part * _mean_bandwidth(tier)))
        if not points:
            raise MachineError(
                f"machine {self.machine.name}: no memory level has a read_bandwidth; "
                "probe the machine, or add device.memory[].read_bandwidth in byte/s"
            )
        return Curve(tuple(sorted(points)))

    @property
    def capacity_bytes(self) -> float:
        """Memory that one rank may use."""
        return self.machine.device.main_memory.capacity_bytes / self.sharing


def tensor_link(machine: Machine, parallel: Parallel) -> Link | None:
    """The link that tensor-parallel ranks, which are neighbours, exchange over."""
    return _reached(_link(machine, parallel.tp), machine, parallel.tp)


def context_link(machine: Machine, parallel: Parallel) -> Link | None:
    """The slowest link between context-parallel ranks, by the order of the axes."""
    axes = parallel.order.split("-")
    span = math.prod(getattr(parallel, axis) for axis in axes[axes.index("cp") :])
    return _reached(_link(machine, span), machine, 1)


def data_link(machine: Machine, parallel: Parallel) -> Link | None:
    """The slowest link between data-parallel ranks, which stand ``tp`` apart."""
    link = _link(machine, parallel.tp * parallel.dp)
    return _reached(link, machine, min(parallel.dp, machine.devices_per_node // parallel.tp))


def neighbours_link(machine: Machine, span: int, members: int) -> Link | None:
    """The slowest link among ranks that lie at most ``span`` apart, those of a package included.

    Args:
        machine: the machine.
        span: ranks from the first to the last of a group.
        members: ranks of the group that stand on one node.
    """
    package = machine.link("package") if span <= machine.devices_per_package else None
    return _reached(package or _link(machine, span), machine, members)


def _reached(link: Link | None, machine: Machine, members: int) -> Link | None:
    """What a ring reaches of a link between GPUs; members of a node bring a port each."""
    if link is None or machine.device.kind == "cpu":
        return link
    near = machine.link("device")
    most = near.bandwidth if near is not None else math.inf
    return _ring_link(link, max(1, members) if link.scope == "node" else 1, most)


@functools.lru_cache(maxsize=1024)
def _ring_link(link: Link, ports: int, most: float) -> Link:
    rate = CALIBRATED.wire * min(max(most, link.bandwidth), ports * link.bandwidth)
    return link.model_copy(update={"bandwidth": rate})


def _link(machine: Machine, span: int) -> Link | None:
    if machine.sites > 1:
        each = (machine.device.num_cores or 1) if machine.device.kind == "cpu" else 1
        if span * machine.sites > machine.num_devices * each:
            return machine.link("wan")
    if machine.device.kind == "cpu":
        if span <= ranks_per_host(machine, Parallel(dp=span)) and machine.nodes == 1:
            return machine.link("loopback") or machine.link("device")
        return machine.link("node") or machine.link("loopback")
    if span > machine.devices_per_node:
        return machine.link("node") or machine.link("device")
    return machine.link("device") or machine.link("node")
