"""What there is: devices, memory tiers, links, prices.

All rates are in units per second of the plain unit: byte/s, FLOP/s, s, W. A number
that nobody probed or declared is absent, never zero.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import MachineError

__all__ = ["Device", "Link", "Machine", "Measurement", "MemoryTier"]

# No device of today reaches these; a file that claims more has a slipped unit.
MAX_FLOPS = 1e17
MAX_BANDWIDTH = 1e15

Provenance = Literal["probed", "declared", "emulated"]


class Measurement(Value):
    """One probed number with its spread.

    Args:
        probe: name of the probe part.
        quantity: what was measured, such as ``latency`` or ``fma_fp32``.
        unit: s, B/s, FLOP/s, B, op/cycle.
        median: middle of the repeats.
        low: 5th percentile of the repeats.
        high: 95th percentile of the repeats.
        repeats: how often it was measured.
        at: size it was measured at (bytes, matrix edge ...), if there is one.
        plausible: the plausibility check held.
        note: why it was skipped or is doubtful.
    """

    probe: str
    quantity: str
    unit: str
    median: float
    low: float
    high: float
    repeats: PositiveInt
    at: float | None = None
    plausible: bool = True
    note: str = ""


class MemoryTier(Value):
    """One level of memory of a device, fastest first in :attr:`Device.memory`.

    Args:
        name: l1d, l2, l3, dram, hbm, disk.
        capacity_bytes: size of the level.
        read_bandwidth: byte/s of all cores (or the whole device) reading.
        write_bandwidth: byte/s written.
        latency_s: one dependent load.
    """

    name: str
    capacity_bytes: PositiveInt
    read_bandwidth: PositiveFloat | None = Field(default=None, le=MAX_BANDWIDTH)
    write_bandwidth: PositiveFloat | None = Field(default=None, le=MAX_BANDWIDTH)
    latency_s: PositiveFloat | None = Field(default=None, le=10.0)


class Link(Value):
    """A way for bytes to travel between two ends of one scope.

    Args:
        scope: device (between devices of a node), node (between nodes of a
            cluster), wan, or loopback (between processes of one host).
        bandwidth: byte/s in one direction and per device.
        latency_s: one small message.
    """

    scope: Literal["loopback", "device", "node", "wan"]
    bandwidth: PositiveFloat = Field(le=MAX_BANDWIDTH)
    latency_s: NonNegativeFloat = Field(le=10.0)


class Device(Value):
    """One kind of device of a node: a GPU, or the CPU as a whole.

    Args:
        name: product name.
        kind: cpu or gpu.
        num_cores: cores of a CPU; a rank may use some of them.
        peak_flops: dtype -> FLOP/s that the hardware could do.
        matmul_flops: dtype -> FLOP/s that a large matrix product reaches.
        matmul_flops_1core: the same on one core of a CPU.
        op_overhead_s: time a framework spends to launch one operator.
        memory: tiers from fastest to slowest; the main memory is named dram or hbm.
        power_watts: draw under load.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    num_cores: PositiveInt | None = None
    peak_flops: dict[str, PositiveFloat] = {}
    matmul_flops: dict[str, PositiveFloat] = {}
    matmul_flops_1core: dict[str, PositiveFloat] = {}
    op_overhead_s: NonNegativeFloat = Field(default=5e-6, le=1.0)
    memory: tuple[MemoryTier, ...] = Field(min_length=1)
    power_watts: PositiveFloat | None = Field(default=None, le=100_000)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for rates in (self.peak_flops, self.matmul_flops, self.matmul_flops_1core):
            for dtype, rate in rates.items():
                if rate > MAX_FLOPS:
                    raise MachineError(
                        f"device {self.name}: {dtype} = {rate:g} FLOP/s; no device does more "
                        f"than {MAX_FLOPS:g}; write the rate in FLOP/s"
                    )
        for dtype, reached in self.matmul_flops.items():
            peak = self.peak_flops.get(dtype)
            if peak is not None and reached > 1.05 * peak:
                raise MachineError(
                    f"device {self.name}: matmul_flops.{dtype} = {reached:g} is above "
                    f"peak_flops.{dtype} = {peak:g}; correct one of them"
                )
        if not any(tier.name in ("dram", "hbm") for tier in self.memory):
            raise MachineError(f"device {self.name}: no memory tier is named dram or hbm; add one")
        return self

    @property
    def main_memory(self) -> MemoryTier:
        """The tier that holds the model."""
        return next(tier for tier in self.memory if tier.name in ("dram", "hbm"))


class Machine(Value):
    """A number of equal nodes, each with equal devices.

    Args:
        name: a short name, the file's stem.
        provenance: how most of the numbers came to be.
        nodes: number of nodes.
        devices_per_node: devices of a node; 1 for a CPU node.
        device: what each of them is.
        links: scope -> link.
        usd_per_device_hour: rental price.
        overhead_watts: the rest of a node.
        sources: dotted field -> where its number comes from.
        measurements: what the probes saw.
        noise: half-width of the probes' 90 % interval, as a share; None if declared.
        fingerprint: CPU model, core count, kernel, versions.
    """

    name: str
    provenance: Provenance = "declared"
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 1
    device: Device
    links: tuple[Link, ...] = ()
    usd_per_device_hour: NonNegativeFloat | None = Field(default=None, le=100_000)
    overhead_watts: NonNegativeFloat = 0.0
    sources: dict[str, str] = {}
    measurements: tuple[Measurement, ...] = ()
    noise: NonNegativeFloat | None = None
    fingerprint: dict[str, str] = {}

    @model_validator(mode="after")
    def _linked(self) -> Self:
        needed = {"device"} if self.devices_per_node > 1 else set()
        needed |= {"node"} if self.nodes > 1 else set()
        missing = needed - {link.scope for link in self.links}
        if missing:
            raise MachineError(
                f"machine {self.name}: no link of scope {', '.join(sorted(missing))}; "
                "several devices or nodes need one"
            )
        return self

    @property
    def num_devices(self) -> int:
        """All devices of all nodes."""
        return self.nodes * self.devices_per_node

    def link(self, scope: str) -> Link | None:
        """The link of this scope, or None."""
        return next((link for link in self.links if link.scope == scope), None)
