"""Run the probes and make one :class:`~shoal.ir.machine.Machine` of what they saw."""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import MachineError, NoisyMachineError, ShoalError
from shoal.core.files import shoal_home
from shoal.core.native import cpu_model
from shoal.core.parts import Choice, table
from shoal.core.tables import digits
from shoal.ir.machine import Device, Link, Machine, Measurement, MemoryTier
from shoal.machine import host
from shoal.machine.fingerprint import fingerprint, versions
from shoal.machine.noise import NoiseReport, NoiseWatch
from shoal.machine.protocols import ProbeContext

# Type -> instructions that compute in it, of which the fastest counts.
_UNITS = {
    "fp32": ("fma_fp32",),
    "fp64": ("fma_fp64",),
    "bf16": ("tile_bf16", "dot_bf16"),
    "int8": ("tile_int8", "dot_int8"),
}
# Products reach a good part of the units' peak; not this small a fraction of it.
_SLOWEST = 100.0


def saved_path() -> Path:
    """Where the probed machine is kept: what the name ``local`` means."""
    return shoal_home() / "machine.yaml"


def probe(
    fast: bool = True,
    *,
    probes: Sequence[str | Choice] | None = None,
    strict: bool = False,
    save: Path | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> Machine:
    """Measure this machine.

    Args:
        fast: about half a minute on 2 cores, instead of 4 minutes.
        probes: names or choices of the probes to run; None for all that are not on request.
        strict: refuse a noisy machine instead of warning.
        save: write the result there; :func:`saved_path` makes it the machine ``local``.
        progress: called with (probes done, probes in all, what happens now); also for
            what is skipped or doubtful.

    Raises:
        MachineError: nothing could be measured, or an option is impossible.
        NoisyMachineError: with ``strict``, when the machine is too busy.
        BuildError: there is no compiler.
    """
    parts = table("probe")
    usual = [name for name in parts if not getattr(parts.load(name), "on_request", False)]
    chosen = [Choice(name=p) if isinstance(p, str) else p for p in (probes or usual)]
    built = [(choice.name, parts.build(choice)) for choice in chosen]

    def say(done: int, text: str) -> None:
        if progress is not None:
            progress(float(done), float(len(built)), text)

    watch = NoiseWatch()
    if strict:
        _refuse(watch.seen())
    measurements: list[Measurement] = []
    with ProbeContext(fast=fast) as context:
        for done, (name, part) in enumerate(built):
            say(done, name)
            try:
                measurements += part.run(context)
            except ShoalError as cause:
                if not isinstance(cause, MachineError) or len(built) == 1:
                    raise
                context.skip(name, str(cause))
        if slow_products(measurements):
            # Something else had the cores meanwhile, or it is really so.
            say(len(built), "matmul again")
            again = [item for name, part in built if name == "matmul" for item in part.run(context)]
            measurements = [item for item in measurements if item.probe != "matmul"] + again
            for dtype, reason in slow_products(measurements).items():
                context.skip(f"matmul.{dtype}", reason)
                measurements = [
                    item.model_copy(update={"plausible": False, "note": reason})
                    if item.probe == "matmul" and item.quantity.startswith(f"matmul_{dtype}")
                    else item
                    for item in measurements
                ]
        quiet = watch.seen()
        for place, reason in context.skipped.items():
            say(len(built), f"skipped {place}: {reason}")
        for reason in quiet.reasons:
            say(len(built), f"noisy: {reason}")
        if strict:
            _refuse(quiet)
        machine = assemble(measurements, context.skipped, context.facts, quiet)
    if save is not None:
        machine.save(
            save, header="Probed by shoal probe. Numbers are in plain units: B/s, FLOP/s, s."
        )
    return machine


def slow_products(found: Sequence[Measurement]) -> dict[str, str]:
    """Types whose matrix products are far too slow for the units of the cores, and how slow."""
    seen = _Seen(found)
    reasons = {}
    for dtype, (peak, _) in _peaks(seen, len(host.cpus())).items():
        reached = seen.best("matmul", f"matmul_{dtype}")
        if reached is not None and reached < peak / _SLOWEST:
            reasons[dtype] = (
                f"{digits(reached / 1e9)} GFLOP/s, of a peak of {digits(peak / 1e9)}; measure "
                "again when other programs have ended"
            )
    return reasons


def _refuse(quiet: NoiseReport) -> None:
    if quiet.reasons:
        raise NoisyMachineError(
            f"the machine is too busy for measurements: {'; '.join(quiet.reasons)}; "
            "wait, or probe without strict"
        )


def assemble(
    found: Sequence[Measurement],
    skipped: dict[str, str],
    facts: dict[str, Any],
    quiet: NoiseReport | None = None,
) -> Machine:
    """One machine from measurements; what was not measured is absent or the OS's number.

    Raises:
        MachineError: there is not even a number for the main memory.
    """
    sources = {f"skipped.{place}": reason for place, reason in skipped.items()}
    if quiet is not None and quiet.reasons:
        sources["noise"] = "noisy: " + "; ".join(quiet.reasons)
    seen = _Seen(found)
    local = _cpu(seen, sources)
    gpu = facts.get("gpu")
    device = _gpu(seen, gpu, local, sources) if gpu else local
    links = []
    latency, bandwidth = seen.of("collective", "latency"), seen.of("collective", "bandwidth")
    if latency and bandwidth:
        links.append(Link(scope="loopback", bandwidth=bandwidth, latency_s=latency))
        sources["links.loopback"] = (
            "collective: all-reduce of 2 ranks; time = 2 (n-1) (latency + bytes / "
            "(n bandwidth)); the network's own numbers are the measurements of loopback"
        )
    elif (trip := seen.of("loopback", "round_trip")) and (rate := seen.of("loopback", "bandwidth")):
        links.append(Link(scope="loopback", bandwidth=rate, latency_s=trip / 2))
        sources["links.loopback"] = "loopback: TCP, half a round trip"
    count = int(gpu["count"]) if gpu else 1
    if count > 1:
        rate = seen.of("gpu", "host_to_device") or 1e10
        links.append(Link(scope="device", bandwidth=rate, latency_s=1e-5))
        sources["links.device"] = "gpu: bandwidth to the host, a lower bound; latency assumed"
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Machine(
        name="local",
        provenance="probed",
        devices_per_node=count,
        device=device,
        links=tuple(links),
        sources=sources,
        measurements=tuple(found),
        noise=_noise(found),
        fingerprint={**fingerprint(), **_prefixed(versions()), "probed_at": stamp},
    )


class _Seen:
    """Plausible medians by probe and quantity."""

    def __init__(self, found: Sequence[Measurement]) -> None:
        self.items = [item for item in found if item.plausible]

    def all(self, probe: str, pattern: str) -> list[Measurement]:
        return [
            item
            for item in self.items
            if item.probe == probe and re.fullmatch(pattern, item.quantity)
        ]

    def of(self, probe: str, quantity: str) -> float | None:
        hits = self.all(probe, re.escape(quantity))
        return hits[-1].median if hits else None

    def best(self, probe: str, quantity: str) -> float | None:
        return max((item.median for item in self.all(probe, re.escape(quantity))), default=None)


def _cpu(seen: _Seen, sources: dict[str, str]) -> Device:
    cores = len(host.cpus())
    reached, single, peak = {}, {}, {}
    for dtype in ("fp32", "bf16", "fp16"):
        one = seen.best("matmul", f"matmul_{dtype}_1core")
        every = seen.best("matmul", f"matmul_{dtype}")
        if every:
            reached[dtype] = every
            single[dtype] = one if one else every
            sources[f"device.matmul_flops.{dtype}"] = "matmul: the best size"
    for dtype, (rate, name) in _peaks(seen, cores).items():
        peak[dtype] = rate
        sources[f"device.peak_flops.{dtype}"] = f"units: {name} x clock x {cores} cores"
    for dtype in ("fp32", "bf16"):
        if dtype in reached and reached[dtype] > peak.get(dtype, 0.0):
            peak[dtype] = reached[dtype]
            sources[f"device.peak_flops.{dtype}"] = "matmul: above the units' rate"
    overhead = seen.of("framework", "op_overhead")
    fields: dict[str, Any] = {}
    if overhead:
        fields["op_overhead_s"] = overhead
        sources["device.op_overhead_s"] = "framework: mean of six eager operators"
    return Device(
        name=cpu_model(),
        kind="cpu",
        num_cores=cores,
        peak_flops=peak,
        matmul_flops=reached,
        matmul_flops_1core=single,
        memory=tuple(_tiers(seen, cores, sources)),
        **fields,
    )


def _peaks(seen: _Seen, cores: int) -> dict[str, tuple[float, str]]:
    """FLOP/s of the arithmetic units of all cores, and which unit, by type."""
    clock = seen.of("units", "clock")
    peaks = {}
    for dtype, names in _UNITS.items():
        rate, name = max((seen.of("units", name) or 0.0, name) for name in names)
        if clock and rate:
            peaks[dtype] = rate * clock * cores, name
    return peaks


def _tiers(seen: _Seen, cores: int, sources: dict[str, str]) -> list[MemoryTier]:
    caches = host.caches()
    probed = {n for n in ("l1d", "l2", "l3") if seen.of("memory_latency", f"{n}.capacity")}
    names = sorted({*caches, *probed})
    tiers = []
    below = 0.0
    if seen.all("memory_bandwidth", ".*"):
        sources["device.memory.read_bandwidth"] = "memory_bandwidth: read, all cores"
        sources["device.memory.write_bandwidth"] = (
            "memory_bandwidth: copy, all cores, bytes read and written together"
        )
    for name in names:
        capacity = seen.of("memory_latency", f"{name}.capacity")
        sources[f"device.memory.{name}.capacity_bytes"] = (
            "memory_latency: knee of the latency curve" if capacity else "the operating system"
        )
        size = int(capacity or caches[name])
        tiers.append(
            MemoryTier(
                name=name,
                capacity_bytes=size,
                read_bandwidth=_rate(seen, "read", cores, below, size),
                write_bandwidth=_rate(seen, "copy", cores, below, size),
                latency_s=seen.of("memory_latency", f"{name}.latency"),
            )
        )
        below = size
    tiers.append(
        MemoryTier(
            name="dram",
            capacity_bytes=host.memory_total(),
            read_bandwidth=_rate(seen, "read", cores, below, float("inf")),
            write_bandwidth=_rate(seen, "copy", cores, below, float("inf"))
            or seen.of("framework", "elementwise_bandwidth"),
            latency_s=seen.of("memory_latency", "dram.latency"),
        )
    )
    sources["device.memory.dram.capacity_bytes"] = "the operating system"
    read = seen.of("system", "file_read_cold")
    write = seen.of("system", "disk_write")
    if read or write:
        place = shoal_home()
        while not place.exists():
            place = place.parent
        tiers.append(
            MemoryTier(
                name="disk",
                capacity_bytes=max(1, shutil.disk_usage(place).total),
                read_bandwidth=read,
                write_bandwidth=write,
                latency_s=seen.of("system", "disk_fsync"),
            )
        )
        sources["device.memory.disk"] = "system: cold read; write with fsync; latency of an fsync"
    return tiers


def _rate(seen: _Seen, kernel: str, cores: int, above: float, upto: float) -> float | None:
    """Rate of all cores at the largest footprint that lies well inside a level."""
    items = [
        item
        for item in seen.all("memory_bandwidth", f"{kernel}_{cores}threads")
        if item.at is not None and above < item.at <= 0.8 * upto
    ]
    if not items and above and upto == float("inf"):
        # The last cache is larger than any footprint probed: the largest one stands for memory.
        items = seen.all("memory_bandwidth", f"{kernel}_{cores}threads")
    if not items:
        return None
    # Inside a cache the best footprint counts; of main memory the largest.
    chosen = max(items, key=lambda i: (i.at or 0.0) if upto == float("inf") else i.median)
    return chosen.median


def _gpu(seen: _Seen, facts: dict[str, Any], local: Device, sources: dict[str, str]) -> Device:
    reached = {}
    for dtype in ("fp32", "bf16", "fp16"):
        best = seen.best("gpu", f"matmul_{dtype}")
        if best:
            reached[dtype] = best
    fields: dict[str, Any] = {}
    overhead = seen.of("gpu", "op_overhead")
    if overhead:
        fields["op_overhead_s"] = overhead
    if facts.get("power_watts"):
        fields["power_watts"] = facts["power_watts"]
    rate = seen.of("gpu", "memory")
    memory = [MemoryTier(name="hbm", capacity_bytes=facts["memory_bytes"], read_bandwidth=rate)]
    if facts.get("l2_bytes"):
        memory.insert(0, MemoryTier(name="l2", capacity_bytes=facts["l2_bytes"]))
    # What its node has behind it.
    memory += [tier for tier in local.memory if tier.name in ("dram", "disk")]
    sources["device"] = "gpu: torch.cuda, NVML and products measured with torch"
    return Device(
        name=facts["name"],
        kind="gpu",
        num_cores=local.num_cores,
        matmul_flops=reached,
        memory=tuple(memory),
        **fields,
    )


def _noise(found: Sequence[Measurement]) -> float | None:
    """Median half-width of the 90 % intervals, over what has several repeats."""
    shares = [
        (item.high - item.low) / (2 * item.median)
        for item in found
        if item.repeats > 3 and item.median > 0
    ]
    return float(np.median(shares)) if shares else None


def _prefixed(found: dict[str, str]) -> dict[str, str]:
    return {f"version.{name}": version for name, version in found.items() if name != "python"}
