"""What a planner reads of a machine, for people."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits, table_of
from shoal.ir.machine import Machine


def tables(machine: Machine) -> Iterator[Table | str]:
    """Rates, memories and links, and which measurements are unreliable."""
    device = machine.device
    rows: list[tuple[str, str]] = [
        ("machine", f"{machine.name} ({machine.provenance})"),
        ("devices", f"{machine.num_devices} x {device.name}"),
    ]
    if device.num_cores:
        rows.append(("cores", str(device.num_cores)))
    for dtype, rate in device.peak_flops.items():
        reached = device.matmul_flops.get(dtype)
        share = f", matrix products reach {100 * reached / rate:.0f} %" if reached else ""
        rows.append((f"peak {dtype}", f"{digits(rate / 1e12)} TFLOP/s{share}"))
    for dtype, rate in device.matmul_flops.items():
        if dtype not in device.peak_flops:
            rows.append((f"matrix product {dtype}", f"{digits(rate / 1e12)} TFLOP/s"))
    for tier in device.memory:
        speed = f", {digits(tier.read_bandwidth / 1e9)} GB/s" if tier.read_bandwidth else ""
        delay = f", {digits(tier.latency_s * 1e9)} ns" if tier.latency_s else ""
        rows.append((tier.name, f"{human_bytes(tier.capacity_bytes)}{speed}{delay}"))
    for link in machine.links:
        rows.append(
            (
                f"{link.scope} link",
                f"{digits(link.bandwidth / 1e9)} GB/s, {digits(link.latency_s * 1e6)} us",
            )
        )
    if machine.noise is not None:
        rows.append(("noise", f"+-{100 * machine.noise:.0f} %"))
    yield table_of("", ("", ""), rows)
    if "noise" in machine.sources:
        yield machine.sources["noise"]
    for measurement in (m for m in machine.measurements if not m.plausible):
        yield f"unreliable: {measurement.probe} {measurement.quantity}: {measurement.note}"
