"""What there is: devices, memory tiers, links, prices.

All rates are in units per second of the plain unit: byte/s, FLOP/s, s, W. A number
that was neither probed nor declared is absent, never zero.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shoal.core.config import Value
from shoal.core.errors import MachineError
from shoal.ir.correction import Correction

# No device of today reaches these; a file that claims more has a slipped unit.
MAX_FLOPS = 1e17
MAX_BANDWIDTH = 1e15
# None is as slow as this either: 989 is a rate in TFLOP/s, 3350 one in GB/s.
MIN_FLOPS = 1e6
MIN_BANDWIDTH = 1e3
MIN_MEMORY_BANDWIDTH = 1e6
MIN_GPU_BANDWIDTH = 1e9
MIN_MAIN_MEMORY = 1e6
# A message inside a node, and between the nodes of one site, is faster than this.
MAX_LATENCY_S = {"loopback": 0.1, "package": 0.1, "device": 0.1, "node": 1.0, "wan": 10.0}

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
        repeats: number of repeats.
        at: size it was measured at (bytes, matrix edge ...), if there is one.
        plausible: the plausibility check held.
        note: why it was skipped or is unreliable.
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

    @model_validator(mode="after")
    def _unit(self) -> Self:
        for field in ("read_bandwidth", "write_bandwidth"):
            rate = getattr(self, field)
            if rate is not None and rate < MIN_MEMORY_BANDWIDTH:
                raise MachineError(
                    f"device.memory.{self.name}.{field} = {rate:g} B/s: this is implausibly slow; "
                    f"write the rate in B/s (1 TB/s is 1e12)"
                )
        return self


class Link(Value):
    """A way for bytes to travel between two ends of one scope.

    Args:
        scope: package (between devices of one package, as two dies), device (between devices of
            a node), node (between nodes of a cluster), wan, or loopback (between processes of one
            host).
        bandwidth: byte/s in one direction and per device.
        latency_s: one small message.
    """

    scope: Literal["loopback", "package", "device", "node", "wan"]
    bandwidth: PositiveFloat = Field(le=MAX_BANDWIDTH)
    latency_s: NonNegativeFloat = Field(le=10.0)

    @model_validator(mode="after")
    def _unit(self) -> Self:
        if self.bandwidth < MIN_BANDWIDTH:
            raise MachineError(
                f"links.{self.scope}.bandwidth = {self.bandwidth:g} B/s: this is implausibly "
                f"slow; write the rate in B/s (400 Gbit/s is 5e10)"
            )
        if self.latency_s > MAX_LATENCY_S[self.scope]:
            raise MachineError(
                f"links.{self.scope}.latency_s = {self.latency_s:g} s: expected at most "
                f"{MAX_LATENCY_S[self.scope]:g} s in this scope; write the time in s (5 us is 5e-6)"
            )
        return self


class Fabric(Value):
    """The leaf-spine network between the nodes of a cluster.

    A node has one port in each rail, and the rails are equal networks of their own: device
    ``i`` of every node speaks in rail ``i % rails``. The nodes of one leaf reach each other
    through it; others go over a spine.

    Args:
        leaves: leaf switches of one rail.
        hosts_per_leaf: nodes of a leaf.
        spines: spine switches of one rail; 0 where a single leaf has all nodes.
        uplinks: links from each leaf to each spine.
        rails: ports of a node.
        port_bandwidth: byte/s of a node's port, one direction.
        uplink_bandwidth: byte/s of one link between leaf and spine, one direction.
        hop_s: seconds that a switch adds to a message.
        source: where the numbers come from.
    """

    leaves: PositiveInt = Field(le=1_000_000)
    hosts_per_leaf: PositiveInt = Field(le=1_000_000)
    spines: NonNegativeInt = Field(default=0, le=1_000_000)
    uplinks: PositiveInt = Field(default=1, le=1024)
    rails: PositiveInt = Field(default=1, le=1024)
    port_bandwidth: PositiveFloat = Field(le=MAX_BANDWIDTH)
    uplink_bandwidth: PositiveFloat | None = Field(default=None, le=MAX_BANDWIDTH)
    hop_s: NonNegativeFloat = Field(default=5e-7, le=0.1)
    source: str = ""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for field in ("port_bandwidth", "uplink_bandwidth"):
            rate = getattr(self, field)
            if rate is not None and rate < MIN_BANDWIDTH:
                raise MachineError(
                    f"fabric.{field} = {rate:g} B/s: this is implausibly slow; write the rate in "
                    f"B/s "
                    "(400 Gbit/s is 5e10)"
                )
        if self.leaves > 1 and self.spines == 0:
            raise MachineError(
                f"fabric.spines = 0: {self.leaves} leaves are not connected; give 1 or more"
            )
        return self

    @property
    def hosts(self) -> int:
        """Nodes that it has ports for."""
        return self.leaves * self.hosts_per_leaf

    @property
    def uplink(self) -> float:
        """Byte/s of one link between leaf and spine; that of a port if not stated."""
        return self.uplink_bandwidth or self.port_bandwidth

    @property
    def oversubscription(self) -> float:
        """What the nodes of a leaf can send over what the leaf can send on; 1 blocks nothing."""
        if self.spines == 0:
            return 1.0
        up = self.spines * self.uplinks * self.uplink
        return max(1.0, self.hosts_per_leaf * self.port_bandwidth / up)


class Device(Value):
    """One kind of device of a node: a GPU, or the CPU as a whole.

    Args:
        name: product name.
        kind: cpu, or gpu for every device that is one rank's own: a GPU, a die of one, a TPU.
        num_cores: cores of a CPU; a rank may use some of them.
        peak_flops: dtype -> peak FLOP/s of the hardware.
        matmul_flops: dtype -> FLOP/s that a large matrix product reaches.
        matmul_flops_1core: the same on one core of a CPU.
        op_overhead_s: launch overhead of one operator.
        sustained: ``matmul_flops`` were measured in long runs, limited by power as in a training
            step.
        memory: tiers from fastest to slowest; the main memory is named dram or hbm. Behind a GPU's
            hbm may be dram, the memory of its host, and disk; all devices of a node share these.
        power_watts: power under load, W.
        idle_watts: idle power, W.
        mtbf_hours: mean hours between its failures, with its share of the node.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    num_cores: PositiveInt | None = None
    peak_flops: dict[str, PositiveFloat] = {}
    matmul_flops: dict[str, PositiveFloat] = {}
    matmul_flops_1core: dict[str, PositiveFloat] = {}
    op_overhead_s: NonNegativeFloat = Field(default=5e-6, le=1.0)
    sustained: bool = False
    memory: tuple[MemoryTier, ...] = Field(min_length=1)
    power_watts: PositiveFloat | None = Field(default=None, le=100_000)
    idle_watts: PositiveFloat | None = Field(default=None, le=100_000)
    mtbf_hours: PositiveFloat | None = Field(default=None, ge=1.0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for field in ("peak_flops", "matmul_flops", "matmul_flops_1core"):
            for dtype, rate in getattr(self, field).items():
                if not MIN_FLOPS <= rate <= MAX_FLOPS:
                    bound = "more" if rate > MAX_FLOPS else "so little"
                    raise MachineError(
                        f"device {self.name}: {field}.{dtype} = {rate:g} FLOP/s; no device does "
                        f"{bound}; write the rate in FLOP/s (1 TFLOP/s is 1e12)"
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
        self._main_memory_possible()
        self._power_possible()
        return self

    def _main_memory_possible(self) -> None:
        main = self.main_memory
        if main.capacity_bytes < MIN_MAIN_MEMORY:
            raise MachineError(
                f"device {self.name}: memory.{main.name}.capacity_bytes = {main.capacity_bytes}; "
                "no model fits; write the size in bytes (80 GB is 80000000000)"
            )
        rate = main.read_bandwidth
        if self.kind == "gpu" and rate is not None and rate < MIN_GPU_BANDWIDTH:
            raise MachineError(
                f"device {self.name}: memory.{main.name}.read_bandwidth = {rate:g} B/s; this is "
                f"implausibly slow; write the rate in B/s (1 TB/s is 1e12)"
            )

    def _power_possible(self) -> None:
        if self.idle_watts is None or self.power_watts is None:
            return
        if self.idle_watts > self.power_watts:
            raise MachineError(
                f"device {self.name}: idle_watts = {self.idle_watts:g} is above power_watts = "
                f"{self.power_watts:g}; correct one of them"
            )

    @property
    def main_memory(self) -> MemoryTier:
        """The tier that holds the model."""
        return next(tier for tier in self.memory if tier.name in ("dram", "hbm"))

    @property
    def own_memory(self) -> tuple[MemoryTier, ...]:
        """The main memory and the caches before it."""
        return self.memory[: self.memory.index(self.main_memory) + 1]

    @property
    def streamed_memory(self) -> tuple[MemoryTier, ...]:
        """Of these, what an operator may stream from: levels beyond the first, of known rate."""
        known = (tier for tier in self.own_memory if tier.read_bandwidth is not None)
        return tuple(tier for tier in known if tier.name != "l1d")

    def beyond(self, name: str) -> MemoryTier | None:
        """What lies behind the main memory under this name: dram or disk; None if not stated."""
        behind = self.memory[len(self.own_memory) :]
        return next((tier for tier in behind if tier.name == name), None)


class Machine(Value):
    """A number of equal nodes, each with equal devices.

    Args:
        name: a short name, the file's stem.
        provenance: origin of most of the numbers.
        nodes: number of nodes, of all sites.
        devices_per_node: devices of a node; 1 for a CPU node.
        devices_per_package: neighbouring devices with a faster link between them, as the dies of
            one module; a divisor of ``devices_per_node``.
        node_size: devices per node in shorthands.
        sites: sites of equal size, connected by a wide-area link; a divisor of ``nodes``.
        device: the device.
        links: scope -> link.
        fabric: switches between the nodes of a site, if known.
        usd_per_device_hour: rental price.
        overhead_watts: power of the rest of a node, W.
        sources: dotted field -> where its number comes from.
        measurements: measurements of the probes.
        noise: half-width of the probes' 90 % interval, as a share; None if declared.
        fingerprint: CPU model, core count, kernel, versions.
        calibration: corrections of predicted times from runs on this machine.
    """

    name: str
    provenance: Provenance = "declared"
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 1
    devices_per_package: PositiveInt = 1
    node_size: PositiveInt = Field(default=8, le=100_000)
    sites: PositiveInt = 1
    device: Device
    links: tuple[Link, ...] = ()
    fabric: Fabric | None = None
    usd_per_device_hour: NonNegativeFloat | None = Field(default=None, le=100_000)
    overhead_watts: NonNegativeFloat = 0.0
    sources: dict[str, str] = {}
    measurements: tuple[Measurement, ...] = ()
    noise: NonNegativeFloat | None = None
    fingerprint: dict[str, str] = {}
    calibration: tuple[Correction, ...] | None = None

    @model_validator(mode="after")
    def _linked(self) -> Self:
        needed = {"device"} if self.devices_per_node > 1 else set()
        needed |= {"node"} if self.nodes > self.sites else set()
        needed |= {"wan"} if self.sites > 1 else set()
        needed |= {"package"} if self.devices_per_package > 1 else set()
        scopes = [link.scope for link in self.links]
        twice = sorted({scope for scope in scopes if scopes.count(scope) > 1})
        if twice:
            raise MachineError(
                f"machine {self.name}: links: scope {', '.join(twice)} stands twice; keep one"
            )
        if self.nodes % self.sites:
            raise MachineError(
                f"machine {self.name}: sites = {self.sites}: {self.nodes} nodes cannot be shared "
                "by them evenly; give a divisor of nodes"
            )
        if self.devices_per_node % self.devices_per_package:
            raise MachineError(
                f"machine {self.name}: devices_per_package = {self.devices_per_package}: "
                f"{self.devices_per_node} devices of a node cannot be shared by packages evenly; "
                "give a divisor of devices_per_node"
            )
        missing = needed - set(scopes)
        if missing:
            raise MachineError(
                f"machine {self.name}: no link of scope {', '.join(sorted(missing))}; "
                "several devices or nodes need one"
            )
        self._fabric_possible()
        return self

    def _fabric_possible(self) -> None:
        fabric, link = self.fabric, self.link("node")
        if fabric is None:
            return
        here = self.nodes // self.sites
        if fabric.hosts < here:
            raise MachineError(
                f"machine {self.name}: fabric: {fabric.leaves} leaves of {fabric.hosts_per_leaf} "
                f"hosts have {fabric.hosts} ports for {here} nodes; add leaves"
            )
        claimed = 0.0 if link is None else link.bandwidth * self.devices_per_node
        have = fabric.rails * fabric.port_bandwidth
        if claimed > 1.05 * have:
            raise MachineError(
                f"machine {self.name}: links.node.bandwidth: {self.devices_per_node} devices claim "
                f"{claimed:g} B/s of a node whose {fabric.rails} fabric ports have {have:g}; "
                "correct one of them"
            )

    @property
    def num_devices(self) -> int:
        """All devices of all nodes."""
        return self.nodes * self.devices_per_node

    def with_links(self, faster: float) -> Machine:
        """The same with links of so many times the bandwidth."""
        if faster == 1.0:
            return self
        links = tuple(
            link.model_copy(update={"bandwidth": faster * link.bandwidth}) for link in self.links
        )
        return self.model_copy(update={"links": links})

    def link(self, scope: str) -> Link | None:
        """The link of this scope, or None."""
        return next((link for link in self.links if link.scope == scope), None)

    def correction(self, engine: str, quantity: str, model: str) -> Correction | None:
        """The correction of a predicted time: that of the model, else that of all others."""
        own = {
            one.model: one
            for one in self.calibration or ()
            if (one.engine, one.quantity) == (engine, quantity)
        }
        return own.get(model) or own.get("")
