"""The ring of T3: a product whose stores trigger its reduce-scatter, event by event.

A device of a ring computes [tokens, k] x [k, n], its summand of the output, in stages of as many
workgroup tiles as it has compute units. The output is cut in N chunks, one a device, and
device r computes them in the staggered order r + 1, r + 2, ... r. Tiles of the first chunk are
stored straight into the memory of device r - 1. Of every later chunk a tracker counts, region by
region, the updates that a tile got: its own store and the one that comes from device r + 1. When
both are there it triggers a DMA, which reads the region and sends it on; own regions end there.
All those stores are *updates*: the memory adds them near its banks, and no kernel reads both
summands to write their sum. Updates bypass the last-level cache, which is left to the operands.

Memory is a server of requests, those of the product and those of communication in queues of
their own: while more than ``threshold_bytes`` of the product wait, communication does; below
that they take turns. Operands come in slices of the inner dimension, double-buffered, so a
product that waits for its memory is late, and so is everything behind it.

Equal devices do the same at the same time, so one of them, that sends to itself, stands for
all; with ``slow`` every device is simulated.

Operands are read as the cache model says: panels of rows and columns, least recently used
first out, where the stores of the sequential product take room and T3's do not.

Source: Pati et al., T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives, 2024 (mechanism, simulated device).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.core.errors import require

Policy = Literal["compute_first", "round_robin"]


class RingDevice(Value):
    """One device of the ring; by default one of the size that such papers simulate.

    The paper's table of simulator parameters is not available: the defaults are those of a
    data-centre GPU of 2020, and ``efficiency`` and ``update_cost`` are assumptions.

    Args:
        compute_units: workgroup tiles that are computed at once.
        clock_hz: of a compute unit.
        flop_per_cycle: of a compute unit, multiply and add counted as two, 16 bit.
        efficiency: share of that which a large product reaches.
        dram_bandwidth: byte/s, reads and writes together.
        cache_bytes: last-level cache.
        link_bandwidth: byte/s to the next device, one direction.
        link_latency_s: of a message.
        update_cost: time of an update near memory over that of a plain write.
        threshold_bytes: requests of the product that may wait while communication is served.
        policy: compute_first as above; round_robin takes turns always.
        tile_m: rows of a workgroup's tile.
        tile_n: its columns.
    """

    compute_units: PositiveInt = 80
    clock_hz: PositiveFloat = 1.4e9
    flop_per_cycle: PositiveFloat = 1024.0
    efficiency: PositiveFloat = 0.75
    dram_bandwidth: PositiveFloat = 1e12
    cache_bytes: PositiveFloat = 16.0 * 2**20
    link_bandwidth: PositiveFloat = 75e9
    link_latency_s: NonNegativeFloat = 500e-9
    update_cost: PositiveFloat = 1.5
    threshold_bytes: NonNegativeFloat = 512.0 * 1024
    policy: Policy = "compute_first"
    tile_m: PositiveInt = 256
    tile_n: PositiveInt = 128


class PartialProduct(Value):
    """A device's summand of a row-split layer's output.

    Args:
        tokens: rows.
        k: inner dimension of this device.
        n: columns.
        tp: devices.
        bytes_per_value: of operands and output.
    """

    tokens: PositiveInt
    k: PositiveInt
    n: PositiveInt
    tp: PositiveInt
    bytes_per_value: PositiveInt = 2

    @property
    def chunk_bytes(self) -> float:
        """Output of one device after the reduce-scatter."""
        return self.tokens * self.n * self.bytes_per_value / self.tp


class OverlapResult(Value):
    """What a simulation of product and reduce-scatter saw.

    Args:
        seconds: until every device has its rows of the sum.
        product_s: until the last device's product is stored.
        operand_reads: bytes read for the product, of one device.
        product_writes: bytes of local updates of one device.
        scatter_reads: bytes that DMAs read, of one device.
        scatter_writes: bytes of updates that came over the link, of one device.
        sent: bytes over the link, of one device.
        updates: fewest and most updates that went into a tile of the result.
        triggers: DMAs that the tracker started, of one device.
    """

    seconds: float
    product_s: float
    operand_reads: float
    product_writes: float
    scatter_reads: float
    scatter_writes: float
    sent: float
    updates: tuple[float, float]
    triggers: int


@dataclass(frozen=True)
class _Stages:
    """The product, stage by stage.

    Args:
        reads: bytes of operands that each stage reads from memory.
        tiles: first tile of each stage, and the end.
        per_chunk: tiles of a chunk.
        seconds: arithmetic of a stage.
        tile_bytes: output of a tile, on average.
    """

    reads: list[float]
    tiles: list[int]
    per_chunk: int
    seconds: float
    tile_bytes: float


def _grid(product: PartialProduct) -> tuple[int, int]:
    """Chunks of the output by rows and by columns: the blocks that are nearest to square.

    Squares share most of what they read. An all-reduce may scatter any blocks.
    """
    pairs = [(d, product.tp // d) for d in range(1, product.tp + 1) if product.tp % d == 0]
    return min(pairs, key=lambda pair: product.tokens / pair[0] + product.n / pair[1])


def _stages(product: PartialProduct, device: RingDevice, *, bypass: bool) -> _Stages:
    """Cut a product in stages, and say what each of them reads past the cache.

    Tiles of a chunk are taken column by column in bands, so high that a stage is nearly square.
    """
    size = product.bytes_per_value
    down, across = _grid(product)
    rows, columns = product.tokens / down, product.n / across
    high, wide = math.ceil(rows / device.tile_m), math.ceil(columns / device.tile_n)
    per_chunk = high * wide
    total = per_chunk * product.tp
    tile_m, tile_n = rows / high, columns / wide
    row_panel = tile_m * product.k * size
    column_panel = tile_n * product.k * size
    tile_bytes = product.chunk_bytes / per_chunk
    band = max(1, round(math.sqrt(device.compute_units * tile_n / tile_m)))
    inside = [
        (row, column)
        for top in range(0, high, band)
        for column in range(wide)
        for row in range(top, min(high, top + band))
    ]
    cache: OrderedDict[tuple[str, int], float] = OrderedDict()
    held = 0.0

    def touch(key: tuple[str, int], nbytes: float) -> float:
        nonlocal held
        if key in cache:
            cache.move_to_end(key)
            return 0.0
        cache[key] = nbytes
        held += nbytes
        while held > device.cache_bytes and cache:
            held -= cache.popitem(last=False)[1]
        return nbytes

    reads, starts = [], []
    for start in range(0, total, device.compute_units):
        starts.append(start)
        tiles = range(start, min(total, start + device.compute_units))
        places = []
        for tile in tiles:
            chunk, within = divmod(tile, per_chunk)
            row, column = inside[within]
            places.append((chunk // across * high + row, chunk % across * wide + column))
        # Workgroups of a stage walk through k together: a panel is read for all of them once.
        read = sum(touch(("row", row), row_panel) for row in sorted({p[0] for p in places}))
        read += sum(touch(("column", c), column_panel) for c in sorted({p[1] for p in places}))
        if not bypass:
            for tile in tiles:
                touch(("out", tile), tile_bytes)
        reads.append(read)
    rate = device.flop_per_cycle * device.clock_hz * device.efficiency
    seconds = 2.0 * tile_m * tile_n * product.k / rate
    return _Stages(reads, [*starts, total], per_chunk, seconds, tile_bytes)


# Parts of a stage's inner dimension, read while the part before is computed; parts of a chunk that
# the tracker knows; bytes of one request to memory.
_SLICES = 4
_REGIONS = 8
_REQUEST = 256 * 1024


@dataclass
class _Memory:
    """One device's memory: two queues and the one served last."""

    compute: deque[tuple[float, float, Callable[[], None] | None]] = field(default_factory=deque)
    communication: deque[tuple[float, float, Callable[[], None] | None]] = field(
        default_factory=deque
    )
    waiting: float = 0.0
    busy: bool = False
    turn: bool = False


@dataclass
class _State:
    """One device in a simulation."""

    slow: float
    memory: _Memory = field(default_factory=_Memory)
    slice: int = 0
    read: int = -1
    computing: bool = False
    link_free: float = 0.0
    stores: int = 0
    product_s: float = 0.0
    # Of the region (step, number): tile updates that came, and the summands in them.
    came: dict[tuple[int, int], int] = field(default_factory=dict)
    summands: dict[tuple[int, int], int] = field(default_factory=dict)
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("operands", "stores", "dma", "updates", "sent"), 0.0)
    )
    triggers: int = 0
    done: int = 0


class _Ring:
    """The events of product and reduce-scatter on a ring.

    Regions are named by the step at which a device computes them, so that what a device sends in
    step i is what the next one needs in step i + 1.
    """

    def __init__(
        self,
        product: PartialProduct,
        device: RingDevice,
        *,
        overlapped: bool,
        bypass: bool,
        slow: Mapping[int, float],
    ) -> None:
        self.product, self.device, self.overlapped = product, device, overlapped
        self.work = _stages(product, device, bypass=bypass)
        self.devices = [_State(slow.get(r, 1.0)) for r in range(product.tp if slow else 1)]
        per_chunk = self.work.per_chunk
        regions = min(_REGIONS, per_chunk)
        self.ends = [per_chunk * (i + 1) // regions for i in range(regions)]
        self.sizes = [b - a for a, b in itertools.pairwise([0, *self.ends])]
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        self.now = 0.0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, call, arguments))

    def run(self) -> None:
        for r in range(len(self.devices)):
            self.fetch(r)
        while self.events:
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)

    # Memory.

    def ask(
        self, r: int, nbytes: float, cost: float, then: Callable[[], None], *, compute: bool
    ) -> None:
        """Move bytes; ``then`` is called when the last of them have moved."""
        memory = self.devices[r].memory
        queue = memory.compute if compute else memory.communication
        parts = max(1, math.ceil(nbytes / _REQUEST))
        each = nbytes / parts
        seconds = each * cost / self.device.dram_bandwidth
        for i in range(parts):
            queue.append((each, seconds, then if i == parts - 1 else None))
        if compute:
            memory.waiting += nbytes
        if not memory.busy:
            self.serve(r)

    def serve(self, r: int) -> None:
        memory = self.devices[r].memory
        compute, communication = memory.compute, memory.communication
        if not compute and not communication:
            memory.busy = False
            return
        memory.busy = True
        if compute and communication:
            full = memory.waiting > self.device.threshold_bytes
            first = self.device.policy == "compute_first" and full
            memory.turn = first or not memory.turn
            mine = memory.turn
        else:
            mine = bool(compute)
        nbytes, seconds, then = (compute if mine else communication).popleft()
        if mine:
            memory.waiting -= nbytes
        self.at(self.now + seconds, self.served, r, then)

    def served(self, r: int, then: Callable[[], None] | None) -> None:
        if then is not None:
            then()
        self.serve(r)

    # The product.

    def fetch(self, r: int) -> None:
        """Read the operands of the next slice."""
        state = self.devices[r]
        wanted = state.read + 1
        if wanted >= _SLICES * len(self.work.reads):
            return
        nbytes = self.work.reads[wanted // _SLICES] / _SLICES

        def here() -> None:
            state.read = wanted
            self.compute(r)

        state.counts["operands"] += nbytes
        self.ask(r, nbytes, 1.0, here, compute=True)

    def compute(self, r: int) -> None:
        """Start the next slice if its operands are here and the units are free."""
        state = self.devices[r]
        if state.computing or state.slice > state.read:
            return
        state.computing = True
        self.at(self.now + self.work.seconds * state.slow / _SLICES, self.computed, r)
        self.fetch(r)

    def computed(self, r: int) -> None:
        state = self.devices[r]
        state.computing = False
        state.slice += 1
        if state.slice % _SLICES == 0:
            self.store(r, state.slice // _SLICES - 1)
        self.compute(r)

    def store(self, r: int, stage: int) -> None:
        """A stage is computed: its tiles are stored, region by region."""
        state, work = self.devices[r], self.work
        tile, end = work.tiles[stage], work.tiles[stage + 1]
        while tile < end:
            step, inside = divmod(tile, work.per_chunk)
            region = next(i for i, stop in enumerate(self.ends) if inside < stop)
            tiles = min(end - tile, self.ends[region] - inside)
            nbytes = tiles * work.tile_bytes
            tile += tiles
            if self.overlapped and step == 0:
                self.send(r, 0, region, tiles, 1)
                continue
            state.counts["stores"] += nbytes
            state.stores += 1

            def stored(step: int = step, region: int = region, tiles: int = tiles) -> None:
                state.stores -= 1
                state.product_s = self.now
                if self.overlapped:
                    self.update(r, step, region, tiles, 1)

            cost = self.device.update_cost if self.overlapped else 1.0
            self.ask(r, nbytes, cost, stored, compute=True)
        state.product_s = max(state.product_s, self.now)

    # Tracking, triggering, sending.

    def update(self, r: int, step: int, region: int, tiles: int, summands: int) -> None:
        """Tiles of a region were updated; at the threshold the DMA starts."""
        state, key = self.devices[r], (step, region)
        state.came[key] = state.came.get(key, 0) + tiles
        state.summands[key] = state.summands.get(key, 0) + tiles * summands
        if state.came[key] < 2 * self.sizes[region]:
            return
        if step == self.product.tp - 1:
            state.done += 1
            return
        state.triggers += 1
        nbytes = self.sizes[region] * self.work.tile_bytes
        state.counts["dma"] += nbytes
        each = state.summands[key] // self.sizes[region]
        self.ask(
            r,
            nbytes,
            1.0,
            lambda: self.send(r, step, region, self.sizes[region], each),
            compute=False,
        )

    def send(self, r: int, step: int, region: int, tiles: int, summands: int) -> None:
        """Tiles go over the link and update the next device's memory."""
        state, device = self.devices[r], self.device
        nbytes = tiles * self.work.tile_bytes
        state.counts["sent"] += nbytes
        state.link_free = max(self.now, state.link_free) + nbytes / device.link_bandwidth
        target = (r - 1) % len(self.devices)

        def arrive() -> None:
            self.devices[target].counts["updates"] += nbytes
            self.ask(
                target,
                nbytes,
                device.update_cost,
                lambda: self.update(target, step + 1, region, tiles, summands),
                compute=False,
            )

        self.at(state.link_free + device.link_latency_s, arrive)


def fuse(
    product: PartialProduct,
    device: RingDevice | None = None,
    *,
    slow: Mapping[int, float] | None = None,
) -> OverlapResult:
    """Simulate a product whose stores trigger its reduce-scatter.

    Args:
        product: of each device.
        device: what all of them are.
        slow: device -> how much longer its arithmetic takes; then all devices are simulated.

    Raises:
        ConfigError: fewer than two devices, or fewer rows than devices.
    """
    require(product.tp >= 2, "t3.tp", product.tp, expected="at least 2: one device sends nothing")
    require(
        product.tokens >= product.tp,
        "t3.tokens",
        product.tokens,
        expected=f"at least {product.tp}, a row for each device",
    )
    ring = _Ring(product, device or RingDevice(), overlapped=True, bypass=True, slow=slow or {})
    ring.run()
    last = product.tp - 1
    updates = [
        state.summands[last, region] / size
        for state in ring.devices
        for region, size in enumerate(ring.sizes)
    ]
    first = ring.devices[0]
    return OverlapResult(
        seconds=ring.now,
        product_s=max(state.product_s for state in ring.devices),
        operand_reads=first.counts["operands"],
        product_writes=first.counts["stores"],
        scatter_reads=first.counts["dma"],
        scatter_writes=first.counts["updates"],
        sent=first.counts["sent"],
        updates=(min(updates), max(updates)),
        triggers=first.triggers,
    )


def product_alone(
    product: PartialProduct, device: RingDevice | None = None, *, bypass: bool = False
) -> tuple[float, float]:
    """Seconds and operand bytes of the product with nothing beside it.

    Args:
        product: of each device.
        device: what all of them are.
        bypass: its stores leave the cache to the operands.
    """
    ring = _Ring(product, device or RingDevice(), overlapped=False, bypass=bypass, slow={})
    ring.run()
    return ring.now, ring.devices[0].counts["operands"]
